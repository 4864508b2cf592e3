"""The examples and the README's loop, run as a reader would: they learn, no weight has a gradient, and a Trainer's checkpoint resumes bit for bit."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import logra
from logra.rl.learner import BASE

ROOT = Path(logra.__file__).resolve().parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
WATCHED = """
import runpy, sys
sys.argv, sys.path[0] = sys.argv[1:], "examples"
sketches = runpy.run_path(sys.argv[0])["sketches"]
assert len(sketches) == 14 and all(sketch.weight.grad is None and sketch.S_dr.any() for sketch in sketches.values())
"""


def run(launch, example, out):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, *launch, f"examples/{example}.py", str(out)], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_readmes_loop_runs_as_it_is_printed():
    code = re.search(r"```python\n(import logra\n.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    torch.manual_seed(0)
    config = transformers.Qwen2Config(vocab_size=50, hidden_size=320, intermediate_size=384, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
    model = transformers.Qwen2ForCausalLM(config)
    ids = torch.randint(0, 50, (2, 2, 4, 12))
    seen = []

    def loss(model, input_ids):
        return model(input_ids=input_ids, labels=input_ids).loss

    with torch.no_grad():
        before = [float(loss(model, batch[0])) for batch in ids]
    contexts = logra.Contexts.of_responses(ids[0, 0], torch.ones_like(ids[0, 0]), torch.ones_like(ids[0, 0]))
    names = {"model": model, "batches": ids, "loss": loss, "contexts": contexts, "print": seen.append}
    exec(compile(code, "README.md", "exec"), names)
    assert len(names["sketches"]) == 7 and names["optimizer"].sketches.update == 3 and "q_proj" in str(seen[0])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(hasattr(module, "sketch") for module in model.modules())
    with torch.no_grad():
        assert all(float(loss(model, batch[0])) < value for batch, value in zip(ids, before))


def states(checkpoint):
    """Weights, the optimizer's state and what was logged at or after step `checkpoint` names, but for clocks."""
    history = [{name: value for name, value in row.items() if not re.search("time|runtime|per_second", name)}
               for row in json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]]
    return load_file(checkpoint / "model.safetensors"), torch.load(checkpoint / "optimizer.pt", weights_only=True), history


@pytest.mark.parametrize("example, first, last", [("trainer", 30, 60), ("grpo", 15, 30)])
def test_under_a_trainer_it_learns_and_a_checkpoint_resumes_bit_for_bit(example, first, last, tmp_path):
    run([], example, tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    shutil.copytree(tmp_path / "whole" / f"checkpoint-{first}", tmp_path / "cut" / f"checkpoint-{first}")
    run(["-c", WATCHED], example, tmp_path / "cut")
    (weights, optimizer, history), (ours, our_optimizer, our_history) = (states(tmp_path / part / f"checkpoint-{last}") for part in ("whole", "cut"))
    assert weights.keys() == ours.keys() and all(torch.equal(weights[name], ours[name]) for name in weights)
    assert optimizer["param_groups"] == our_optimizer["param_groups"] and optimizer["control"] == our_optimizer["control"] == {"update": last + 1, "kappa": 0.0}
    for index, state in optimizer["state"].items():
        assert torch.equal(state["v_d"], our_optimizer["state"][index]["v_d"])
    assert history == our_history and all(row["grad_norm"] > 0 and row["alpha"] > 0 for row in history)
    if example == "grpo":
        rewards = [row["reward"] for row in history]
        assert len(rewards) == last and sum(rewards[-6:]) / 6 > sum(rewards[:6]) / 6 + 0.15, rewards
    else:
        assert history[-1]["loss"] < 0.6 * history[0]["loss"]
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "cut" / "model")
        assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())


def demonstrated(weights):
    """The mean loss of demonstrations that no example is shown."""
    sys.path.insert(0, str(ROOT / "examples"))
    from demonstrations import demonstration

    model = transformers.AutoModelForCausalLM.from_pretrained(BASE)
    model.load_state_dict(weights, strict=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(BASE)
    batch = transformers.DataCollatorForSeq2Seq(tokenizer)([demonstration(tokenizer, index) for index in range(5000, 5064)])
    with torch.no_grad():
        return float(model(**batch).loss)


def moved(weights):
    base = load_file(BASE / "model.safetensors")
    return sum(not torch.equal(weights[name], base[name]) for name in base)


def test_two_processes_under_accelerate_learn_and_stay_the_same(tmp_path):
    assert run(ACCELERATE, "accelerated", tmp_path).count("predicted KL") == 4              # one of them reports
    first, second = (torch.load(tmp_path / f"model-{number}.pt", weights_only=True) for number in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert moved(first) == 14 and demonstrated(first) < 0.6 * demonstrated({})              # the sketched matrices, and they alone
    assert torch.load(tmp_path / "state" / "optimizer.bin", weights_only=True)["control"]["update"] == 41


def test_two_ranks_under_fsdp2_learn(tmp_path):
    assert run(TORCHRUN, "fsdp", tmp_path).count("predicted KL") == 4
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert moved(weights) == 14 and demonstrated(weights) < 0.6 * demonstrated({})
