"""A run's metrics as they come, for TensorBoard (where it is installed) and for Weights & Biases (where WANDB_PROJECT names a project).

    tensorboard --logdir records/tensorboard                   all runs of a folder of records beside each other
    WANDB_PROJECT=logra python -m logra.rl.train ...            WANDB_MODE=offline and the rest as W&B reads them

Names are those of the RL libraries' (verl's) where there is one. Nothing of a run depends on what is written here. After a resume, updates that are made
again replace what TensorBoard had of them; W&B, whose history only grows, shows both rows at the same update.
"""

import importlib.util
import math
import os
from pathlib import Path

from logra.rl.config import RunConfig

NAMES = {
    "metrics": {
        "reward": "critic/rewards/mean", "baseline": "critic/baseline", "loss": "actor/pg_loss", "gradient_norm": "actor/grad_norm", "learning_rate": "actor/lr",
        "predicted_kl": "actor/predicted_kl", "realised_kl": "actor/realised_kl", "mismatch": "actor/rollout_logprob_diff", "length": "response_length/mean",
        "truncated": "response_length/clip_ratio", "tokens": "perf/total_num_tokens", "skipped": "training/skipped_updates", "sketch_norm": "logra/sketch_norm",
        "alpha": "logra/alpha", "budget": "logra/kl_budget", "kappa": "logra/kappa"},
    "evaluation": {"pass_at_1": "val/mean@k", "pass_at_k": "val/pass@k", "score": "val/score/mean"},
    "timings": {"rollout": "timing_s/gen", "train": "timing_s/update_actor", "probe": "timing_s/kl_probe", "update": "timing_s/optimizer_step",
                "sync": "timing_s/update_weights", "evaluation": "timing_s/testing", "total": "timing_s/step",     # verl's update_weights: the trainer's to the rollout
                 "peak_gib": "perf/max_memory_allocated_gb"},
}
_GROUP = {"metrics": "training", "evaluation": "val", "timings": "timing_s"}


def update_of(kind: str, row: dict) -> int:
    """The update that a row is of; a row of timings has a part `update`."""
    return row["number" if kind == "timings" else "update"]


def named(kind: str, row: dict) -> dict[str, float]:
    """A row of metrics, timings or an evaluation by the names that are shown; what is no number is left out."""
    own = "number" if kind == "timings" else "update"
    return {NAMES[kind].get(key, f"{_GROUP[kind]}/{key}"): float(value) for key, value in row.items() if key != own and isinstance(value, (int, float))}


class Logs:
    """Where one run's rows go. folder: its record's. update: how far it is, so that TensorBoard drops what it had of later ones."""

    def __init__(self, config: RunConfig, folder: Path, update: int = 0):
        self.board = self.wandb = None
        if importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            # beside the record, not in it: it is not what the run found
            self.board = SummaryWriter(folder.parent / "tensorboard" / folder.name, purge_step=update + 1 if update else None)
        if os.environ.get("WANDB_PROJECT"):
            if not importlib.util.find_spec("wandb"):
                raise ModuleNotFoundError("WANDB_PROJECT is set, but wandb is not installed: pip install wandb, or unset it")
            import wandb

            self.wandb = wandb.init(name=folder.name, id=folder.name, resume="allow", config=config.model_dump(mode="json"), dir=folder.parent)
            self.wandb.define_metric("update")              # the axis of all curves: W&B's own step counts rows, of which an update has two or three
            self.wandb.define_metric("*", step_metric="update")

    def __call__(self, kind: str, row: dict) -> None:
        update, shown = update_of(kind, row), named(kind, row)
        if self.board is not None:
            for name, value in shown.items():
                self.board.add_scalar(name, value, update)
        if self.wandb is not None:
            self.wandb.log({name: value for name, value in shown.items() if math.isfinite(value)} | {"update": update})

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
