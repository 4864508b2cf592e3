"""Runs that are stopped, that meet numbers that are not finite, and that come back; what they leave behind and what they show meanwhile."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from processes import on_ranks
from runs_of_a_small_model import configured

from logra.rl import logs, models, stopping, train
from logra.rl.checkpoint import KEPT, Checkpoints
from logra.rl.ranks import Alone, Ranks, whole_tensor
from logra.rl.stopping import Limit, Stopped
from logra.rl.train import Trainer, run


@pytest.fixture
def handlers():
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


def same_records(one, two):
    for name in ("metrics", "evaluations"):
        pd.testing.assert_frame_equal(pd.read_parquet(one / f"{name}.parquet"), pd.read_parquet(two / f"{name}.parquet"), check_exact=True)


# the end of the time ------------------------------------------------------------------------------------------------------


def test_a_signal_and_the_clock_end_a_run_with_a_checkpoint_from_which_it_goes_on_to_the_same_bits(folder, tmp_path, monkeypatch, handlers):
    config = configured(folder, updates=6, checkpoint_every=100)
    run(config, tmp_path / "whole")
    progress = train._progress

    def at_the_third(row, *rest):
        if row["update"] == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        progress(row, *rest)

    monkeypatch.setattr(train, "_progress", at_the_third)
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump()))
    command = [str(tmp_path / "config.json"), "--resume", "--no-logs", "--folder", str(tmp_path / "cut")]
    assert train.main(command) == stopping.GO_ON
    told = json.loads((tmp_path / "cut" / "stopped.json").read_text())
    assert (told["code"], told["update"], told["why"]) == (stopping.GO_ON, 3, "SIGUSR1 was received")
    assert train.main([*command, "--wall-clock", "0:00"]) == stopping.GO_ON
    assert "wall-clock" in json.loads((tmp_path / "cut" / "stopped.json").read_text())["why"]
    monkeypatch.setattr(train, "_progress", progress)
    assert train.main([*command, "--wall-clock", "1-00:00:00"]) == 0
    same_records(tmp_path / "whole", tmp_path / "cut")
    assert not (tmp_path / "cut" / "stopped.json").exists() and not (tmp_path / "cut" / "checkpoint").exists()


def test_an_update_that_would_outlast_the_limit_is_not_begun():
    limit = Limit(100)
    assert not limit.reached(50) and "up to 200 s" in limit.reached(200)
    assert [stopping.seconds(text) for text in ("90", "3:50:00", "30:00", "1-02:03:04")] == [90, 13800, 1800, 93784]
    with pytest.raises(ValueError, match="no duration: wanted seconds, MM:SS"):
        stopping.seconds("3h")


def test_what_a_run_took_before_it_was_stopped_bounds_its_first_update_after(folder, tmp_path, monkeypatch, handlers):
    config = configured(folder, updates=6, checkpoint_every=2, evaluate_every=2)
    progress, began = train._progress, []

    def stop_at_the_second(row, *rest):
        if row["update"] == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        progress(row, *rest)

    with monkeypatch.context() as stopped, pytest.raises(Stopped):
        stopped.setattr(train, "_progress", stop_at_the_second)
        run(config, tmp_path / "r", limit=Limit().listen())
    log = tmp_path / "r" / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    took = [row for row in rows if row["kind"] == "timings"]
    assert [row.get("evaluation", 0) > 0 for row in took] == [False, True], "an evaluation's seconds stand beside the update's that it follows"
    took[1]["evaluation"] = 1000.0
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(Trainer, "advance", lambda trainer: began.append(trainer.update))
    with pytest.raises(Stopped, match="no time for another update, of up to 100[0-9] s"):
        run(config, tmp_path / "r", limit=Limit(900))
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer: began.append(trainer.update))
    with pytest.raises(Stopped, match="no time for another update"):
        run(config, tmp_path / "new", limit=Limit(0))
    assert not began


# numbers that are not finite ----------------------------------------------------------------------------------------------


def break_at(trainer, where, updates, monkeypatch):
    """At these updates something is not finite."""
    loss, update, q = train.policy_loss, trainer.method.update, __import__("logra").kl.predicted_kl
    bad = lambda: trainer.update + 1 in updates  # noqa: E731

    def broken(timed, batch, logprobs):
        if bad() and where == "sketch":
            next(iter(trainer.method.sketches.values())).S_dr[1, 2] = math.inf
        if bad() and where == "gradient":
            next(p for p in trainer.model.parameters() if p.grad is not None).grad[0, 0] = math.nan
        return update(timed, batch, logprobs)

    monkeypatch.setattr(trainer.method, "update", broken)
    monkeypatch.setattr(train, "policy_loss", lambda *arguments: loss(*arguments) * (math.nan if bad() and where == "loss" else 1))
    monkeypatch.setattr("logra.kl.predicted_kl", lambda *arguments: math.nan if bad() and where == "q" else q(*arguments))


@pytest.mark.parametrize("where, changes", [("loss", {}), ("sketch", {}), ("q", {"trainable": "all"}), ("gradient", {"method": "dense"}), ("loss", {"method": "dense"})])
def test_an_update_that_meets_no_number_is_skipped_and_leaves_no_trace(folder, where, changes, monkeypatch):
    config = configured(folder, mismatch=False, **changes)
    undisturbed, trainer = Trainer(config), Trainer(config)
    want = [undisturbed.step() for _ in range(2)]
    undisturbed.update += 1                                 # these prompts were never asked
    want.append(undisturbed.step())
    break_at(trainer, where, {3}, monkeypatch)
    rows = [trainer.advance() for _ in range(4)]
    assert [row["update"] for row in rows] == [1, 2, 3, 4] and [row.get("skipped") for row in rows] == [None, None, 1, 1]
    assert "alpha" not in rows[2] and rows[2]["reward"] is not None and math.isfinite(rows[2]["loss"]) == (where != "loss")
    assert [rows[0], rows[1], {k: v for k, v in rows[3].items() if k != "skipped"}] == want
    assert all(torch.equal(x, y) for x, y in zip(trainer.model.state_dict().values(), undisturbed.model.state_dict().values()))


def test_three_in_a_row_stop_the_run_with_its_last_good_state(folder, tmp_path, monkeypatch, capsys):
    config = configured(folder, updates=8, checkpoint_every=3, evaluate_every=4)
    run(config, tmp_path / "whole")
    with monkeypatch.context() as broken:
        made = []

        class Broken(Trainer):
            def __init__(self, *arguments):
                super().__init__(*arguments)
                made.append(self)
                break_at(self, "loss", {5, 6, 7}, broken)

        broken.setattr(train, "Trainer", Broken)
        with pytest.raises(Stopped, match="stopped after update 4: 3 updates in a row") as stopped:
            run(config, tmp_path / "cut")
    assert stopped.value.code == stopping.NOT_FINITE == json.loads((tmp_path / "cut" / "stopped.json").read_text())["code"]
    assert "update 7 is skipped, 3 in a row: the loss of update 7 is nan" in capsys.readouterr().err
    assert Checkpoints(tmp_path / "cut", Alone()).newest().name == "update-000004"
    run(config, tmp_path / "cut")                           # what was wrong is mended: the same three are made
    same_records(tmp_path / "whole", tmp_path / "cut")


# checkpoints --------------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_whole_or_not_there_and_few_are_kept(tmp_path, monkeypatch):
    checkpoints, held = Checkpoints(tmp_path, Alone()), torch.arange(6.0).reshape(2, 3)
    for update in range(1, 5):
        held += 1
        checkpoints.save(update, {"update": update, "of": {0: {"step": 3, "v": held}, "betas": (0.9, 0.95)}})
    before = held.clone()
    held.zero_()
    assert [path.name for path in sorted(checkpoints.folder.iterdir())] == [f"update-{update:06d}" for update in (3, 4)[-KEPT:]]
    with monkeypatch.context() as full:
        full.setattr("torch.distributed.checkpoint.save", lambda *_, **__: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            checkpoints.save(5, {"update": 5, "v": held})
    assert checkpoints.newest().name == "update-000004"
    found = checkpoints.load({})
    assert found["update"] == 4 and found["of"][0]["step"] == 3 and found["of"]["betas"] == (0.9, 0.95) and torch.equal(found["of"][0]["v"], before)
    into = torch.empty(2, 3)
    assert Checkpoints(tmp_path, Alone()).load({"of/0/v": into})["of"][0]["v"] is into and torch.equal(into, before)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    seen, fsync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda number: (seen.append(Path(os.readlink(f"/proc/self/fd/{number}")).name), fsync(number)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (seen.append("renamed") if to.name == "update-000001" else None, rename(path, to))[1])
    Checkpoints(tmp_path, Alone()).save(1, {"update": 1, "v": torch.ones(3)})
    before, after = seen[:seen.index("renamed")], seen[seen.index("renamed") + 1:]
    assert {"rest.pt", ".update-000001.aside"} <= set(before) and any(name.endswith(".distcp") for name in before)
    assert after == ["checkpoint"]


KILLED_IN_A_RESUME = """
import json, resource, signal, sys
from pathlib import Path
from logra.rl import train
load = train.Trainer.load_state_dict
def loaded(trainer, state):
    load(trainer, state)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)           # from here on the first byte that is written to a file ends the process
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
train.Trainer.load_state_dict = loaded
train.run(train.RunConfig(**json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def halfway(folder, tmp_path_factory):
    """A configuration, its run, and the same run as far as update 3, with a checkpoint of update 2."""
    made, config = tmp_path_factory.mktemp("halfway"), configured(folder, updates=5, checkpoint_every=2, evaluate_every=2)

    class Broken(Trainer):
        def step(self):
            if self.update == 3:
                raise KeyboardInterrupt
            return super().step()

    run(config, made / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "Trainer", Broken)
        run(config, made / "cut")
    return config, made / "whole", made / "cut"


def test_a_kill_in_a_resume_at_the_first_byte_that_it_writes_loses_nothing(halfway, tmp_path):
    config, whole, cut = halfway
    shutil.copytree(cut, tmp_path / "cut")
    with open(tmp_path / "cut" / "log.jsonl", "a") as log:
        log.write('{"kind": "metrics", "upd')               # as an earlier kill leaves it
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump()))
    killed = subprocess.run([sys.executable, "-c", KILLED_IN_A_RESUME, tmp_path / "config.json", tmp_path / "cut"], capture_output=True)
    assert killed.returncode == -signal.SIGXFSZ, killed.stderr[-2000:]
    run(config, tmp_path / "cut")
    same_records(whole, tmp_path / "cut")


