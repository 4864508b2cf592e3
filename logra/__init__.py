"""LoGRA: reinforcement-learning post-training of language models from low-rank gradient sketches (arXiv 2610.06647)."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:                                           # for editors and type checkers, which cannot follow __getattr__
    from logra import checkpointing, projection, sync
    from logra.kl import ConstantBudget, Contexts, CosineBudget, KLControl, predicted_kl, realised_kl, step_scale
    from logra.linear import Sketches, attach, detach
    from logra.loops import StepControl
    from logra.optim import Proposal, RowAdam, SketchSGD
    from logra.replicas import Replicas
    from logra.update import LowRankUpdate

__version__ = "0.1.0"

_MODULES = ("checkpointing", "projection", "sync")
_NAMES = {
    "kl": ("ConstantBudget", "Contexts", "CosineBudget", "KLControl", "predicted_kl", "realised_kl", "step_scale"), "linear": ("Sketches", "attach", "detach"),
    "loops": ("StepControl",), "optim": ("Proposal", "RowAdam", "SketchSGD"), "replicas": ("Replicas",), "update": ("LowRankUpdate",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted([*_MODULES, *_HOME])


def __getattr__(name: str):
    """Imports what is asked for, and torch with it: who only draws a figure or reads a plan does not wait for them."""
    if name in _HOME:
        return getattr(import_module(f"logra.{_HOME[name]}"), name)
    if name in _MODULES or name in _NAMES:
        return import_module(f"logra.{name}")
    raise AttributeError(f"module 'logra' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
