"""vLLM engines in Ray's actors: one rollout whichever engine makes a response, through deaths, hangs and restarts.

Real Ray, real vLLM on the CPU, in processes with vLLM's interpreter (./reproduce.sh setup-vllm). Starting an engine is what takes the time.
"""

import os
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

import logra
from logra import sync
from logra.rl.learner import load_base
from logra.rl.placement import ROOT, Process, Synchronised, vllm_python

# of many lengths, so that the longest and the shortest are not on one engine
PROMPTS = ["+".join(str(10 + (7 * i + j) % 90) for j in range(2 + i % 5)) + "=" for i in range(13)]


def started(**settings):
    return Process(vllm_python(), engine="ray", threads=1, **dict(model="learner", mode="exact", dtype="float32", ranks=1, seconds=10.0, restarts=2) | settings)


def below(process: psutil.Process) -> list[psutil.Process]:
    """Ray's actors, and their workers."""
    try:
        children = process.children(recursive=True)
        actors = [child for child in children if "ray::Engine" in "".join(child.cmdline())]
        return sorted({child for actor in actors for child in [actor, *actor.children(recursive=True)]}, key=lambda child: child.create_time())
    except psutil.NoSuchProcess:                            # one ended meanwhile
        return below(process)


def gone(processes, seconds=60) -> bool:
    return not psutil.wait_procs(processes, seconds)[1]


class Run:
    """A run's rollout with its optimizer; steps are from random sketches."""

    def __init__(self, engine):
        self.sketches = logra.attach(load_base()[0], 16)
        self.optimizer, self.generator = logra.RowAdam(self.sketches, relative_step=1e-2), torch.Generator().manual_seed(0)
        self.rollout = Synchronised(engine, self.sketches, "exact")

    def step(self) -> dict:
        for sketch in self.sketches.values():
            sketch.S_dr.normal_(generator=self.generator)
        return self.rollout.publish(self.optimizer.step())

    def batch(self):
        return self.rollout.generate(PROMPTS, 3, 12, 1.0)

    @property
    def driver(self) -> psutil.Process:
        return psutil.Process(self.rollout.engine.process.pid)

    def held_as_the_trainers(self) -> bool:
        return self.rollout.engine.compare(sync.full_weights(self.sketches, torch.bfloat16))[0] == 0


@pytest.fixture(scope="module")
def two():
    """Two engines and one update."""
    run = Run(started(engines=2))
    run.batch()
    row = run.step()
    assert (row["sync"], row["sync_version"], row["sync_equal"], row["rollout_version"]) == ("update", 1, True, 0)
    yield run
    run.rollout.close()


def same(one, two) -> bool:
    return one.texts == two.texts and all(torch.equal(getattr(one, name), getattr(two, name)) for name in ("input_ids", "response_mask", "logprobs", "complete"))


@contextmanager
def stopped(process: psutil.Process, killed_after: float | None):
    """What is asked of it meanwhile gets no answer, until it is killed."""
    process.suspend()
    timer = threading.Timer(killed_after or 0, process.kill)
    if killed_after:
        timer.start()
    yield
    timer.join() if killed_after else None


def test_responses_do_not_depend_on_which_engine_made_them_or_on_how_many_there_are(two):
    ours = two.batch()
    alone = Process(vllm_python(), engine="vllm", threads=1, model="learner", mode="exact", dtype="float32")
    try:
        alone.apply(sync.full_weights(two.sketches))
        theirs = alone.generate(PROMPTS, 3, 12, 1.0, 1)
    finally:
        alone.close()
    assert ours.texts == theirs.texts and torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.response_mask, theirs.response_mask)
    assert (ours.logprobs - theirs.logprobs).abs().max() < 1e-4     # rounding alone: other responses beside it


@pytest.mark.parametrize("which, killed_after", [(0, 1.0), (1, None)], ids=["killed", "hanging"])
def test_a_batch_keeps_its_bits_when_an_engine_ends_over_it(two, which, killed_after):
    before, engines = two.batch(), below(two.driver)
    with stopped(engines[which], killed_after):
        again = two.batch()
    assert same(before, again) and two.held_as_the_trainers()
    assert not engines[which].is_running() and engines[1 - which].is_running() and len(below(two.driver)) == 2


