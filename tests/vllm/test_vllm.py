"""vLLM as the rollout engine, on the CPU: an engine that is kept up to date equals one that is started on the merged weights.

The engines run in processes with the interpreter of .venv-vllm (./reproduce.sh setup-vllm), or of LOGRA_VLLM_PYTHON; without it these
tests fail, they are not skipped. Starting an engine is what takes the time: five are started.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

import logra
from logra import sync, wire
from logra.rl.config import RunConfig
from logra.rl.learner import load_base
from logra.rl.loss import token_logprobs
from logra.rl.placement import ROOT, Process, Synchronised, vllm_python
from logra.rl.train import Trainer

SHOTS = "".join(f"{a}+{b}+{c}={a + b}+{c}={a + b + c}\n" for a, b, c in ((12, 34, 56), (47, 85, 36), (21, 17, 90), (66, 13, 75), (50, 49, 48)))
PROMPTS = [f"{SHOTS}{a}+{a + 3}+{99 - a}=" for a in range(10, 34)]            # more than a block of the prefix cache in common


def engine(model, dtype, ranks=1):
    return Process(vllm_python(), engine="vllm", threads=1, model=str(model), mode="exact", dtype=dtype, ranks=ranks)


@pytest.fixture(scope="module")
def run():
    """Two updates of a run with vLLM as its rollout, in bfloat16: the trainer, and the rows of its record."""
    trainer = Trainer(RunConfig(rollout="vllm", sync="exact", updates=2, prompts=8, micro_batch=8, max_new_tokens=6, relative_step=1e-3, evaluation_prompts=4,
                                rank=16, incorrect_reward=-0.5))
    yield trainer, [trainer.step() for _ in range(2)]
    trainer.rollout.close()


def test_a_run_with_vllm_as_its_rollout_is_recorded_as_any_other(run):
    rows = run[1]
    assert [(row["rollout_version"], row["sync_version"], row["sync"], row["sync_equal"]) for row in rows] == [(0, 1, "update", True), (1, 2, "update", True)]
    assert all(abs(row["mismatch"]) < 0.1 for row in rows)  # bfloat16 against float32, sampled token by token


def test_sampled_log_probabilities_are_those_of_the_policy_at_its_temperature(run):
    trainer = run[0]
    batch = trainer.rollout.generate(PROMPTS, 5, 10, 1.5)
    with torch.no_grad():
        ours, raw = (token_logprobs(trainer.model, batch.input_ids, batch.attention_mask, batch.response_mask, temperature) for temperature in (1.5, 1.0))
    theirs = batch.logprobs[batch.response_mask]
    apart = [float((theirs - x).abs().mean()) for x in (ours, raw)]
    assert apart[0] < 0.05 and apart[0] < apart[1] / 4, apart


def damaged(message):
    """One integer of one matrix is another, under a right digest: of two ranks, one alone holds its row."""
    tensors, about = wire.unpack(wire.opened(message))
    tensors["model.layers.1.mlp.up_proj:factor"][3, 5] ^= 1
    return wire.seal(wire.pack(tensors, about))


def equals_a_fresh_engine(rollout, model, tokenizer, optimizer, folder, dtype, ranks=1):
    """Twenty updates more and a refusal; then the engine's samples and their log-probabilities against those of a new engine."""
    sketches, generator = rollout.sketches, torch.Generator().manual_seed(3)

    def step():
        for sketch in sketches.values():
            sketch.S_dr.normal_(generator=generator)
        return optimizer.step()

    optimizer.param_groups[0]["lr"] = 1e-2
    first = rollout.generate(PROMPTS, 1, 10, 1.0)           # fills the prefix cache with the old policy
    for _ in range(20):
        row = rollout.publish(step())
        assert row["sync"] == "update" and row["sync_equal"] and not row["sync_refused"]
    with pytest.raises(sync.SyncError, match="hash: 1 of 14 matrices"):
        rollout.engine.apply(damaged(step().to_bytes()))
    assert rollout.publisher.push().version == sketches.update - 1
    assert rollout.engine.compare(sync.full_weights(sketches, torch.bfloat16)) == (0, 425_984)
    ours = rollout.generate(PROMPTS, 1, 10, 1.0)
    logra.detach(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    fresh = engine(folder, dtype, ranks)
    try:
        theirs = fresh.generate(PROMPTS, 1, 10, 1.0, None)
    finally:
        fresh.close()
    assert torch.equal(ours.input_ids, theirs.input_ids)
    assert (ours.logprobs - theirs.logprobs).abs().max() == 0 and not torch.equal(ours.logprobs, first.logprobs)


def test_an_updated_engine_samples_as_one_that_is_started_on_the_merged_weights(run, tmp_path):
    trainer = run[0]
    equals_a_fresh_engine(trainer.rollout, trainer.model, trainer.tokenizer, trainer.method.optimizer, tmp_path, "bfloat16")


def test_an_updated_engine_of_two_tensor_parallel_workers_does_too(tmp_path):
    model, tokenizer = load_base()
    sketches = logra.attach(model, 64, "hadamard")
    rollout = Synchronised(engine("learner", "float32", ranks=2), sketches, "exact")
    try:
        equals_a_fresh_engine(rollout, model, tokenizer, logra.RowAdam(sketches, relative_step=1e-2, bits=16), tmp_path, "float32", ranks=2)
    finally:
        rollout.close()


def test_requests_in_flight_go_on_under_the_new_weights_and_another_model_is_refused():
    done = subprocess.run([vllm_python(), str(Path(__file__).with_name("in_flight.py"))], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["other_model"] == "base"
    assert seen["running"] == seen["requests"] == 8 and seen["reset"] and seen["version"] == "1"
    assert seen["difference"] < 1e-4 < seen["old_difference"]
