"""Sketches reduced to row shards in backward, and RowAdam on them, by real processes: the same as one process with the whole batch."""

import models
import pytest
import torch
from processes import on_ranks

import logra
from logra.shards import RowShards

UPDATES = 3
UP, KEYS = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.k_proj"
# ranks -> the sketches' rank, the model's shape, and how the rows of two matrices lie: 50 of them, and the keys', of which the last of four ranks has none
SHAPES = {2: (16, {}, (25, 25), (24, 24)), 3: (16, {}, (17, 17, 16), (16, 16, 16)), 4: (4, dict(head_dim=6, num_key_value_heads=1), (13, 13, 13, 11), (2, 2, 2, 0))}


def attached(ranks):
    rank, shape, _, _ = SHAPES[ranks]
    return logra.attach(models.llama(intermediate_size=50, num_hidden_layers=1, **shape), rank)


def batches(update):
    return models.ids(12, 9, seed=update).split(1)          # as many on each of 2, 3 or 4 ranks


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
    sketches = attached(ranks)
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


@pytest.mark.parametrize("ranks, kind", [(2, "SketchSGD"), (3, "RowAdam"), (4, "RowAdam"), (4, "SketchSGD")])
def test_ranks_that_hold_rows_train_as_one_that_holds_all(ranks, kind, tmp_path):
    sketches = attached(ranks)
    weights, factors, q = train(sketches, getattr(logra, kind)(sketches, relative_step=1e-2, bits=16), batches)
    found = on_ranks(on_a_rank, ranks, tmp_path, kind)
    for (ours, factor, our_q), rows, whole, state in found:
        assert our_q == pytest.approx(q, rel=1e-4)
        for name, sketch in sketches.items():
            torch.testing.assert_close(ours[name], weights[name], rtol=0, atol=1e-4 * float(weights[name].abs().max()))
            torch.testing.assert_close(whole[name], sketch.S_dr, rtol=1e-4, atol=1e-5 * float(sketch.S_dr.abs().max()))
            assert torch.equal(ours[name], found[0][0][0][name]) and torch.equal(factor[name], found[0][0][1][name])     # all ranks alike, to the bit
            assert kind == "SketchSGD" or state[name] == rows[name]
    assert [tuple(rows[name] for _, rows, _, _ in found) for name in (UP, KEYS)] == list(SHAPES[ranks][2:])


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