@pytest.mark.parametrize("lost, why", [(lambda line: line["kind"] == "metrics" and line["update"] == 1, "lacks the metrics of 1 updates, the first of them 1"),
                                       (lambda line: line["kind"] == "timings" and line["number"] == 2, "lacks the timings of 1 updates, the first of them 2"),
                                       (lambda line: True, "lacks the metrics of 2 updates, the first of them 1")])
def test_a_log_that_lost_rows_is_refused_until_the_checkpoints_after_them_are_removed(halfway, tmp_path, lost, why):
    config, whole, cut = halfway
    shutil.copytree(cut, tmp_path / "cut")
    log = tmp_path / "cut" / "log.jsonl"
    left = [line for line in log.read_text().splitlines(keepends=True) if not lost(json.loads(line))]
    log.write_text("".join(left))
    for _ in range(2):                                      # and is left as it was
        with pytest.raises(ValueError, match=rf"log.jsonl {why}, and the run is at update 2: remove from .*checkpoint those of that update and later; --resume then"):
            run(config, tmp_path / "cut")
    assert log.read_text() == "".join(left)
    shutil.rmtree(tmp_path / "cut" / "checkpoint" / "update-000002")
    run(config, tmp_path / "cut")
    same_records(whole, tmp_path / "cut")


def test_a_record_with_a_gap_is_not_marked_as_whole(tmp_path):
    rows = [{"kind": kind, "update": update, "number": update} for update in (3, 4) for kind in ("metrics", "timings")]
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ValueError, match="lacks the metrics of 2 updates, the first of them 1"):
        train._complete(tmp_path, rows, tmp_path / "log.jsonl", 4)
    assert [path.name for path in tmp_path.iterdir()] == ["log.jsonl"]


