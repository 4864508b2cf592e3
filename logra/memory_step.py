"""The training call whose memory is asked for: the library's own backward, probe and update, sharded by FSDP2 where there are several GPUs."""

from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from logra import kl, linear, logprobs, projection
from logra.checkpointing import keep_projections
from logra.coverage import decoder_blocks
from logra.memory_setting import Category, Setting
from logra.memory_tracker import Tracker
from logra.optim import RowAdam
from logra.shards import RowShards

_SELECTED_ABOVE = 64                                        # as the trainer's `selected_above`: matrices with min(d, k) above it, whatever the method


class Step(nn.Module):
    """A model of a Hugging Face class as `setting` trains it, with the optimizer's state and, in them, the gradients of an earlier micro-batch.

    FSDP's hooks sit on a module's call, so that what uses parts of a model, as the loss and the probe do, is called through this root.
    """

    def __init__(self, model: nn.Module, setting: Setting, mesh: DeviceMesh | None):
        super().__init__()
        self.model, self.setting, self.mesh = model, setting, mesh
        self.device = next(model.parameters()).device
        names = list(linear.attach(model, max(_SELECTED_ABOVE, setting.rank - 1)))
        linear.detach(model)
        model.requires_grad_(False)
        if setting.method == "logra":
            self.sketches = linear.attach(model, setting.rank, modules=names, keep_projections=setting.keep_projections, share_inputs=setting.share_inputs)
            self.sketches.shards = RowShards() if setting.sharded_sketches and mesh is not None else None
        elif setting.method == "lora":
            import peft

            adapters = peft.LoraConfig(r=setting.rank, lora_alpha=setting.rank, lora_dropout=0.0, target_modules=names)
            # made where they belong: to be moved there, as peft does next, a fake module cannot bear
            with torch.device(self.device), patch.object(nn.Module, "to", lambda module, *_, **__: module):
                peft.inject_adapter_in_model(adapters, model)
        elif setting.trainable == "all":
            model.requires_grad_(True)
        else:
            for name in names:
                model.get_submodule(name).weight.requires_grad_(True)
        if setting.checkpointing:
            kept = {"context_fn": keep_projections} if setting.selective else {}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **kept})
        if mesh is not None:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if setting.gathered == "bfloat16" else None, reduce_dtype=torch.float32)
            for block in decoder_blocks(model, model).values():
                fully_shard(block, mesh=mesh, mp_policy=policy)
            if setting.split_embedding and model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
                fully_shard(model.get_input_embeddings(), mesh=mesh, mp_policy=policy)
            fully_shard(self, mesh=mesh, mp_policy=policy)

    def forward(self, function, *arguments, **keywords):
        return function(*arguments, **keywords)

    def prepare(self, tracker: Tracker) -> None:
        """State as after an update, and gradients or sketches as after a micro-batch; `tracker` follows what is there from now on."""
        self.tracker, setting = tracker, self.setting
        tracker.label((local(x) for x in [*self.model.parameters(), *self.model.buffers()]), Category.WEIGHTS)
        for layer, block in enumerate(decoder_blocks(self.model, self.model).values()):
            _mark(tracker, layer, block)
        if setting.method == "logra":
            self.optimizer = RowAdam(self.sketches, relative_step=6e-5)
            self.sketches.base = ""                         # else the first update hashes whole weights
            for sketch in self.sketches.values():
                tracker.label([sketch.S_dr], Category.SKETCHES)
            state = {s.weight: {"step": 1, "v_d": torch.zeros(len(s.S_dr), dtype=torch.float64, device=self.device)} for s in self.sketches.values()}
            self.optimizer.state.update(state)
            self.resident = [torch.zeros_like(s.S_dr) for s in self.sketches.values()] if setting.resident_factor else []
            tracker.label([*(x["v_d"] for x in state.values()), *self.resident], Category.OPTIMIZER)
            return
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW([local(p) for p in trained], lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)    # sharded as it is
            owner = local(parameter)
            self.optimizer.state[owner] = {"step": torch.tensor(1.0), "exp_avg": torch.zeros_like(owner), "exp_avg_sq": torch.zeros_like(owner)}
            tracker.label([local(parameter.grad)], Category.GRADIENTS)
            tracker.label([self.optimizer.state[owner][name] for name in ("exp_avg", "exp_avg_sq")], Category.OPTIMIZER)

    def run(self) -> None:
        """A micro-batch that is not the update's first, then the probe and the update. Phases: train, probe, update."""
        setting, tracker = self.setting, self.tracker
        with self._watched():
            self.model.train()
            with tracker.phase("train"), tracker.saving():
                self(self._loss, *self._batch(setting.micro_batch, setting.context)).backward()
                self.kept = None
            self.model.eval()
            if setting.method == "logra":
                self._sketched_update()
            else:
                self._adamw()

    def _batch(self, responses, tokens):
        """ids, attention mask, mask of generated tokens: int64, int64 and bool [b, t]; all but the first token are generated."""
        ids = torch.arange(responses * tokens, device=self.device).view(responses, tokens) % 100
        mask = torch.ones_like(ids)
        return ids, mask, torch.cat([mask[:, :1] * 0, mask[:, 1:]], 1).bool()

    def _autocast(self, where: bool):
        return torch.autocast(self.device.type, torch.bfloat16) if where else nullcontext()

    def _loss(self, ids, mask, generated):
        with self._autocast(self.mesh is None or self.setting.gathered == "float32"):
            head, targets = self.model.get_output_embeddings(), ids[:, 1:][generated[:, 1:]]
            h_nh = self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1][generated[:, 1:]]
            if self.setting.loss == "chunked":
                return -logprobs.token_logprobs(h_nh, head.weight, targets, head.bias).sum()
            logits = head(h_nh)
            self.kept = [logits] * (self.setting.loss == "kept")
            logits = logits.float()                         # in place of the narrow ones, which then are freed
            self.kept += [logits] * len(self.kept)
        if self.setting.loss == "in_place":
            return -_OverwrittenLogprob.apply(logits, targets).sum()
        return -torch.log_softmax(logits, -1).gather(1, targets[:, None]).sum()

    def _sketched_update(self) -> None:
        setting, tracker = self.setting, self.tracker
        with tracker.phase("update"), tracker.making(Category.OPTIMIZER):
            proposal = self.optimizer.propose()
        if setting.probe != "none":
            with tracker.phase("probe"), tracker.making(Category.PROBE), self._attention(setting.probe_attention), torch.no_grad():
                ids, mask, generated = self._batch(setting.probe_responses, setting.probe_tokens)
                contexts = kl.Contexts.of_responses(ids, mask, generated)
                with self._autocast(self.mesh is None):     # as a run's: float32 where weights are gathered in it
                    self(kl.predicted_kl, self.model, proposal, contexts, setting.probe)
        with tracker.phase("update"), tracker.making(Category.OPTIMIZER):
            self.optimizer.step()

    def _adamw(self) -> None:
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor) and parameter.grad is not None:
                local(parameter).grad = local(parameter.grad)
        with self.tracker.phase("update"), self.tracker.making(Category.OPTIMIZER):
            self.optimizer.step()

    @contextmanager
    def _attention(self, name: str):
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(name)
        try:
            yield
        finally:
            self.model.set_attn_implementation(before)

    @contextmanager
    def _watched(self):
        """The tracker knows who makes what: FSDP, the projections."""
        def named(function, category):
            def inner(*arguments, **keywords):
                with self.tracker.making(category):
                    return function(*arguments, **keywords)
            return inner

        with ExitStack() as stack:
            for name, category in (("unshard", Category.GATHERED), ("wait_for_unshard", Category.GATHERED), ("post_backward", Category.GRADIENTS)):
                stack.enter_context(patch.object(FSDPParamGroup, name, named(getattr(FSDPParamGroup, name), category)))
            stack.enter_context(patch.object(projection, "entries", named(projection.entries, Category.PROJECTIONS)))
            if self.mesh is not None and dist.get_backend() == "fake":      # its sums cannot be read
                for method in ("total", "exact_total"):
                    stack.enter_context(patch.object(RowShards, method, lambda _, values: values))
            yield


