"""The paper's own runs, as configurations with what each will take: memory, hours, disk. Made without a GPU and without the network.

    ./reproduce.sh --profile h100 --plan [--json]

A profile that is a folder, `profiles/<name>/`: `common.yaml` and a file for each group of runs:

    title: Table 1, Figures 1 to 3
    settings: {updates: 300}                   # fields of RunConfig, over common.yaml's and the model's
    grid:                                      # one run for each combination; a run is called after its file and its labels
      model: [1.5B, 7B]                        # labels of common.yaml's `models`
      seed: [1, 2]                             # values of a field
      control: {none: {control: none}, …}      # labels, with fields
"""
from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from logra.memory_setting import GIB, PAPER, Category, Setting
from logra.paper import printed, simulated
from logra.paper.profiles import ProfileError, closest
from logra.rl.config import RunConfig


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Machine(_Strict):
    training_gpus: int
    generating_gpus: int
    card_gb: float                                          # memory of each GPU, 10⁹ bytes

    @property
    def card_gib(self) -> float:
        return self.card_gb * 1e9 / GIB


class Common(_Strict):
    machine: Machine
    settings: dict[str, Any]
    models: dict[str, dict[str, Any]]


class Group(_Strict):
    title: str
    settings: dict[str, Any] = {}
    grid: dict[str, list | dict[str, dict[str, Any]]]


