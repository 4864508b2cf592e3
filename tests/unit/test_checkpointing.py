"""Selective checkpointing and what plain checkpointing does not make again: the same sketches to the bit, less work in backward."""

from contextlib import nullcontext

import models
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import logra
from logra import linear, projection
from logra.rl.footprint import Meter

PLAIN = {"use_reentrant": False}
KEPT = PLAIN | {"context_fn": logra.checkpointing.keep_projections}


def trained(build, checkpointing, *, counted=False, autocast=False, batches=3, t=24, **settings):
    """(sketches after some micro-batches, FLOPs where `counted`, projections hashed, most bytes alive beyond the model's and the sketches').

    Not counted together with bytes: the counter's module hooks keep what a block made again until the garbage collector comes by.
    """
    model = build().train()
    sketches = logra.attach(model, 16, **settings)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    known = [*model.parameters(), *model.buffers(), *(sketch.S_dr for sketch in sketches.values())]
    meter, hashed, entries = Meter(), [], projection.entries
    meter.label(known, "weights")
    before = meter.total
    flops = FlopCounterMode(display=False) if counted else None
    with pytest.MonkeyPatch.context() as patch, flops or nullcontext():
        patch.setattr(linear.projections, "entries", lambda *args, **kwargs: hashed.append(args) or entries(*args, **kwargs))
        for seed in range(batches):
            ids = models.ids(2, t, seed=seed)
            with meter.measuring():
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = models.loss(model, ids)
                loss.backward()
    meter.at_peak()
    return [sketch.S_dr for sketch in sketches.values()], flops and flops.get_total_flops(), len(hashed), meter.peak - before


@pytest.mark.parametrize("build", [models.qwen2, models.qwen3_5])
@pytest.mark.parametrize("share_inputs", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_sketches_are_those_without_checkpointing(build, share_inputs, autocast):
    expected, *_ = trained(build, None, share_inputs=share_inputs, autocast=autocast)
    for checkpointing in (PLAIN, KEPT):
        S, *_ = trained(build, checkpointing, share_inputs=share_inputs, autocast=autocast)
        assert all(torch.equal(a, b) for a, b in zip(S, expected)) and float(S[0].norm()) > 0


def test_kept_projections_are_made_once_and_cost_what_they_hold():
    def each(counted):
        return zip(*(trained(lambda: models.qwen2(num_hidden_layers=10), way, batches=1, t=120, counted=counted) for way in (None, PLAIN, KEPT)))

    (_, (whole, plain, kept), _, _) = each(counted=True)
    assert whole < kept < plain                             # FLOPs
    ((sketches, _, _), _, hashed, (whole, plain, kept)) = each(counted=False)
    assert hashed == (len(sketches), 2 * len(sketches), len(sketches))
    assert plain < kept < whole                             # bytes
    # 7 projections of 16 and attention's output of 64 with its log-sum-exp, of 240 tokens in 10 blocks
    assert kept - plain < 1.2 * 4 * 240 * (7 * 16 + 64 + 4) * 10


def test_a_blocks_last_product_is_not_made_again(monkeypatch):
    model = models.llama().train()
    logra.attach(model, 16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=PLAIN)
    loss = models.loss(model, models.ids(2, 9))
    again, F_linear = [], linear.F.linear
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    monkeypatch.setattr(linear.F, "linear", lambda x, weight, bias=None: again.append(names[id(weight)]) or F_linear(x, weight, bias))
    loss.backward()
    made = {name.rpartition(".mlp.")[2] for name in again if ".mlp." in name}
    assert made == {"gate_proj.weight", "up_proj.weight"} and len(again) == 6 * 2


def test_a_second_backward_through_kept_projections_is_refused_and_does_not_add_something_else():
    model = models.qwen2().train()
    sketches = logra.attach(model, 16)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=KEPT)
    loss = models.loss(model, models.ids(1, 9))
    loss.backward(retain_graph=True)
    once = [sketch.S_dr.clone() for sketch in sketches.values()]
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()
    assert all(torch.equal(sketch.S_dr, S) for sketch, S in zip(sketches.values(), once))
