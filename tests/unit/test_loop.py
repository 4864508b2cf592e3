"""The learning loop: rollouts, loss, updates, resume. The model is a small random Qwen2 with the learner's tokenizer."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest
import torch
from runs_of_a_small_model import configured

import logra
from logra.rl import runs
from logra.rl.evaluate import evaluate, sampler
from logra.rl.loss import policy_loss, token_logprobs
from logra.rl.records import MissingRecord
from logra.rl.rollout import generate, named_seed
from logra.rl.train import Trainer, run

PROMPTS = ["1+2=", "47+85+36=", "5=", "What is 12 + 7?"]


@pytest.fixture
def trainer(folder):
    return Trainer(configured(folder))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_rollout_and_trainer_agree_on_every_sampled_token(trainer, temperature):
    batch = generate(trainer.model, trainer.tokenizer, PROMPTS * 4, 1, 8, temperature)
    with torch.no_grad():
        ours = token_logprobs(trainer.model, batch.input_ids, batch.attention_mask, batch.response_mask, temperature)
    assert (ours - batch.logprobs[batch.response_mask]).abs().max() < 1e-5
    assert batch.response_mask.sum(1).max() <= 8 and batch.complete.dtype == torch.bool


def test_a_batch_equals_its_rows_done_singly(trainer):
    batch = generate(trainer.model, trainer.tokenizer, PROMPTS, 2, 8)
    with torch.no_grad():
        together = token_logprobs(trainer.model, batch.input_ids, batch.attention_mask, batch.response_mask)
        singly = torch.cat([token_logprobs(trainer.model, *(x[:, :n] for x in (batch.input_ids[i:i + 1], batch.attention_mask[i:i + 1], batch.response_mask[i:i + 1])))
                            for i, n in enumerate(batch.attention_mask.sum(1).tolist())])
    assert (together - singly).abs().max() < 1e-5


def test_the_seed_alone_decides_a_rollout_and_global_generators_are_left_alone(trainer):
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two, other = (generate(trainer.model, trainer.tokenizer, PROMPTS, seed, 8) for seed in (7, 7, 8))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert one.texts == two.texts != other.texts and torch.equal(one.logprobs, two.logprobs)


def test_a_training_rollout_refuses_top_p(trainer):
    with pytest.raises(ValueError, match="top_p is 0.7"):
        generate(trainer.model, trainer.tokenizer, PROMPTS, 1, 4, top_p=0.7)


def test_chunked_logprobs_have_the_values_and_gradients_of_the_whole(folder, monkeypatch):
    trainer = Trainer(configured(folder, method="dense", trainable="all"))
    batch = generate(trainer.model, trainer.tokenizer, PROMPTS, 3, 8)
    results = []
    for chunk in (1024, 5):
        monkeypatch.setattr("logra.logprobs.chunk_tokens", lambda vocabulary: chunk)
        trainer.model.zero_grad()
        logprobs = token_logprobs(trainer.model, batch.input_ids, batch.attention_mask, batch.response_mask)
        logprobs.square().sum().backward()
        results.append((logprobs.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])))
    assert torch.allclose(results[0][0], results[1][0], atol=1e-6)
    assert (results[0][1] - results[1][1]).norm() < 1e-5 * results[0][1].norm()


def test_the_loss_is_the_capped_importance_weighted_policy_gradient(trainer):
    batch = generate(trainer.model, trainer.tokenizer, PROMPTS, 4, 8)
    n = int(batch.response_mask.sum())
    log_p = (batch.logprobs[batch.response_mask] + torch.linspace(-1.5, 1.5, n)).requires_grad_()
    advantages = torch.tensor([1.0, -0.3, 0.0, 2.0])
    policy_loss(log_p, batch, advantages, tokens=n, cap=2.0).backward()
    want, place = [], 0
    for row in range(len(batch)):
        for column in range(batch.input_ids.shape[1]):
            if batch.response_mask[row, column]:
                ratio = torch.exp(log_p.detach()[place].double() - batch.logprobs[row, column].double())
                want.append(-float(advantages[row]) * min(float(ratio), 2.0) / n)
                place += 1
    assert torch.allclose(log_p.grad.double(), torch.tensor(want, dtype=torch.float64), rtol=1e-5)


@pytest.mark.parametrize("method", ["logra", "dense"])
def test_micro_batches_change_neither_the_loss_nor_the_step(folder, method):
    rows, weights = [], []
    for micro in (8, 3):
        trainer = Trainer(configured(folder, method=method, micro_batch=micro, bits=16))
        before = trainer.model.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
        rows.append(trainer.step())
        weights.append(trainer.model.state_dict()["model.layers.0.mlp.up_proj.weight"] - before)
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=1e-6)
    assert (weights[0] - weights[1]).norm() < 1e-2 * weights[0].norm()      # AdamW's first step is a sign: noise on tiny gradients shows


@pytest.mark.parametrize("method", ["logra", "dense"])
def test_a_rewarded_response_becomes_more_likely(folder, method, monkeypatch):
    trainer = Trainer(configured(folder, method=method, control="none"))
    seen = {}

    def keep(*args, **kwargs):
        seen["batch"] = generate(*args, **kwargs)
        return seen["batch"]

    monkeypatch.setattr("logra.rl.placement.generate", keep)
    monkeypatch.setattr(trainer.task, "verify", lambda response, problem: float(problem.index == 3))
    before_weights = {n: p.clone() for n, p in trainer.model.named_parameters()}
    trainer.step()
    batch = seen["batch"]
    with torch.no_grad():
        after = torch.zeros_like(batch.logprobs).masked_scatter(
            batch.response_mask, token_logprobs(trainer.model, batch.input_ids, batch.attention_mask, batch.response_mask))
    assert (after - batch.logprobs)[3].sum() > 0
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before_weights[n])}
    assert moved == {n for n in before_weights if "_proj.weight" in n}      # the same set for both, and nothing else


def test_baseline_is_used_before_it_takes_the_batch_in(folder):
    trainer = Trainer(configured(folder, updates=3))
    rows = [trainer.step() for _ in range(3)]
    b = 0.0
    for row in rows:
        assert row["baseline"] == pytest.approx(b)
        b = 0.9 * b + 0.1 * row["reward"]


def test_evaluation_counts_what_the_verifier_says(trainer):
    row = evaluate(sampler(trainer.model, trainer.tokenizer, trainer.config), trainer.task, trainer.config, update=0)
    task = trainer.task
    problems = [task.problem("evaluation", i) for i in range(4) for _ in range(4)]
    out = generate(trainer.model, trainer.tokenizer, [p.prompt for p in problems], named_seed(1, "evaluate", 0, 0), 6, 0.7, 0.7, recorded=False)
    right = [task.verify(text, p) for text, p in zip(out.texts, problems)]
    assert row["pass_at_1"] == sum(right) / 16 and row["pass_at_k"] == sum(any(right[i:i + 4]) for i in (0, 4, 8, 12)) / 4
    assert row["length"] == pytest.approx(float(out.response_mask.sum()) / 16) and row["samples"] == 16


def test_each_layers_sketch_norm_is_recorded_and_their_squares_add_up_to_the_whole(folder, monkeypatch):
    trainer, seen = Trainer(configured(folder)), {}
    propose = trainer.method.optimizer.propose
    monkeypatch.setattr(trainer.method.optimizer, "propose", lambda: seen.update({name: sketch.S_dr.clone() for name, sketch in trainer.method.sketches.items()}) or propose())
    row = trainer.step()
    for number in range(trainer.model.config.num_hidden_layers):
        flat = torch.cat([S_dr.flatten() for name, S_dr in seen.items() if name.startswith(f"model.layers.{number}.")]).double()
        assert row[f"sketch_norm/model.layers.{number}"] == pytest.approx(float(flat.norm()), rel=1e-12) and flat.norm() > 0
    of_layers = [value for name, value in row.items() if name.startswith("sketch_norm/")]
    assert sum(value ** 2 for value in of_layers) == pytest.approx(row["sketch_norm"] ** 2, rel=1e-12) and len(of_layers) == trainer.model.config.num_hidden_layers


def test_bfloat16_compute_and_checkpointing_train_float32_weights(folder):
    trainer = Trainer(configured(folder, compute="bfloat16", checkpointing=True, micro_batch=3))
    row = trainer.step()
    assert row["realised_kl"] > 0 and all(p.dtype == torch.float32 for p in trainer.model.parameters())


def test_a_runs_probe_sees_no_more_tokens_of_a_response_than_it_was_told(folder, monkeypatch):
    seen, predicted = [], logra.kl.predicted_kl
    monkeypatch.setattr(logra.kl, "predicted_kl", lambda model, proposal, contexts, *more: seen.append(contexts.input_ids.shape[1]) or predicted(model, proposal, contexts, *more))
    for tokens in (None, 12):
        Trainer(configured(folder, probe_tokens=tokens)).step()
    assert seen[1] == 12 < seen[0]


def test_logra_may_train_the_rest_by_adamw(folder):
    trainer = Trainer(configured(folder, trainable="all"))
    before = trainer.model.model.norm.weight.clone()
    for _ in range(2):
        trainer.step()
    assert not torch.equal(before, trainer.model.model.norm.weight)
    assert all(sketch.weight.grad is None for sketch in logra.linear.attached(trainer.model).values())


@pytest.mark.parametrize("changes", [{}, {"method": "dense"}, {"trainable": "all", "optimizer": "sgd", "projection": "hadamard", "refresh": False}],
                         ids=["logra", "dense", "logra-all"])
def test_a_killed_run_resumes_bit_for_bit(folder, tmp_path, changes):
    config = configured(folder, updates=12, **changes)
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump()))
    command = [sys.executable, "-m", "logra.rl.train", str(tmp_path / "config.json"), "--resume", "--folder"]
    run(config, tmp_path / "whole")
    process = subprocess.Popen([*command, str(tmp_path / "cut")], stdout=subprocess.DEVNULL)
    log, deadline = tmp_path / "cut" / "log.jsonl", time.time() + 60
    while (not log.exists() or log.read_text().count('"metrics"') < 5) and time.time() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    subprocess.run([*command, str(tmp_path / "cut")], check=True, capture_output=True)
    for name in ("metrics", "evaluations"):
        pd.testing.assert_frame_equal(*(pd.read_parquet(tmp_path / cut / f"{name}.parquet") for cut in ("whole", "cut")), check_exact=True)


def test_a_folder_with_another_run_is_refused(folder, tmp_path):
    run(configured(folder, updates=1), tmp_path / "r")
    with pytest.raises(FileExistsError, match="another run"):
        run(configured(folder, updates=2), tmp_path / "r")


def test_ensure_makes_what_is_missing_once_and_names_what_failed(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path))
    monkeypatch.setenv("LOGRA_INPUTS", str(tmp_path / "inputs.jsonl"))
    configs = [configured(folder, updates=2, seed=seed) for seed in (1, 2)]
    monkeypatch.setenv("LOGRA_DRAW_ONLY", "1")
    with pytest.raises(MissingRecord, match="does not exist"):
        runs.ensure(configs)
    monkeypatch.delenv("LOGRA_DRAW_ONLY")
    made = runs.ensure(configs)
    stamp = [os.stat(run.folder / "metrics.parquet").st_mtime_ns for run in made]
    again = runs.ensure(configs[::-1])
    assert [run.config.seed for run in again] == [2, 1] and len(made[0].metrics) == 2
    assert stamp == [os.stat(run.folder / "metrics.parquet").st_mtime_ns for run in made]
    assert len((tmp_path / "inputs.jsonl").read_text().splitlines()) == 4
    environment = made[0].folder / "environment.json"
    environment.write_text(json.dumps(json.loads(environment.read_text()) | {"model_sha256": "0" * 64}))
    with pytest.raises(ValueError, match="made from another base"):
        runs.ensure(configs[:1])
    with pytest.raises(RuntimeError, match="failed with exit code 1(.|\n)*unknown task 'nonsense'"):
        runs.ensure([configured(folder, task="nonsense")])


def test_runs_that_start_and_end_at_the_same_time_keep_their_exit_codes():
    with ThreadPoolExecutor(8) as threads:
        codes = list(threads.map(lambda i: runs._exit_code(runs.FORKED.Process(target=sys.exit, args=(i % 3,))), range(150)))
    assert codes == [i % 3 for i in range(150)]
