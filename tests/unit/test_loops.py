"""In loops of other people: sketches that nobody zeroes, clipping, KL control inside optimizer.step(), and averages over real processes."""

import io
import math

import models
import pytest
import torch
from processes import on_ranks
from torch.distributed.fsdp import fully_shard

import logra
from logra.loops import right_padded
from logra.shards import RowShards

RANK = 16


def weights(sketches):
    return {name: sketch.weight.detach().clone() for name, sketch in sketches.items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def trained(zero, micro_batches=2):
    model = models.llama().train()
    sketches = logra.attach(model, RANK)
    optimizer = logra.RowAdam(sketches, relative_step=1e-2)
    for update in range(3):
        for ids in models.ids(4, 9, seed=update).chunk(micro_batches):
            models.loss(model, ids).backward()
        optimizer.step()
        zero(model, optimizer)
    return weights(sketches)


def test_a_loop_that_zeroes_the_models_gradients_alone_trains_the_same():
    wanted = trained(lambda model, optimizer: optimizer.zero_grad())
    assert same(trained(lambda model, optimizer: model.zero_grad()), wanted)              # transformers' Trainer does it
    assert same(trained(lambda model, optimizer: None), wanted)


def test_clipping_scales_all_sketches_by_one_number():
    sketches = logra.attach(models.llama(), RANK)
    models.loss(sketches.model, models.ids(2, 9)).backward()
    before = {name: sketch.S_dr.clone() for name, sketch in sketches.items()}
    norm = math.sqrt(sum(float(S.double().square().sum()) for S in before.values()))
    assert sketches.clip_norm_(math.inf) == sketches.norm() == pytest.approx(norm) and same({n: s.S_dr for n, s in sketches.items()}, before)
    assert sketches.clip_norm_(norm / 4) == pytest.approx(norm) and sketches.norm() == pytest.approx(norm / 4)
    for name, sketch in sketches.items():
        torch.testing.assert_close(sketch.S_dr, before[name] / 4)
    with pytest.raises(ValueError, match="max_norm is positive, but it is 0"):
        sketches.clip_norm_(0)


# KL control inside step() -------------------------------------------------------------------------------------------------

MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1, 1]])
LABELS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, 1]])


def inputs(seed=0):
    ids = models.ids(3, 9, seed)
    return {"input_ids": ids, "attention_mask": MASK, "labels": ids.masked_fill(LABELS == 0, -100)}


def controlled(**settings):
    model = models.llama().train()
    sketches = logra.attach(model, RANK)
    optimizer = logra.RowAdam(sketches, relative_step=1e-2)
    return model, optimizer, logra.StepControl(model, optimizer, logra.KLControl(logra.CosineBudget(1e-3, 1e-4, updates=5), alpha_max=50.0), **settings)


def test_a_step_takes_the_budget_on_what_the_model_was_trained_on():
    model, optimizer, steps = controlled()
    hand, own, removed = controlled()
    removed.remove()
    for seed in range(3):
        for m in (model, hand):
            m(**inputs(seed)).loss.backward()
        optimizer.step()                                    # the prompts' padding stands before, the responses' behind
        rows = [inputs(seed)["input_ids"][row][MASK[row].bool()] for row in range(3)]
        response = [LABELS[row][MASK[row].bool()] for row in range(3)]
        padded = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (rows, [torch.ones_like(row) for row in rows], response)]
        alpha = removed.control.scale(hand, own.propose(), logra.Contexts.of_responses(*padded))
        own.step(alpha)
        assert steps.last == {"alpha": alpha, "predicted_kl": pytest.approx(steps.control.budget_now), "budget": removed.control.budget_now}
        assert same(weights(optimizer.sketches), weights(own.sketches))


def test_a_saved_optimizer_has_the_controls_state_and_resumes_bit_for_bit():
    model, optimizer, steps = controlled()
    model(**inputs(0)).loss.backward()
    optimizer.step()
    steps.control.kappa = 1e-5
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    other, again, resumed = controlled()
    other.load_state_dict(model.state_dict())
    again.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert resumed.control.state_dict() == steps.control.state_dict() == {"update": 2, "kappa": 1e-5}
    for m, o in ((model, optimizer), (other, again)):
        m(**inputs(1)).loss.backward()
        o.step()
    assert same(weights(optimizer.sketches), weights(again.sketches)) and steps.last == resumed.last