def test_a_checkpoint_counts_only_with_the_rows_up_to_it_on_the_disk(folder, tmp_path, monkeypatch):
    synced, fsync, save = [], os.fsync, Checkpoints.save

    def noted(number):
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if path.name == "log.jsonl":
            synced.append([json.loads(line)["update"] for line in path.read_text().splitlines() if '"metrics"' in line])
        fsync(number)

    def saved(checkpoints, update, state):
        assert synced[-1] == list(range(1, update + 1))
        save(checkpoints, update, state)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Checkpoints, "save", saved)
    run(configured(folder, updates=4), tmp_path / "r")
    assert len(synced) == 2


def test_weights_that_are_to_be_kept_are_a_model_of_their_own(folder, tmp_path):
    config = configured(folder, updates=3, keep_weights_at=[2])
    trainer = Trainer(config)
    for _ in range(2):
        trainer.step()
    run(config, tmp_path / "r")
    model, tokenizer = models.load(tmp_path / "r" / "weights-000002")
    assert tokenizer.get_vocab() == trainer.tokenizer.get_vocab() and model.state_dict().keys() == trainer.model.state_dict().keys()
    assert all(torch.equal(x, trainer.model.state_dict()[name]) for name, x in model.state_dict().items())


def test_kept_projections_change_no_bit_and_shared_inputs_are_shared(folder):
    rows = [Trainer(configured(folder, checkpointing=True, checkpoint_projections=kept, share_inputs=True)).step() for kept in (False, True)]
    assert rows[0] == rows[1]
    trainer = Trainer(configured(folder, share_inputs=True))
    q, k, o = (trainer.method.sketches[f"model.layers.0.self_attn.{name}_proj"] for name in "qko")
    assert q.key == k.key != o.key


