"""The paper's own runs as this code would make them: each is a configuration that it takes, with the memory, hours and disk that it needs."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console
from runs_of_a_small_model import configured

from logra.paper import node, plan, printed, settings
from logra.paper.profiles import ProfileError
from logra.paper.provenance import ROOT
from logra.rl.train import Trainer

H100 = ROOT / "profiles" / "h100"


@pytest.fixture(scope="module")
def runs():
    return {run.name: run for run in plan.load(H100)}


def test_every_run_of_the_paper_is_in_the_plan_once(runs):
    by_title = {}
    for run in runs.values():
        by_title.setdefault(run.title.split(",")[0], []).append(run)
    assert {title: len(found) for title, found in by_title.items()} == {"Table 1": 18, "Figure 5(a)": 12, "Figure 6": 8, "Table 2": 3, "Figure 4": 1, "Figure 5(b": 1}
    assert len({run.config.hash() for run in runs.values()}) == len(runs) == 43
    main = [(run.model, run.config.method, run.config.seed) for run in by_title["Table 1"]]
    assert sorted(main) == sorted((model, method, seed) for model in ("1.5B", "7B", "27B") for method in ("dense", "logra") for seed in (1, 2, 42))
    assert {(run.config.rank, run.config.projection, run.config.refresh) for run in by_title["Figure 5(a)"]} == {
        (rank, *kind) for rank in (4, 16, 64, 256) for kind in (("rademacher", False), ("rademacher", True), ("gaussian", True))}
    assert {(run.config.control, run.config.budget, run.config.budget_updates, run.config.mismatch) for run in by_title["Figure 6"]} == {
        ("none", 2e-4, 300, False), ("constant", 1.5e-3, 300, False), ("constant", 1.5e-4, 300, False), ("cosine", 2e-4, 1500, False)}
    long, states, lora = runs["long-27b"].config, runs["reconstruction-1.5b"].config, runs["lora-1.5b-seed42"].config
    assert (long.seed, long.context, long.probe, long.budget_updates, long.evaluate_every, long.updates > 1100) == (42, 16384, "finite_difference", 1000, 20, True)
    assert (states.rank, states.refresh, states.keep_weights_at) == (64, False, (160, 280))
    assert (lora.method, lora.learning_rate, lora.rank, lora.beta2, lora.updates) == ("lora", 2e-4, 256, 0.95, 300)


def test_the_main_runs_have_table_4s_settings(runs):
    main = [run.config for run in runs.values() if run.model == "1.5B" and run.title.startswith("Table 1")]
    rows = settings.compare([c for c in main if c.method == "dense"], [c for c in main if c.method == "logra"]).set_index("setting")
    # these rows are written for one process, and so are never the paper's
    place = {"Training GPUs", "Generation engines", "Synchronisation of the rollout", "Model", "Task", "Updates", "Prompt and response (tokens)"}
    assert set(rows.index[rows["differs"] != ""]) <= place
    config = main[0]
    assert (config.task, config.sync, config.rollout, config.engines, config.context, config.updates) == ("dapo_math", "full", "ray", 4, 4096, 300)
    assert [runs[f"main-{model}-logra-seed1"].config.evaluate_every for model in ("1.5b", "7b", "27b")] == [5, 5, 10]


@pytest.mark.parametrize("model, method, within", [("1.5B", "dense", 0.05), ("1.5B", "logra", 0.08), ("7B", "dense", 0.05), ("7B", "logra", 0.08), ("27B", "logra", 0.10)])
def test_simulated_memory_of_the_papers_stack_is_table_1s(runs, model, method, within):
    run, row = runs[f"main-{model.lower()}-{method}-seed1"], printed.main_result(model, method)
    assert run.paper["paper_average_gib"] == pytest.approx(row["average_gib"], rel=within)
    # a peak is the highest of one update over three seeds; at 7B these spread over 4.98 GiB, and it is there that 10 % are exceeded
    assert run.paper["paper_peak_gib"] == pytest.approx(row["peak_gib"], rel=0.10, abs=row["peak_gib_sd"])
    assert run.fits and run.needs_gib < run.machine.card_gib


def test_dense_27b_and_nothing_else_is_refused(runs):
    refused = [run for run in runs.values() if not run.fits]
    assert {run.name for run in refused} == {f"main-27b-dense-seed{seed}" for seed in (1, 2, 42)}
    assert "GiB on each training GPU" in refused[0].refusal() and "the paper's own run was out of memory" in refused[0].refusal()
    small = replace(runs["main-7b-logra-seed1"], machine=plan.Machine(training_gpus=4, generating_gpus=4, card_gb=16))
    assert not small.fits and "a card of 16 GB has 14.9" in small.refusal()


def test_an_engine_that_does_not_fit_its_card_is_refused_before_a_gpu_is_touched(runs):
    run, large = runs["main-1.5b-logra-seed1"], runs["main-27b-logra-seed1"]
    weights = 1.54e9 * 2 / 2 ** 30
    assert run.engine_gib == pytest.approx(weights + 40 + 4, rel=0.02)
    changed = lambda run, **changes: replace(run, config=run.config.model_copy(update=changes))  # noqa: E731
    assert changed(run, sync="exact").engine_gib == changed(run, rollout_dtype="float32").engine_gib == pytest.approx(2 * weights + 44, rel=0.02)
    assert changed(run, rollout="vllm").engine_gib == 0
    assert large.fits and changed(large, sync="exact", engine_ranks=2, engines=2).fits and not changed(large, sync="exact").fits
    refused = changed(large, engine_cache_gib=40.0)
    assert not refused.fits and refused.hours == 0 and "GiB on each generating GPU, 40 of them for keys and values, and a card of 80 GB has 74.5" in refused.refusal()


def test_a_node_without_the_memory_to_read_the_model_on_every_rank_is_refused(runs, monkeypatch):
    run, large = runs["main-1.5b-logra-seed1"], runs["main-27b-logra-seed1"]
    weights = 1.54e9 * 4 / 2 ** 30
    assert run.host_gib == pytest.approx(4 * weights + weights / 2, rel=0.02)           # four ranks, and a message in bfloat16
    changed = lambda **changes: replace(run, config=run.config.model_copy(update=changes)).host_gib  # noqa: E731
    assert changed(sync="exact") == pytest.approx(5 * weights, rel=0.02) and changed(sync="none") == pytest.approx(4 * weights, rel=0.02)
    assert run.as_row()["host_gib"] == run.host_gib
    for total, refused in ((int(large.host_gib * 2 ** 30) - 1, True), (int(large.host_gib * 2 ** 30) + 1, False)):
        monkeypatch.setattr(node.psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
        with pytest.raises(ProfileError) as wrong:          # of the GPUs, which are not here
            node.check([run, large])
        assert (f"main-27b-logra-seed1 needs {large.host_gib:,.0f} beside its GPUs: each of 4 training ranks reads the whole model" in str(wrong.value)) == refused


def test_a_model_with_linear_attention_asks_for_its_kernels(runs, monkeypatch, tmp_path, capsys):
    run = runs["main-27b-logra-seed1"]
    monkeypatch.setattr(node, "ROOT", tmp_path)
    (tmp_path / run.config.model).mkdir(parents=True)
    for model_type, found, asked in (("qwen3_5", None, True), ("qwen3_5", "a spec", False), ("qwen2", None, False)):
        (tmp_path / run.config.model / "config.json").write_text(json.dumps({"model_type": model_type}))
        monkeypatch.setattr(node.importlib.util, "find_spec", lambda name, found=found: found)
        with pytest.raises(ProfileError):                   # of the GPUs, which are not here
            node.check([run])
        assert ("fla is wanted for qwen3_5 (pip install flash-linear-attention" in capsys.readouterr().err) == asked


def test_hours_come_from_printed_rates_and_say_so(runs):
    assert runs["main-7b-dense-seed1"].rate == (25.28, "Table 1") and runs["main-7b-dense-seed1"].gpu_hours == pytest.approx(300 / 25.28 * 8)
    rate, source = runs["lora-1.5b-seed1"].rate
    assert 3600 / rate == pytest.approx(3600 / 55.44 - 11.31 + 10.63) and "Table 2" in source
    assert runs["long-27b"].rate[0] == pytest.approx(6.99 / 4) and "contexts" in runs["long-27b"].rate[1]
    weights = 1.54e9 * 4 / 2 ** 30
    assert runs["reconstruction-1.5b"].disk_gib == pytest.approx((3 + 2) * weights, rel=0.05)       # two checkpoints and a third in the making, two states
    assert runs["main-1.5b-dense-seed1"].disk_gib > 2 * runs["main-1.5b-logra-seed1"].disk_gib      # AdamW's moments


def test_a_plan_needs_no_gpu_and_a_run_that_cannot_be_made_is_refused_before_one_is_touched(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert node.main("h100", None, True, True, None, Console()) == 0
    shown = json.loads(capsys.readouterr().out)["runs"]
    assert len(shown) == 43 and sum(run["fits"] for run in shown) == 40 and all(run["record"].startswith(run["name"]) for run in shown)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a GPU was asked for"))
    with pytest.raises(ProfileError, match="main-27b-dense-seed1 needs .* a card of 80 GB .* out of memory"):
        node.main("h100", ["main-27b-dense-seed1"], False, False, None, Console())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ProfileError, match=r"this machine has 0 GPUs, and the schedule wants 8 of 80 GB \(4 train, 4 generate\)"):
        node.main("h100", ["main-1.5b-logra-seed1"], False, False, None, Console())


def test_the_command_line_knows_profiles_of_runs_and_of_notebooks():
    call = lambda *words: subprocess.run([sys.executable, "-m", "logra.paper.reproduce", "--profile", *words], capture_output=True, text=True, cwd=ROOT)  # noqa: E731
    refused = call("h100", "--only", "main-27b-dense-seed1")
    assert refused.returncode == 2 and refused.stderr.startswith("reproduce: main-27b-dense-seed1 needs")
    assert call("laptop", "--plan").returncode == 2


def test_a_table_shows_every_run_and_what_it_comes_to(runs, capsys):
    plan.show(list(runs.values()), Console(width=250))
    shown = capsys.readouterr().out
    assert all(name in shown for name in runs) and "40 runs" in shown and "GPU-hours" in shown
    assert f"{max(run.host_gib for run in runs.values() if run.fits):,.0f} GiB of the node's own memory" in shown


@pytest.mark.parametrize("text, message", [
    ("title: t\ngrid: {model: [2B]}", "unknown '2B'; common.yaml has 1.5B, 7B, 27B"),
    ("title: t\nsettings: {rnak: 3}\ngrid: {model: [1.5B]}", "rnak: Extra inputs are not permitted"),
    ("title: t\nsettings: {rank: 512}\ngrid: {model: [1.5B]}", "selected_above"),
    ("title: t\nsettings: {engines: 8}\ngrid: {model: [1.5B]}", "8 GPUs for engines, but common.yaml's generating_gpus is 4"),
    ("grid: {model: [1.5B]}", "title: Field required"),
])
def test_what_is_wrong_in_a_file_is_found_before_anything_runs(text, message, tmp_path):
    (tmp_path / "common.yaml").write_text((H100 / "common.yaml").read_text())
    (tmp_path / "one.yaml").write_text(text)
    with pytest.raises(ProfileError, match=message):
        plan.load(tmp_path)


def small_plan(folder, model, **changes):
    """A plan of two short runs of the small model, for a machine of two training ranks."""
    config = configured(model, **(dict(updates=4, prompts=4, evaluate_every=4) | changes))
    common = {"machine": {"training_gpus": 2, "generating_gpus": 0, "card_gb": 80}, "settings": config.model_dump(mode="json", exclude={"name", "model"}), "models": {"tiny": {"model": str(model)}}}
    folder.mkdir()
    (folder / "common.yaml").write_text(yaml.safe_dump(common))
    (folder / "small.yaml").write_text(yaml.safe_dump({"title": "Small", "grid": {"model": ["tiny"], "seed": [1, 2]}}))
    return plan.load(folder)


def test_the_node_makes_the_runs_by_torchrun_and_goes_on_after_the_wall_clock(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path / "records"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(plan.Planned, "hours", 0.0)         # of no model that the paper has
    runs = small_plan(tmp_path / "plan", folder)
    assert node.make(runs, 0, Console()) == 75 and "running" not in capsys.readouterr().out
    assert node.make(runs[:1], None, Console()) == 0
    made = node.folder_of(runs[0])
    assert (made / "metrics.parquet").exists() and json.loads((made / "environment.json").read_text())["ranks"] == 2
    assert node.make(runs[:1], None, Console()) == 0 and "cached" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["dense", "lora"])
def test_a_rollout_keeps_up_with_every_method_by_full_weights(method, folder):
    trainer = Trainer(configured(folder, method=method, sync="full", learning_rate=1e-2))
    rows = [trainer.step() for _ in range(2)]
    assert [(row["sync"], row["sync_version"], row["sync_equal"]) for row in rows] == [("full", 1, True), ("full", 2, True)]
    assert [row["rollout_version"] for row in rows] == [0, 1] and rows[0]["sync_weights"] == rows[1]["rollout_weights"] != rows[0]["rollout_weights"]
    copy, ids = trainer.rollout.engine.model, torch.arange(12).view(2, 6) % 10
    base = Trainer(configured(folder, method=method)).model
    with torch.no_grad():
        ours, theirs, before = (model(input_ids=ids).logits.float() for model in (trainer.model, copy, base))
    assert (ours - theirs).norm() < 0.05 * (ours - before).norm()   # adapters merged, rounded to bfloat16


def test_the_launchers_are_bash_that_parses():
    for script in ("slurm.sh", "node.sh"):
        assert subprocess.run(["bash", "-n", str(ROOT / "launch" / script)]).returncode == 0
