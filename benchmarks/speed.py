"""How long LoGRA's parts take beside dense training, LoRA (peft), GaLore (galore-torch) and Flora (flora-opt): ratios, and the FLOPs beside each.

    OMP_NUM_THREADS=1 python benchmarks/speed.py --out speed.json                                                        # the 1.5B layer
    OMP_NUM_THREADS=1 python benchmarks/speed.py --out speed.json --models smollm2-135m 7b --parts layer --dtypes float32    # adds to it

Two packages are needed for GaLore's and Flora's rows alone: pip install --no-deps -r requirements/benchmarks.lock. Without them the rows are left
out, and the result says so. What a row is compared with was measured in the same process, interleaved; a ratio compares medians (and, beside it,
least times). An OUT that exists is added to; a part that it has for the same model and dtype is replaced.

part          what
projections   forward and backward of the seven projections of a decoder layer
layer         of the decoder layer; checkpointed: under activation checkpointing
model         of the whole model with its loss (smollm2-135m: the pretrained weights), in float32 or under autocast
terms         the projections' products one by one
optimizer     one step of each optimizer on the layer's projections
hash          all of the layer's A, by kind
update        the pieces of an update of the layer, and their shares at the paper's proportions (128 responses, 8 probed)
whole         the same of the whole model, and whole updates run at those proportions (16 responses, 1 probed)
"""

import argparse
import importlib.util
import json
import os
import shlex
import sys
import time
from pathlib import Path

import torch
import transformers

import cases
import pieces
import timing

PARTS = ("projections", "layer", "checkpointed", "terms", "optimizer", "hash", "update", "model", "whole")
LIMITS = {16: 0.68, 64: 0.70, 256: 0.75}                    # the FLOP model's ratios at 1.5B that the targets name
COLUMNS = {"method": "s", "rank": "d", "seconds": ".4f", "seconds_least": ".4f", "ratio": ".3f", "ratio_least": ".3f", "flops_ratio": ".3f", "floor": ".3f", "note": "s"}


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS[:-2]))
    parser.add_argument("--models", nargs="+", choices=list(cases.CONFIGS), default=["1.5b"])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16", "autocast"), default=["float32", "bfloat16", "autocast"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 256])
    parser.add_argument("--methods", nargs="+", choices=cases.METHODS, default=list(cases.METHODS))
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    missing = [name for name in ("flora_opt", "galore_torch") if importlib.util.find_spec(name) is None]
    if missing:
        args.methods = [method for method in args.methods if method != "flora"]
    environment = timing.environment(args.device)
    result = {"environment": environment, "commands": [], "left out": missing, "rows": [], "shares": [], "targets": []}
    if args.out is not None and args.out.exists():
        result = json.loads(args.out.read_text())
        if result["environment"] != environment:
            raise SystemExit(f"speed: {args.out} was measured under {result['environment']}, this is {environment}; give another --out")
    result["commands"].append(shlex.join(["OMP_NUM_THREADS=" + os.environ.get("OMP_NUM_THREADS", ""), "python", "benchmarks/speed.py", *(sys.argv[1:] if arguments is None else map(str, arguments))]))
    for model in args.models:
        for part in args.parts:
            for dtype in [d for d in args.dtypes if part not in ("optimizer", "hash") or d == args.dtypes[0]]:
                started = time.perf_counter()
                measure(result, args, model, part, dtype, others=not missing)
                print(f"{time.perf_counter() - started:.0f} s", flush=True)
                result["targets"] = targets(result)
                timing.write(result, args.out)
    timing.table("Targets", result["targets"], {"target": "s", "limit": ".3f", "value": ".3f", "value_least": ".3f", "holds": "s"})
    return result


