"""RunConfig: everything that one run depends on. Same configuration, same machine, same lock: same numbers."""

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RunConfig(BaseModel):
    """One reinforcement-learning run. Values that the paper states are the defaults where a small model does not forbid it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "run"                                       # what the record's folder begins with; no part of the run's identity
    seed: int = 1

    # what is trained, on what
    model: str = "learner"                                  # "learner", "mixture_learner", a name that rl.models knows, or a Hugging Face folder
    task: str = "sums"                                      # see rl.tasks
    task_config: dict = {}
    method: Literal["logra", "dense", "lora"] = "logra"
    trainable: Literal["selected", "all"] = "selected"      # the attention and MLP projections alone, or the rest as well by AdamW
    selected_above: int = Field(64, ge=1)                   # matrices with min(d, k) above it are selected, whatever the method; rank − 1 takes all that the rank allows

    # the loop
    updates: int = Field(200, ge=1)
    prompts: int = Field(128, ge=1)                         # an update, one response each
    micro_batch: int = Field(128, ge=1)                     # responses in a forward
    max_new_tokens: int = Field(24, ge=1)
    context: int | None = Field(None, ge=2)                 # that a prompt and its response have together; None: no such limit
    temperature: float = Field(1.0, gt=0)
    importance_cap: float = Field(2.0, gt=0)                # min(π_train / π_rollout, cap)
    baseline_decay: float = Field(0.9, ge=0, lt=1)          # b ← decay · b + (1 − decay) · the batch's mean reward
    incorrect_reward: float = 0.0
    binary_reward: bool = True
    verifier_seconds: float = Field(5.0, gt=0)              # that one response's verifier may take, where it runs in a worker process
    compute: Literal["float32", "bfloat16"] = "float32"     # weights are stored in float32 either way
    checkpointing: bool = False                             # activation checkpointing, non-reentrant
    checkpoint_projections: bool = False                    # under it, X Aᵀ and attention's output are kept, not made a second time
    gathered: Literal["float32", "bfloat16"] = "float32"    # over ranks: as what a layer's weights are gathered (FSDP2)
    sharded_sketches: bool = False                          # over ranks: S is summed to row shards in each backward, not once an update
    offload: bool = False                                   # over ranks: weights lie in the CPU's memory between uses (FSDP2), and are updated there

    # where responses are sampled, and how its weights keep up with the trainer's (`rl.placement`)
    rollout: Literal["in_process", "process", "vllm", "ray"] = "in_process"
    sync: Literal["none", "exact", "lossy", "full"] = "none"    # "none": on the trainer's own weights
    rollout_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    engines: int = Field(1, ge=1)                           # vLLM engines of rollout "ray" (`rl.engines`)
    engine_ranks: int = Field(1, ge=1)                      # of tensor parallelism, in each
    engine_cache_gib: float = Field(0.5, gt=0)              # memory of each of these for keys and values
    engine_seconds: float = Field(3600.0, gt=0)             # for its part of a batch; an engine that takes longer is taken to hang
    engine_restarts: int = Field(3, ge=0)                   # of an engine without a batch in between

    # LoGRA
    rank: int = Field(64, ge=1)                             # of LoRA's adapters as well
    projection: Literal["rademacher", "gaussian", "hadamard"] = "rademacher"
    refresh: bool = True
    share_inputs: bool = False                              # one projection for q, k and v, and one for gate and up
    optimizer: Literal["rowadam", "sgd"] = "rowadam"
    beta2: float = Field(0.95, ge=0, lt=1)                  # of RowAdam, and of AdamW
    relative_step: float = Field(6e-5, gt=0)                # ‖ΔW‖/‖W‖ of a nominal step (Section 3.4.3)
    bits: Literal[8, 16] | None = 8                         # of the update's rounded factor; None leaves it in float32 (no sync then)

    # predicted-KL control
    control: Literal["none", "constant", "cosine"] = "cosine"
    budget: float = Field(2e-4, gt=0)                       # δ, or δ_max of Eq. 16, nats a prediction
    budget_end: float = Field(2e-5, gt=0)                   # δ_min
    budget_updates: int = Field(300, ge=1)                  # H
    alpha_max: float = Field(3.0, gt=0)
    mismatch: bool = True                                   # Eq. 17
    probe: Literal["jvp", "finite_difference"] = "jvp"
    probe_responses: int = Field(8, ge=1)                   # two for each of the paper's four training GPUs
    probe_tokens: int | None = Field(None, ge=2)            # of each, prompt included, from its beginning: bounds the probe's memory; None: whole responses

    # AdamW, of the dense method, of the rest that `trainable: all` adds, and of LoRA, which has the learning rate without a schedule (D.4)
    learning_rate: float = Field(1e-6, gt=0)
    learning_rate_end: float = Field(1e-7, ge=0)
    warmup: int = Field(9, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    schedule_updates: int = Field(300, ge=1)

    # evaluation (C.1) and checkpoints
    evaluate_every: int = Field(5, ge=1)
    evaluate_from: int = Field(0, ge=0)                     # the first update that is evaluated, besides the start
    evaluation_prompts: int = Field(128, ge=1)
    evaluation_samples: int = Field(4, ge=1)
    evaluation_temperature: float = Field(0.7, gt=0)
    evaluation_top_p: float = Field(0.7, gt=0, le=1)
    evaluation_resamples: int = Field(0, ge=0)              # of the bootstrap intervals; 0 records none
    checkpoint_every: int = Field(50, ge=1)
    keep_weights_at: tuple[int, ...] = ()                   # updates after which the whole weights are kept in the record
    threads: int = Field(1, ge=1)                           # of torch: another number sums in another order

    @model_validator(mode="after")
    def _rank_below_selection(self):
        if self.method != "dense" and self.rank > self.selected_above + 1:
            raise ValueError(f"rank is {self.rank}, but matrices with min(d, k) above selected_above = {self.selected_above} "
                             "are selected: set selected_above to at least the rank − 1")
        return self

    @model_validator(mode="after")
    def _adapters_alone(self):
        if self.method == "lora" and self.trainable != "selected":
            raise ValueError(f"trainable is {self.trainable!r}, but LoRA trains adapters of the selected matrices and nothing else: set it to selected")
        return self

    @model_validator(mode="after")
    def _rollout_can_keep_up(self):
        if self.sync == "none" and self.rollout != "in_process":
            raise ValueError(f"rollout is {self.rollout!r}, whose weights have to keep up with the trainer's: set sync to exact, lossy or full")
        if self.sync != "none" and self.trainable != "selected":
            raise ValueError(f"sync is {self.sync!r}, which sends the selected matrices alone: set trainable to selected")
        if self.sync in ("exact", "lossy") and self.method != "logra":
            raise ValueError(f"sync is {self.sync!r}, which sends updates of LoGRA's selected matrices alone, but method is {self.method!r}: set method to logra, or sync to full")
        if self.sync in ("exact", "lossy") and self.bits is None:
            raise ValueError(f"sync is {self.sync!r}, but an update that is not rounded (bits: null) cannot be sent: set bits to 8 or 16, or sync to none or full")
        return self

    @model_validator(mode="after")
    def _switches_have_what_they_switch(self):
        if self.checkpoint_projections and not (self.checkpointing and self.method == "logra"):
            raise ValueError("checkpoint_projections keeps LoGRA's projections under activation checkpointing: set checkpointing to true and method to logra, or drop it")
        if self.keep_weights_at and self.method == "lora":
            raise ValueError("keep_weights_at keeps a model's own weights, which LoRA does not change: drop it")
        if self.gathered == "bfloat16" and (self.compute != "bfloat16" or self.method == "logra" and self.probe == "finite_difference"):
            raise ValueError("gathered is bfloat16: that is for compute bfloat16, and no weights for a finite-difference probe, which would measure their rounding: "
                             "set compute to bfloat16 and probe to jvp, or gathered to float32")
        if self.sharded_sketches and self.method != "logra":
            raise ValueError(f"sharded_sketches shards LoGRA's sketches, but method is {self.method!r}: drop it")
        if self.share_inputs and self.method != "logra":
            raise ValueError(f"share_inputs shares LoGRA's projections, but method is {self.method!r}: drop it")
        return self

    def hash(self) -> str:
        """12 hex digits that stand for everything but the name. Only what differs from a default counts, so that a new field
        leaves old records valid; a record says its values in full, and one that holds others than were asked for is refused."""
        text = json.dumps(self.model_dump(exclude={"name"}, exclude_defaults=True), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def record(self) -> str:
        """The name of the run's folder."""
        return f"{self.name}-{self.hash()}"

    def same_run(self, written: dict) -> bool:
        """Whether a record's config.json is of this run: every value but the name equal, fields that it does not have at their defaults."""
        return RunConfig(**written).model_dump(exclude={"name"}) == self.model_dump(exclude={"name"})
