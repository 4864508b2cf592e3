"""vLLM as the rollout engine, on the CPU: an engine that is kept up to date equals one that is started on the merged weights.

The engines run in processes with the interpreter of .venv-vllm (./reproduce.sh setup-vllm), or of LOGRA_VLLM_PYTHON; without it these
tests fail, they are not skipped.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import logra
from logra import sync
from logra.rl.config import RunConfig
from logra.rl.learner import load_base
from logra.rl.placement import ROOT, Process, Synchronised, vllm_python
from logra.rl.train import Trainer

SHOTS = "".join(f"{a}+{b}+{c}={a + b}+{c}={a + b + c}\n" for a, b, c in ((12, 34, 56), (47, 85, 36), (21, 17, 90), (66, 13, 75), (50, 49, 48)))
PROMPTS = [f"{SHOTS}{a}+{a + 3}+{99 - a}=" for a in range(10, 34)]            # more than a block of the prefix cache in common


class Steps:
    def __init__(self, **changes):
        self.model, self.tokenizer = load_base()
        self.sketches = logra.attach(self.model, 64, **changes)
        self.optimizer = logra.RowAdam(self.sketches, relative_step=1e-2)
        self.generator = torch.Generator().manual_seed(3)

    def step(self):
        for sketch in self.sketches.values():
            sketch.S_dr.normal_(generator=self.generator)
        return self.optimizer.step()


def engine(model, mode="exact", dtype="bfloat16"):
    return Process(vllm_python(), engine="vllm", threads=1, model=str(model), mode=mode, dtype=dtype)


@pytest.mark.parametrize("dtype, projection", [("bfloat16", "rademacher"), ("float32", "hadamard")])
def test_an_updated_engine_samples_as_one_that_is_started_on_the_merged_weights(tmp_path, dtype, projection):
    trainer = Steps(projection=projection)
    updated = Synchronised(engine("learner", dtype=dtype), trainer.sketches, "exact")
    try:
        first = updated.generate(PROMPTS, 1, 10, 1.0)       # fills the prefix cache with the old policy
        for _ in range(20):
            row = updated.publish(trainer.step())
            assert row["sync"] == "update" and row["sync_equal"] and not row["sync_refused"]
        with pytest.raises(sync.SyncError, match="digest"):
            updated.engine.apply(trainer.step().to_bytes()[:-1] + b"\0")
        assert updated.publisher.push().version == 21
        full = sync.full_weights(trainer.model, torch.bfloat16)
        assert updated.engine.compare(full) == (0, 425_984)
        ours = updated.generate(PROMPTS, 1, 10, 1.0)
    finally:
        updated.close()
    logra.detach(trainer.model)
    trainer.model.save_pretrained(tmp_path)
    trainer.tokenizer.save_pretrained(tmp_path)
    fresh = engine(tmp_path, dtype=dtype)
    try:
        theirs = fresh.generate(PROMPTS, 1, 10, 1.0, None)
    finally:
        fresh.close()
    assert torch.equal(ours.input_ids, theirs.input_ids)
    assert (ours.logprobs - theirs.logprobs).abs().max() == 0 and not torch.equal(ours.logprobs, first.logprobs)


def test_a_run_with_vllm_as_its_rollout_is_recorded_as_any_other():
    config = RunConfig(rollout="vllm", sync="exact", updates=2, prompts=8, micro_batch=8, max_new_tokens=6, relative_step=1e-3, evaluation_prompts=4, rank=16,
                       incorrect_reward=-0.5)
    trainer = Trainer(config)
    try:
        rows = [trainer.step() for _ in range(2)]
    finally:
        trainer.rollout.close()
    assert [(row["rollout_version"], row["sync_version"], row["sync"], row["sync_equal"]) for row in rows] == [(0, 1, "update", True), (1, 2, "update", True)]
    assert all(abs(row["mismatch"]) < 0.1 for row in rows)  # bfloat16 against float32, sampled token by token


def test_requests_in_flight_go_on_under_the_new_weights():
    done = subprocess.run([vllm_python(), str(Path(__file__).with_name("in_flight.py"))], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["running"] == seen["requests"] == 8 and seen["reset"] and seen["version"] == "1"
    assert seen["difference"] < 1e-4 < seen["old_difference"]