def test_an_update_reaches_an_engine_that_dies_over_it_and_is_not_applied_twice_elsewhere(two):
    version = two.sketches.update
    with stopped(below(two.driver)[0], 1.0):
        row = two.step()
    assert (row["sync"], row["sync_refused"], row["sync_version"], row["sync_equal"]) == ("full", "gap", version, True)
    assert two.held_as_the_trainers() and two.step()["sync"] == "update"


def test_engines_end_with_their_driver_and_the_run_goes_on_with_another_one(two):
    before, driver, engines = two.batch(), two.driver, below(two.driver)
    driver.kill()
    again = two.batch()
    assert gone(engines) and two.driver.pid != driver.pid
    assert same(before, again) and two.held_as_the_trainers()


def test_an_engine_that_fails_again_and_again_is_given_up_with_what_it_died_of(two):
    two.batch()                                             # counts from here
    end = threading.Event()

    def kill_each():
        while not end.is_set():
            for process in below(two.driver):
                process.kill()
            time.sleep(0.1)

    killer = threading.Thread(target=kill_each)
    engines = below(two.driver)
    killer.start()
    try:
        assert gone(engines)
        with pytest.raises(RuntimeError, match="(?s)failed 3 times without completing a batch, and 2 restarts are allowed .*died"):
            two.batch()
    finally:
        end.set()
        killer.join()


def test_an_engine_of_two_tensor_parallel_workers_leaves_none_behind():
    run = Run(started(engines=1, ranks=2, seconds=60.0))
    try:
        run.batch()
        assert run.step()["sync"] == "update" and run.held_as_the_trainers()
        engine, *workers = below(run.driver)
        assert len(workers) >= 2
        engine.kill()
        assert gone(workers)
    finally:
        run.rollout.close()


def test_a_cluster_that_is_named_is_joined_and_its_engines_end_with_the_driver(tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    command = [Path(vllm_python()).with_name("ray"), "start", "--head", "--block", "--port", str(port), "--num-cpus", "2", "--include-dashboard=false", "--disable-usage-stats"]
    with open(tmp_path / "log", "w") as log:
        head = psutil.Popen(list(map(str, command)), stdout=log, stderr=log, start_new_session=True)
    try:
        while head.is_running() and "--block" not in (tmp_path / "log").read_text():
            time.sleep(0.1)
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
        run = Run(started(engines=1))
        run.batch()
        assert run.step()["sync"] == "update" and not below(run.driver)
        engines = below(head)
        assert len(engines) == 1
        run.driver.kill()
        assert gone(engines) and head.is_running()
        run.rollout.close()
    finally:
        processes = [head, *head.children(recursive=True)]
        head.terminate()
        assert gone(processes)


def test_engines_have_the_gpus_that_training_ranks_leave_or_say_what_is_missing():
    asked = """
from logra.rl.engines import gpus_left
print(gpus_left(8, 4, {"LOCAL_WORLD_SIZE": "4"}), gpus_left(8, 2, {"CUDA_VISIBLE_DEVICES": "7,5,3"}), gpus_left(1, 1, {"LOGRA_ENGINE_GPUS": "0"}))
gpus_left(1, 1, {})
"""
    done = subprocess.run([vllm_python(), "-c", asked], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "['4', '5', '6', '7'] ['5', '3'] ['0']"
    assert done.returncode and "the engines need 1 GPUs, but have none of 0" in done.stderr


def test_an_engine_that_cannot_start_says_why(tmp_path):
    model, tokenizer = load_base()
    for part in (model.config, model.generation_config, tokenizer):
        part.save_pretrained(tmp_path)                      # and no weights
    others = set(psutil.Process().children(recursive=True))
    with pytest.raises(RuntimeError, match="engine 0 of 1 does not start: (.|\\n)*Cannot find any model weights"):
        started(engines=1, model=str(tmp_path))
    assert gone(set(psutil.Process().children(recursive=True)) - others)