def test_steps_that_are_scaled_already_closures_and_what_is_not_training():
    model, optimizer, steps = controlled(responses=2)
    for seed in range(2):
        model(**inputs(seed)).loss.backward()
    assert [len(rows.input_ids) for rows in steps._rows] == [2]                             # the first rows of the first micro-batch
    optimizer.step(0.5)
    assert not steps.last                                   # the caller's own α
    model, optimizer, steps = controlled()
    with pytest.raises(RuntimeError, match="no training forward of the model since the last step"):
        optimizer.step()
    with torch.no_grad():
        model(**inputs())
    model.eval()(**inputs())
    assert not steps._rows
    model.train()
    before = weights(optimizer.sketches)
    optimizer.step(lambda: model(**inputs()).loss.backward())
    assert steps.last["alpha"] > 0 and not same(weights(optimizer.sketches), before)


def test_rows_padded_anywhere_become_right_padded():
    contexts = right_padded(torch.tensor([[0, 5, 6, 0, 7], [1, 2, 3, 4, 5]]), torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]]),
                            torch.tensor([[-100, -100, 6, -100, 7], [-100, -100, -100, 4, 5]]))
    assert contexts.input_ids[0, :3].tolist() == [5, 6, 7] and contexts.attention_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert contexts.predictions.tolist() == [[True, True, False, False, False], [False, False, True, True, False]]


# several processes --------------------------------------------------------------------------------------------------------


def on_a_rank(number, ranks):
    model, optimizer, steps = controlled()
    optimizer.sketches.replicas, rows = logra.Replicas(), []
    for update in range(3):
        if update < 2 or number == 0:                       # one has no batch for the last update
            ids = models.ids(2 * ranks, 9, seed=update)[2 * number:2 * number + 2]
            models.loss(model, ids).backward()
            model(input_ids=ids)
        norm = optimizer.sketches.clip_norm_(1e9)
        optimizer.step(*([0.5] if update == 2 else []))
        model.zero_grad()
        rows.append((norm, steps.last["alpha"]))
    other = logra.attach(models.llama(seed=number), RANK)
    with pytest.warns(UserWarning, match="one of 2 processes makes a step from its own sketches alone"):
        logra.SketchSGD(other, lr=0.1).propose()
    other.replicas = logra.Replicas()
    with pytest.raises(RuntimeError, match=r"ranks \[1\] do not have rank 0's weights or projections"):
        logra.SketchSGD(other, lr=0.1).propose()
    return weights(optimizer.sketches), rows


def test_replicas_train_as_one_on_the_mean_of_their_losses_and_stay_the_same(tmp_path):
    model, optimizer, steps = controlled()
    rows = []
    for update in range(3):
        ids = models.ids(4, 9, seed=update)[:4 if update < 2 else 2]
        (models.loss(model, ids) / 2).backward()
        model(input_ids=ids)
        norm = optimizer.sketches.norm()
        optimizer.step(*([0.5] if update == 2 else []))
        rows.append((norm, steps.last["alpha"]))
    found = on_ranks(on_a_rank, 2, tmp_path)
    assert same(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    for wanted, row in zip(rows, found[0][1], strict=True):
        assert row == pytest.approx(wanted, rel=1e-4)
    start = weights(controlled()[1].sketches)
    for name, weight in weights(optimizer.sketches).items():
        assert (found[0][0][name] - weight).norm() < 0.02 * (weight - start[name]).norm()      # 8 bits: an entry may round the other way


def on_shards(number, ranks):
    model = models.llama().train()
    sketches = logra.attach(model, RANK)
    sketches.base
    early = logra.SketchSGD(sketches, lr=0.1)
    for block in model.model.layers:                        # each a root of its own, whose weights stay gathered after a forward
        fully_shard(block)
    sketches.shards = RowShards()
    optimizer = logra.RowAdam(sketches, relative_step=1e-2)
    logra.StepControl(model, optimizer, logra.KLControl(logra.CosineBudget(1e-3, 1e-4, updates=5), alpha_max=50.0))
    for seed in range(3):
        model(**inputs(seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.model.layers[1].unshard()
    for wrong in (early, optimizer):
        with pytest.raises(RuntimeError, match="is not the parameter that this optimizer was made for, so that a step on it would be lost"):
            wrong.step(1.0)
    model.model.layers[1].reshard()
    return {name: sketch.weight.full_tensor() for name, sketch in sketches.items()}


def test_a_step_after_a_probe_reaches_the_shards_of_fsdp2(tmp_path):
    model, optimizer, _ = controlled()
    for seed in range(3):
        model(**inputs(seed)).loss.backward()
        optimizer.step()
    (found,), start = on_ranks(on_shards, 1, tmp_path), weights(controlled()[1].sketches)
    for name, weight in weights(optimizer.sketches).items():
        assert (found[name] - weight).norm() < 0.02 * (weight - start[name]).norm()
