"""Table 4: the settings of the paper's main runs beside those that this code really runs, row by row.

Ours come from `RunConfig` objects and from the optimizers that are built of them, never from a list kept by hand.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch
from torch import nn

import logra
from logra.paper import profiles
from logra.paper.printed import table
from logra.paper.provenance import ROOT, log_input
from logra.rl.config import RunConfig
from logra.rl.methods import AdamW
from logra.rl.ranks import Alone

UNSTATED = "not stated"


def parameters_of(name: str, profile: str) -> dict[str, Any]:
    """What the profile runs notebooks/<name>.ipynb with; a notebook that it does not list has its own defaults.

    Raises ProfileError for a profile or notebook that does not exist.
    """
    source = ROOT / "notebooks" / f"{name}.ipynb"
    declared = profiles.declared_parameters(profiles.read_notebook(source, name), name)
    entry = profiles.load(ROOT, profile).notebooks.get(name)
    log_input(source), log_input(ROOT / "profiles" / f"{profile}.yaml")
    return profiles.resolve(name, entry.parameters if entry else {}, declared)


def compare(dense: Sequence[RunConfig], sketched: Sequence[RunConfig]) -> pd.DataFrame:
    """One row a setting: place, setting, dense (paper), dense (here), LoGRA (paper), LoGRA (here), differs.

    Where runs of one method differ (seeds, a sweep), all their values stand there; of the paper's "5 / 5 / 10" for its three sizes the
    smallest model's is compared. differs: "dense", "LoGRA", "both" or nothing; what the paper
    leaves out differs from nothing.
    """
    printed = table("table4").fillna("").set_index("setting")
    rows = []
    for setting, ours in ROWS.items():
        paper = printed.loc[setting] if setting in printed.index else {"dense": "", "logra": "", "place": "–"}
        line = {"place": paper["place"], "setting": setting}
        differ = []
        for method, label, configs in (("dense", "dense", dense), ("logra", "LoGRA", sketched)):
            line[f"{label} (paper)"], line[f"{label} (here)"] = paper[method] or UNSTATED, _join(ours(config) for config in configs)
            if paper[method] and line[f"{label} (here)"] not in (paper[method], paper[method].split(" / ")[0]):
                differ.append(label)
        rows.append(line | {"differs": {0: "", 1: "".join(differ), 2: "both"}[len(differ)]})
    return pd.DataFrame(rows)


def marks(rows: pd.DataFrame) -> pd.DataFrame:
    """Which cells of `compare`'s table differ from the paper, for `tables.save`."""
    marked = pd.DataFrame(False, rows.index, rows.columns)
    for label in ("dense", "LoGRA"):
        marked[f"{label} (here)"] = rows["differs"].isin([label, "both"])
    return marked


def _join(values) -> str:
    return ", ".join(dict.fromkeys(values))


def _short(value: float) -> str:
    """2e-4 for 0.0002, 0.95 for 0.95."""
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:g}"
    mantissa, exponent = f"{value:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _group(config: RunConfig) -> dict[str, Any]:
    """The parameter group of the optimizer that a run of this configuration has."""
    if config.method == "dense":
        return AdamW([nn.Parameter(torch.zeros(1))], config, Alone()).optimizer.param_groups[0]
    sketches = logra.attach(nn.ModuleDict({"layer": nn.Linear(2, 2)}), 1, modules=["layer"])
    made = logra.RowAdam(sketches, beta2=config.beta2, relative_step=config.relative_step) if config.optimizer == "rowadam" else logra.SketchSGD(sketches, relative_step=config.relative_step)
    return made.param_groups[0]


def _optimizer(config: RunConfig) -> str:
    if config.method == "dense":
        decay = _group(config)["weight_decay"]
        return f"AdamW ({'zero weight decay' if decay == 0 else f'weight decay {decay:g}'})"
    return {"rowadam": "RowAdam", "sgd": "SketchSGD"}[config.optimizer]


