"""SketchedLinear: the forward is nn.Linear's; the backward adds to the sketch S_dr = G_dk A_rkᵀ (Eq. 2), never forming G.

`attach` turns the attention and MLP projections of a model into sketched ones in place; `detach` turns them back.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import torch
from torch import nn
from torch._compile import _disable_dynamo                  # torch.compiler.disable without the second that importing the compiler takes
from torch.nn import functional as F

from logra import bits
from logra import projection as projections
from logra.checkpointing import held, under_reentrant
from logra.coverage import Coverage, choose
from logra.replicas import Replicas, warn_if_forgotten
from logra.shards import RowShards

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_BAND = 1 << 22                                             # elements of a narrow tensor that are widened at a time (16 MiB)


class Source:
    """What one matrix reads, or several that read the same: the name that makes its projections' keys, A and X Aᵀ."""

    def __init__(self, name: str, k: int, owner: "Sketches"):
        self.name, self.k, self.owner = name, k, owner
        self.kept = self._last = None

    def key_at(self, update: int) -> int:
        return projections.key(self.owner.seed, update if self.owner.refresh else 0, self.name)

    def project(self, X_tk: torch.Tensor, key: int) -> torch.Tensor:
        """X Aᵀ · √r, [t, r], in float32 also where X is narrower, or else the sketch would lose what X still holds.

        A is hashed here and let go, layer by layer, unless `keep_projections` holds it.
        """
        dtype = torch.promote_types(X_tk.dtype, torch.float32)
        wanted = (key, dtype, X_tk.device)
        if self.kept is None or self.kept[0] != wanted:
            E_rk = projections.entries(self.owner.projection, self.owner.rank, self.k, key, dtype=dtype, device=X_tk.device)
            self.kept = (wanted, E_rk) if self.owner.keep_projections else None
        else:
            E_rk = self.kept[1]
        with torch.autocast(X_tk.device.type, enabled=False):
            band = len(X_tk) if X_tk.dtype == dtype else max(1, _BAND // self.k)
            if len(X_tk) <= band:
                return X_tk.to(dtype) @ E_rk.T
            return torch.cat([X.to(dtype) @ E_rk.T for X in X_tk.split(band)])

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        """P_tr = X Aᵀ · √r of a forward, without a graph: the same tensor for each matrix that reads the same x."""
        key = self.key_at(self.owner.update)
        last = self._last
        if last is not None and last[0]() is x and last[1:3] == (x._version, key):
            return last[3]
        reading, writing = getattr(held, "reading", None), getattr(held, "writing", None)
        if reading is not None:
            P_tr = next(reading[self])
        else:
            with torch.no_grad():
                X_tk = x.reshape(-1, x.shape[-1])
                if torch.is_autocast_enabled(x.device.type):
                    X_tk = X_tk.to(torch.get_autocast_dtype(x.device.type))
                P_tr = self.project(X_tk, key)
        if writing is not None:
            writing.setdefault(self, []).append(P_tr)
        if self.owner.share_inputs:
            self._last = (weakref.ref(x, self._forget), x._version, key, P_tr)
        return P_tr

    def _forget(self, reference) -> None:
        """x is gone: nobody reads it again."""
        if self._last is not None and self._last[0] is reference:
            self._last = None

    def __getstate__(self):
        return vars(self) | {"_last": None}                 # a copy of a model reads other tensors


class Sketch:
    """One matrix's sketch. `S_dr` is float32 [d, r] on the weight's device, zero until the first backward; of it, this rank's rows alone
    where `Sketches.shards` is set."""

    def __init__(self, name: str, module: nn.Linear, owner: "Sketches", source: Source):
        self.name, self.module, self.owner, self.source = name, module, owner, source
        self.d, self.k = module.weight.shape
        self.spent = False                                  # S is of an update that was made: the next backward starts anew
        self.delta = None                                   # (a, factors) while a KL probe runs: see Sketches.perturbed
        self._S_dr = self._anchor = None

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
        return self.source.key_at(update)

    @property
    def S_dr(self) -> torch.Tensor:
        shards = self.owner.shards
        # row shards stay where they were made: an offloaded weight is on the GPU while a forward has it gathered, and S is not to follow it there
        if self._S_dr is None or shards is None and self._S_dr.device != self.weight.device:
            rows = slice(0, self.d) if shards is None else shards.rows(self.d)
            old, self._S_dr = self._S_dr, torch.zeros(rows.stop - rows.start, self.rank, device=self.weight.device)
            if old is not None:
                self._S_dr.copy_(old)
        return self._S_dr

    def A_rk(self, rows=None, columns=None, dtype=torch.float32, device=None) -> torch.Tensor:
        """The projection in use, or a slice of it: hashed anew at each call."""
        return projections.matrix(self.owner.projection, self.rank, self.k, self.key, rows, columns, dtype,
                                  device or self.weight.device)

    def add(self, dY_td: torch.Tensor, P_tr: torch.Tensor) -> None:
        """S += dYᵀ (X Aᵀ): one micro-batch's contribution to Eq. 2, accumulated in float32; over all ranks, where S is sharded.

        The first one after a step begins a new S, for a loop may call zero_grad() of the model, which knows no sketches.
        """
        if self.spent:
            self.S_dr.zero_()
            self.spent = False
        self.owner.reduced = None
        shards = self.owner.shards
        into = self.S_dr if shards is None else torch.zeros(self.d, self.rank, device=dY_td.device)
        band = self.d if dY_td.dtype == torch.float32 else max(1, _BAND // max(1, len(dY_td)))
        for start in range(0, self.d, band):
            into[start:start + band].addmm_(dY_td[:, start:start + band].float().T, P_tr.float(), alpha=projections.unit(self.rank))
        if shards is not None:
            self.S_dr.add_(shards.reduce(into).to(self.S_dr.device))

    @property
    def anchor(self) -> torch.Tensor:
        """A zero-size tensor that requires grad: under a frozen input it alone keeps the node in autograd's graph."""
        if self._anchor is None:
            self._anchor = torch.empty(0, requires_grad=True)
        return self._anchor


class _Sketching(torch.autograd.Function):
    """The backward of X Wᵀ + b, which adds dYᵀ (X Aᵀ) = G Aᵀ to the sketch (Eq. 2). It keeps X Aᵀ in place of X.

    Its output stands for the product, without memory of its own, and exists before it: where activation checkpointing makes a block
    again, it stops once the last X Aᵀ is there, and the block's last product is not made a second time.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, anchor, P_tr, sketch, dtype):
        ctx.x_shape, ctx.x_dtype, ctx.sketch = x.shape, x.dtype, sketch
        ctx.save_for_backward(P_tr, weight)
        return x.new_zeros((), dtype=dtype).expand(*x.shape[:-1], len(weight))

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
        return dx, None, db, None, None, None, None


class _Product(torch.autograd.Function):
    """The value X Wᵀ + b, put in the place of what stands for it; keeps nothing."""

    @staticmethod
    def forward(ctx, stand_in, x, weight, bias):
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return dy, None, None, None


class SketchedLinear(nn.Linear):
    """An nn.Linear whose backward fills a sketch. Made by `attach`; it has the same parameters under the same names."""

    sketch: Sketch

    @_disable_dynamo                                        # a compiled backward may reorder what is added to S in place
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sketch = self.sketch
        if sketch.delta is not None:
            return self._perturbed(x)
        if torch.is_grad_enabled():
            device = x.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
            stand_in = _Sketching.apply(x, self.weight, self.bias, sketch.anchor, sketch.source.projected(x), sketch, dtype)
            return _Product.apply(stand_in, x.detach(), self.weight, self.bias)
        if self.training and under_reentrant():
            raise RuntimeError(f"{sketch.name} runs under reentrant activation checkpointing, which loses sketches: "
                               "use gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})")
        return F.linear(x, self.weight, self.bias)

    def _perturbed(self, x: torch.Tensor) -> torch.Tensor:
        """x Wᵀ + b + a · (x Eᵀ) Fᵀ, a band of tokens at a time: the last term is float32, with its tangent twice that."""
        a, factors = self.sketch.delta
        F_dr, key = factors[self.sketch.name]
        X_tk = x.reshape(-1, x.shape[-1])
        P_tr = self.sketch.source.project(X_tk, key)
        F_dr, band, parts = F_dr.to(P_tr), max(1, _BAND // len(F_dr)), []
        for X, P in zip(X_tk.split(band), P_tr.split(band)):
            y = F.linear(X, self.weight, self.bias)
            plain = y.dtype == P.dtype and not isinstance(a, torch.Tensor)
            parts.append(y.addmm_(P, F_dr.T, alpha=a) if plain else y + (a * F.linear(P, F_dr)).to(y.dtype))
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*x.shape[:-1], len(F_dr))


class Sketches(Mapping):
    """The sketches of a model, by canonical module name. `update` counts from 1; the optimizer's step advances it.

    shards: None, or a `RowShards`, by which each rank keeps some rows of every sketch (set before the first backward).
    replicas: None, or a `Replicas`, over which whole sketches are averaged once an update (set before the first step).
    run, session: whose updates these are, stamped on each: a name that another run does not have, and a number that grows
    whenever the run is started anew (both may be set).
    """

    def __init__(self, model, rank, projection, seed, refresh, keep_projections, share_inputs):
        self.model, self.rank, self.projection, self.seed, self.refresh = model, rank, projection, seed, refresh
        self.keep_projections, self.share_inputs = keep_projections, share_inputs
        self.shards: RowShards | None = None
        self.replicas: Replicas | None = None
        self.reduced: int | None = None                     # the update whose sketches are averaged already
        self.update = 1
        self._sketches: dict[str, Sketch] = {}
        self._coverage = Coverage()
        self._frozen: list[nn.Parameter] = []               # what attach froze, for detach
        self.run, self.session = f"{seed}/{rank}/{projection}/{'refreshed' if refresh else 'fixed'}{'/shared' if share_inputs else ''}", 0

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
            sketch.spent = False
            if sketch._S_dr is not None:
                sketch._S_dr.zero_()
        self.reduced = None

    @torch.no_grad()
    def reduce(self) -> None:
        """S ← its mean over `replicas`, once an update: called by `propose`, `squares` and `clip_norm_`, by all ranks alike.

        Raises RuntimeError where the ranks' weights or projections are not the same.
        """
        if self.replicas is None and self.shards is None:
            warn_if_forgotten(next(iter(self.values())).weight)
        if self.replicas is None or self.reduced == self.update:
            return
        self.replicas.check((self.base, self.run, self.update))
        for sketch in self.values():
            if sketch.spent:                                # this rank had no batch
                sketch.S_dr.zero_()
        self.replicas.mean_([sketch.S_dr for sketch in self.values()])
        self.reduced = self.update

    @torch.no_grad()
    def squares(self) -> dict[str, float]:
        """‖S‖² of each matrix, in float64; where sketches are sharded, of this rank's rows."""
        self.reduce()
        return {name: float(sketch.S_dr.double().square().sum()) for name, sketch in self.items()}

    def norm(self) -> float:
        """‖S‖ over all matrices: what a loop logs as its gradient norm, for E‖S‖² = ‖G‖² and no weight has a `.grad`."""
        square = sum(self.squares().values())
        return math.sqrt(square if self.shards is None else self.shards.total([square])[0])

    @torch.no_grad()
    def clip_norm_(self, max_norm: float) -> float:
        """All S in place, scaled so that ‖S‖ is `max_norm` at most; returns ‖S‖ as it was. In the place of torch.nn.utils.clip_grad_norm_.

        ‖S‖ is clipped, never ‖S A‖, which is larger by √(k/r). Under a relative step size it changes what RowAdam remembers alone.
        Raises ValueError for a max_norm that is not positive.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is positive, but it is {max_norm}")
        norm = self.norm()
        if norm > max_norm:
            for sketch in self.values():
                sketch.S_dr.mul_(max_norm / norm)
        return norm

    @contextmanager
    def perturbed(self, factors: Mapping[str, tuple[torch.Tensor, int]], a):
        """Within it the forward is that of W + a · F E, never formed: y = x Wᵀ + a · (x Eᵀ) Fᵀ, with E = √r A, A's entries.

        factors: (F_dr, key of A) by name, asked for at each forward of each layer. a: a float or a dual scalar.
        """
        try:
            for name in factors:
                self[name].delta = (a, factors)
            yield
        finally:
            for sketch in self.values():
                sketch.delta = None


def attach(model: nn.Module, rank: int, projection: str = "rademacher", seed: int = 0, refresh: bool = True, *,
           modules: Iterable[str] | None = None, freeze_rest: bool = True, keep_projections: bool = False,
           share_inputs: bool = False) -> Sketches:
    """Sketch the attention and MLP projections of `model` in place, and freeze the rest.

    Args:
        rank: r, the rank of sketches and updates.
        projection: "rademacher", "gaussian" or "hadamard" (Section 2.1; see `logra.projection`).
        seed: the run's seed, which with the update's number and the module's name makes each projection's key.
        refresh: a new projection at every update (Algorithm 1); False keeps the first.
        modules: names of the nn.Linear modules to take; by default all in the decoder's blocks that are wider than `rank`.
        freeze_rest: False leaves the other parameters as they are, to be trained by an optimizer of their own.
        keep_projections: hold every A in memory between forwards (faster for a small model) instead of hashing it anew.
        share_inputs: one projection for the matrices of a block that read the same input (q, k and v; gate and up), so that one X Aᵀ is
            made and kept for all of them: 4r numbers a token and block in place of 7r. Each sketch is as unbiased as before; those of
            one group are no longer independent.

    Returns the sketches; `.coverage()` says what was taken, what was left and why. Weights keep their names and values, and
    their `.grad` stays None. Raises ValueError where nothing matches or a module cannot be sketched, RuntimeError if attached already.
    """
    if any(isinstance(module, SketchedLinear) for module in model.modules()):
        raise RuntimeError("this model has sketches attached already: call logra.detach(model) first")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"rank must be a positive integer, but it is {rank!r}")
    sketches = Sketches(model, rank, projection, seed, refresh, keep_projections, share_inputs)
    chosen, sketches._coverage = choose(model, rank, None if modules is None else set(map(projections.canonical_name, modules)))
    for module in chosen.values():                          # raises here, before anything is changed
        projections.entries(projection, rank, module.in_features, key=0, rows=slice(0, 1), columns=slice(0, 1))
    weights = [module.weight for module in chosen.values()]
    sketches._frozen = [p for p in (model.parameters() if freeze_rest else weights) if p.requires_grad]
    for parameter in sketches._frozen:
        parameter.requires_grad_(False)
    sources = {}
    for name, module in chosen.items():
        read = _source_name(name) if share_inputs else name
        source = sources.setdefault((read, module.in_features), Source(read, module.in_features, sketches))
        module.__class__ = SketchedLinear
        module.sketch = sketches._sketches[name] = Sketch(name, module, sketches, source)
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


def _source_name(name: str) -> str:
    """The name of what a module reads: the same for modules that read the same, whichever of them are sketched."""
    parent, _, last = name.rpartition(".")
    group = next((group for group in _SAME_INPUT if last in group), (last,))
    return f"{parent}.{'+'.join(group)}" if parent else "+".join(group)
