"""Optimizers that read sketches: SketchSGD (U = S) and RowAdam (Appendix B). Both make a LowRankUpdate of each step."""

import math
from collections.abc import Mapping

import torch

from logra import projection
from logra.linear import Sketches
from logra.shards import own_rows
from logra.update import LowRankUpdate


class Proposal(Mapping):
    """{module name: U_dr}, float32 [d, r]; the proposed update is D_W = −eta · U_dr A_rk (Section 2.3), with A of update `number`.

    U is S with its rows rescaled, and is made from S each time it is asked for: nothing of S's size is held. Raises RuntimeError
    once S has changed.
    """

    def __init__(self, sketches: Sketches, scales: Mapping[str, tuple[torch.Tensor | None, float]], eta: float):
        self.sketches, self.eta, self.number = sketches, eta, sketches.update
        self._scales = scales                               # (divisor_d, multiplier) with U = S / divisor · multiplier
        self._versions = _versions(sketches)

    def __getitem__(self, name: str) -> torch.Tensor:
        S_dr = self.sketches[name].S_dr
        if (id(S_dr), S_dr._version) != self._versions[name]:
            raise RuntimeError(f"the sketch of {name} has changed since this proposal was made: use it before zero_grad() and the next backward, "
                               "or keep the LowRankUpdate that step() returns")
        U_dr = _rescaled(S_dr, *self._scales[name])
        shards = self.sketches.shards
        return U_dr if shards is None else shards.gather(U_dr, self.sketches[name].d)

    def __iter__(self):
        return iter(self._scales)

    def __len__(self) -> int:
        return len(self._scales)


class _Times(Mapping):
    """A proposal's factors times a number, one at a time."""

    def __init__(self, proposal: Proposal, by: float):
        self.proposal, self.by = proposal, by

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.proposal[name].mul_(self.by)

    def __iter__(self):
        return iter(self.proposal)

    def __len__(self) -> int:
        return len(self.proposal)


