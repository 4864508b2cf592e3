"""The ways from a backward to new weights, with one interface: LoGRA, and the paper's baselines, dense AdamW and LoRA."""

import math
import re

import torch

import logra
from logra.rl.config import RunConfig
from logra.rl.ranks import Alone, Ranks, whole_tensor
from logra.rl.rollout import Rollout, named_seed


def selected(model, config: RunConfig) -> list[str]:
    """Names of the matrices that every method trains: the same for every rank up to `selected_above`."""
    names = list(logra.attach(model, config.selected_above))
    logra.detach(model)
    return names


def norms(sketches: logra.Sketches) -> dict[str, float]:
    """A row's `sketch_norm`, ‖S‖ over all matrices, and `sketch_norm/<layer>`, over those of a layer, by the module name up to the layer's number
    ("model.layers.3"); of a matrix outside of layers by its own."""
    whole, layers = 0.0, {}
    for name, square in sketches.squares().items():
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        layer = "sketch_norm/" + (numbered[0] if numbered else name)
        whole, layers[layer] = whole + square, layers.get(layer, 0.0) + square
    squares = [whole, *layers.values()]
    return dict(zip(("sketch_norm", *layers), map(math.sqrt, squares if sketches.shards is None else sketches.shards.total(squares))))


class AdamW:
    """AdamW on float32 weights, no weight decay; a linear warm-up and a cosine to `learning_rate_end` (Table 4), or a constant rate for LoRA (D.4)."""

    def __init__(self, parameters, config: RunConfig, ranks: Alone | Ranks):
        self.config, self.ranks = config, ranks
        self.optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=1e-8, weight_decay=0.0)

    def rate(self, update: int) -> float:
        config = self.config
        if config.method == "lora":
            return config.learning_rate
        if update <= config.warmup:
            return config.learning_rate * update / config.warmup
        done = min(1.0, (update - config.warmup) / max(1, config.schedule_updates - config.warmup))
        return config.learning_rate_end + (config.learning_rate - config.learning_rate_end) / 2 * (1 + math.cos(math.pi * done))

    def step(self, update: int) -> dict:
        (group,) = self.optimizer.param_groups
        group["lr"] = self.rate(update)
        gradients = [p.grad for p in group["params"] if p.grad is not None]
        norm = math.sqrt(sum(self.ranks.square(g) for g in gradients))
        if not math.isfinite(norm):
            raise FloatingPointError(f"the gradient of update {update} is not finite: nothing was applied")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"learning_rate": group["lr"], "gradient_norm": norm}


class Matrices(logra.Sketches):
    """What keeping a rollout up with full weights asks of a method without sketches: whose its selected matrices are, their version, their whole weights."""

    def __init__(self, model, names: list[str], seed: int):
        super().__init__(model, 0, "none", seed, False, False, False)
        self._sketches = {name: _Matrix(model, name) for name in names}


class _Matrix:
    def __init__(self, model, name: str):
        self.model, self.name = model, name

    @property
    def weight(self) -> torch.Tensor:
        """W, or W + B A of what has an adapter: a collective where it is sharded."""
        module = self.model.get_submodule(self.name)
        if not hasattr(module, "lora_A"):
            return module.weight
        W, A, B = map(whole_tensor, (module.base_layer.weight, module.lora_A.default.weight, module.lora_B.default.weight))
        return W + B @ A * module.scaling["default"]


