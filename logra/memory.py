"""Where the bytes of a training call go on each GPU: simulated, without a GPU and without memory for it, or measured.

    python -m logra.memory Qwen2.5-Math-7B --method logra --rank 256 --gpus 4 --card 80

    ledger = simulate(configuration("Qwen2.5-Math-7B"), Setting(method="logra", rank=256, gpus=4))
    ledger.at_peak("train")          # {category: bytes} of the backward; "probe" and "update" are the other phases

Both run the same code: the library's forward and backward of one micro-batch that is not the update's first, the KL probe, the update.
A simulation runs it on fake tensors (shapes, types and lifetimes are real, numbers are not made) as rank 0 of a process group whose
other ranks do not exist. Counted are tensors. Not modelled: CUDA streams, which may hold a layer or two of gather buffers longer,
workspaces inside operators, fragmentation and the CUDA context. Forward AD makes a temporary more under fake tensors than in truth.
"""

import argparse
import copy
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from logra import bits, memory_depth
from logra.memory_setting import GIB, LEAST, PAPER, PHASES, Category, Setting
from logra.memory_step import Step
from logra.memory_tracker import Tracker

__all__ = ["GIB", "LEAST", "PAPER", "Category", "Ledger", "Setting", "configuration", "measure", "shipped", "simulate"]

_FOLDER = Path(__file__).with_name("model_configs")


def shipped() -> list[str]:
    """Names of the models whose configurations are in the package."""
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def configuration(name: str | Path):
    """A Hugging Face text configuration: of a shipped model by its name, or of a folder or file. Raises FileNotFoundError for another."""
    import transformers

    path = _FOLDER / f"{name}.json" if name in shipped() else Path(name).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no model {str(name)!r}: wanted {', '.join(shipped())}, or a folder with a config.json")
    found = json.loads(path.read_text())
    return transformers.AutoConfig.for_model(found.pop("model_type"), **found)


@dataclass(frozen=True)
class Ledger:
    """Bytes on one GPU. peaks: by category (all of them) at the peak of each phase that there was.

    trace: (phase, bytes of each `Category`) in time's order, one row for each operator that changed them; empty where depth was extrapolated.
    allocated: of a measured step alone, the most that torch's allocator held, workspaces inside operators included.
    """

    setting: Setting
    peaks: dict[str, dict[str, int]]
    trace: list[tuple[str, tuple[int, ...]]]
    allocated: int | None = None

    @classmethod
    def of(cls, setting: Setting, trace, allocated: int | None = None) -> "Ledger":
        names = [category.value for category in Category]
        phases = [phase for phase in PHASES if any(row[0] == phase for row in trace)]
        return cls(setting, {phase: dict(zip(names, max((sizes for at, sizes in trace if at == phase), key=sum))) for phase in phases}, trace, allocated)

    def at_peak(self, *phases: str) -> dict[str, int]:
        """Bytes by category at the highest peak of some phases, by default of all; zeros where none of them was."""
        found = [self.peaks[phase] for phase in phases or PHASES if phase in self.peaks]
        return max(found, key=lambda sizes: sum(sizes.values()), default=dict.fromkeys((category.value for category in Category), 0))

    def peak(self, *phases: str) -> int:
        return sum(self.at_peak(*phases).values())

    def summary(self) -> dict:
        """GiB: `peak_gib`, `step_peak_gib` (backward and update), `probe_peak_gib`, and the categories at each phase's peak."""
        by_phase = {phase: {name: size / GIB for name, size in sizes.items()} for phase, sizes in self.peaks.items()}
        return {"setting": asdict(self.setting), "peak_gib": self.peak() / GIB, "step_peak_gib": self.peak("train", "update") / GIB,
                "probe_peak_gib": self.peak("probe") / GIB, "phases": by_phase}


