"""Sketches reduced to row shards in backward, and RowAdam on them, by real processes: the same as one process with the whole batch."""

import models
import pytest
import torch
from processes import on_ranks

import logra
from logra.shards import RowShards

RANK, UPDATES = 16, 3


def model():
    return models.llama(intermediate_size=50, num_hidden_layers=1)      # 48 rows and 50: 16 + 16 + 16, and 17 + 17 + 16, over three ranks


def batches(update):
    return models.ids(6, 9, seed=update).split(1)


def train(sketches, optimizer, mine):
    """Steps on the given micro-batches of each update; the weights, the factors of the last update, and the probe's q at each."""
    q = []
    for update in range(UPDATES):
        optimizer.zero_grad()
        for ids in mine(update):
            models.loss(sketches.model, ids).backward()
        proposal, ids = optimizer.propose(), models.ids(2, 9)
        q.append(logra.predicted_kl(sketches.model, proposal, logra.Contexts(ids, torch.ones_like(ids), ids >= 0)))
        made = optimizer.step(0.5)
    return {name: sketch.weight.detach().clone() for name, sketch in sketches.items()}, {name: m.factor() for name, m in made.matrices.items()}, q


def on_a_rank(number, ranks, kind):
    sketches = logra.attach(model(), RANK)
    sketches.shards = RowShards()
    optimizer = getattr(logra, kind)(sketches, relative_step=1e-2, bits=16)
    result = train(sketches, optimizer, lambda update: batches(update)[number::ranks])
    rows = {name: sketch.S_dr for name, sketch in sketches.items()}
    whole = {name: sketches.shards.gather(S_dr, sketches[name].d) for name, S_dr in rows.items()}
    state = {name: optimizer.state[sketch.weight].get("v_d", torch.zeros(0)).shape[0] for name, sketch in sketches.items()}
    list(sketches.values())[0].S_dr.fill_(torch.nan if number == ranks - 1 else 1.0)
    with pytest.raises(FloatingPointError, match="q_proj"):             # one rank's NaN stops them all
        optimizer.propose()
    return result, {name: S_dr.shape[0] for name, S_dr in rows.items()}, whole, state


@pytest.mark.parametrize("ranks, kind", [(2, "SketchSGD"), (3, "RowAdam")])
def test_ranks_that_hold_rows_train_as_one_that_holds_all(ranks, kind, tmp_path):
    sketches = logra.attach(model(), RANK)
    weights, factors, q = train(sketches, getattr(logra, kind)(sketches, relative_step=1e-2, bits=16), batches)
    found = on_ranks(on_a_rank, ranks, tmp_path, kind)
    for (ours, factor, our_q), rows, whole, state in found:
        assert our_q == pytest.approx(q, rel=1e-4)
        for name, sketch in sketches.items():
            torch.testing.assert_close(ours[name], weights[name], rtol=0, atol=1e-4 * float(weights[name].abs().max()))
            torch.testing.assert_close(whole[name], sketch.S_dr, rtol=1e-4, atol=1e-5 * float(sketch.S_dr.abs().max()))
            assert torch.equal(ours[name], found[0][0][0][name]) and torch.equal(factor[name], found[0][0][1][name])     # all ranks alike, to the bit
            assert kind == "SketchSGD" or state[name] == rows[name]
    assert {tuple(rows["model.layers.0.mlp.up_proj"] for _, rows, _, _ in found)} == {(25, 25) if ranks == 2 else (17, 17, 16)}


@pytest.mark.parametrize("d", [1, 5, 14, 16])
def test_rows_are_torch_chunks_some_of_them_empty(d):
    for ranks in (1, 2, 3, 4, 7):
        chunks = [len(chunk) for chunk in torch.arange(d).chunk(ranks)]
        shards = []
        for number in range(ranks):
            shard = RowShards.__new__(RowShards)
            shard.number, shard.ranks = number, ranks
            shards.append(shard.rows(d))
        assert [rows.stop - rows.start for rows in shards] == chunks + [0] * (ranks - len(chunks))
        assert torch.equal(torch.cat([torch.arange(d)[rows] for rows in shards]), torch.arange(d))
