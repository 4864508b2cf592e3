"""Measured bytes: exact on tensors of known size, within what the allocator saw on a real step, and without a trace in the run."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from logra.rl import footprint
from logra.rl.config import RunConfig
from logra.rl.footprint import CATEGORIES, Meter, measure, trace
from logra.rl.rollout import generate
from logra.rl.train import Trainer

MATRICES = 2 * (4 * 128 * 128 + 3 * 128 * 384)              # entries of the learner's selected matrices
ROWS = 2 * (4 * 128 + 2 * 384 + 128)                        # their d's, summed
COLUMNS = 2 * (6 * 128 + 384)                               # their k's
ADAPTERS = 64 * (ROWS + COLUMNS)


def configured(**changes):
    return RunConfig(**(dict(updates=6, prompts=8, micro_batch=8, max_new_tokens=6, relative_step=1e-3, learning_rate=1e-3, incorrect_reward=-0.5) | changes))


def test_the_peak_of_tensors_of_known_size():
    meter = Meter()
    weight = torch.ones(100, requires_grad=True)
    meter.label([weight], "weights")
    with meter.measuring():
        x = torch.ones(1000)
        y = x[:10] * 2                                      # a view owns nothing; a product of 10
        del x
        z = torch.exp(weight)                               # kept for backward, under the view below too
        z[5:].sum().backward()
        del y, z
    found = meter.at_peak()
    assert found["weights"] == 400 and sum(found.values()) == meter.peak == 400 + 4000 + 40
    meter.restart()
    with meter.measuring():
        z = torch.exp(weight)
        w = z.square()
    found = meter.at_peak()
    assert (found["weights"], found["activations"], found["other"]) == (400, 400, 400 + 400)      # other: w, and weight.grad, which nobody labelled
    assert len(w) == 100


def test_zeros_of_forward_differentiation_own_no_memory():
    meter = Meter()
    with meter.measuring():
        zero = torch._efficientzerotensor((1000, 1000))
        torch.ones(3) * zero[0, :3]
    assert meter.peak < 100


@pytest.mark.parametrize("method, gradients, optimizer", [("dense", 4 * MATRICES, 8 * MATRICES), ("logra", 4 * 64 * ROWS, 16 * ROWS), ("lora", 4 * ADAPTERS, 8 * ADAPTERS)])
def test_state_is_counted_to_the_byte(method, gradients, optimizer):
    trainer = Trainer(configured(method=method, prompts=2, micro_batch=1))
    trainer.step()
    row = measure(trainer)                                  # of two micro-batches: at the peak the gradients of the first are there
    assert row["peak"] == sum(row[c] for c in CATEGORIES)
    assert row["gradients"] == gradients
    # AdamW has step counters besides; RowAdam's peak lies in its step, where the old v (float64) and the new are both there
    assert 0 <= row["optimizer"] - optimizer < 1000
    parameters = sum(p.nbytes for p in trainer.model.parameters())
    assert parameters <= row["weights"] < parameters + 1000         # and the rotary frequencies
    assert (row["projections"] > 0) == (method == "logra") == ("peak_probe" in row)


def test_the_allocator_saw_hardly_more():
    trainer = Trainer(configured(method="dense", prompts=32, micro_batch=32))
    batch = generate(trainer.model, trainer.tokenizer, [trainer.task.problem("train", i).prompt for i in range(32)], 1, 24)
    advantages, tokens = torch.ones(32), int(batch.response_mask.sum())
    trainer._backward(batch, advantages, tokens)            # gradients are there before either measurement
    meter = Meter()
    footprint._label(meter, trainer)
    before = meter.total
    with meter.measuring():
        trainer._backward(batch, advantages, tokens)
    meter.at_peak()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        trainer._backward(batch, advantages, tokens)
    events = sorted((e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    allocated = most = 0
    for event in events:
        allocated += event.nbytes()
        most = max(most, allocated)
    ours = meter.peak - before - sum(x.nbytes for x in (batch.input_ids, batch.attention_mask, batch.response_mask, batch.logprobs, advantages))
    assert ours == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("method", ["dense", "logra", "lora"])
def test_a_measured_run_is_the_run(method):
    config = configured(method=method)
    plain, measured = Trainer(config), Trainer(config)
    rows = [(plain.step(), measure(measured)) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(plain.model.state_dict().values(), measured.model.state_dict().values()))
    assert [a["tokens"] for a, _ in rows] == [b["tokens"] for _, b in rows]
    traced = trace(config, updates=3, every=2)
    assert traced["update"].tolist() == [1, 2] and traced["tokens"].tolist() == [rows[0][1]["tokens"], rows[1][1]["tokens"]]
    assert traced["peak"].tolist() == [rows[0][1]["peak"], rows[1][1]["peak"]]