def simulate(config, setting: Setting, whole: bool = False) -> Ledger:
    """The ledger of a step on one of `setting.gpus` GPUs. config: a Hugging Face text configuration.

    A decoder's layers are alike: two shallow models are run, and the moments of their layers read at the true depth (`logra.memory_depth`).
    `whole` runs all layers, with the same result and a trace. Raises RuntimeError inside a process group.
    """
    def moments(layers):
        return memory_depth.pieces(*_trace(_shortened(config, layers), setting))

    period = _period(config)
    layers, second = memory_depth.shallow(period), None
    while not whole and config.num_hidden_layers > layers + period:
        first, second = second or moments(layers), moments(layers + period)
        found = memory_depth.at_depth(first, second, layers, period, (config.num_hidden_layers - layers) // period)
        if found:
            return replace(Ledger.of(setting, list(found.items())), trace=[])
        layers += period
    return Ledger.of(setting, _trace(config, setting)[0])


def _trace(config, setting: Setting) -> tuple[list, list]:
    """A tracker's trace and marks of a simulated step."""
    bands = patch.dict(bits.BAND, cpu=bits.BAND["cuda"])    # it is the step of a GPU
    with _ranks_that_do_not_exist(setting.gpus) as mesh, FakeTensorMode(allow_non_fake_inputs=True), bands:
        with Tracker(config.vocab_size):                    # attaching needs true indices
            step = Step(_model(config, setting, "cpu"), setting, mesh)
        gc.collect()                                        # whole weights hang in cycles after they were sharded
        with Tracker(config.vocab_size) as tracker:
            step.prepare(tracker)
            step.run()
    return tracker.trace, tracker.marks


def _period(config) -> int:
    """After how many layers their kinds repeat."""
    kinds = getattr(config, "layer_types", None) or ["same"] * config.num_hidden_layers
    for period in range(1, len(kinds) + 1):
        if len(kinds) % period == 0 and kinds == kinds[:period] * (len(kinds) // period):
            return period


def _shortened(config, layers: int):
    short = copy.deepcopy(config)
    if getattr(short, "layer_types", None):
        short.layer_types = short.layer_types[:layers]
    short.num_hidden_layers = layers
    return short


def measure(config, setting: Setting, device: str = "cpu") -> Ledger:
    """The same ledger of a real step with random weights, on a CPU or a CUDA device, followed twice: tensor by tensor, and by the allocator.

    Within a process group the model is sharded over it, and `setting.gpus` has to be its size. Raises ValueError where it is not.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if setting.gpus != world:
        raise ValueError(f"the setting says {setting.gpus} GPUs, but {world} {'process is' if world == 1 else 'processes are'} here")
    mesh = init_device_mesh(torch.device(device).type, (world,)) if world > 1 else None
    step = Step(_model(config, setting, device), setting, mesh)
    gc.collect()
    with Tracker(config.vocab_size) as tracker:
        step.prepare(tracker)
        before = sum(tracker.totals())
        step.run()
    trace = list(tracker.trace)
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        step.run()
        return Ledger.of(setting, trace, torch.cuda.max_memory_allocated(device))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.run()
    held = most = before
    for event in sorted((e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return Ledger.of(setting, trace, most)


def _model(config, setting: Setting, device: str):
    import transformers

    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=setting.attention, dtype=torch.float32)


@contextmanager
def _ranks_that_do_not_exist(gpus: int) -> Iterator:
    """A device mesh of `gpus` ranks, of which this process is the first; None for one GPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if gpus == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError("a process group exists already, and a simulation makes one of its own: run it in another process")
    dist.init_process_group("fake", rank=0, world_size=gpus, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (gpus,))
    finally:
        dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m logra.memory", description=__doc__.splitlines()[0])
    parser.add_argument("model", help=f"{', '.join(shipped())}, or a folder with a config.json")
    parser.add_argument("--card", type=float, default=80, help="memory of a GPU in GB, 10⁹ bytes (default: %(default)s)")
    sets = parser.add_mutually_exclusive_group()
    sets.add_argument("--paper", action="store_const", dest="base", const=PAPER, help="what the paper's stack is assumed to do, in place of this library's defaults")
    sets.add_argument("--least", action="store_const", dest="base", const=LEAST, help="with the switches that need the least memory")
    parser.add_argument("--json", action="store_true", help="print JSON in place of a table")
    for field in fields(Setting):
        kind = dict(action=argparse.BooleanOptionalAction) if field.type is bool else dict(type=field.type)
        parser.add_argument("--" + field.name.replace("_", "-"), default=None, help=f"default: {field.default}", **kind)
    options = parser.parse_args(arguments)
    given = {field.name: getattr(options, field.name) for field in fields(Setting) if getattr(options, field.name) is not None}
    try:
        config = configuration(options.model)
        setting = replace(options.base or Setting(), **given)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    ledger = simulate(config, setting)
    card = options.card * 1e9
    if options.json:
        print(json.dumps({"model": options.model, **ledger.summary(), "card_gib": card / GIB, "fits": ledger.peak() <= card}))
    else:
        _print(options.model, ledger, card)
    return 0


def _print(name: str, ledger: Ledger, card: float) -> None:
    from rich.console import Console
    from rich.table import Table

    setting, found, phases = ledger.setting, ledger.peaks, list(ledger.peaks)
    table = Table(title=f"{name}, {setting.method}, GiB on each of {setting.gpus} GPU{'s' * (setting.gpus > 1)}, simulated", title_justify="left")
    table.add_column("at the peak of")
    for phase in phases:
        table.add_column(phase, justify="right")
    for category in Category:
        if any(found[phase][category.value] for phase in phases):
            table.add_row(category.value, *(f"{found[phase][category.value] / GIB:.3f}" for phase in phases))
    table.add_section()
    table.add_row("sum", *(f"{ledger.peak(phase) / GIB:.3f}" for phase in phases), style="bold")
    console = Console()
    console.print(table)
    peak = ledger.peak()
    where = max(phases, key=ledger.peak)
    console.print(f"It {'fits' if peak <= card else 'does not fit'} a card of {card / 1e9:g} GB ({card / GIB:.1f} GiB): the peak, {peak / GIB:.2f} GiB, lies in {where}; "
                  f"{abs(card - peak) / GIB:.2f} GiB are {'left' if peak <= card else 'missing'}. CUDA's context, workspaces and fragmentation are not in it.", highlight=False)
    if setting.gpus > 1:
        apart = "gathered for its own use" if setting.split_embedding else "gathered with the head, through all of the step (for its own use, as in a run: --split-embedding)"
        console.print(f"Weights are gathered in {setting.gathered} (a run gathers them in float32 unless it says gathered: bfloat16; here: --gathered); "
                      f"an embedding that is not the head's is {apart}.", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