def _moments(config: RunConfig) -> str:
    if config.method == "dense":
        return "β₁ {:g}, β₂ {:g}".format(*_group(config)["betas"])
    return f"β₂ {_group(config)['beta2']:g}; no first moment" if config.optimizer == "rowadam" else "none"


def _step_size(config: RunConfig) -> str:
    if config.method == "dense":
        return f"learning rate {_short(config.learning_rate)} → {_short(config.learning_rate_end)}"
    if config.control == "none":
        return f"relative norm {_short(config.relative_step)}"
    return f"predicted KL {_short(config.budget)}" + (f" → {_short(config.budget_end)}" if config.control == "cosine" else "")


def _schedule(config: RunConfig) -> str:
    if config.method == "dense":
        return f"{config.warmup}-update warmup; cosine decay"
    return {"cosine": "cosine budget decay", "constant": "constant budget", "none": "none"}[config.control]


def _sketched(value: Callable[[RunConfig], str]) -> Callable[[RunConfig], str]:
    """A setting that a dense run does not have."""
    return lambda config: value(config) if config.method == "logra" else "not applicable"


ROWS: dict[str, Callable[[RunConfig], str]] = {
    "Training seeds": lambda c: str(c.seed),
    "Prompts an update": lambda c: str(c.prompts),
    "Responses an update": lambda c: str(c.prompts),                       # one each
    "Micro-batch on a training GPU": lambda c: str(c.micro_batch),
    "Optimizer": _optimizer,
    "Moment decay": _moments,
    "Epsilon": lambda c: f"{_short(_group(c).get('eps', 0.0))}, {'absolute' if c.method == 'dense' else 'relative'}",
    "Projection": _sketched(lambda c: f"rank {c.rank}, {c.projection}"),
    "Projection refresh": _sketched(lambda c: "every update" if c.refresh else "never"),
    "Step-size rule": _step_size,
    "Schedule": _schedule,
    "Schedule's horizon (updates)": lambda c: str(c.schedule_updates if c.method == "dense" else c.budget_updates),
    "Updates": lambda c: str(c.updates),
    "Mismatch subtraction": _sketched(lambda c: "enabled; budget floor 50%" if c.mismatch else "off"),
    "Evaluation interval (updates)": lambda c: str(c.evaluate_every),
    "Training GPUs": lambda c: "0 (one CPU process)",                      # rl.train runs in one process
    "Generation engines": lambda c: "0 (the trainer generates)",
    "Computation": lambda c: {"bfloat16": "BF16", "float32": "FP32"}[c.compute],
    "Activation checkpointing": lambda c: "on" if c.checkpointing else "off",
    "Synchronisation of the rollout": lambda c: "none: one copy of the weights",
    "Temperature and top-p of training": lambda c: f"{c.temperature:.1f}, 1.0",
    "Prompt and response (tokens)": lambda c: f"{c.max_new_tokens} of response",
    "Temperature and top-p of evaluation": lambda c: f"{c.evaluation_temperature:g}, {c.evaluation_top_p:g}",
    "Evaluation problems × samples": lambda c: f"{c.evaluation_prompts} × {c.evaluation_samples}",
    "Reward": lambda c: f"{'binary' if c.binary_reward else 'graded'}, {c.incorrect_reward:g} or 1",
    "Reward baseline": lambda c: "global running",
    "Decay of the baseline": lambda c: f"{c.baseline_decay:g}",
    "Relative norm of a nominal step": _sketched(lambda c: _short(c.relative_step)),
    "Cap α_max": _sketched(lambda c: f"{c.alpha_max:g}"),
    "Probe": _sketched(lambda c: f"{c.probe}, {c.probe_responses} responses" + (f" up to {c.probe_tokens} tokens" if c.probe_tokens else "")),
    "Cap of the importance weight": lambda c: f"{c.importance_cap:g}",
    "Trained matrices": lambda c: {"selected": "attention and MLP", "all": "all"}[c.trainable],
    "Model": lambda c: c.model,
    "Task": lambda c: c.task,
}
