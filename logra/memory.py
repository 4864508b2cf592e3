"""Where the bytes of a training call go on each GPU: simulated without one, and measured.

    python -m logra.memory Qwen2.5-Math-7B --method logra --rank 256 --gpus 4
"""

import gc
import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from logra.memory_step import Setting, Step
from logra.memory_tracker import Category, Tracker

CONFIGURATIONS = Path(__file__).with_name("model_configs")
GIB = 2 ** 30


def configuration(name: str):
    """A Hugging Face text configuration: of a shipped model by its name, or of a folder or file. Raises FileNotFoundError for another."""
    import transformers

    shipped = {file.stem: file for file in sorted(CONFIGURATIONS.glob("*.json"))}
    path = shipped.get(name, Path(name).expanduser())
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"no model {name!r}: wanted {', '.join(shipped)}, or a folder with a config.json")
    fields = json.loads(path.read_text())
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


@dataclass(frozen=True)
class Ledger:
    """trace: (phase, bytes of each category) in time's order; phases are train, probe and update."""

    setting: Setting
    trace: list[tuple[str, tuple[int, ...]]]

    def at_peak(self, *phases: str) -> dict[str, int]:
        """Bytes by category at the peak of some phases (all by default)."""
        rows = [row for phase, row in self.trace if not phases or phase in phases]
        return dict(zip((c.value for c in Category), max(rows, key=sum, default=(0,) * len(Category))))

    def peak(self, *phases: str) -> int:
        return sum(self.at_peak(*phases).values())


def simulate(config, setting: Setting) -> Ledger:
    """The ledger of a step on one of `setting.gpus` ranks, without a GPU and without memory for it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import transformers

    if dist.is_initialized():
        raise RuntimeError("a process group exists already: a simulation has one of its own, of ranks that do not exist; run it in another process")
    with ExitStack() as stack:
        mesh = None
        if setting.gpus > 1:
            dist.init_process_group("fake", rank=0, world_size=setting.gpus, store=FakeStore())
            stack.callback(dist.destroy_process_group)
            mesh = init_device_mesh("cpu", (setting.gpus,))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=setting.attention, dtype=torch.float32)
        with Tracker(config.vocab_size):
            step = Step(model, setting, mesh)
        gc.collect()                                        # whole weights hang in cycles after they were sharded
        with Tracker(config.vocab_size) as tracker:
            step.prepare(tracker)
            step.run()
    return Ledger(setting, tracker.trace)