class SketchOptimizer(torch.optim.Optimizer):
    """What both share: the step size η, the update and its number, zeroing.

    The learning rate of the one parameter group, `lr`, is the relative norm of a nominal step, ‖ηUA‖ / ‖W‖ over all
    selected matrices together (Section 3.4.3), or η itself when `lr` was given; a scheduler may change either.
    A subclass has `_scales()`: for each matrix (divisor_d, multiplier) with U = S / divisor · multiplier, and its next state, which takes
    effect when the step is made. Over row shards (`Sketches.shards`) each rank has its rows of S, U and state, and norms are of the whole.
    """

    def __init__(self, sketches: Sketches, relative_step, lr, bits, **defaults):
        if (relative_step is None) == (lr is None):
            raise ValueError(f"give one of relative_step (now {relative_step}) and lr (now {lr})")
        size = relative_step if lr is None else lr
        if not (math.isfinite(size) and size >= 0):
            raise ValueError(f"a step size is a finite number that is not negative, but it is {size}")
        low = [f"{name} ({s.weight.dtype})" for name, s in sketches.items() if s.weight.dtype != torch.float32]
        if low:
            raise TypeError(f"{len(low)} selected weights are not float32, {low[0]} for one: a step would be lost in rounding; "
                            "load the model in float32 and compute in bfloat16 under autocast")
        self.sketches, self.bits = sketches, bits
        self._proposed = None, None
        super().__init__([sketch.weight for sketch in sketches.values()],
                         dict(lr=size, relative=lr is None, update=sketches.update, **defaults))

    @torch.no_grad()
    def propose(self) -> Proposal:
        """The proposed update. Changes nothing: it may be called again. Raises FloatingPointError for a sketch that is not finite."""
        group, sketches = self.param_groups[0], self.sketches
        for (name, sketch), parameter in zip(sketches.items(), group["params"], strict=True):
            if sketch.weight is not parameter:
                raise RuntimeError(f"the weight of {name} is not the parameter that this optimizer was made for, so that a step on it would be lost: make the "
                                   "optimizer after fully_shard(), and call module.reshard() before a step where weights are gathered")
        sketches.reduce()
        finite = _totals(sketches, {name: float(not torch.isfinite(sketch.S_dr).all()) for name, sketch in sketches.items()})
        bad = [name for name, count in finite.items() if count]
        if bad:
            raise FloatingPointError(f"the sketches of {bad[:3]} and {max(0, len(bad) - 3)} others hold NaN or inf: "
                                     "skip this update (optimizer.zero_grad()) and look at the loss")
        scales, self._pending = self._scales()
        eta = group["lr"]
        if group["relative"]:
            weight = _weights_norm(sketches)
            step = math.sqrt(sum(_totals(sketches, {name: _squared_norm(_rescaled(sketch.S_dr, *scales[name]), sketch)
                                                    for name, sketch in sketches.items()}).values()))
            eta = group["lr"] * weight / step if step > 0 else 0.0
        self._proposed = Proposal(sketches, scales, eta), self._made_from()
        return self._proposed[0]

    def _made_from(self) -> tuple:
        """What a proposal depends on: unless it has changed, `step` takes the proposal that was made for the probe."""
        group = {field: value for field, value in self.param_groups[0].items() if field != "params"}
        return group, self.sketches.update, _versions(self.sketches), [(id(w), w._version) for w in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, alpha=1.0) -> LowRankUpdate:
        """Apply −αηUA to the weights, rounded as the update will be sent (Eq. 4), and move on to the next update.

        alpha: the multiplier of Eq. 7. A closure, as torch.optim takes one, is called for its backward; None means 1.
        Call zero_grad() before the next backward. Raises as `propose` does, with nothing changed.
        """
        if callable(alpha):
            with torch.enable_grad():
                alpha()
            alpha = 1.0
        alpha = 1.0 if alpha is None else float(alpha)
        proposal, made_from = self._proposed
        if proposal is None or made_from != self._made_from():
            proposal = self.propose()
        update = LowRankUpdate.round(self.sketches, _Times(proposal, -alpha * proposal.eta), self.bits)
        update.apply(self.sketches)
        for name, state in self._pending.items():
            self.state[self.sketches[name].weight].update(state)
        for sketch in self.sketches.values():
            sketch.spent = True
        self._proposed = None, None
        self.sketches.update += 1
        self.param_groups[0]["update"] = self.sketches.update
        return update

    def zero_grad(self, set_to_none: bool = True) -> None:
        """S ← 0; and the gradients of the weights, which have none."""
        super().zero_grad(set_to_none)
        self.sketches.zero()

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.sketches.update = self.param_groups[0]["update"]
        self._proposed = None, None


class SketchSGD(SketchOptimizer):
    """U = S, the basic variant of Section 2.1: no state.

    relative_step: ‖ΔW‖/‖W‖ of a nominal step over all selected matrices; or lr: η of Eq. 3. bits: 8 or 16 of the sent factor; None rounds nothing and sends nothing.
    """

    def __init__(self, sketches: Sketches, relative_step: float | None = None, lr: float | None = None, bits: int | None = 8):
        super().__init__(sketches, relative_step, lr, bits)

    def _scales(self):
        return {name: (None, 1.0) for name in self.sketches}, {}


