"""Verifiers run in worker processes: whatever one does, its call ends in time, is counted, and the others' rewards are right."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

import hostile
from hostile import answers

from logra.rl import pool, rewards, verifiers
from logra.rl.pool import Unparsable
from logra.rl.records import ROOT
from logra.rl.tasks import Problem, Sums

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


def test_workers_that_died_between_batches_are_replaced():
    assert scores(["right"] * 4).rewards == [1.0] * 4
    for worker in pool._held[1]:
        os.kill(worker.process.pid, signal.SIGKILL)
    time.sleep(0.2)
    found = scores(["right", "half"] * 4, binary=False)
    assert found.rewards == [1.0, 0.5] * 4 and found.failures == 0


def _score_while_stopped(ready):
    scores(["right"])
    ready.set()
    found = scores(["loop", "right"] * 4)
    assert found.rewards == [0.0, 1.0] * 4 and found.kinds["timed out"] == 4


def test_a_death_that_the_parent_sees_late_is_of_its_own_call():
    """The parent is stopped for longer than the limit, while its workers end: afterwards each death is still the right call's. The parent is a process of
    its own: a shell with job control takes a pytest that stops for one that has ended."""
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    parent = context.Process(target=_score_while_stopped, args=(ready,))
    parent.start()
    assert ready.wait(60)
    time.sleep(0.1)
    os.kill(parent.pid, signal.SIGSTOP)
    time.sleep(4 * LIMIT)
    os.kill(parent.pid, signal.SIGCONT)
    parent.join(60)
    assert parent.exitcode == 0


def slow_to_import(response, problem):
    return float(os.environ["LOGRA_PREPARED"] == response)


def _prepare(problem):
    time.sleep(2 * LIMIT + pool._GRACE)
    os.environ["LOGRA_PREPARED"] = "right"


slow_to_import.prepare = _prepare


def test_what_a_judge_prepares_is_not_on_the_clock():
    problem = Problem("p", "a", "misbehaving", 0, {}, slow_to_import)
    assert rewards.score(Misbehaving(), [problem] * 2, ["right", "wrong"], limit=LIMIT).rewards == [1.0, 0.0]


def test_a_call_that_cannot_be_sent_is_counted_and_an_interrupt_leaves_no_worker():
    problem = Problem("p", "a", "misbehaving", 0, {}, misbehave)
    assert [verdict.kind for verdict in pool.verdicts([(lambda response, problem: 1.0, "right", problem), (misbehave, "right", problem)], LIMIT)] == ["raised", "scored"]
    workers = [worker.process for worker in pool._held[1]]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(LIMIT / 2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            pool.verdicts([(misbehave, "sleep", problem)], 60.0)
    finally:
        signal.signal(signal.SIGINT, before)
    assert pool._held is None and not any(worker.is_alive() for worker in workers)


def test_a_script_without_a_guard_is_not_run_again_by_the_workers(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text("""
from logra.rl import rewards, verifiers
from logra.rl.tasks import Problem
print("once", rewards.score(None, [Problem("p", "34", "m", 0, {}, verifiers.math)] * 2, ["Answer: 34", "35"]).rewards)
""")
    made = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (made.stdout, made.returncode) == ("once [1.0, 0.0]\n", 0), made.stderr
    monkeypatch.setattr(misbehave, "__module__", "__main__")
    with pytest.raises(ValueError, match="misbehave.* is of __main__"):
        scores(["right"])


def test_workers_that_cannot_start_are_an_error(monkeypatch):
    pool.close()
    monkeypatch.setattr(pool, "_serve", misbehave_at_once)
    with pytest.raises(RuntimeError, match=r"workers in a row died as they started \(exit code 7\)"):
        scores(["right"])
    assert pool._held is None


def misbehave_at_once(pipe):
    os._exit(7)


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
    assert len(pool._held[1]) == min(pool.cores(), pool._WORKERS) and all(worker.process.is_alive() for worker in pool._held[1])
    assert not [child for child in psutil.Process().children(recursive=True) if child.status() == psutil.STATUS_ZOMBIE]


def test_the_end_of_a_call_is_told_apart_from_what_its_process_and_parent_need_afterwards():
    found = hostile.main(33, LIMIT / 2)                     # one of each kind
    assert pool.Worker is not hostile.Timed and found["calls without a known end"] == [] and found["honest right"] == found["honest"] == 3
    assert found["calls ended by their alarm"] == found["hostile"]["timed out"] > 0
    late, noticed = found["seconds from the limit to the end"], found["seconds from the end until the parent noticed"]
    assert -0.05 < late["median"] <= late["at most"] < LIMIT / 2, "the limit did not hold"
    assert noticed["at most"] > 0 and found["seconds from there until another worker had a call"]["median"] > 0


def test_a_task_without_a_judge_stays_in_this_process(monkeypatch):
    monkeypatch.setattr(pool, "_workers", None)             # a worker would raise
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
