"""Synchronisation: the rollout's weights are the trainer's to the bit, and whatever is wrong is refused whole."""

import copy
import dataclasses
import io
import socket
import threading

import pytest
import torch
from safetensors.torch import load, save
from transformers import Qwen2Config, Qwen2ForCausalLM

import logra
from logra import bits, sync, wire
from logra.update import LowRankUpdate


def small(seed=0, **changes):
    torch.manual_seed(seed)
    config = dict(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
                  tie_word_embeddings=True)
    return Qwen2ForCausalLM(Qwen2Config(**(config | changes))).eval()


class Trainer:
    """A model whose sketches are filled at random: a step is then as any other to the receiver."""

    def __init__(self, model=None, rank=8, bits=8, relative_step=1e-3, **changes):
        self.model = small() if model is None else model
        self.base = copy.deepcopy(self.model)
        self.sketches = logra.attach(self.model, rank, **changes)
        self.optimizer = logra.RowAdam(self.sketches, relative_step=relative_step, bits=bits)
        self.generator = torch.Generator().manual_seed(7)

    def step(self) -> LowRankUpdate:
        for sketch in self.sketches.values():
            sketch.S_dr.normal_(generator=self.generator)
        return self.optimizer.step()

    def differing(self, model) -> int:
        """Bits that differ between bfloat16(master) and a rollout's weights, over all matrices."""
        pairs = [(sketch.weight.bfloat16(), model.get_submodule(name).weight.bfloat16()) for name, sketch in self.sketches.items()]
        return sum(int((a.view(torch.int16) ^ b.view(torch.int16)).count_nonzero()) for a, b in pairs)


def elsewhere(trainer, seed=5):
    """The trainer's base with other selected matrices: what full weights can mend."""
    model, generator = copy.deepcopy(trainer.base), torch.Generator().manual_seed(seed)
    for name in trainer.sketches:
        torch.nn.init.normal_(model.get_submodule(name).weight, std=0.02, generator=generator)
    return model


def state(receiver):
    """Everything that a refused message must leave as it was."""
    return receiver.fingerprints(), receiver.version, receiver.run, receiver.base, receiver.session, receiver.interrupted


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


def _resealed(message, change):
    """A message with a right digest and other content, as a faulty sender would make it."""
    tensors, about = wire.unpack(wire.opened(message))
    change(tensors, about)
    return wire.seal(wire.pack(tensors, about))


def _factor(tensors, about):
    next(t for name, t in tensors.items() if name.endswith(":factor"))[0, 0] += 1


def _rename(tensors, about):
    name = next(iter(about["matrices"]))
    for part in ("factor", "exponents"):
        tensors[f"other:{part}"] = tensors.pop(f"{name}:{part}")
    about["matrices"]["other"] = about["matrices"].pop(name)


def _leave_out(tensors, about):
    name = next(iter(about["matrices"]))
    del about["matrices"][name], tensors[f"{name}:factor"], tensors[f"{name}:exponents"]


def _shorter(tensors, about):
    name = next(iter(about["matrices"]))
    for part in ("factor", "exponents"):
        tensors[f"{name}:{part}"] = tensors[f"{name}:{part}"][:-1]


def _wider(tensors, about):
    next(iter(about["matrices"].values()))["k"] += 16


def _set(**fields):
    return lambda tensors, about: about.update(fields)


def _exponent(tensors, about):
    next(t for name, t in tensors.items() if name.endswith(":exponents"))[0] = 300


def _dtype(tensors, about):
    name = next(name for name in tensors if name.endswith(":factor"))
    tensors[name] = tensors[name].float()


