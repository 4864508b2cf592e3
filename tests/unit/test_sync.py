"""Synchronisation: the rollout's weights are the trainer's to the bit, and whatever is wrong is refused whole."""

import copy
import dataclasses
import io
import socket
import threading
import weakref

import pytest
import torch
from following import Trainer, another_factor, resealed, small
from safetensors.torch import load

from logra import bits, sync, wire
from logra.update import LowRankUpdate


@pytest.mark.parametrize("projection", ["rademacher", "hadamard", "gaussian"])
@pytest.mark.parametrize("width, rank", [(8, 16), (16, 16), (8, 31), (16, 31)])
def test_no_bit_differs_after_many_updates(projection, width, rank, monkeypatch):
    monkeypatch.setattr(sync, "_KEPT", 20_000)              # some matrices are computed once, some again
    trainer = Trainer(rank=rank, bits=width, projection=projection)
    rollouts = [copy.deepcopy(trainer.base) for _ in range(3)]
    receivers = [sync.Receiver(rollouts[0]), sync.Receiver(rollouts[1], lost_on="host"), sync.Receiver(rollouts[2], dtype=torch.float32)]
    for number in range(1, 31):
        update = trainer.step()
        message = update.to_bytes()
        for receiver in receivers:
            acknowledged = receiver.apply(message)
            assert (acknowledged.status, acknowledged.version, acknowledged.weights) == ("applied", number, bits.combined(update.after))
    assert [trainer.differing(rollout) for rollout in rollouts] == [0, 0, 0]
    assert all(receiver.fingerprints() == update.after for receiver in receivers)
    assert rollouts[0].model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16