# over ranks ---------------------------------------------------------------------------------------------------------------


def on_a_rank(number, ranks, config, broken):
    found = {}
    for offload in (False, True):
        trainer = Trainer(config.model_copy(update={"offload": offload}), Ranks())
        total = trainer.ranks.total
        trainer.ranks.total = lambda value: total(float("nan") if number == 1 and trainer.update + 1 == broken and not trainer.seconds.get("update") else value)
        found[offload] = [trainer.advance() for _ in range(3)], {name: whole_tensor(x).clone() for name, x in trainer.model.named_parameters()}
    return found


def test_ranks_skip_together_and_weights_on_the_cpu_train_to_the_same_bits(folder, tmp_path):
    one, two = on_ranks(on_a_rank, 2, tmp_path, configured(folder, prompts=4), 2)
    for found in (one, two):
        assert [row.get("skipped") for row in found[False][0]] == [None, 1, 1]
        for rows, weights in (found[True], one[False]):
            assert str(rows) == str(found[False][0])        # as text: NaN equals itself
            assert all(torch.equal(x, found[False][1][name]) for name, x in weights.items())


# what is shown ------------------------------------------------------------------------------------------------------------


def test_each_number_of_a_run_has_one_name_and_a_part_of_an_update_is_not_taken_for_its_reward():
    metrics = logs.named("metrics", {"update": 3, "reward": 0.5, "loss": 0.1, "alpha": 2.0, "unknown": 1, "sync": "full"})
    timings = logs.named("timings", {"number": 3, "reward": 7.0, "rollout": 1.0, "update": 2.0, "sync": 3.0, "total": 9.0})
    evaluation = logs.named("evaluation", {"update": 3, "pass_at_1": 0.25, "length": 12.0})
    assert metrics == {"critic/rewards/mean": 0.5, "actor/pg_loss": 0.1, "logra/alpha": 2.0, "training/unknown": 1.0}
    assert timings == {"timing_s/reward": 7.0, "timing_s/gen": 1.0, "timing_s/optimizer_step": 2.0, "timing_s/update_weights": 3.0, "timing_s/step": 9.0}
    assert evaluation == {"val/mean@k": 0.25, "val/length": 12.0}


def test_a_run_is_shown_in_tensorboard_and_its_record_does_not_change(folder, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = configured(folder, updates=3)
    run(config, tmp_path / "quiet")
    run(config, tmp_path / "shown", shown=True)
    same_records(tmp_path / "quiet", tmp_path / "shown")
    events = EventAccumulator(str(tmp_path / "tensorboard" / "shown"))
    events.Reload()
    metrics = pd.read_parquet(tmp_path / "shown" / "metrics.parquet")
    assert [(e.step, e.value) for e in events.Scalars("critic/rewards/mean")] == [(u, pytest.approx(r)) for u, r in zip(metrics["update"], metrics["reward"])]
    assert {"actor/pg_loss", "val/mean@k", "timing_s/step", "logra/alpha"} <= set(events.Tags()["scalars"])


def test_a_run_is_shown_in_wandb_and_its_record_does_not_change(folder, tmp_path, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import MetricRecord

    for hook in ("exit", "excepthook"):                     # wandb leaves its own there
        monkeypatch.setattr(sys, hook, getattr(sys, hook))
    config = configured(folder, updates=3)
    run(config, tmp_path / "quiet")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "logra")
    run(config, tmp_path / "shown", shown=True)
    same_records(tmp_path / "quiet", tmp_path / "shown")
    (written,) = tmp_path.glob("wandb/offline-run-*/run-shown.wandb")
    held = written.read_bytes()
    assert all(name.encode() in held for name in ("critic/rewards/mean", "actor/pg_loss", "val/mean@k", "timing_s/step", "logra/alpha"))
    axis = MetricRecord(glob_name="*", step_metric="update").SerializeToString()
    assert axis in held, "a curve's axis is the update, not the number of rows"
