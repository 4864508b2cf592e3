"""Verifiers run in worker processes: whatever one does, its call ends in time, is counted, and the others' rewards are right."""

import ctypes
import os
import signal
import sys
import time

import psutil
import pytest

pytest.importorskip("pebble", reason="the workers need pebble")

from hostile import answers  # noqa: E402
from logra.rl import pool, rewards, verifiers  # noqa: E402
from logra.rl.pool import Unparsable  # noqa: E402
from logra.rl.tasks import Problem, Sums  # noqa: E402

LIMIT = 1.0


def misbehave(response, problem):
    """A verifier that does what the response says."""
    match response:
        case "right": return 1.0
        case "half": return 0.5
        case "loop":
            while True: pass
        case "sleep": time.sleep(600)
        case "C code": return float(len(str((1 << (1 << 30)) ** 50 % 7)))
        case "exit": os._exit(3)
        case "system exit": sys.exit(0)
        case "segfault": ctypes.string_at(0)
        case "killed": os.kill(os.getpid(), signal.SIGKILL)
        case "recursion": return misbehave(response, problem)
        case "memory": return float(len(bytearray(1 << 40)))
        case "no answer": raise Unparsable("nothing there")
        case "interrupt": raise KeyboardInterrupt
        case "nan": return float("nan")
        case "text": return "yes"
        case "large": return 7.0
        case "alarm off":
            signal.setitimer(signal.ITIMER_REAL, 0)
            time.sleep(600)


class Misbehaving:
    name = "misbehaving"


def scores(words, **settings):
    problems = [Problem("p", "a", "misbehaving", i, {}, misbehave) for i in range(len(words))]
    return rewards.score(Misbehaving(), problems, words, limit=LIMIT, **settings)


KINDS = {"timed out": ["loop", "sleep", "C code", "alarm off"], "crashed": ["exit", "segfault", "killed"],
         "raised": ["system exit", "recursion", "memory", "interrupt", "nan", "text", "large"], "unparsable": ["no answer"]}


@pytest.mark.parametrize("kind", KINDS)
def test_each_way_to_fail_costs_one_reward_and_is_counted(kind):
    words = [word for bad in KINDS[kind] for word in ("right", bad)] + ["right", "half"]
    found = scores(words, incorrect=-0.01)
    assert found.rewards == [1.0, -0.01] * len(KINDS[kind]) + [1.0, -0.01]
    assert found.kinds == {name: len(KINDS[kind]) * (name == kind) for name in KINDS}
    assert found.failures == (0 if kind == "unparsable" else len(KINDS[kind]))
    assert found.metrics()[f"verifier_{kind.replace(' ', '_')}"] == len(KINDS[kind]) and found.metrics()["verifier_failures"] == found.failures
    assert scores(["half"], binary=False).rewards == [0.5]


def test_a_pool_whose_idle_workers_were_killed_is_replaced():
    assert scores(["right"] * 4).rewards == [1.0] * 4
    for worker in pool._held[1]._pool_manager.worker_manager.workers.values():
        os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.5)
    assert scores(["right"] * 4).rewards == [1.0] * 4


def test_hostile_answers_lose_no_worker_and_no_honest_answer():
    """Two of every kind here; `python tests/unit/hostile.py` judges a thousand and times each."""
    honest = Problem("p", r"\frac{1}{2}", "mathematics", 0, {}, verifiers.math)
    given = [response for _, response in answers(66)]
    mixed = [response for bad in given for response in (bad, r"\boxed{0.5}")]
    start = time.perf_counter()
    found = rewards.score(Misbehaving(), [honest] * len(mixed), mixed, limit=LIMIT)
    assert found.rewards[1::2] == [1.0] * 66
    assert not any(found.rewards[::2]), [given[i][:80] for i, reward in enumerate(found.rewards[::2]) if reward]
    assert time.perf_counter() - start < pool._START + 66 * (LIMIT + pool._GRACE), "the limit did not hold"
    workers = pool._held[1]._pool_manager.worker_manager.workers
    time.sleep(0.5)
    assert len(workers) == min(pool.cores(), pool._WORKERS) and all(psutil.pid_exists(pid) for pid in workers)


def test_a_task_without_a_judge_stays_in_this_process(monkeypatch):
    monkeypatch.setattr(pool, "_pool", None)                # a worker would raise
    found = rewards.score(Sums(), [Sums().problem("train", 0)], ["1"])
    assert found.kinds is None and found.metrics() == {"verifier_failures": 0}


def test_a_reward_that_is_one_value_for_all_is_said_once_with_the_reasons():
    flat, count, notes = scores(["no answer"] * 3), 0, []
    for _ in range(7):
        count, note = rewards.all_equal(flat, count)
        notes.append(note)
    assert count == 7 and [bool(note) for note in notes] == [False] * 4 + [True] + [False] * 2
    assert "every reward of 5 batches in a row is 0" in notes[4]["warning"] and "3 unparsable; nothing there (3)" in notes[4]["warning"]
    assert rewards.all_equal(scores(["right", "half"]), 4) == (0, {})
