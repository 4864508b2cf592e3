"""Times of several ways to do one thing, side by side in one run: a round runs each once, and a round's order is the last one's, turned by one.

On the CPU with one thread the clock is the processor time of this process, which other processes on the machine do not stretch; otherwise
it is wall time, around a synchronised device.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode, addmm_flop, sdpa_backward_flop_count, sdpa_flop_count

# What PyTorch's counter leaves out: products added in place, and the CPU's fused attention (counted whole, though half is masked).
_UNCOUNTED = {
    torch.ops.aten.addmm_: lambda to, a, b, *args, out_shape=None, **kwargs: addmm_flop(to, a, b),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        lambda q, k, v, *args, out_shape=None, **kwargs: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda dy, q, k, v, *args, out_shape=None, **kwargs: sdpa_backward_flop_count(dy, q, k, v),
}


@dataclass
class Case:
    """One way: `run` is timed, `before` prepares each run untimed. rank: None where there is none. note: said in the table."""

    method: str
    run: Callable[[], object]
    rank: int | None = None
    before: Callable[[], object] = lambda: None
    note: str = ""
    labels: dict = field(default_factory=dict)


def clock(device: str) -> tuple[Callable[[], float], str]:
    """The clock of this run, in seconds, and its name."""
    if device == "cpu" and torch.get_num_threads() == 1:
        return time.process_time, "processor time of one thread"
    if device == "cpu":
        return time.perf_counter, f"wall time, {torch.get_num_threads()} threads"

    def synchronised():
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronised, "wall time, synchronised"


def interleaved(cases: list[Case], repetitions: int, device: str = "cpu") -> list[dict]:
    """A row a case: its labels, seconds (all, their median and least), FLOPs of its matrix products as PyTorch counts them.

    Every case runs once before, uncounted; its FLOPs are those of that run.
    """
    now, _ = clock(device)
    flops, samples = [], [[] for _ in cases]
    for case in cases:
        case.before()
        with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
            case.run()
        flops.append(counter.get_total_flops())
    for repetition in range(repetitions):
        for place in range(len(cases)):
            i = (place + repetition) % len(cases)
            cases[i].before()
            start = now()
            cases[i].run()
            samples[i].append(now() - start)
    return [dict(case.labels, method=case.method, rank=case.rank, note=case.note, flops=count, seconds=statistics.median(times),
                 seconds_least=min(times), samples=times) for case, count, times in zip(cases, flops, samples)]


def against(rows: list[dict], base: dict) -> list[dict]:
    """The rows with their ratios to `base`: of medians, of least times, and of FLOPs."""
    for row in rows:
        row["ratio"], row["ratio_least"] = row["seconds"] / base["seconds"], row["seconds_least"] / base["seconds_least"]
        row["flops_ratio"] = row["flops"] / base["flops"] if base["flops"] else None
    return rows


def precision(dtype: str, device: str):
    """A context for `dtype`: "float32" and "bfloat16" are the weights' own, "autocast" is float32 weights that compute in bfloat16."""
    return torch.autocast(device, dtype=torch.bfloat16) if dtype == "autocast" else nullcontext()


def environment(device: str) -> dict:
    """What the numbers depend on: hardware, versions, threads, clock."""
    name = torch.cuda.get_device_name() if device == "cuda" else _processor()
    installed = {package.name: package.version for package in distributions()}
    versions = {name: installed[name] for name in ("torch", "transformers", "peft", "galore-torch", "flora-opt") if name in installed}
    return {"device": device, "hardware": name, "clock": clock(device)[1], "threads": torch.get_num_threads(), "cores": os.cpu_count(),
            "python": platform.python_version(), "cuda": torch.version.cuda, "versions": versions,
            "capability": torch.backends.cpu.get_cpu_capability() if device == "cpu" else list(torch.cuda.get_device_capability())}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def write(result: Mapping, out: Path | None) -> None:
    """JSON into a file, if one was named; written aside and moved, so that a file is whole or not there."""
    if out is not None:
        aside = out.with_suffix(".part")
        aside.write_text(json.dumps(result, indent=1) + "\n")
        aside.replace(out)


def table(title: str, rows: list[dict], columns: Mapping[str, str]) -> None:
    """Print rows. columns: {key: format, such as ".3f"}; a key that a row lacks, or has None at, is left blank."""
    shown = Table(title=title, title_justify="left")
    for key, form in columns.items():
        shown.add_column(key.replace("_", " "), justify="left" if form == "s" else "right")
    for row in rows:
        shown.add_row(*("" if row.get(key) is None else format(row[key], form) for key, form in columns.items()))
    Console(width=140).print(shown)