@dataclass(frozen=True)
class Planned:
    """One run of the schedule. model: its label, "1.5B"; title: the group's."""

    name: str
    title: str
    model: str
    config: RunConfig
    machine: Machine

    @cached_property
    def ledger(self) -> dict:
        """The training call as this code makes it, GiB on a GPU (`Ledger.summary`); less for dense and LoRA runs, and where an untied embedding, which
        the ledger keeps with the root, is gathered for its own use."""
        config, gpus = self.config, self.machine.training_gpus
        common = dict(method=config.method, gpus=gpus, context=config.context, micro_batch=config.micro_batch, checkpointing=config.checkpointing, trainable=config.trainable)
        if config.method == "logra":
            at_once = min(config.micro_batch, -(-config.probe_responses // gpus))
            setting = Setting(rank=config.rank, share_inputs=config.share_inputs, selective=config.checkpoint_projections, sharded_sketches=config.sharded_sketches,
                              probe=config.probe, probe_tokens=config.probe_tokens or config.context, probe_responses=at_once, **common)
        else:                                               # the paper's stack, whose whole logits are more than this code's chunks
            setting = replace(PAPER, rank=config.rank, **common)
        return simulated.ledger(Path(config.model).name, setting)

    @property
    def needs_gib(self) -> float:
        """The most that a training GPU has to hold. The ledger gathers weights in bfloat16: where the run does in float32, what is gathered counts twice."""
        more = self.config.gathered == "float32"
        return max(sum(sizes.values()) + more * sizes[Category.GATHERED.value] for sizes in self.ledger["phases"].values())

    @property
    def engine_gib(self) -> float:
        """What a generating GPU has to hold: its share of the weights (twice where the 16 bits that bfloat16 lost lie beside them), keys and values, and
        4 GiB for activations and CUDA graphs. 0 where no engine has a GPU of its own."""
        config = self.config
        if config.rollout != "ray":
            return 0.0
        bfloat16 = self.ledger["phases"]["train"][Category.WEIGHTS.value] * self.machine.training_gpus / 2
        twice = config.sync == "exact" or config.rollout_dtype == "float32"
        return bfloat16 / config.engine_ranks * (1 + twice) + config.engine_cache_gib + 4.0

    @property
    def host_gib(self) -> float:
        """What the node's own memory has to hold: each training rank reads the whole model in float32 before it is sharded, and a message of full
        weights lies in rank 0's. Engines' processes are not in it."""
        config, gpus = self.config, self.machine.training_gpus
        whole = self.ledger["phases"]["train"][Category.WEIGHTS.value] * gpus
        message = 0.0 if config.sync == "none" else whole / 2 if config.sync == "full" else whole      # bfloat16, or float32
        return gpus * whole + message

    @property
    def fits(self) -> bool:
        return max(self.needs_gib, self.engine_gib) <= self.machine.card_gib

    @cached_property
    def paper(self) -> dict:
        """Of Table 1 or 2: what is printed, and the same simulated for the paper's stack (`simulated.PAPER`); empty for a run that they do not hold."""
        if self.title.startswith("Table 1"):
            row = printed.main_result(self.model, self.config.method)
        elif self.title.startswith("Table 2"):
            row = printed.table("table2").set_index("method").loc[self.config.method]
        else:
            return {}
        found = simulated.bar(self.model, self.config.method)
        return {"printed_average_gib": row["average_gib"], "printed_peak_gib": row["peak_gib"], "paper_average_gib": found["average_gib"],
                "paper_peak_gib": found["peak_gib"], "paper_needs_gib": found["needs_gib"]}

    @property
    def rate(self) -> tuple[float, str]:
        """(updates an hour, where the number comes from): from the paper's printed rates, which include generation and evaluation. 0 where none is known."""
        config = self.config
        base = printed.main_result(self.model, "logra" if config.method == "lora" else config.method)["updates_per_hour"]
        if base != base:
            return 0.0, "Table 1: out of memory"
        if config.method == "lora":
            calls = printed.table("table2").set_index("method")["seconds_per_update"]
            return 3600 / (3600 / base - calls["logra"] + calls["lora"]), "Table 1's LoGRA, with Table 2's difference of the training calls"
        if config.context != 4096:
            return base * 4096 / config.context, f"Table 1, divided by the ratio of the contexts ({config.context:,} to 4,096)"
        return base, "Table 1" if self.title.startswith("Table 1") else "Table 1, same model and method"

    @property
    def hours(self) -> float:
        """On the whole node. 0 for a run that is refused."""
        rate = self.rate[0]
        return self.config.updates / rate if rate and self.fits else 0.0

    @property
    def gpu_hours(self) -> float:
        return self.hours * (self.machine.training_gpus + self.machine.generating_gpus)

    @property
    def disk_gib(self) -> float:
        """Checkpoints, those that are kept and one that is being written, and the weights that stay; 0 for a run that is refused."""
        from logra.rl.checkpoint import KEPT                 # with FSDP2: most of a second, for who only asks which runs there are

        train, gpus = self.ledger["phases"]["train"], self.machine.training_gpus
        weights, moments = train[Category.WEIGHTS.value] * gpus, train[Category.OPTIMIZER.value] * gpus
        return ((KEPT + 1) * (weights + moments) + len(self.config.keep_weights_at) * weights) * self.fits

    def as_row(self) -> dict:
        rate, source = self.rate
        return {"name": self.name, "for": self.title, "record": self.config.record, "updates": self.config.updates,
                "updates_per_hour": rate, "rate_from": source, "hours": self.hours, "gpu_hours": self.gpu_hours, "disk_gib": self.disk_gib,
                "needs_gib": self.needs_gib, "engine_gib": self.engine_gib, "host_gib": self.host_gib, "card_gib": self.machine.card_gib, "fits": self.fits, **self.paper, "config": self.config.model_dump(mode="json", exclude_defaults=True)}

    def refusal(self) -> str:
        """Why it cannot be run on these cards; empty where it can."""
        if self.fits:
            return ""
        if self.needs_gib <= self.machine.card_gib:
            return (f"{self.name} needs {self.engine_gib:.1f} GiB on each generating GPU, {self.config.engine_cache_gib:g} of them for keys and values, and a card of "
                    f"{self.machine.card_gb:g} GB has {self.machine.card_gib:.1f}: lower engine_cache_gib, or raise engine_ranks")
        phase = max(self.ledger["phases"], key=lambda name: sum(self.ledger["phases"][name].values()))
        return (f"{self.name} needs {self.needs_gib:.1f} GiB on each training GPU (simulated; the peak lies in {phase}), and a card of {self.machine.card_gb:g} GB has "
                f"{self.machine.card_gib:.1f}" + (": the paper's own run was out of memory" if self.config.method == "dense" and self.model == "27B" else ""))


def load(folder: Path) -> list[Planned]:
    """All runs of a profile's folder, in the order of its files. Raises ProfileError that names the file and the field."""
    common = _read(folder / "common.yaml", Common)
    runs = []
    for file in sorted(folder.glob("*.yaml")):
        if file.stem != "common":
            runs += _expanded(file, _read(file, Group), common)
    for run in runs:
        if (of := run.config.engines * run.config.engine_ranks) != common.machine.generating_gpus and run.config.rollout == "ray":
            raise ProfileError(f"{run.name}: {of} GPUs for engines, but common.yaml's generating_gpus is {common.machine.generating_gpus}")
    return runs


def _read(file: Path, kind):
    try:
        return kind.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise ProfileError(f"{file} does not exist: a profile that is a folder needs one") from None
    except yaml.YAMLError as error:
        raise ProfileError(f"{file} is not YAML: {error}") from None
    except ValidationError as error:
        raise ProfileError("\n".join(f"{file}: {' > '.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors())) from None


def _expanded(file: Path, group: Group, common: Common) -> list[Planned]:
    axes = []
    for field, values in group.grid.items():
        if field == "model":
            if unknown := [label for label in values if label not in common.models]:
                raise ProfileError(f"{file}: grid > model: unknown {unknown[0]!r}; common.yaml has {', '.join(common.models)}{closest(str(unknown[0]), list(common.models))}")
            axes.append([(label, {}) for label in values])
        elif isinstance(values, dict):
            axes.append(list(values.items()))
        else:
            axes.append([(value if isinstance(value, str) else f"{field}{value}", {field: value}) for value in values])
    runs = []
    for chosen in itertools.product(*axes):
        labels = dict(zip(group.grid, (label for label, _ in chosen)))
        model = labels["model"]
        name = "-".join([file.stem, *labels.values()]).lower()
        fields = common.settings | common.models[model] | group.settings
        for _, more in chosen:
            fields |= more
        try:
            config = RunConfig(name=name, **fields)
        except ValidationError as error:
            raise ProfileError("\n".join(f"{file}: {name}: {' > '.join(map(str, e['loc'])) or 'its settings'}: {e['msg']}" for e in error.errors())) from None
        runs.append(Planned(name, group.title, model, config, common.machine))
    return runs


def chosen(runs: list[Planned], only: list[str] | None) -> list[Planned]:
    """Those whose name begins with one of `only`, all without. Raises ProfileError for one that none begins with."""
    for wanted in only or []:
        if not any(run.name.startswith(wanted) for run in runs):
            raise ProfileError(f"--only {wanted}: no run's name begins so{closest(wanted, [run.name for run in runs])}")
    exact = [wanted for wanted in only or [] if any(run.name == wanted for run in runs)]
    return [run for run in runs if not only or run.name in exact or any(run.name.startswith(wanted) for wanted in only if wanted not in exact)]


def show(runs: list[Planned], console) -> None:
    """The schedule as a table, and what it comes to."""
    from rich.box import SIMPLE
    from rich.table import Table

    def pair(average: float, peak: float) -> str:
        return f"{average:.1f} / {peak:.1f}" if average == average else ""

    table = Table(title="Memory: GiB on a training GPU, average / peak as printed and simulated for the paper's stack; what this code needs at most, simulated, and what an engine's GPU holds", title_justify="left", box=SIMPLE)
    table.add_column("run", no_wrap=True)
    for column in ("updates", "an hour", "hours", "GPU-hours", "disk, GiB", "printed", "paper's stack", "needs", "engine"):
        table.add_column(column, justify="right", no_wrap=True)
    for title, group in itertools.groupby(runs, key=lambda run: run.title):
        table.add_section()
        table.add_row(f"[bold]{title}")
        for run in group:
            paper, cost = run.paper, ("", "refused", "", "")
            if run.fits:
                cost = (f"{run.rate[0]:.2f}", f"{run.hours:.1f}", f"{run.gpu_hours:,.0f}", f"{run.disk_gib:,.0f}")
            stack = paper and (pair(paper["paper_average_gib"], paper["paper_peak_gib"]) or f"{paper['paper_needs_gib']:.1f}")
            table.add_row(f"  {run.name}", f"{run.config.updates:,}", *cost, paper and (pair(paper["printed_average_gib"], paper["printed_peak_gib"]) or "OOM") or "", stack or "",
                          f"{run.needs_gib:.1f}", f"{run.engine_gib:.1f}", style="" if run.fits else "red")
    console.print(table)
    kept = [run for run in runs if run.fits]
    console.print(f"{len(kept)} runs, {sum(run.gpu_hours for run in kept):,.0f} GPU-hours, {sum(run.hours for run in kept) / 24:.1f} days on one node, at the paper's printed rates (none is measured here); "
                  f"{max((run.disk_gib for run in kept), default=0):,.0f} GiB of disk for the largest, checkpoints are deleted at a run's end; "
                  f"{max((run.host_gib for run in kept), default=0):,.0f} GiB of the node's own memory for the largest, as its ranks read the model.", highlight=False, soft_wrap=True)
    for source in dict.fromkeys(run.rate[1] for run in kept):
        of = dict.fromkeys(run.title for run in kept if run.rate[1] == source)
        console.print(f"Updates an hour of {'; '.join(of)}: {source}.", highlight=False, soft_wrap=True)
    for run in runs:
        if not run.fits:
            console.print(f"Refused: {run.refusal()}.", style="red", highlight=False, soft_wrap=True)
