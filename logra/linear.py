"""SketchedLinear: the forward is nn.Linear's; the backward adds to the sketch S_dr = G_dk A_rkᵀ (Eq. 2), never forming G.

`attach` turns the attention and MLP projections of a model into sketched ones in place; `detach` turns them back.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointFunction

from logra import bits
from logra import projection as projections


class Sketch:
    """One matrix's sketch. `S_dr` is float32 [d, r] on the weight's device, zero until the first backward."""

    def __init__(self, name: str, module: nn.Linear, owner: "Sketches"):
        self.name, self.module, self.owner = name, module, owner
        self.d, self.k = module.weight.shape
        self.delta = None                                   # (a, F_dr, key) while a KL probe runs: see Sketches.perturbed
        self._S_dr = self._kept = self._anchor = None

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight

    @property
    def rank(self) -> int:
        return self.owner.rank

    @property
    def key(self) -> int:
        """The key of the projection that is in use."""
        return self.key_at(self.owner.update)

    def key_at(self, update: int) -> int:
        """The key of update number `update`: another one for each, unless `refresh` is off."""
        return projections.key(self.owner.seed, update if self.owner.refresh else 0, self.name)

    @property
    def S_dr(self) -> torch.Tensor:
        if self._S_dr is None or self._S_dr.device != self.weight.device:
            old, self._S_dr = self._S_dr, torch.zeros(self.d, self.rank, device=self.weight.device)
            if old is not None:
                self._S_dr.copy_(old)
        return self._S_dr

    def A_rk(self, rows=None, columns=None, dtype=torch.float32, device=None) -> torch.Tensor:
        """The projection in use, or a slice of it: hashed anew at each call."""
        return projections.matrix(self.owner.projection, self.rank, self.k, self.key, rows, columns, dtype,
                                  device or self.weight.device)

    def project(self, X_tk: torch.Tensor, key: int) -> torch.Tensor:
        """X Aᵀ · √r, [t, r], in float32 also where X is narrower, or else the sketch would lose what X still holds."""
        dtype = torch.promote_types(X_tk.dtype, torch.float32)
        wanted = (key, dtype, X_tk.device)
        if self._kept is None or self._kept[0] != wanted:
            E_rk = projections.entries(self.owner.projection, self.rank, self.k, key, dtype=dtype, device=X_tk.device)
            self._kept = (wanted, E_rk) if self.owner.keep_projections else None
        else:
            E_rk = self._kept[1]
        with torch.autocast(X_tk.device.type, enabled=False):
            return X_tk.to(dtype) @ E_rk.T

    def add(self, dY_td: torch.Tensor, P_tr: torch.Tensor) -> None:
        """S += dYᵀ (X Aᵀ): one micro-batch's contribution to Eq. 2, accumulated in float32."""
        self.S_dr.addmm_(dY_td.float().T, P_tr.float(), alpha=projections.unit(self.rank))

    @property
    def anchor(self) -> torch.Tensor:
        """A zero-size tensor that requires grad: under a frozen input it alone keeps the node in autograd's graph."""
        if self._anchor is None:
            self._anchor = torch.empty(0, requires_grad=True)
        return self._anchor


