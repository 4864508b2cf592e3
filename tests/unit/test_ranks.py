"""Training over ranks, by real processes with gloo and FSDP2: the update of given sketches to the bit, a run to float32 rounding, and resumes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pandas as pd
import psutil
import pytest
import torch
import torch.distributed as dist
from processes import on_ranks
from runs_of_a_small_model import configured
from torch import nn
from torch.distributed.fsdp import fully_shard

import logra
from logra.rl.ranks import Alone, Ranks, dealt, whole_tensor
from logra.rl.train import Trainer, run

ROWS = {"a": (14, 9), "b": (3, 6), "c": (5, 8), "d": (1, 7), "e": (16, 5)}      # over 4 ranks: 4, 4, 4, 2; 1, 1, 1, 0; 2, 2, 1, 0; 1, 0, 0, 0


# the update of given sketches ---------------------------------------------------------------------------------------------


def matrices():
    torch.manual_seed(3)
    return nn.ModuleDict({name: nn.Linear(k, d) for name, (d, k) in ROWS.items()})


def updates(sketches, optimizer, given, reduced):
    made = []
    for S in given:
        for name, sketch in sketches.items():
            sketch.S_dr.copy_(S[name])
        with reduced(sketches):
            made.append(optimizer.step(0.37))
            optimizer.zero_grad()
    return [(u.matrices, u.after, u.base) for u in made], {name: whole_tensor(s.weight).clone() for name, s in sketches.items()}


def make(kind, bits):
    sketches = logra.attach(matrices(), 3, modules=list(ROWS))
    sketches.base
    return sketches, lambda: getattr(logra, kind)(sketches, relative_step=1e-3, bits=bits)


def given(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{name: torch.randn(d, 3, generator=generator) * torch.rand(d, 1, generator=generator) for name, (d, _) in ROWS.items()} for _ in range(6)]


def steps_on_a_rank(number, ranks, settings):
    found = []
    for kind, bits in settings:
        sketches, optimizer = make(kind, bits)
        for module in sketches.model.values():
            fully_shard(module)
        parts = [{name: S if number == ranks - 1 else 0 * S for name, S in of_update.items()} for of_update in given()]     # their sum is exact
        found.append(updates(sketches, optimizer(), parts, Ranks().reduced))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_update_of_the_same_sketches_has_the_same_bits_for_any_number_of_ranks(ranks, tmp_path):
    settings = [("RowAdam", 8), ("RowAdam", 16), ("SketchSGD", 8)]
    found = on_ranks(steps_on_a_rank, ranks, tmp_path, settings)
    for i, setting in enumerate(settings):
        sketches, optimizer = make(*setting)
        made, weights = updates(sketches, optimizer(), given(), Alone().reduced)
        for ours, our_weights in (on_rank[i] for on_rank in found):
            for (matrices, after, base), (our_matrices, our_after, our_base) in zip(made, ours, strict=True):
                assert after == our_after and base == our_base              # fingerprints of whole weights, which a receiver checks
                for name in ROWS:
                    assert torch.equal(matrices[name].integers_dr, our_matrices[name].integers_dr)
                    assert torch.equal(matrices[name].exponent_d, our_matrices[name].exponent_d)
            assert all(torch.equal(weights[name], our_weights[name]) for name in ROWS)


# a run --------------------------------------------------------------------------------------------------------------------


def seen(trainer, gathered="float32"):
    """Rows, whole sketches and responses of three updates (of one, where weights are gathered in bfloat16 and later responses are others), how the weights have moved, and an evaluation."""
    rows, sketches, texts = [], [], []
    before = {name: whole_tensor(x).clone() for name, x in trainer.model.named_parameters()}
    update = trainer.method.update

    def watched(timed, batch, logprobs):
        texts.append(batch.texts)
        if hasattr(trainer.method, "sketches"):
            S = {name: sketch.S_dr.clone() for name, sketch in trainer.method.sketches.items()}
            shards = trainer.method.sketches.shards
            if shards is not None:
                S = {name: shards.gather(S_dr, trainer.method.sketches[name].d) for name, S_dr in S.items()}
            elif trainer.ranks.count > 1:
                for S_dr in S.values():
                    dist.all_reduce(S_dr)
            sketches.append(S)
        return update(timed, batch, logprobs)

    trainer.method.update = watched
    for _ in range(3 if gathered == "float32" else 1):
        rows.append(trainer.step())
    evaluation = trainer.evaluate()
    trainer.rollout.close()
    return rows, sketches, texts, {name: whole_tensor(x) - before[name] for name, x in trainer.model.named_parameters()}, evaluation


def trainers_on_a_rank(number, ranks, configs):
    return [seen(Trainer(config, Ranks()), config.gathered) for config in configs]


CASES = {
    "logra": dict(prompts=8, micro_batch=2),
    "fewer responses than ranks": dict(prompts=2, micro_batch=1, probe_responses=1, control="constant"),
    "uneven": dict(prompts=7, micro_batch=1, probe_responses=5, probe="finite_difference", temperature=0.8),
    "bfloat16, checkpointing": dict(prompts=6, micro_batch=3, compute="bfloat16", checkpointing=True),
    "sketches sharded as made": dict(prompts=5, micro_batch=2, sharded_sketches=True),
    "weights gathered in bfloat16": dict(prompts=6, micro_batch=3, compute="bfloat16", gathered="bfloat16", sharded_sketches=True, checkpointing=True),
    "an embedding that is not the head's": dict(prompts=4, micro_batch=2, model="untied", trainable="all"),
    "all": dict(prompts=4, micro_batch=2, trainable="all"),
    "exact sync": dict(prompts=4, micro_batch=2, sync="exact"),
    "lossy sync": dict(prompts=4, micro_batch=2, sync="lossy"),
    "dense": dict(prompts=5, micro_batch=2, method="dense", trainable="all"),
    "lora": dict(prompts=5, micro_batch=2, method="lora"),
}


@pytest.mark.parametrize("ranks, cases", [(2, list(CASES)), (3, list(CASES)), (4, ["fewer responses than ranks", "sketches sharded as made"])])
def test_ranks_train_as_one_on_the_same_responses(ranks, cases, folder, untied, tmp_path):
    # at 8 bits an entry may round the other way; κ is the mean of rounding errors here, and would carry them into the budget
    configs = [configured(folder, **dict(bits=16, mismatch=False) | changes | ({"model": str(untied)} if "model" in changes else {})) for changes in map(CASES.get, cases)]
    found = on_ranks(trainers_on_a_rank, ranks, tmp_path, configs)
    for i, (case, config) in enumerate(zip(cases, configs)):
        rows, sketches, texts, moves, evaluation = seen(Trainer(config.model_copy(update={"gathered": "float32", "sharded_sketches": False})), config.gathered)
        near, far = (dict(rel=2e-2, abs=2e-3), 0.1) if config.compute == "bfloat16" else (dict(rel=1e-4, abs=1e-6), 0.01)
        if config.gathered == "bfloat16":                   # the residual stream and the norms are in bfloat16 too, which autocast leaves in float32
            near, far = dict(rel=5e-2, abs=5e-3), 0.2
        for our_rows, our_sketches, our_texts, our_moves, our_evaluation in (on_rank[i] for on_rank in found):
            assert our_texts == texts, case                                 # named draws: the same for any number of ranks
            assert our_evaluation == pytest.approx(evaluation) or config.gathered == "bfloat16", case
            for row, ours in zip(rows, our_rows, strict=True):
                assert row.keys() == ours.keys(), case
                for name, value in row.items():
                    if name not in ("sync_weights", "rollout_weights"):     # these have the same bits only where S has
                        assert ours[name] == (value if isinstance(value, str) else pytest.approx(value, **near)), (case, name)
            for S, ours in zip(sketches, our_sketches, strict=True):
                for name in S:
                    assert (S[name] - ours[name]).norm() <= near["rel"] * S[name].norm(), (case, name)
            for name, move in moves.items():
                if not name.endswith("k_proj.bias"):                        # its gradient is 0 but for rounding, of which AdamW takes the sign
                    assert (our_moves[name] - move).norm() <= far * move.norm(), (case, name)
                assert torch.equal(our_moves[name], found[0][i][3][name]), (case, name)
        if config.sync == "exact":
            assert all(row["sync_equal"] and row["sync_differing"] == 0 for row in found[0][i][0])


def failing_on_a_rank(number, ranks, config):
    trainer = Trainer(config, Ranks())
    before = {name: whole_tensor(x).clone() for name, x in trainer.model.named_parameters()}
    total = trainer.ranks.total
    with pytest.raises(ZeroDivisionError if number == 0 else RuntimeError, match="division by zero"):   # rank 0's work fails: all hear of it
        trainer.ranks.led(lambda: 1 / 0)
    trainer.ranks.total = lambda value: total(float("nan") if number == 1 else value)
    with pytest.raises(FloatingPointError, match="the loss of update 1 is nan"):        # on one rank: all stop
        trainer.step()
    return all(torch.equal(whole_tensor(x), before[name]) for name, x in trainer.model.named_parameters())


def test_what_fails_on_one_rank_stops_all_with_the_weights_as_they_were(folder, tmp_path):
    assert on_ranks(failing_on_a_rank, 2, tmp_path, configured(folder, prompts=2)) == [True, True]


# a resume -----------------------------------------------------------------------------------------------------------------


def run_on_a_rank(number, ranks, config, folder):
    run(config, folder)


@pytest.mark.parametrize("method", ["logra", "dense"])
def test_a_killed_run_on_ranks_resumes_bit_for_bit_and_on_another_number_of_ranks(method, folder, tmp_path):
    config = configured(folder, updates=10, method=method, prompts=6, checkpoint_every=3, **({"trainable": "all"} if method == "logra" else {}))
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump()))
    on_ranks(run_on_a_rank, 2, tmp_path, config, tmp_path / "whole")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "logra.rl.train", tmp_path / "config.json", "--resume", "--folder", tmp_path / "cut"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True)
    log, deadline = tmp_path / "cut" / "log.jsonl", time.time() + 120
    while (not log.exists() or log.read_text().count('"metrics"') < 5) and time.time() < deadline:
        time.sleep(0.01)
    children = psutil.Process(process.pid).children()
    process.kill()                                          # torchrun alone: its ranks do not outlive it, else two runs would write one record
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
    assert len(children) == 2 and not psutil.wait_procs(children, timeout=10)[1] and any((tmp_path / "cut" / "checkpoint").glob("update-*"))
    for ranks in (1, 3):
        shutil.copytree(tmp_path / "cut", tmp_path / f"on {ranks}")
    subprocess.run(command, check=True, capture_output=True, env=environment)
    run(config, tmp_path / "on 1")
    on_ranks(run_on_a_rank, 3, tmp_path, config, tmp_path / "on 3")
    whole = pd.read_parquet(tmp_path / "whole" / "metrics.parquet")
    for name in ("cut", "on 1", "on 3"):
        metrics = pd.read_parquet(tmp_path / name / "metrics.parquet")
        pd.testing.assert_frame_equal(metrics, whole, check_exact=name == "cut", rtol=1e-3, atol=1e-6)
    assert json.loads((tmp_path / "cut" / "environment.json").read_text())["ranks"] == 2


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_responses_are_dealt_evenly_in_number_and_in_tokens(ranks):
    tokens = torch.randint(1, 4000, (64,), generator=torch.Generator().manual_seed(ranks)).tolist()
    hands = dealt(tokens, ranks)
    assert sorted(sum(hands, [])) == list(range(64)) and all(hand == sorted(hand) for hand in hands)
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    per_response = [sum(tokens[row] for row in hand) / len(hand) for hand in hands]
    assert max(per_response) < 1.1 * min(per_response)
