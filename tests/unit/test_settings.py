"""Table 4's column of ours follows the configurations; what differs from the paper is found, and nothing else."""
import nbformat
import pytest
import yaml

from logra.paper import printed, settings
from logra.rl.config import RunConfig

PAPER = dict(micro_batch=1, rank=256, selected_above=256, compute="bfloat16", checkpointing=True, evaluation_prompts=500, updates=20000)
SIZE = {"Training GPUs", "Generation engines", "Synchronisation of the rollout", "Prompt and response (tokens)", "Model", "Task"}     # of place and size: never the paper's here


def rows(dense=(), sketched=()):
    made = settings.compare([RunConfig(method="dense", seed=s, **PAPER, **dict(dense)) for s in (1, 2, 42)], [RunConfig(method="logra", seed=s, **(PAPER | dict(sketched))) for s in (1, 2, 42)])
    return made.set_index("setting")


def test_a_run_with_the_papers_settings_differs_in_place_and_size_alone():
    differs = rows(sketched={"relative_step": 6e-5})["differs"]
    assert set(differs.index[differs != ""]) == SIZE
    assert set(printed.table("table4")["setting"]) <= set(differs.index), "every printed setting has a row"


@pytest.mark.parametrize("change, setting, ours", [
    ({"rank": 64}, "Projection", "rank 64, rademacher"),
    ({"refresh": False}, "Projection refresh", "never"),
    ({"optimizer": "sgd"}, "Optimizer", "SketchSGD"),
    ({"beta2": 0.9}, "Moment decay", "β₂ 0.9; no first moment"),
    ({"control": "constant", "budget": 1.5e-3}, "Step-size rule", "predicted KL 0.0015"),
    ({"mismatch": False}, "Mismatch subtraction", "off"),
    ({"budget_updates": 1000}, "Schedule's horizon (updates)", "1000"),
])
def test_a_setting_that_is_changed_is_marked(change, setting, ours):
    row = rows(sketched=change).loc[setting]
    assert (row["LoGRA (here)"], row["differs"]) == (ours, "LoGRA")


def test_the_dense_optimizer_is_asked_and_a_sweep_is_listed():
    made = settings.compare([RunConfig(method="dense", learning_rate=rate, learning_rate_end=rate / 10) for rate in (1e-6, 1e-4)], [RunConfig()]).set_index("setting")
    assert made.loc["Step-size rule", "dense (here)"] == "learning rate 1e-6 → 1e-7, learning rate 1e-4 → 1e-5"
    assert "dense" not in made.loc["Moment decay", "differs"] and made.loc["Moment decay", "dense (here)"] == "β₁ 0.9, β₂ 0.95"


def test_a_notebooks_parameters_are_its_own_under_the_profiles(tmp_path, monkeypatch):
    (tmp_path / "notebooks/figures").mkdir(parents=True)
    (tmp_path / "profiles").mkdir()
    monkeypatch.setattr(settings, "ROOT", tmp_path)
    cells = [nbformat.v4.new_code_cell("updates = 7\nseeds = [1]", metadata={"tags": ["parameters"]}), nbformat.v4.new_code_cell("raise SystemExit")]
    for name in ("fig8", "fig9"):
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / f"notebooks/figures/{name}.ipynb")
    entry = {"timeout": 1, "outputs": ["a.csv"], "parameters": {"updates": 9}}
    (tmp_path / "profiles/laptop.yaml").write_text(yaml.safe_dump({"figures": "figures", "notebooks": {"figures/fig9": entry}}))
    assert settings.parameters_of("figures/fig9", "laptop") == {"updates": 9, "seeds": [1]}
    assert settings.parameters_of("figures/fig8", "laptop") == {"updates": 7, "seeds": [1]}, "not in the profile: the defaults"