class Dense:
    """Ordinary gradients and AdamW, on the selected matrices or on everything."""

    def __init__(self, model, config: RunConfig, ranks: Alone | Ranks):
        self.updates, self.applied = 0, None
        self.sketches = Matrices(model, selected(model, config) if config.sync != "none" else [], config.seed)
        if config.sync != "none":
            self.sketches.base                              # while the weights are whole, without adapters, and those of no update
        self.choose(model, config)
        ranks.shard(model, config)
        self.adamw = AdamW([p for p in model.parameters() if p.requires_grad], config, ranks)

    def choose(self, model, config: RunConfig) -> None:
        """Leaves `requires_grad` on what is trained."""
        if config.trainable == "selected":
            chosen = {f"{name}.weight" for name in selected(model, config)}
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in chosen)

    def update(self, timed, batch: Rollout, logprobs) -> dict:
        with timed("update"):
            row = self.adamw.step(self.updates + 1)
        self.updates += 1
        self.sketches.update = self.updates + 1
        return row

    def discard(self) -> None:
        """Forget what the backwards of an update that is not made have added up."""
        self.adamw.optimizer.zero_grad()

    def state_dict(self) -> dict:
        return {"updates": self.updates, "optimizer": self.adamw.optimizer.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        self.sketches.update = self.updates + 1
        self.adamw.optimizer.load_state_dict(state["optimizer"])


class LoRA(Dense):
    """Low-rank adapters of the selected matrices, W + B_dr A_rk, and AdamW on A and B; every weight of the model stays as it is.

    peft's defaults, B = 0 and A uniform, without dropout. The adapters' scale alpha / rank is 1: the paper does not state alpha, and
    under Adam a scale and a learning rate do much the same, of which the rate is the one that is swept.
    """

    def choose(self, model, config: RunConfig) -> None:
        import peft                                         # a second, which the other methods need not wait

        adapters = peft.LoraConfig(r=config.rank, lora_alpha=config.rank, lora_dropout=0.0, target_modules=selected(model, config))
        with torch.random.fork_rng([]):
            torch.manual_seed(named_seed(config.seed, "adapters"))
            peft.inject_adapter_in_model(adapters, model)   # in place: the model samples and evaluates through them


class LoGRA:
    """Sketches, a sketch optimizer and the predicted-KL control; with `trainable: all`, AdamW on what is not sketched."""

    def __init__(self, model, config: RunConfig, ranks: Alone | Ranks):
        self.model, self.config, self.ranks = model, config, ranks
        self.sketches = logra.attach(model, config.rank, config.projection, config.seed, config.refresh, modules=selected(model, config),
                                     freeze_rest=config.trainable == "selected", keep_projections=ranks.count == 1, share_inputs=config.share_inputs)
        self.sketches.base                                  # while the weights are whole, and those of no update
        ranks.shard(model, config)
        if config.sharded_sketches:
            self.sketches.shards = ranks.shards
        step = dict(relative_step=config.relative_step, bits=config.bits)
        self.optimizer = (logra.RowAdam(self.sketches, beta2=config.beta2, **step) if config.optimizer == "rowadam"
                          else logra.SketchSGD(self.sketches, **step))
        budget = (logra.CosineBudget(config.budget, config.budget_end, config.budget_updates) if config.control == "cosine"
                  else logra.ConstantBudget(config.budget))
        self.control = logra.KLControl(budget, config.alpha_max, config.mismatch, config.probe, config.temperature,
                                       config.micro_batch)
        rest = [p for p in model.parameters() if p.requires_grad]
        self.rest = AdamW(rest, config, ranks) if rest else None

    def update(self, timed, batch: Rollout, logprobs) -> dict:
        before = self.control.state_dict()
        try:
            with self.ranks.reduced(self.sketches):
                return self._update(timed, batch, logprobs)
        except FloatingPointError:
            self.control.load_state_dict(before)            # κ had this batch's mismatch in it
            raise

    def _update(self, timed, batch: Rollout, logprobs) -> dict:
        config, sketches, ranks = self.config, self.sketches, self.ranks
        probe = ranks.probe(batch, config.probe_responses)
        contexts = logra.Contexts.of_responses(probe.input_ids, probe.attention_mask, probe.response_mask).beginning(config.probe_tokens)
        with timed("update"):
            proposal = self.optimizer.propose()
            row = norms(sketches)
        with timed("probe"):
            trainer = torch.zeros_like(batch.logprobs).masked_scatter(batch.response_mask, logprobs)
            self.control.observe(batch.logprobs, trainer, batch.response_mask & batch.complete[:, None])
            if config.control == "none":
                q, alpha = ranks.run(logra.predicted_kl, self.model, proposal, contexts, config.probe, config.temperature, config.micro_batch), 1.0
            else:
                alpha = ranks.run(self.control.scale, self.model, proposal, contexts)
                q = self.control.q
                row |= {"budget": self.control.budget_now, "kappa": self.control.kappa}
        with timed("update"):
            if self.rest is not None:
                row |= self.rest.step(sketches.update)
            update = self.applied = self.optimizer.step(alpha)
            self.optimizer.zero_grad()
        with timed("probe"):
            realised = ranks.run(logra.realised_kl, self.model, update, contexts, temperature=config.temperature, applied=True, micro_batch=config.micro_batch)
        return row | {"alpha": alpha, "predicted_kl": alpha ** 2 * q, "realised_kl": realised}

    def discard(self) -> None:
        """Forget what the backwards of an update that is not made have added up."""
        self.optimizer.zero_grad()
        if self.rest is not None:
            self.rest.optimizer.zero_grad()

    def state_dict(self) -> dict:
        rest = None if self.rest is None else self.rest.optimizer.state_dict()
        return {"optimizer": self._of_rows(self.optimizer.state_dict(), self.ranks.of_rows), "control": self.control.state_dict(), "rest": rest}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(self._of_rows(state["optimizer"], self.ranks.rows_of))
        self.control.load_state_dict(state["control"])
        if self.rest is not None:
            self.rest.optimizer.load_state_dict(state["rest"])

    def _of_rows(self, state: dict, change) -> dict:
        """RowAdam's state with change(v_d, d) in the place of each matrix's statistics."""
        sizes = [sketch.d for sketch in self.sketches.values()]
        return state | {"state": {index: {name: change(x, sizes[index]) if name == "v_d" else x for name, x in of_matrix.items()}
                                  for index, of_matrix in state["state"].items()}}