WRONG = {
    "cut": (lambda m: m[:-7], "truncated"), "head only": (lambda m: m[:20], "truncated"), "empty": (lambda m: b"", "truncated"),
    "longer": (lambda m: m + b"x", "malformed"), "no message": (lambda m: b"x" * 400, "malformed"), "next format": (lambda m: b"LoGRA002" + m[8:], "format"),
    "flipped": (lambda m: m[:-9] + bytes([m[-9] ^ 4]) + m[-8:], "digest"), "flipped digest": (lambda m: m[:20] + bytes([m[20] ^ 1]) + m[21:], "digest"),
    "not safetensors": (lambda m: wire.seal(b"\xff" * 300), "malformed"), "no metadata": (lambda m: wire.seal(save({"x": torch.ones(2)})), "malformed"),
    "factor": (_factor, "hash"), "unknown matrix": (_rename, "matrix"), "matrix missing": (_leave_out, "matrix"), "rows": (_shorter, "shape"),
    "columns": (_wider, "shape"), "run": (_set(run="another"), "run"), "base": (_set(base="0" * 32), "base"), "session": (_set(session=3), "session"),
    "gap": (_set(number=5), "gap"), "key": (lambda t, a: next(iter(a["matrices"].values())).update(key=1), "hash"),
    "projection": (_set(projection="hadamard"), "hash"), "unknown projection": (_set(projection="sparse"), "malformed"),
    "rank": (_set(rank=9), "malformed"), "bits": (_set(bits=16), "malformed"), "number": (_set(number="2"), "malformed"), "true": (_set(number=True), "malformed"),
    "exponent": (_exponent, "malformed"), "dtype": (_dtype, "malformed"), "kind": (_set(kind="pickle"), "malformed"), "no matrices": (_set(matrices={}), "malformed"),
    "extra tensor": (lambda t, a: t.update(extra=torch.ones(1)), "malformed"), "hash": (lambda t, a: next(iter(a["matrices"].values())).update(after="0" * 16), "hash"),
    "no matrix at all": (lambda t, a: (t.clear(), a.update(matrices={})), "malformed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_whatever_is_wrong_is_named_and_refused_whole_and_full_weights_mend_it(case):
    change, reason = WRONG[case]
    trainer = Trainer()
    rollout = copy.deepcopy(trainer.base)
    receiver = sync.Receiver(rollout)
    receiver.apply(trainer.step().to_bytes())
    before = state(receiver)
    good = trainer.step().to_bytes()
    spoil = change if change.__code__.co_argcount == 1 else lambda message: _resealed(message, change)
    with pytest.raises(sync.SyncError) as error:
        receiver.apply(spoil(good))
    assert error.value.reason == reason and state(receiver) == before
    assert receiver.apply(good).status == "applied" and trainer.differing(rollout) == 0

    way = [spoil]                                           # the first message is spoilt on the way, what follows is not
    report = sync.Publisher(trainer.sketches, lambda message: receiver.apply(way.pop()(message) if way else message)).publish(trainer.step())
    assert (report.kind, report.refused, report.equal) == ("full", reason, True) and trainer.differing(rollout) == 0


def test_an_update_is_taken_once_in_its_order():
    trainer = Trainer()
    receiver = sync.Receiver(copy.deepcopy(trainer.base))
    first, second, third = (trainer.step().to_bytes() for _ in range(3))
    with pytest.raises(sync.SyncError, match="gap"):
        receiver.apply(second)
    receiver.apply(first)
    receiver.apply(second)
    held = receiver.fingerprints()
    assert [receiver.apply(m).status for m in (first, second, first)] == ["duplicate"] * 3 and receiver.fingerprints() == held
    with pytest.raises(sync.SyncError, match="conflict"):
        receiver.apply(_resealed(second, _factor))
    assert receiver.apply(third).version == 3


def test_full_weights_start_a_receiver_of_any_base_and_old_ones_are_stale():
    trainer = Trainer()
    start = sync.full_weights(trainer.model)
    update = trainer.step()
    rollout = elsewhere(trainer)
    receiver = sync.Receiver(rollout)
    with pytest.raises(sync.SyncError, match="base"):
        receiver.apply(update.to_bytes())
    assert receiver.apply(start).version == 0 and receiver.apply(update.to_bytes()).version == 1 and trainer.differing(rollout) == 0
    with pytest.raises(sync.SyncError, match="stale"):
        receiver.apply(start)
    with pytest.raises(sync.SyncError, match="mode"):       # bfloat16 lacks what the next update adds to
        receiver.apply(sync.full_weights(trainer.model, torch.bfloat16))
    other = Trainer(elsewhere(trainer))
    with pytest.raises(sync.SyncError, match="base"):
        receiver.apply(sync.full_weights(other.model))
    other.sketches.run = "another run"
    for message in (sync.full_weights(other.model), other.step().to_bytes()):
        with pytest.raises(sync.SyncError, match="run"):
            receiver.apply(message)
    receiver.release()
    with pytest.raises(sync.SyncError, match="base"):
        receiver.apply(other.step().to_bytes())
    assert receiver.apply(sync.full_weights(other.model)).version == 2 and other.differing(rollout) == 0


def _head(model):
    model.lm_head.weight[3, 5] *= 1.01                      # tied: the embedding too


def _bias(model):
    model.model.layers[1].self_attn.k_proj.bias[7] = 1e-3


def _norm(model):
    model.model.norm.weight[0] = 1.01


def _unselected(model):
    model.model.layers[0].self_attn.v_proj.weight[0, 0] += 0.01


@pytest.mark.parametrize("change", [_head, _bias, _norm, _unselected])
def test_a_model_that_differs_in_what_no_message_changes_is_refused_for_good(change):
    trainer = Trainer(small(num_key_value_heads=1), rank=16)                 # k_proj and v_proj, 16 × 32, are not selected
    assert not any("v_proj" in name for name in trainer.sketches)
    rollout = copy.deepcopy(trainer.base)
    with torch.no_grad():
        change(rollout)
    receivers = [sync.Receiver(rollout), sync.Receiver(copy.deepcopy(trainer.base))]
    before = state(receivers[0])
    for message in (sync.full_weights(trainer.model), trainer.step().to_bytes()):
        with pytest.raises(sync.SyncError, match="base: this is another model"):
            receivers[0].apply(message)
        assert state(receivers[0]) == before and receivers[1].apply(message).status == "applied"
    with pytest.raises(sync.SyncError, match="base"):       # the trainer hears of it: full weights cannot mend it
        sync.Publisher(trainer.sketches, receivers[0].apply).publish(trainer.step())


def test_the_rest_of_the_model_counts_as_the_bfloat16_that_a_rollout_holds_of_it():
    trainer = Trainer(small(num_key_value_heads=1), rank=16)
    rollout = copy.deepcopy(trainer.base)
    for name, parameter in rollout.named_parameters():      # an engine that loaded the base in bfloat16
        if name.removesuffix(".weight") not in trainer.sketches:
            parameter.data = parameter.data.bfloat16().float()
    assert sync.Receiver(rollout).apply(trainer.step().to_bytes()).version == 1


def test_a_trainer_that_starts_again_from_an_older_state_is_followed_and_its_former_self_is_not():
    trainer = Trainer()
    rollout = copy.deepcopy(trainer.base)
    receiver = sync.Receiver(rollout)
    receiver.apply(trainer.step().to_bytes())
    weights, optimizer = copy.deepcopy(trainer.model.state_dict()), copy.deepcopy(trainer.optimizer.state_dict())
    late = [trainer.step().to_bytes() for _ in range(2)]
    for message in late:
        receiver.apply(message)
    old = sync.full_weights(trainer.model)
    trainer.model.load_state_dict(weights)
    trainer.optimizer.load_state_dict(optimizer)
    trainer.sketches.session = 1
    publisher = sync.Publisher(trainer.sketches, receiver.apply)
    report = publisher.publish(trainer.step())              # its update 2 is another one than the receiver's
    assert (report.refused, report.version, report.equal) == ("session", 2, True) and trainer.differing(rollout) == 0
    for message, reason in ((old, "stale"), (late[1], "session")):
        with pytest.raises(sync.SyncError, match=reason):
            receiver.apply(message)


def test_a_receiver_that_was_cut_off_half_way_knows_it(monkeypatch):
    trainer = Trainer()
    rollout = copy.deepcopy(trainer.base)
    receiver = sync.Receiver(rollout)
    write, count = sync.Slot.write, iter(range(100))

    def cut_off(slot, W, lost_on):
        if next(count) == 3:
            raise KeyboardInterrupt
        write(slot, W, lost_on)

    first, second = trainer.step(), trainer.step()
    monkeypatch.setattr(sync.Slot, "write", cut_off)
    with pytest.raises(KeyboardInterrupt):
        receiver.apply(first.to_bytes())
    monkeypatch.undo()
    for message in (first.to_bytes(), second.to_bytes()):   # a retry would add twice to the matrices that were written
        with pytest.raises(sync.SyncError, match="interrupted"):
            receiver.apply(message)
    report = sync.Publisher(trainer.sketches, receiver.apply).publish(second)
    assert (report.refused, report.version) == ("interrupted", 2) and trainer.differing(rollout) == 0


def test_a_receiver_of_full_weights_takes_nothing_else():
    trainer = Trainer()
    rollout = copy.deepcopy(trainer.base)
    receiver = sync.Receiver(rollout, "full")
    update = trainer.step()
    with pytest.raises(sync.SyncError, match="mode"):
        receiver.apply(update.to_bytes())
    report = sync.Publisher(trainer.sketches, receiver.apply, "full").publish(update)
    matrices = sum(sketch.weight.numel() for sketch in trainer.sketches.values())
    assert report.version == 1 and 2 * matrices < report.bytes < 2 * matrices + 10_000 and trainer.differing(rollout) == 0


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
        refused = everywhere(_resealed(update.to_bytes(), _factor), [None] * ranks)
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
