"""Does the method hold on this GPU? Bits against the CPU, memory against the simulation, times beside dense training and LoRA. benchmarks/gpu_check.sh runs it.

    python benchmarks/gpu_check.py --out gpu.json                   # CUDA, randomly initialised 1.5B and 7B, 4,096 tokens, rank 256
    python benchmarks/gpu_check.py --device cpu --small             # the same code on small shapes, without a GPU

Short runs of the trainer under torchrun are among the checks (gpu_runs.py), one of them with a vLLM engine where --engine asks for it and
LOGRA_VLLM_PYTHON or ./reproduce.sh setup-vllm gives vLLM's interpreter. Nothing is downloaded. Exits 1 if a check of correctness fails; memory and times are reported, and fail nothing.
"""

import argparse
import copy
import dataclasses
import gc
import importlib.util
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers

import cases
import gpu_runs
import logra
import pieces
import timing
from logra import projection, sync
from logra.bits import fingerprint
from logra.memory import Setting, measure, simulate
from logra.update import LowRankUpdate

GIB = 1 << 30
METHODS = ("dense", "logra", "lora")


def main(arguments=None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small shapes, 64 tokens, rank 16")
    parser.add_argument("--engine", action="store_true", help="with a run whose responses vLLM samples")
    parser.add_argument("--models", nargs="+", choices=list(cases.CONFIGS))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=450.0, help="no further model is begun after this time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gpu_check: this PyTorch sees no CUDA device; --device cpu --small exercises the script without one")
    transformers.logging.set_verbosity_error()
    started = time.perf_counter()
    models = args.models or (["tiny"] if args.small else ["1.5b", "7b"])
    tokens, rank = (64, 16) if args.small else (4096, 256)
    result = {"environment": timing.environment(args.device), "models": models, "tokens": tokens, "rank": rank, "checks": [], "memory": [], "times": [],
              "shares": [], "left out": []}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        simulations = {(model, method): pool.submit(simulated, model, method, tokens, rank) for model in models for method in METHODS}
        run(result, args, models, tokens, rank, simulations, started)
    result["seconds"] = time.perf_counter() - started
    timing.write(result, args.out)
    print(f"{result['seconds']:.0f} s" + (f"; no time for {result['left out']}" if result["left out"] else ""))
    return result


def run(result: dict, args, models, tokens: int, rank: int, simulations: dict, started: float) -> None:
    """Every check, then each model while there is time; the result is written after each."""
    for check in (projections, sketches, updates, probes, linear_attention, receiver):
        result["checks"] += check(cases.CONFIGS["tiny" if args.small else "1.5b"](), args.device)
        timing.write(result, args.out)
    result["left out"] += [] if args.device == "cpu" or importlib.util.find_spec("fla") else ["linear attention by fla's kernels: fla is not installed"]
    found, left_out = gpu_runs.checks(args.engine)
    result["left out"] += left_out
    result["checks"] += [row(*check) for check in found]
    timing.table("Correctness", result["checks"], {"check": "s", "value": ".2e", "limit": ".2e", "holds": "s"})
    for model in models:
        if time.perf_counter() - started > args.seconds:
            result["left out"].append(model)
            continue
        run_model(result, model, tokens, rank, args)
        timing.write(result, args.out)
    for found in result["memory"]:                          # last, so that what was measured is written whatever comes of them
        found |= simulations[found["model"], found["method"]].result()
    columns = {"model": "s", "method": "s"} | dict.fromkeys(("allocated", "step", "simulated step", "probe", "simulated probe"), ".4f")
    timing.table("Memory, GiB", result["memory"], columns)


def row(check: str, value: float, limit: float) -> dict:
    return {"check": check, "value": float(value), "limit": limit, "holds": "yes" if value <= limit else "no"}


def projections(config, device: str) -> list[dict]:
    """A on the device is A on the CPU, to the bit, for each kind and each number of inputs."""
    rows = []
    for kind in projection.KINDS:
        for k in sorted({k for _, k in cases.shapes(config).values()}):
            here = projection.entries(kind, min(256, k), k, 12345, device=device)
            wrong = (here.cpu() != projection.entries(kind, min(256, k), k, 12345)).sum()
            rows.append(row(f"A, {kind}, {k} inputs: entries that differ", wrong, 0))
    return rows


