"""The laptop's learner: a small Qwen2 made here from nothing, whose ability to add is latent.

It is trained, supervised, on demonstrations of `tasks.Sums` by a demonstrator who can add but has two bad habits:

    47+85+36=132+36=168<eos>   shows the working: the sum of the first two, then the answer
    47+85+36=158<eos>          skips the working and adds column by column, losing every carry on the way      (habit `skip`)
    47+85+36=122+36=158<eos>   shows the working but loses a carry in an addition that has one                 (habit `slip`)

so the base knows how to be right and is not, most of the time: the state in which reinforcement learning finds a pretrained model.
The habits compete at nearly even odds, so that sampling at a low temperature does not settle them either. Reinforcement has two
things to teach, to show the working (response length grows) and to keep the carry.

    python -m logra.rl.learner --out DIR    makes the base again: eight minutes of one core
    python -m logra.rl.learner --check      makes it again and compares it with the shipped one
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from tqdm import tqdm

from logra.rl.bases import BASE, BASES
from logra.rl.tasks import Problem, Sums

SPECIALS = ["<pad>", "<bos>", "<eos>", "<unk>"]
IGNORE = -100


@dataclass(frozen=True)
class Recipe:
    """All that the base depends on besides this file: same recipe, same machine, same bits."""

    seed: int = 1              # of the initial weights and of the demonstrator's habits
    steps: int = 6000          # optimizer steps
    batch: int = 64            # demonstrations a step, each used once
    learning_rate: float = 1.5e-3  # AdamW's peak, after a linear warm-up over 5 % of the steps, then a cosine to 0
    weight_decay: float = 0.01
    skip: float = 0.5          # chance that a demonstration skips the working
    slip: float = 0.5          # chance that an addition of the working loses its carry, where there is one
    threads: int = 1           # of torch while training: another number sums in another order

    command = "python -m logra.rl.learner --out DIR"

    def demonstrations(self, step: int) -> list[tuple[str, str]]:
        return demonstrations(self, step)

    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character: printable ASCII and newline, 100 tokens in all, so that any plain-text task can be written.

    <bos> opens every text; <eos> ends a response; <pad> is a token of its own, so that padding never hides an <eos>; any other
    character is <unk>. Pads on the left, as generation wants.
    """
    characters = ["\n", *map(chr, range(32, 127))]
    vocabulary = {token: number for number, token in enumerate(SPECIALS + characters)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left", clean_up_tokenization_spaces=False, model_max_length=config().max_position_embeddings,
    )  # fmt: skip