def test_biases_embeddings_and_norms_are_left_alone_and_the_head_stays_tied():
    trainer = Trainer()
    rollout = copy.deepcopy(trainer.base)
    receiver = sync.Receiver(rollout)
    before = {name: p.clone() for name, p in rollout.named_parameters()}
    receiver.apply(trainer.step().to_bytes())
    moved = {name for name, p in rollout.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {f"{name}.weight" for name in trainer.sketches}
    assert rollout.lm_head.weight is rollout.model.embed_tokens.weight


def test_lossy_drifts_where_exact_does_not():
    trainer = Trainer(relative_step=6e-5)
    receivers = {mode: sync.Receiver(copy.deepcopy(trainer.base), mode) for mode in ("exact", "lossy")}
    for _ in range(40):
        message = trainer.step().to_bytes()
        for receiver in receivers.values():
            receiver.apply(message)
    wanted = sync.full_weights(trainer.model)
    drift = {mode: receiver.compare(wanted) for mode, receiver in receivers.items()}
    entries = sum(sketch.weight.numel() for sketch in trainer.sketches.values())
    assert drift["exact"] == (0, entries) and drift["lossy"][1] == entries and drift["lossy"][0] > entries / 20
    # what the paper's text costs: most steps are lost in rounding
    pushed = receivers["lossy"].apply(sync.full_weights(trainer.model, torch.bfloat16))
    assert receivers["lossy"].compare(wanted)[0] == 0 and pushed.version == 40


def test_a_message_is_the_same_bytes_each_time_and_gives_back_the_update():
    one, two = Trainer().step(), Trainer().step()
    message = one.to_bytes()
    assert message == two.to_bytes()
    back = LowRankUpdate.from_bytes(message)
    assert back.to_bytes() == message and (back.number, back.run, back.base, back.after) == (1, one.run, one.base, one.after)
    assert all(torch.equal(back.dense(name), one.dense(name)) for name in one.matrices)
    tensors = load(message[wire.HEAD.size:])                # any reader of safetensors can look inside
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(tensors[f"{name}:factor"], one.matrices[name].integers_dr) and len(tensors) == 2 * len(one.matrices)


def test_messages_follow_each_other_through_a_socket():
    trainer = Trainer()
    messages = [trainer.step().to_bytes(), sync.full_weights(trainer.model), trainer.step().to_bytes()]
    one, other = socket.socketpair()

    def send():
        with one, one.makefile("wb") as stream:
            for message in messages:
                wire.write(stream, message)

    thread = threading.Thread(target=send)
    thread.start()
    with other, other.makefile("rb") as stream:
        assert [wire.read(stream) for _ in range(4)] == [*messages, None]
    thread.join()
    for cut, reason in ((10, "truncated"), (60, "truncated")):
        with pytest.raises(sync.SyncError) as error:
            wire.read(io.BytesIO(messages[0][:cut]))
        assert error.value.reason == reason
    with pytest.raises(sync.SyncError, match="no message"):
        wire.read(io.BytesIO(b"GET / HTTP/1.1\r\n" + b"Host: somewhere.example\r\n" * 4))


def test_an_update_that_no_weights_have_seen_has_no_message():
    trainer = Trainer()
    for sketch in trainer.sketches.values():
        sketch.S_dr.normal_()
    update = LowRankUpdate.round(trainer.sketches, trainer.optimizer.propose())
    with pytest.raises(ValueError, match="apply it to the trainer's weights first"):
        update.to_bytes()


def test_full_weights_are_made_one_matrix_at_a_time():
    def gathered():
        before = lambda: None  # noqa: E731
        for i in range(3):
            assert before() is None                         # the one before is let go, when the next is gathered
            W_dk = torch.full((4, 5), float(i))
            before = weakref.ref(W_dk)
            yield f"{i}", W_dk
            del W_dk

    full = wire.FullWeights.of(gathered(), 0, "run", "base", dtype=torch.bfloat16)
    assert full.after == {name: bits.fingerprint(W_dk) for name, W_dk in full.weights.items()} and len(full.after) == 3


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_layers_split_over_ranks_hold_their_slices_of_the_whole(ranks, dtype):
    trainer = Trainer(small(num_key_value_heads=2, num_hidden_layers=1))
    heads, kv_heads, head_dim, k = 4, 2, 16, 32
    layer = "model.layers.0"

    def part_lists(rank):
        return [bits.fused_attention([f"{layer}.self_attn.{x}_proj" for x in "qkv"], heads, kv_heads, head_dim, k, rank, ranks),
                bits.column_parallel([f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], [48, 48], k, rank, ranks),
                bits.row_parallel(f"{layer}.self_attn.o_proj", 32, heads * head_dim, rank, ranks), bits.row_parallel(f"{layer}.mlp.down_proj", 32, 48, rank, ranks)]

    barrier, shared = threading.Barrier(ranks), [None] * ranks

    def add_up(rank):
        def together(total):
            shared[rank] = total
            barrier.wait(timeout=30)
            result = torch.stack(shared).sum(0)
            barrier.wait(timeout=30)
            return result
        return together

    def rest(rank):                                         # whole on every rank, as norms are, and counted once
        return {name: [dataclasses.replace(slot, part=slot.part._replace(counts=rank == 0))] for name, (slot,) in sync.whole(trainer.base)[1].items()}

    fused, receivers = [], [None] * ranks
    for rank in range(ranks):
        own, slots = [], {}
        for parts in part_lists(rank):
            whole = {part.name: trainer.base.get_submodule(part.name).weight.detach() for part in parts}
            parameter = torch.cat([whole[p.name][p.rows, p.columns] for p in parts]).to(dtype)
            own.append((parts, parameter))
            for p in parts:
                slots[p.name] = [sync.Slot(p, tuple(whole[p.name].shape), parameter[p.at:p.at + p.rows.stop - p.rows.start])]
        fused.append((own, slots))

    def everywhere(message, results):
        def one(rank):
            try:
                if receivers[rank] is None:
                    receivers[rank] = sync.Receiver(None, slots=fused[rank][1], rest=rest(rank), add_up=add_up(rank))
                results[rank] = receivers[rank].apply(message)
            except sync.SyncError as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(ranks)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return results

    results = everywhere(sync.full_weights(trainer.model), [None] * ranks)
    for number in range(1, 4):
        update = trainer.step()
        refused = everywhere(resealed(update.to_bytes(), another_factor), [None] * ranks)
        assert {error.reason for error in refused} == {"hash"}       # every rank refuses, also those whose own slice is right
        results = everywhere(update.to_bytes(), [None] * ranks)
        assert {(ack.version, ack.weights) for ack in results} == {(number, bits.combined(update.after))}
    for own, _ in fused:
        for parts, parameter in own:
            master = {p.name: trainer.sketches[p.name].weight[p.rows, p.columns] for p in parts}
            assert torch.equal(parameter, torch.cat([master[p.name] for p in parts]).to(dtype))


def test_a_message_carries_what_it_needs_and_little_more():
    trainer = Trainer(small(hidden_size=128, intermediate_size=256, num_attention_heads=8), rank=64)
    update = trainer.step()
    factors = sum(m.integers_dr.numel() + 2 * m.exponent_d.numel() for m in update.matrices.values())
    overhead = len(update.to_bytes()) - factors
    assert overhead < 400 * len(update.matrices) + 500      # names, keys, fingerprints: bytes a matrix, not a row


def test_the_update_object_is_not_changed_by_sending_it():
    update = Trainer().step()
    before = dataclasses.replace(update, after=dict(update.after))
    update.to_bytes()
    assert update.after == before.after and update.number == before.number