class _OverwrittenLogprob(torch.autograd.Function):
    """log π of the targets, [n], from fp32 logits [n, v] that become their own gradient in backward."""

    @staticmethod
    def forward(ctx, logits_nv, targets):
        chunks = [torch.log_softmax(z, -1).gather(1, y[:, None])[:, 0] for z, y in zip(logits_nv.split(256), targets.split(256))]
        ctx.save_for_backward(logits_nv, targets)
        return torch.cat(chunks)

    @staticmethod
    def backward(ctx, dy):
        logits_nv, targets = ctx.saved_tensors
        for z, y, g in zip(logits_nv.split(256), targets.split(256), dy.split(256)):
            p = torch.softmax(z, -1).mul_(-g[:, None])
            z.copy_(p.scatter_add_(1, y[:, None], g[:, None]))
        return logits_nv, None


def _mark(tracker: Tracker, layer: int, block: nn.Module) -> None:
    """Before FSDP's own hooks, which are there already: what it gathers for a layer's forward belongs to that."""
    def after(module, arguments, output):
        tracker.mark("after", layer)
        hidden = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: tracker.mark("backward", layer))

    block.register_forward_pre_hook(lambda module, arguments: tracker.mark("forward", layer), prepend=True)
    block.register_forward_hook(after, prepend=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """A rank's own part of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
