"""LoGRA: reinforcement-learning post-training of language models from low-rank gradient sketches (arXiv 2610.06647)."""

from logra import checkpointing, projection, sync
from logra.kl import ConstantBudget, Contexts, CosineBudget, KLControl, predicted_kl, realised_kl, step_scale
from logra.linear import Sketches, attach, detach
from logra.loops import StepControl
from logra.optim import Proposal, RowAdam, SketchSGD
from logra.replicas import Replicas
from logra.update import LowRankUpdate

__version__ = "0.1.0"
__all__ = ["ConstantBudget", "Contexts", "CosineBudget", "KLControl", "LowRankUpdate", "Proposal", "Replicas", "RowAdam",
           "SketchSGD", "Sketches", "StepControl", "attach", "checkpointing", "detach", "predicted_kl", "projection", "realised_kl", "step_scale", "sync"]
