"""Whatever happens to a message on its way, a receiver refuses it by name and stands as it stood (the long form: benchmarks/sync_fuzz.py)."""

import copy
import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logra import sync, wire
from logra.rl.records import ROOT

spec = importlib.util.spec_from_file_location("sync_fuzz", ROOT / "benchmarks" / "sync_fuzz.py")
sync_fuzz = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sync_fuzz)


@pytest.fixture(scope="module")
def standing():
    trial = sync_fuzz.Trial(seed=1)
    receiver = trial.receiver()
    return trial, receiver, receiver.fingerprints()


def refused(standing, message) -> str:
    trial, receiver, held = standing
    try:
        answer = receiver.apply(message).status
    except sync.SyncError as error:
        answer = error.reason
    assert answer != "applied" and receiver.version == trial.at and receiver.interrupted is None
    assert receiver.fingerprints() == held
    return answer


@pytest.mark.parametrize("kind", sync_fuzz.DAMAGES)
def test_every_kind_of_damage_is_refused(standing, kind):
    answers = {refused(standing, standing[0].damaged(kind)) for _ in range(12)}
    assert answers <= {*sync.SyncError.REASONS, "duplicate"} and ("duplicate" not in answers or kind == "replay")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_edit_of_the_right_message_is_refused(standing, data):
    good = standing[0].run.updates[standing[0].at]
    resealed = data.draw(st.booleans())
    made = bytearray(wire.opened(good) if resealed else good)
    start = data.draw(st.integers(0, len(made) - 1))
    stop = data.draw(st.integers(start, min(len(made), start + 40)))
    made[start:stop] = data.draw(st.binary(max_size=40))
    made = bytes(made)
    if made != (wire.opened(good) if resealed else good):
        refused(standing, wire.seal(made) if resealed else made)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(order=st.lists(st.integers(0, 5), max_size=12))
def test_in_any_order_with_repeats_and_losses_the_weights_are_those_of_some_update_in_turn(standing, order):
    run = standing[0].run
    rollout = copy.deepcopy(run.base)
    receiver = sync.Receiver(rollout)
    for number in order:
        before = receiver.version
        try:
            receiver.apply(run.updates[number])
        except sync.SyncError as error:
            assert error.reason == "gap" and number > before
        assert receiver.version == max(before, number + 1 if number == before else 0)
    differing, _ = receiver.compare(run.full[receiver.version])
    assert differing == 0 and torch.isfinite(rollout.model.layers[0].mlp.up_proj.weight).all()
