"""Rollouts that are sampled elsewhere: the same run to the bit where nothing is lost, and recovery where something goes wrong."""

import os
import signal
import threading

import pandas as pd
import pytest
import torch

from logra import sync
from logra.rl.config import RunConfig
from logra.rl.train import Trainer, run


def configured(**changes):
    return RunConfig(**(dict(updates=4, prompts=8, micro_batch=8, max_new_tokens=6, relative_step=1e-3, evaluate_every=4, evaluation_prompts=4,
                             checkpoint_every=2, rank=16, incorrect_reward=-0.5) | changes))


@pytest.fixture
def trainers():
    made = []

    def make(**changes):
        made.append(Trainer(configured(**changes)))
        return made[-1]

    yield make
    for trainer in made:
        trainer.rollout.close()


def test_a_float32_rollout_in_another_process_makes_the_same_run_to_the_bit(trainers):
    own, other = trainers(), trainers(rollout="process", sync="exact", rollout_dtype="float32")
    for number in range(1, 4):
        one, two = own.step(), other.step()
        assert {key: two[key] for key in one} == one
        assert (two["rollout_version"], two["sync_version"], two["sync"], two["sync_equal"], two["sync_differing"]) == (number - 1, number, "update", True, 0)
        assert two["sync_bytes"] < 60_000 and other.seconds["sync"] > 0


@pytest.mark.parametrize("placed", ["in_process", "process"])
def test_a_bfloat16_rollout_is_held_at_the_trainers_weights(trainers, placed):
    trainer = trainers(rollout=placed, sync="exact")
    rows = [trainer.step() for _ in range(3)]
    assert all(row["sync_equal"] for row in rows)
    full = sync.full_weights(trainer.model, torch.bfloat16)
    assert trainer.rollout.engine.compare(full) == (0, 425_984)
    assert abs(rows[-1]["mismatch"]) < 0.05 and rows[-1]["mismatch"] != 0


def test_lossy_and_full_rollouts_are_recorded_as_what_they_are(trainers):
    lossy, full = trainers(sync="lossy"), trainers(sync="full")
    rows = [[trainer.step() for _ in range(2)][-1] for trainer in (lossy, full)]
    assert rows[0]["sync_differing"] > 0.01 and not rows[0]["sync_equal"] and rows[0]["sync"] == "update"
    assert rows[1]["sync_differing"] == 0 and rows[1]["sync"] == "full" and rows[1]["sync_bytes"] > 10 * rows[0]["sync_bytes"]


def test_a_rollout_process_that_is_killed_is_started_anew_and_made_whole(trainers):
    trainer = trainers(rollout="process", sync="exact")
    trainer.step()
    engine = trainer.rollout.engine
    engine.process.kill()
    engine.process.wait()
    row = trainer.step()                                    # it dies between updates: full weights, then the rollout
    assert row["rollout_version"] == 1 and row["sync"] == "update" and row["sync_equal"]

    os.kill(engine.process.pid, signal.SIGSTOP)             # it is sent an update, and dies over it
    threading.Timer(1.0, engine.process.kill).start()
    for sketch in trainer.method.sketches.values():
        sketch.S_dr.normal_()
    report = trainer.rollout.publisher.publish(trainer.method.optimizer.step())
    assert (report.refused, report.kind, report.version, report.equal) == ("interrupted", "full", 3, True)


def test_a_resumed_run_samples_from_the_resumed_weights_and_equals_one_that_was_never_cut(tmp_path, monkeypatch):
    config = configured(sync="exact")
    run(config, tmp_path / "whole")
    step = Trainer.step

    def cut(trainer):
        if trainer.update == 3:
            raise KeyboardInterrupt
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", cut)
    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "cut")
    monkeypatch.undo()
    run(config, tmp_path / "cut")
    whole, resumed = (pd.read_parquet(tmp_path / name / "metrics.parquet") for name in ("whole", "cut"))
    pd.testing.assert_frame_equal(whole, resumed)
    assert resumed["rollout_version"].tolist() == [0, 1, 2, 3] and resumed["rollout_weights"].nunique() == 4
    assert resumed["rollout_weights"].tolist()[1:] == resumed["sync_weights"].tolist()[:-1]
    assert "sync" in pd.read_parquet(tmp_path / "cut" / "timings.parquet")


@pytest.mark.parametrize("changes, message", [(dict(rollout="process"), "set sync to"), (dict(sync="exact", method="dense"), "set method to logra"),
                                              (dict(sync="exact", bits=None), "set bits to 8 or 16")])
def test_a_configuration_that_cannot_keep_up_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        configured(**changes)
