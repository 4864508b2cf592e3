"""Optimizers that read sketches: SketchSGD (U = S) and RowAdam (Appendix B). Both make a LowRankUpdate of each step."""

import math

import torch

from logra import projection
from logra.linear import Sketches
from logra.update import LowRankUpdate


class Proposal(dict):
    """{module name: U_dr}, float32 [d, r]; the proposed update is D_W = −eta · U_dr A_rk (Section 2.3), with A of update `number`."""

    def __init__(self, factors, eta: float, number: int):
        super().__init__(factors)
        self.eta, self.number = eta, number


class _SketchOptimizer(torch.optim.Optimizer):
    """What both share: the step size η, the update and its number, zeroing.

    The learning rate of the one parameter group, `lr`, is the relative norm of a nominal step, ‖ηUA‖ / ‖W‖ over all
    selected matrices together (Section 3.4.3), or η itself when `lr` was given; a scheduler may change either.
    A subclass has `_factor(S_dr, state)`: U_dr of one matrix, and its next state, which takes effect when the step is made.
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
        super().__init__([sketch.weight for sketch in sketches.values()],
                         dict(lr=size, relative=lr is None, update=sketches.update, **defaults))

    @torch.no_grad()
    def propose(self) -> Proposal:
        """The proposed update. Changes nothing: it may be called again. Raises FloatingPointError for a sketch that is not finite."""
        group, names = self.param_groups[0], list(self.sketches)
        bad = [name for name in names if not torch.isfinite(self.sketches[name].S_dr).all()]
        if bad:
            raise FloatingPointError(f"the sketches of {bad[:3]} and {max(0, len(bad) - 3)} others hold NaN or inf: "
                                     "skip this update (optimizer.zero_grad()) and look at the loss")
        made = {name: self._factor(self.sketches[name].S_dr, self.state.get(self.sketches[name].weight, {})) for name in names}
        self._pending = {name: state for name, (_, state) in made.items()}
        factors = {name: U_dr for name, (U_dr, _) in made.items()}
        eta = group["lr"]
        if group["relative"]:
            weight = math.sqrt(sum(float(torch.linalg.vector_norm(s.weight, dtype=torch.float64)) ** 2 for s in self.sketches.values()))
            step = math.sqrt(sum(_squared_norm(U_dr, self.sketches[name]) for name, U_dr in factors.items()))
            eta = group["lr"] * weight / step if step > 0 else 0.0
        return Proposal(factors, eta, self.sketches.update)

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
        proposal = self.propose()
        update = LowRankUpdate.round(self.sketches, {name: U_dr * (-alpha * proposal.eta) for name, U_dr in proposal.items()}, self.bits)
        update.apply(self.sketches)
        for name, state in self._pending.items():
            self.state[self.sketches[name].weight].update(state)
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


class SketchSGD(_SketchOptimizer):
    """U = S, the basic variant of Section 2.1: no state.

    relative_step: ‖ΔW‖/‖W‖ of a nominal step over all selected matrices; or lr: η of Eq. 3. bits: 8 or 16 of the sent factor.
    """

    def __init__(self, sketches: Sketches, relative_step: float | None = None, lr: float | None = None, bits: int = 8):
        super().__init__(sketches, relative_step, lr, bits)

    def _factor(self, S_dr, state):
        return S_dr.clone(), {}


class RowAdam(_SketchOptimizer):
    """Adaptive scale of each row from its past sketches (Eq. 15), d numbers of state a matrix, no first moment.

    beta2: how much of the history is kept. eps: relative to the mean of √v̂ over a matrix's rows. The rest as for SketchSGD.
    """

    def __init__(self, sketches: Sketches, beta2: float = 0.95, eps: float = 1e-8,
                 relative_step: float | None = None, lr: float | None = None, bits: int = 8):
        if not 0 <= beta2 < 1:
            raise ValueError(f"beta2 lies in [0, 1), but it is {beta2}")
        super().__init__(sketches, relative_step, lr, bits, beta2=beta2, eps=eps)

    def _factor(self, S_dr, state):
        group = self.param_groups[0]
        beta2, steps = group["beta2"], state.get("step", 0) + 1
        # float64, since the squares of a small model's sketches come near float32's least number
        square_d = S_dr.double().square().mean(1)
        v_d = (1 - beta2) * square_d + (beta2 * state["v_d"] if state else 0.0)
        root_d = (v_d / (1 - beta2 ** steps)).sqrt()
        eps = max(group["eps"] * float(root_d.mean()), torch.finfo(torch.float32).tiny)
        U_dr = S_dr / (root_d + eps).float()[:, None]
        norm, wanted = U_dr.double().norm(), S_dr.double().norm()
        U_dr *= float(wanted / norm) if norm > 0 else 0.0
        return U_dr, {"step": steps, "v_d": v_d}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        # torch casts state to its weight's dtype; the statistics stay float64
        for index, weight in enumerate(self.param_groups[0]["params"]):
            if index in state_dict["state"]:
                self.state[weight]["v_d"] = state_dict["state"][index]["v_d"].to(weight.device, torch.float64, copy=True)


def _squared_norm(U_dr: torch.Tensor, sketch) -> float:
    """‖U A‖²_F = tr(U (A Aᵀ) Uᵀ), without the d×k product. E Eᵀ is made of integers: exact, however the product is made."""
    E_rk = projection.entries(sketch.owner.projection, sketch.rank, sketch.k, sketch.key, device=U_dr.device)
    U = U_dr.double()
    return float((U @ (E_rk @ E_rk.T).double()).mul_(U).sum()) / sketch.rank