class _SketchedProduct(torch.autograd.Function):
    """X Wᵀ + b, which keeps X Aᵀ in place of X; its backward adds dYᵀ (X Aᵀ) = G Aᵀ to the sketch (Eq. 2)."""

    @staticmethod
    def forward(ctx, x, weight, bias, anchor, sketch):
        ctx.x_shape, ctx.x_dtype, ctx.sketch = x.shape, x.dtype, sketch
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
        P_tr = sketch.project(x.reshape(-1, x.shape[-1]), sketch.key)
        ctx.save_for_backward(P_tr, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        P_tr, weight = ctx.saved_tensors
        dY_td = dy.reshape(-1, dy.shape[-1])
        ctx.sketch.add(dY_td, P_tr)
        dx = None
        if ctx.needs_input_grad[0]:                         # under autocast W is narrowed for it, as in plain autograd
            dx = (dY_td @ weight.to(dY_td.dtype)).view(ctx.x_shape).to(ctx.x_dtype)
        db = dY_td.sum(0) if ctx.needs_input_grad[2] else None
        return dx, None, db, None, None


class SketchedLinear(nn.Linear):
    """An nn.Linear whose backward fills a sketch. Made by `attach`; it has the same parameters under the same names."""

    sketch: Sketch

    @torch.compiler.disable                                 # a compiled backward may reorder what is added to S in place
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sketch = self.sketch
        if sketch.delta is not None:
            a, F_dr, key = sketch.delta
            y, P_tr = F.linear(x, self.weight, self.bias), sketch.project(x, key)
            return y + (a * F.linear(P_tr, F_dr.to(P_tr.dtype))).to(y.dtype)
        if torch.is_grad_enabled():
            return _SketchedProduct.apply(x, self.weight, self.bias, sketch.anchor, sketch)
        if self.training and _under_reentrant_checkpoint():
            raise RuntimeError(f"{sketch.name} runs under reentrant activation checkpointing, which loses sketches: "
                               "use gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})")
        return F.linear(x, self.weight, self.bias)


def _under_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


class CoverageRow(NamedTuple):
    name: str
    kind: str                                               # the module's class
    shape: tuple
    sketched: bool
    why: str                                                # why it was left out; empty if it was not


class Coverage(list):
    """A row for each module that holds a matrix: which ones are sketched, which are left out, and why."""

    def __str__(self):
        taken = sum(row.sketched for row in self)
        lines = [f"{taken} of {len(self)} matrices are sketched"]
        width = max((len(row.name) for row in self), default=0)
        lines += [f"{row.name:<{width}}  {row.kind:<16} {'×'.join(map(str, row.shape)):>14}  "
                  f"{'sketched' if row.sketched else row.why}" for row in self]
        return "\n".join(lines)


class Sketches(Mapping):
    """The sketches of a model, by canonical module name. `update` counts from 1; the optimizer's step advances it.

    run, session: whose updates these are, stamped on each: a name that another run does not have, and a number that grows
    whenever the run is started anew (both may be set).
    """

    def __init__(self, model, rank, projection, seed, refresh, keep_projections):
        self.model, self.rank, self.projection, self.seed, self.refresh = model, rank, projection, seed, refresh
        self.keep_projections = keep_projections
        self.update = 1
        self._sketches: dict[str, Sketch] = {}
        self._coverage = Coverage()
        self._frozen: list[nn.Parameter] = []               # what attach froze, for detach
        self.run, self.session = f"{seed}/{rank}/{projection}/{'refreshed' if refresh else 'fixed'}", 0

    @cached_property
    def base(self) -> str:
        """A hash of the whole model as it is when it is first asked for (see `logra.bits.base`): before the first update, which carries it."""
        selected = {name: sketch.weight.detach() for name, sketch in self.items()}
        rest = {projections.canonical_name(name): parameter for name, parameter in self.model.named_parameters()}
        return bits.base(selected, {name: parameter for name, parameter in rest.items() if name.removesuffix(".weight") not in selected})

    def __getitem__(self, name: str) -> Sketch:
        return self._sketches[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sketches)

    def __len__(self) -> int:
        return len(self._sketches)

    def __repr__(self):
        return f"Sketches(rank={self.rank}, projection={self.projection!r}, refresh={self.refresh}, update={self.update})\n{self._coverage}"

    def coverage(self) -> Coverage:
        return self._coverage

    def zero(self) -> None:
        """S ← 0, before the first micro-batch of an update (Algorithm 1, line 7)."""
        for sketch in self.values():
            if sketch._S_dr is not None:
                sketch._S_dr.zero_()

    @contextmanager
    def perturbed(self, factors: Mapping[str, tuple[torch.Tensor, int]], a):
        """Within it the forward is that of W + a · F E, never formed: y = x Wᵀ + a · (x Eᵀ) Fᵀ, with E = √r A, A's entries.

        factors: (F_dr, key of A) by name. a: a float or a dual scalar.
        """
        try:
            for name, (F_dr, key) in factors.items():
                self[name].delta = (a, F_dr, key)
            yield
        finally:
            for sketch in self.values():
                sketch.delta = None


def attach(model: nn.Module, rank: int, projection: str = "rademacher", seed: int = 0, refresh: bool = True, *,
           modules: Iterable[str] | None = None, freeze_rest: bool = True, keep_projections: bool = False) -> Sketches:
    """Sketch the attention and MLP projections of `model` in place, and freeze the rest.

    Args:
        rank: r, the rank of sketches and updates.
        projection: "rademacher", "gaussian" or "hadamard" (Section 2.1; see `logra.projection`).
        seed: the run's seed, which with the update's number and the module's name makes each projection's key.
        refresh: a new projection at every update (Algorithm 1); False keeps the first.
        modules: names of the nn.Linear modules to take; by default all in the decoder's blocks that are wider than `rank`.
        freeze_rest: False leaves the other parameters as they are, to be trained by an optimizer of their own.
        keep_projections: hold every A in memory between forwards (faster for a small model) instead of hashing it anew.

    Returns the sketches; `.coverage()` says what was taken, what was left and why. Weights keep their names and values, and
    their `.grad` stays None. Raises ValueError where nothing matches or a module cannot be sketched, RuntimeError if attached already.
    """
    if any(isinstance(module, SketchedLinear) for module in model.modules()):
        raise RuntimeError("this model has sketches attached already: call logra.detach(model) first")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a positive integer, but it is {rank!r}")
    sketches = Sketches(model, rank, projection, seed, refresh, keep_projections)
    chosen = _choose(model, sketches, None if modules is None else set(map(projections.canonical_name, modules)))
    for module in chosen.values():                          # raises here, before anything is changed
        projections.entries(projection, rank, module.in_features, key=0, rows=slice(0, 1), columns=slice(0, 1))
    weights = [module.weight for module in chosen.values()]
    sketches._frozen = [p for p in (model.parameters() if freeze_rest else weights) if p.requires_grad]
    for parameter in sketches._frozen:
        parameter.requires_grad_(False)
    for name, module in chosen.items():
        module.__class__ = SketchedLinear
        module.sketch = sketches._sketches[name] = Sketch(name, module, sketches)
    return sketches


def detach(model: nn.Module) -> None:
    """Undo `attach`: plain nn.Linear modules again, with the weights as they are and `requires_grad` as it was."""
    for module in model.modules():
        if isinstance(module, SketchedLinear):
            for parameter in module.sketch.owner._frozen:
                parameter.requires_grad_(True)
            module.__class__ = nn.Linear
            del module.sketch


def attached(model: nn.Module) -> Sketches:
    """The sketches of a model that `attach` was called on. Raises ValueError if it was not."""
    for module in model.modules():
        if isinstance(module, SketchedLinear):
            return module.sketch.owner
    raise ValueError(f"this {type(model).__name__} has no sketches: call logra.attach(model, rank=...) first")


def _choose(model, sketches, wanted) -> dict[str, nn.Linear]:
    """The modules to sketch, by canonical name; fills the coverage table on the way."""
    inner = next((module for module in model.modules() if hasattr(module, "get_decoder")), model)    # without its wrappers
    blocks = _decoder_blocks(model, inner)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    chosen = {}
    for full, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            name = projections.canonical_name(full if part == "weight" else f"{full}.{part}")
            why = _why_not(module, full, blocks, head, sketches.rank) if wanted is None else _why_not_named(module, name, wanted)
            sketches._coverage.append(CoverageRow(name, type(module).__name__, tuple(parameter.shape), not why, why))
            if not why:
                chosen[name] = module
    if wanted is not None and set(chosen) != wanted:
        raise ValueError(f"modules names {sorted(wanted - set(chosen))[:5]}, which are no nn.Linear modules of this "
                         f"{type(model).__name__}:\n{sketches._coverage}")
    if not chosen:
        raise ValueError(f"no module of this {type(model).__name__} can be sketched at rank {sketches.rank}; "
                         f"name nn.Linear modules with modules=[...]:\n{sketches._coverage}")
    return chosen


def _decoder_blocks(model, inner) -> dict[str, nn.Module]:
    """The repeated blocks: the entries of the outermost nn.ModuleList of the (text) decoder, by their full names."""
    decoder = inner.get_decoder() if hasattr(inner, "get_decoder") else inner
    inside = {id(module) for module in decoder.modules()}
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and id(module) in inside]
    outermost = [name for name in lists if not any(name.startswith(other + ".") for other in lists)]
    return {f"{name}.{i}": block for name in outermost for i, block in enumerate(model.get_submodule(name))}


def _why_not(module, name, blocks, head, rank) -> str:
    if module is head:
        return "output head"
    if isinstance(module, nn.Embedding):
        return "embedding"
    block = next((b for b in blocks if name.startswith(b + ".")), None)
    if block is None:
        return "outside the decoder's blocks"
    if type(module) is not nn.Linear:
        return f"not an nn.Linear ({type(module).__name__})"
    parent = name.rpartition(".")[0]
    if parent == block:
        return "not part of an attention or MLP module"
    if hasattr(blocks[block].get_submodule(parent[len(block) + 1:]), "experts"):
        return "a router of experts"
    if min(module.weight.shape) <= rank:
        return f"min(d, k) = {min(module.weight.shape)} is not above the rank {rank}"
    return ""


def _why_not_named(module, name, wanted) -> str:
    if name not in wanted:
        return "not named"
    return "" if type(module) is nn.Linear else f"not an nn.Linear ({type(module).__name__})"
