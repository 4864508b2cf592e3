"""Every notebook is fit for the runner and for reading: stripped, parameterised, complete, in a profile and at its smallest size in another."""
import nbformat
import pytest

from logra.paper import profiles
from logra.paper.provenance import ROOT

FOLDER = ROOT / "notebooks"
NAMES = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)


@pytest.mark.parametrize("name", NAMES)
def test_notebook(name):
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    ids = [cell.get("id") for cell in notebook.cells]
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5) and all(ids) and len(set(ids)) == len(ids), "every cell has an id of its own (nbformat 4.5)"
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            assert not cell.outputs and cell.execution_count is None, f"cell {number} has outputs; they belong in build/, clear them"
            assert cell.source.strip(), f"cell {number} is empty"
            assert "interact(" not in cell.source, "plots.sliders instead: interact can wait forever where nobody reads"
    assert path.stat().st_size < 300_000
    assert notebook.metadata.kernelspec.name == "python3", "any other kernel exists on one machine only"
    profiles.declared_parameters(notebook, name)
    profiles.check_finish(notebook, name, path.stem)
    smallest = {"laptop": "smoke", "workstation": "rehearsal"}
    larger = [profile for profile in smallest if name in profiles.load(ROOT, profile).notebooks]
    assert larger, f"{name} is missing from profiles/laptop.yaml: a notebook of hours belongs into workstation.yaml"
    for profile in larger[:1]:
        assert name in profiles.load(ROOT, smallest[profile]).notebooks, f"{name} is missing from profiles/{smallest[profile]}.yaml"


@pytest.mark.parametrize("profile", sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml")))
def test_a_profile_asks_its_notebooks_for_what_they_take(profile):
    _, tasks = profiles.tasks(ROOT, profile)
    assert tasks
