"""LoRA, the baseline of Table 2: adapters alone move, at a constant rate, resumable to the bit, and the policy that samples is the adapted one."""

import json
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
import torch

from logra.rl.config import RunConfig
from logra.rl.methods import selected
from logra.rl.rollout import generate
from logra.rl.train import Trainer, run


def configured(**changes):
    return RunConfig(**(dict(method="lora", updates=6, prompts=8, micro_batch=8, max_new_tokens=6, learning_rate=1e-3, evaluate_every=3,
                             evaluation_prompts=4, checkpoint_every=2, incorrect_reward=-0.5) | changes))


def test_adapters_of_the_selected_matrices_move_and_nothing_else():
    trainer = Trainer(configured())
    names = selected(Trainer(configured(method="dense")).model, trainer.config)
    before = {name: p.clone() for name, p in trainer.model.named_parameters()}
    trainer.step()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {f"{name}.lora_B.default.weight" for name in names}     # B starts at 0, so A has no gradient at the first update
    trainer.step()
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {f"{name}.lora_{side}.default.weight" for name in names for side in "AB"}


def test_the_start_is_the_base_and_the_adapters_come_from_the_runs_seed_alone():
    plain = Trainer(configured(method="dense"))
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    one, other = Trainer(configured()), Trainer(configured(seed=2))
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(6)
    again = Trainer(configured())
    a, b, c = (dict(t.model.named_parameters())["model.layers.0.mlp.up_proj.lora_A.default.weight"] for t in (one, again, other))
    assert torch.equal(a, b) and not torch.equal(a, c)
    ids = torch.tensor([[1, 20, 21, 22]])
    with torch.no_grad():
        assert torch.equal(one.model(ids).logits, plain.model(ids).logits)


def test_the_rate_is_constant_and_the_optimizer_is_that_of_d4():
    trainer = Trainer(configured(warmup=9, schedule_updates=3))
    assert [trainer.step()["learning_rate"] for _ in range(4)] == [1e-3] * 4
    (group,) = trainer.method.adamw.optimizer.param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-8, 0.0)


def test_rollouts_and_evaluation_go_through_the_adapters():
    trainer = Trainer(configured(learning_rate=0.05))
    arguments = (trainer.model, trainer.tokenizer, ["47+85+36="] * 8, 1, 6)
    before = generate(*arguments)
    trainer.step()
    after = generate(*arguments)
    assert before.texts != after.texts
    row = trainer.step()
    assert abs(row["mismatch"]) < 1e-5                      # the trainer's log-probs are those of the policy that sampled


@pytest.mark.parametrize("changes, message", [({"trainable": "all"}, "adapters of the selected matrices and nothing else"), ({"rank": 66}, "rank is 66"),
                                              ({"sync": "exact"}, "LoGRA's selected matrices alone")])
def test_what_lora_cannot_do_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        configured(**changes)


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    config = configured(updates=12)
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump()))
    command = [sys.executable, "-m", "logra.rl.train", str(tmp_path / "config.json"), "--resume", "--folder"]
    run(config, tmp_path / "whole")
    process = subprocess.Popen([*command, str(tmp_path / "cut")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, deadline = tmp_path / "cut" / "log.jsonl", time.time() + 120
    while (not log.exists() or log.read_text().count('"metrics"') < 5) and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    subprocess.run([*command, str(tmp_path / "cut")], check=True, capture_output=True)
    assert pd.read_parquet(tmp_path / "cut" / "timings.parquet")["number"].tolist() == list(range(1, 13))
    for name in ("metrics", "evaluations"):
        pd.testing.assert_frame_equal(*(pd.read_parquet(tmp_path / cut / f"{name}.parquet") for cut in ("whole", "cut")), check_exact=True)


def test_accuracy_rises():
    trainer = Trainer(configured(prompts=48, micro_batch=48, max_new_tokens=24, evaluation_prompts=64, incorrect_reward=0.0))
    start = trainer.evaluate()["pass_at_1"]
    for _ in range(25):
        trainer.step()
    assert trainer.evaluate()["pass_at_1"] > start + 0.15