class RowAdam(SketchOptimizer):
    """Adaptive scale of each row from its past sketches (Eq. 15), d numbers of state a matrix, no first moment.

    beta2: how much of the history is kept. eps: relative to the mean of √v̂ over a matrix's rows. The rest as for SketchSGD.
    """

    def __init__(self, sketches: Sketches, beta2: float = 0.95, eps: float = 1e-8,
                 relative_step: float | None = None, lr: float | None = None, bits: int | None = 8):
        if not 0 <= beta2 < 1:
            raise ValueError(f"beta2 lies in [0, 1), but it is {beta2}")
        super().__init__(sketches, relative_step, lr, bits, beta2=beta2, eps=eps)

    def _scales(self):
        group, sketches, states = self.param_groups[0], self.sketches, {}
        roots = {}
        for name, sketch in sketches.items():
            state = self.state.get(sketch.weight, {})
            beta2, steps = group["beta2"], state.get("step", 0) + 1
            # float64, since the squares of a small model's sketches come near float32's least number
            square_d = sketch.S_dr.double().square().mean(1)
            v_d = (1 - beta2) * square_d + (beta2 * state["v_d"].to(square_d.device) if state else 0.0)
            roots[name] = (v_d / (1 - beta2 ** steps)).sqrt()
            states[name] = {"step": steps, "v_d": v_d}
        means = _totals(sketches, {name: float(root_d.sum()) / sketches[name].d for name, root_d in roots.items()})
        divisors = {name: (root_d + max(group["eps"] * means[name], torch.finfo(torch.float32).tiny)).float() for name, root_d in roots.items()}
        norms = _whole_norms(sketches, {name: _norm(_rescaled(sketch.S_dr, divisors[name])) for name, sketch in sketches.items()})
        wanted = _whole_norms(sketches, {name: _norm(sketch.S_dr) for name, sketch in sketches.items()})
        return {name: (divisors[name], wanted[name] / norms[name] if norms[name] > 0 else 0.0) for name in sketches}, states

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        # torch casts state to its weight's dtype; the statistics stay float64
        for index, weight in enumerate(self.param_groups[0]["params"]):
            if index in state_dict["state"]:
                self.state[weight]["v_d"] = state_dict["state"][index]["v_d"].to(weight.device, torch.float64, copy=True)


def _rescaled(S_dr: torch.Tensor, divisor_d: torch.Tensor | None, multiplier: float = 1.0) -> torch.Tensor:
    """U_dr, of its own memory."""
    U_dr = S_dr.clone() if divisor_d is None else S_dr / divisor_d[:, None]
    return U_dr if multiplier == 1 else U_dr.mul_(multiplier)


def _versions(sketches: Sketches) -> dict[str, tuple[int, int]]:
    """What changes whenever a sketch does."""
    return {name: (id(sketch.S_dr), sketch.S_dr._version) for name, sketch in sketches.items()}


def _totals(sketches: Sketches, values: dict[str, float]) -> dict[str, float]:
    """Each matrix's number, summed over the ranks that share its rows."""
    return values if sketches.shards is None else dict(zip(values, sketches.shards.total(list(values.values()))))


def _whole_norms(sketches: Sketches, norms: dict[str, float]) -> dict[str, float]:
    """Each matrix's Frobenius norm, from that of each rank's rows."""
    if sketches.shards is None:
        return norms
    return {name: math.sqrt(square) for name, square in _totals(sketches, {name: norm ** 2 for name, norm in norms.items()}).items()}


def _norm(x: torch.Tensor) -> float:
    """Frobenius, in float64, of a few rows at a time (32 MiB of them)."""
    norms = [float(torch.linalg.vector_norm(band, dtype=torch.float64)) for band in x.split(max(1, (1 << 22) // max(1, x.shape[1])))]
    return norms[0] if len(norms) == 1 else math.sqrt(sum(norm ** 2 for norm in norms))


def _weights_norm(sketches: Sketches) -> float:
    """‖W‖ over all selected matrices, of their whole where ranks have rows of them."""
    squares = {}
    for sketch in sketches.values():
        local, _, shards = own_rows(sketch.weight.detach())
        group = shards and shards.group
        squares[group] = shards, squares.get(group, (None, 0.0))[1] + _norm(local) ** 2
    return math.sqrt(sum(shards.total([square])[0] if shards else square for shards, square in squares.values()))


def _squared_norm(U_dr: torch.Tensor, sketch) -> float:
    """‖U A‖²_F = tr(U (A Aᵀ) Uᵀ), without the d×k product. E Eᵀ is made of integers: exact, however the product is made."""
    E_rk = projection.entries(sketch.owner.projection, sketch.rank, sketch.k, sketch.key, device=U_dr.device)
    U = U_dr.double()
    return float((U @ (E_rk @ E_rk.T).double()).mul_(U).sum()) / sketch.rank