def sketches(config, device: str) -> list[dict]:
    """S of a layer's projections against the CPU's: float32 and bfloat16, TF32 off."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        made = {}
        for place in ("cpu", device):
            torch.manual_seed(0)
            module, run = cases.projections(config, 256, dtype, "cpu")
            module, run = (module, run) if place == "cpu" else _moved(config, module, dtype, place)
            attached = logra.attach(module, 16, modules=cases.NAMES, seed=1)
            run(module)
            run(module)                                     # two micro-batches are added up
            made[place] = {name: sketch.S_dr.cpu() for name, sketch in attached.items()}
        worst = max(float((made[device][n] - S).norm() / S.norm()) for n, S in made["cpu"].items())
        rows.append(row(f"S, {dtype}: relative error against the CPU", worst, 1e-5))
    return rows


def _moved(config, module, dtype, device):
    other, run = cases.projections(config, 256, dtype, device)
    other.load_state_dict(module.state_dict())
    return other, run


def updates(config, device: str) -> list[dict]:
    """The rounded update of one layer: its dense form and the weights after it, to the bit, also where TF32 is switched on; RowAdam's U nearly."""
    places, made = {"cpu": "cpu", "device": device}, {}
    draw = torch.Generator().manual_seed(0)
    S = {name: torch.randn(d, 64, generator=draw) for name, (d, _) in cases.shapes(config).items()}
    W = {name: torch.randn(d, k, generator=draw) * 0.02 for name, (d, k) in cases.shapes(config).items()}
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        for place, at in places.items():
            module = cases.Projections(config, torch.float32, at)
            attached = logra.attach(module, 64, modules=cases.NAMES, seed=1)
            for name, sketch in attached.items():
                sketch.weight.data.copy_(W[name])
                sketch.S_dr.copy_(S[name])
            proposal = logra.RowAdam(attached, relative_step=pieces.RELATIVE_STEP).propose()
            if place == "cpu":
                update = LowRankUpdate.round(attached, {name: U * -proposal.eta for name, U in proposal.items()})
            here = _at(update, at)
            dense = {name: here.dense(name).cpu() for name in S}
            here.apply(attached)
            made[place] = {n: U.cpu() for n, U in proposal.items()}, dense, {n: fingerprint(s.weight.detach()) for n, s in attached.items()}
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    (U, dense, weights), (U_here, dense_here, weights_here) = made["cpu"], made["device"]
    return [row("RowAdam's U: relative error against the CPU", max(float((U_here[n] - U[n]).norm() / U[n].norm()) for n in U), 1e-5),
            row("the update's dense form, TF32 on: entries that differ", sum(int((dense_here[n] != dense[n]).sum()) for n in dense), 0),
            row("weights after the update: matrices whose fingerprint differs", sum(weights_here[n] != weights[n] for n in weights), 0)]


def _at(update: LowRankUpdate, device: str) -> LowRankUpdate:
    moved = {name: dataclasses.replace(m, integers_dr=m.integers_dr.to(device), exponent_d=m.exponent_d.to(device)) for name, m in update.matrices.items()}
    return dataclasses.replace(update, matrices=moved, after={})


def _tiny(device: str):
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(cases.CONFIGS["tiny"]()).eval(), pieces.example(211, 48, device)


def probes(config, device: str) -> list[dict]:
    """On a small model: the predicted KL by both methods against the CPU's; S under checkpointing is S."""
    base, _ = _tiny("cpu")
    q = {}
    for place in ("cpu", device):
        model, batch = copy.deepcopy(base).to(place), pieces.example(211, 48, place)
        attached = logra.attach(model, 8, seed=1)
        draw = torch.Generator().manual_seed(0)
        for sketch in attached.values():
            sketch.S_dr.copy_(torch.randn(sketch.S_dr.shape, generator=draw))
        proposal, contexts = logra.SketchSGD(attached, relative_step=1e-3).propose(), logra.Contexts.of_responses(*batch)
        q[place] = {method: logra.predicted_kl(model, proposal, contexts, method) for method in ("jvp", "finite_difference")}
    rows = [row(f"predicted KL, {method}: relative difference to the CPU", abs(q[device][method] / q["cpu"][method] - 1), 1e-3) for method in q["cpu"]]
    S = []
    for checkpointed in (False, True):
        model, batch = copy.deepcopy(base).to(device).train(), pieces.example(211, 48, device)
        attached = logra.attach(model, 8, seed=1)
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        pieces.loss(model, batch, "autocast", device).backward()
        S.append(attached)
    worst = max(float((S[1][n].S_dr - S[0][n].S_dr).norm() / S[0][n].S_dr.norm()) for n in S[0])
    return [*rows, row("S under checkpointing, autocast: relative difference", worst, 1e-5)]


def linear_attention(config, device: str) -> list[dict]:
    """A small random Qwen3.5, by fla's kernels on a GPU where fla is installed: S against the CPU's, and the predicted KL by both methods."""
    heads = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    torch.manual_seed(0)
    base = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(
        vocab_size=211, hidden_size=128, intermediate_size=192, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], max_position_embeddings=256, **heads)).eval()
    S, q = {}, {}
    for place in ("cpu", device):
        model, batch = copy.deepcopy(base).to(place), pieces.example(211, 96, place)
        attached = logra.attach(model, 16, seed=1)
        pieces.loss(model, batch, "float32", place).backward()
        S[place] = {name: sketch.S_dr.cpu() for name, sketch in attached.items()}
        proposal, contexts = logra.SketchSGD(attached, relative_step=1e-3).propose(), logra.Contexts.of_responses(*batch)
        q[place] = [logra.predicted_kl(model, proposal, contexts, method) for method in ("jvp", "finite_difference")]
    worst = max(float((S[device][n] - s).norm() / s.norm()) for n, s in S["cpu"].items())
    return [row("linear attention, S: relative error against the CPU", worst, 1e-2),
            row("linear attention, predicted KL: relative difference between its methods", abs(q[device][0] / q[device][1] - 1), 1e-2)]