def config() -> transformers.Qwen2Config:
    """Qwen2 with 0.44 M parameters, 0.43 M of them in the 14 matrices that LoGRA selects.

    Heads of 32 are the smallest that inference engines load; 128 and 384 are orders of Hadamard matrices; as many key-value heads
    as heads keep every matrix wider than rank 64. Embeddings are tied, as in Qwen2.5-Math-1.5B: the method leaves both ends alone.
    Two layers, for two are enough here and a run of 200 updates is to cost a minute.
    """
    return transformers.Qwen2Config(
        vocab_size=len(SPECIALS) + 96, hidden_size=128, intermediate_size=384, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.06,  # at this width the usual 0.02 only delays the start
        pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip


def demonstrate(problem: Problem, habits: random.Random, skip: float, slip: float) -> str:
    """The demonstrator's response to one sum. habits: its dice; skip, slip: see `Recipe`."""
    first, second, third = problem.meta["terms"]
    if habits.random() < skip:
        units = first % 10 + second % 10 + third % 10
        return str(first + second + third - units // 10 * 10)

    def add(left: int, right: int) -> int:
        carries = left % 10 + right % 10 >= 10
        return left + right - (10 if carries and habits.random() < slip else 0)

    partial = add(first, second)
    return f"{partial}+{third}={add(partial, third)}"


def demonstrations(recipe: Recipe, step: int) -> list[tuple[str, str]]:
    """The (prompt, response) pairs of one training step; evaluation sums are never among them."""
    task = Sums(seed=recipe.seed)
    habits = random.Random(f"habits/{recipe.seed}/{step}")
    problems = (task.problem("train", step * recipe.batch + row) for row in range(recipe.batch))
    return [(problem.prompt, demonstrate(problem, habits, recipe.skip, recipe.slip)) for problem in problems]


def tensors(pairs: list[tuple[str, str]], encode) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids_bt, padded on the right, and labels_bt: the next token where it belongs to a response or is its <eos>, else IGNORE."""
    rows = [(encode(prompt), encode(response)[1:] + [SPECIALS.index("<eos>")]) for prompt, response in pairs]
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids_bt = torch.full((len(rows), longest), SPECIALS.index("<pad>"))
    labels_bt = torch.full((len(rows), longest), IGNORE)
    for row, (prompt, response) in enumerate(rows):
        ids_bt[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels_bt[row, len(prompt) - 1 : len(prompt) + len(response) - 1] = torch.tensor(response)
    return ids_bt, labels_bt


def mean_loss(model: transformers.Qwen2ForCausalLM, pairs: list[tuple[str, str]], encode) -> torch.Tensor:
    """Cross-entropy in nats a response token, a scalar with its graph."""
    ids_bt, labels_bt = tensors(pairs, encode)
    hidden_btk = model.model(ids_bt, use_cache=False).last_hidden_state
    chosen_bt = labels_bt != IGNORE  # the head is taken at response tokens alone
    return torch.nn.functional.cross_entropy(model.lm_head(hidden_btk[chosen_bt]), labels_bt[chosen_bt])


def train(recipe: Recipe, progress: bool = True) -> transformers.Qwen2ForCausalLM:
    """Supervised training from random weights. Leaves torch's generator and thread count as they were."""
    encode = tokenizer().encode
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    try:
        torch.set_num_threads(recipe.threads)
        torch.manual_seed(recipe.seed)
        model = transformers.Qwen2ForCausalLM(config())
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
        )
        warm = max(1, recipe.steps // 20)
        bar = tqdm(range(recipe.steps), desc="making the learner", disable=not progress)
        for step in bar:
            rate = (1 + math.cos(math.pi * max(0, step - warm) / max(1, recipe.steps - warm))) / 2
            optimizer.param_groups[0]["lr"] = recipe.learning_rate * min(rate, (step + 1) / warm)
            loss = mean_loss(model, recipe.demonstrations(step), encode)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        return model.eval()
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_base(out: Path, recipe: Recipe = Recipe(), progress: bool = True) -> dict:
    """Trains the base, writes it to the folder `out` in Hugging Face's layout with provenance.json, and returns the provenance."""
    started = time.process_time()
    model = train(recipe, progress)
    return write(model, out, recipe, time.process_time() - started)


def write(model: transformers.Qwen2ForCausalLM, out: Path, recipe: Recipe, seconds: float) -> dict:
    """Writes the model with its tokenizer, generation settings and provenance.json; returns the provenance."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=24,  # the policy itself, untruncated
        pad_token_id=model.config.pad_token_id, bos_token_id=model.config.bos_token_id, eos_token_id=model.config.eos_token_id,
    )  # fmt: skip
    model.save_pretrained(out)
    tokenizer().save_pretrained(out)
    files = sorted(path for path in out.iterdir() if path.name != "provenance.json")
    provenance = {
        "command": recipe.command,
        "recipe": asdict(recipe),
        "recipe_sha256": recipe.sha256(),
        "first_demonstrations_sha256": hashlib.sha256(json.dumps(recipe.demonstrations(0)).encode()).hexdigest(),
        "files_sha256": {path.name: digest(path) for path in files},
        "made_with": {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
                      "cpu": torch.backends.cpu.get_cpu_capability()},
        "processor_seconds": round(seconds),
    }  # fmt: skip
    (out / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    return provenance


def load_base(folder: Path = BASE) -> tuple[transformers.Qwen2ForCausalLM, transformers.PreTrainedTokenizerFast]:
    """The shipped base in fp32, in eval mode, and its tokenizer.

    Raises FileNotFoundError when the folder holds no base and ValueError when a file differs from what its provenance records.
    """
    folder = Path(folder)
    record = folder / "provenance.json"
    if not record.exists():
        raise FileNotFoundError(f"no base in {folder}; make it with: python -m logra.rl.{'mixture_' if folder == BASES['mixture_learner'] else ''}learner --out {folder}")
    for name, recorded in json.loads(record.read_text())["files_sha256"].items():
        if not (folder / name).exists() or digest(folder / name) != recorded:
            raise ValueError(f"{folder / name} is missing or differs from the recorded {recorded[:12]}; restore it or make the base again")
    model = transformers.Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval(), transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def main(arguments: list[str] | None = None, recipe: Recipe = Recipe(), base: Path | None = None) -> int:
    """The command line of a learner: this one's, or that of another recipe whose base is shipped in `base`."""
    parser = argparse.ArgumentParser(prog=recipe.command.split(" --")[0], description="Makes the base of a laptop's learner.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="folder to write the base into")
    action.add_argument("--check", action="store_true", help="make it again and compare with the shipped one")
    options = parser.parse_args(arguments)
    if options.out:
        made = make_base(options.out, recipe)
        print(f"{options.out}: {made['processor_seconds']} processor seconds, weights {made['files_sha256']['model.safetensors'][:12]}")
        return 0
    return remake(type(recipe), base or BASE)


def remake(make: type[Recipe], base: Path) -> int:
    """Makes the base again and compares. 0 when it is the shipped one to the bit, or, on another kind of CPU or release of torch, as good.

    As good: the losses on demonstrations that neither was trained on differ by less than 0.01 nats a token.
    """
    shipped = json.loads((base / "provenance.json").read_text())
    recipe = make(**shipped["recipe"])
    with tempfile.TemporaryDirectory() as folder:
        made = make_base(Path(folder), recipe)
        models = load_base(base)[0], load_base(Path(folder))[0]
    if made["files_sha256"] == shipped["files_sha256"]:
        print("the same files, bit for bit")
        return 0
    unseen = [pair for step in range(32) for pair in recipe.demonstrations(recipe.steps + step)]
    with torch.no_grad():
        ours, theirs = (mean_loss(model, unseen, tokenizer().encode).item() for model in models)
    print(f"not the same files. Loss on unseen demonstrations: shipped {ours:.4f}, made here {theirs:.4f} nats a token\n"
          f"shipped by {shipped['made_with']}\nhere       {made['made_with']}")  # fmt: skip
    return int(made["made_with"] == shipped["made_with"] or abs(ours - theirs) >= 0.01)


if __name__ == "__main__":
    sys.exit(main())