def measure(result: dict, args, model: str, part: str, dtype: str, others: bool) -> None:
    """Adds the rows of one part to the result, and prints them."""
    config, device, ranks = cases.CONFIGS[model](), args.device, args.ranks
    torch.manual_seed(0)
    repetitions, first = args.repetitions, 0
    if part in ("projections", "layer", "checkpointed"):
        made = cases.passes(getattr(cases, part), config, args.tokens, dtype, device, ranks, args.methods)
    elif part == "terms":
        made = pieces.terms(config, args.tokens, dtype, device, ranks)
    elif part == "optimizer":
        made = pieces.optimizers(config, device, ranks, others)
    elif part == "hash":
        made = pieces.hashes(config, device, ranks)
    elif part == "update":
        if dtype == "bfloat16":
            return                                          # an update is applied to float32 weights
        made = pieces.of_layer(config, args.tokens, dtype, device, max(ranks))
    elif dtype == "bfloat16":
        return
    elif part == "model":
        made = pieces.model_passes(whole(model, device), args.tokens, dtype, device, ranks, [m for m in args.methods if m not in ("dense, added up", "logra, P kept")])
    else:
        made = pieces.of_model(whole(model, device), args.tokens, dtype, device, max(ranks))
    rows = timing.interleaved(made, repetitions, device)
    if part == "optimizer" and others:
        rows += timing.interleaved(pieces.subspaces(config, device), 1, device)
    del made
    timing.against(rows, rows[first])
    labels = {"part": part, "model": model, "dtype": "float32" if part in ("optimizer", "hash") else dtype, "tokens": args.tokens}
    rows = [labels | row for row in rows]
    for kind in ("rows", "shares"):                         # of an earlier call with this OUT
        result[kind] = [row for row in result[kind] if (row["part"].removesuffix(" update"), row["model"], row["dtype"], row["tokens"]) != (part, model, rows[0]["dtype"], args.tokens)]
    if part in ("projections", "layer", "checkpointed", "model"):
        for row in rows:
            row["floor"] = cases.floor(config, row["rank"]) if row["method"] == "logra" and part != "checkpointed" else None
    report(result, rows, labels)
    if part in ("update", "whole"):
        kinds = {"": 1, ", checkpointed": 2} if part == "update" else {"": 1}
        found = [labels | pieces.shares(rows, suffix, hashed) for suffix, hashed in kinds.items()]
        result["shares"] += found
        timing.table(f"Shares of an update of {pieces.RESPONSES} responses, {pieces.PROBED} probed", found, pieces.SHARES)
    if part == "whole":
        rows = timing.interleaved(pieces.whole_updates(whole(model, device), args.tokens, dtype, device, ranks), repetitions, device)
        report(result, [labels | {"part": "whole update"} | row for row in timing.against(rows, rows[0])], labels | {"part": "whole update"})


def report(result: dict, rows: list[dict], labels: dict) -> None:
    result["rows"] += rows
    timing.table(", ".join(f"{key} {value}" for key, value in labels.items()), rows, COLUMNS)


def whole(model: str, device: str):
    """SmolLM2-135M with its pretrained weights, any other model with random ones, in float32."""
    if model == "smollm2-135m":
        from logra.rl import models

        return models.load(models.SMOLLM2)[0].to(device)
    return transformers.AutoModelForCausalLM.from_config(cases.CONFIGS[model](), dtype=torch.float32).eval().to(device)


def targets(result: dict) -> list[dict]:
    """The stated targets at 1.5B, each with what was measured; those without a measurement are left out."""
    found = []

    def add(target, limit, value, least):
        found.append({"target": target, "limit": limit, "value": value, "value_least": least, "holds": "yes" if value <= limit else "no"})

    for row in result["rows"]:
        if row["model"] != "1.5b" or row["method"] != "logra" or row["part"] not in ("projections", "layer"):
            continue
        name = f"{row['part']}, {row['dtype']}, rank {row['rank']}, {row['tokens']} tokens: forward and backward / dense"
        limit = 1.05 * LIMITS.get(row["rank"], row["floor"]) if row["dtype"] == "float32" else 1.0
        add(name, limit, row["ratio"], row["ratio_least"])
    for share in (share for share in result["shares"] if share["model"] == "1.5b"):
        name = f"{'layer' if share['part'] == 'update' else 'whole model'}, {share['pieces']}, {share['model']}, {share['dtype']}: "
        add(name + "hash of A / update", 0.03, share["hash of A"], None)
        add(name + "apply / update", 0.05, share["apply"], None)
        add(name + "finite-difference probe / update", 0.05, share["probe"], None)
    return found


if __name__ == "__main__":
    main()