def receiver(config, device: str) -> list[dict]:
    """Three updates of a small model on the device, sent to a receiver on the CPU: its weights are the trainer's, to the bit."""
    base, batch = _tiny(device)
    other, model = sync.Receiver(copy.deepcopy(base)), base.to(device)
    attached = logra.attach(model, 8, seed=1)
    optimizer = logra.RowAdam(attached, relative_step=1e-3)
    for _ in range(3):
        pieces.loss(model, batch, "autocast", device).backward()
        other.apply(optimizer.step().to_bytes())
        optimizer.zero_grad()
    theirs = other.fingerprints()
    wrong = sum(theirs[name] != fingerprint(sketch.weight.detach()) for name, sketch in attached.items())
    return [row("a receiver on the CPU after three updates: matrices whose fingerprint differs", wrong, 0)]


def run_model(result: dict, model: str, tokens: int, rank: int, args) -> None:
    """Memory and times of a whole model: float32 weights, bfloat16 compute, checkpointing, a micro-batch of one response."""
    config = cases.CONFIGS[model]()
    for method in METHODS:
        result["memory"].append({"model": model, "method": method} | memory(model, method, tokens, rank, args.device))
    with torch.device(args.device):
        torch.manual_seed(0)
        base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    names = list(logra.attach(base, 1))
    logra.detach(base)
    base.train()
    made = [step(base, names, method, tokens, rank, args.device) for method in METHODS]
    rows = timing.interleaved(made, args.repetitions, args.device)
    rows = [{"model": model} | r for r in timing.against(rows, rows[0])]
    result["times"] += rows
    timing.table(f"A micro-batch's forward and backward, {model}", rows, {"method": "s", "seconds": ".4f", "ratio": ".3f", "ratio_least": ".3f", "flops_ratio": ".3f"})
    del made
    rows = timing.interleaved(pieces.of_model(base, tokens, "autocast", args.device, rank, ("finite_difference",)), args.repetitions, args.device)
    result["times"] += [{"model": model, "part": "pieces"} | r for r in rows]
    result["shares"].append({"model": model} | pieces.shares(rows, hashed=2))
    timing.table(f"Shares of an update of {pieces.RESPONSES} responses, {pieces.PROBED} probed, {model}", result["shares"][-1:], pieces.SHARES)
    if args.device == "cuda":
        rows = timing.interleaved(pieces.terms(config, tokens, "autocast", args.device, [rank]), args.repetitions, args.device)
        result["times"] += [{"model": model, "part": "terms"} | r for r in rows]
        timing.table(f"A layer's products, {model}", rows, {"method": "s", "seconds": ".5f"})


def step(base, names, method: str, tokens: int, rank: int, device: str) -> timing.Case:
    """The forward and backward of a micro-batch."""
    module, before, _ = cases.under(base, names, method, None if method == "dense" else rank)
    batch = pieces.example(module.config.vocab_size, tokens, device)
    return timing.Case(method, lambda: pieces.loss(module, batch, "autocast", device).backward(), None if method == "dense" else rank, before)


def memory(model: str, method: str, tokens: int, rank: int, device: str) -> dict:
    """The peaks of a real step, in GiB: tensor by tensor in the training call and in the probe, and the allocator's over all of it."""
    free(device)
    ledger = measure(cases.CONFIGS[model](), setting(method, tokens, rank), device)
    free(device)
    return {"allocated": ledger.allocated / GIB} | _peaks(ledger)


def free(device: str) -> None:
    gc.collect()                                            # a model and its sketches hold each other
    if device == "cuda":
        torch.cuda.empty_cache()


def simulated(model: str, method: str, tokens: int, rank: int) -> dict:
    """The same peaks predicted, in a process of its own, which needs no GPU."""
    return {f"simulated {part}": peak for part, peak in _peaks(simulate(cases.CONFIGS[model](), setting(method, tokens, rank))).items()}


def setting(method: str, tokens: int, rank: int) -> Setting:
    return Setting(method=method, rank=rank, gpus=1, context=tokens, probe="finite_difference", probe_tokens=tokens)


def _peaks(ledger) -> dict:
    return {"step": ledger.peak("train", "update") / GIB, "probe": ledger.peak("probe") / GIB if ledger.setting.method == "logra" else None}


if __name__ == "__main__":
    sys.exit(any(check["holds"] == "no" for check in main()["checks"]))
