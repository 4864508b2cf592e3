"""The protocol of synchronisation: an update is taken once, in its order, from its own run; whatever is wrong is named and refused whole."""

import copy

import pytest
import torch
from following import Trainer, another_factor, elsewhere, resealed, small, state
from safetensors.torch import save

from logra import sync, wire



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
    "factor": (another_factor, "hash"), "unknown matrix": (_rename, "matrix"), "matrix missing": (_leave_out, "matrix"), "rows": (_shorter, "shape"),
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
    spoil = change if change.__code__.co_argcount == 1 else lambda message: resealed(message, change)
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
        receiver.apply(resealed(second, another_factor))
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
