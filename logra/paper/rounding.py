"""What rounding the update's factor costs: its share of a run's own updates, and runs that differ in the rounding alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from logra.paper import learner_runs
from logra.paper.intervals import half_interval
from logra.rl.config import RunConfig
from logra.update import LowRankUpdate

WIDTHS = {"8 bits": 8, "16 bits": 16, "not rounded": None}


def configs(seeds: Sequence[int], budget: float, sizes: Mapping[str, Any]) -> dict[str, list[RunConfig]]:
    """Figure 2's LoGRA runs at each of WIDTHS, one a seed."""
    return {label: [RunConfig(**learner_runs.logra(seed, budget, sizes).model_dump() | {"bits": bits}) for seed in seeds] for label, bits in WIDTHS.items()}


def shares(run: RunConfig, updates: int) -> pd.DataFrame:
    """‖ΔW rounded − ΔW‖ / ‖ΔW‖ over all matrices, at 8 and at 16 bits, of a run's first updates: one row an update and width.

    The run is made again, as it was. Columns: update, bits, share.
    """
    from logra.rl.train import Trainer                     # the whole training loop: where nothing is made, nobody waits for it

    torch.set_num_threads(run.threads)
    torch.use_deterministic_algorithms(True)
    trainer, rows = Trainer(run), []
    sketches = trainer.method.sketches

    def measure(optimizer, arguments, _) -> None:
        alpha, proposal = arguments[1], optimizer.propose()  # which changes nothing: the step proposes the same
        factors = {name: U_dr * (-alpha * proposal.eta) for name, U_dr in proposal.items()}
        meant = LowRankUpdate.round(sketches, factors, None)
        for bits in (8, 16):
            made = LowRankUpdate.round(sketches, factors, bits)
            error, norm = 0.0, 0.0
            for name in factors:
                step = meant.dense(name).double()
                error += float((made.dense(name).double() - step).square().sum())
                norm += float(step.square().sum())
            if norm > 0:                                    # an update without a reward moves nothing
                rows.append({"update": proposal.number, "bits": bits, "share": (error / norm) ** 0.5})

    trainer.method.optimizer.register_step_pre_hook(measure)
    for _ in range(updates):
        trainer.step()
    return pd.DataFrame(rows, columns=["update", "bits", "share"])


def compare(finals: pd.DataFrame, against: str = "not rounded") -> pd.DataFrame:
    """Each column of `finals` (one row a seed) against one of them, seed by seed: difference, its standard error and 95 % interval (t), n.

    distinguishable: whether the interval leaves 0 out. With one seed there is neither.
    """
    rows, n = [], len(finals)
    for label in finals.columns.drop(against):
        pairs = finals[label] - finals[against]
        half = half_interval(pairs)
        rows.append({"factor": label, "against": against, "difference": pairs.mean(), "s.e.": pairs.std() / n ** 0.5, "low": pairs.mean() - half, "high": pairs.mean() + half, "n": n,
                     "distinguishable": bool(abs(pairs.mean()) > half)})
    return pd.DataFrame(rows)
