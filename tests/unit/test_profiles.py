"""Profiles and parameters: everything that can be wrong is found before anything runs, and the message says what to write."""
import nbformat
import pytest
import yaml

from logra.paper import profiles
from logra.paper.profiles import ProfileError

PARAMETERS = 'updates = 3\nrate: float = 1e-3\nseeds = [1, 2]\nrates = [0.1, 1]\nlabel = "a"\nexact = True'


def notebook(parameters=PARAMETERS, last='provenance.finish("fig9_example")', tag="parameters"):
    first = nbformat.v4.new_code_cell(parameters, metadata={"tags": [tag]})
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Example"), first, nbformat.v4.new_code_cell(last)])


@pytest.fixture
def project(tmp_path):
    """Writes a project with one notebook and one profile; returns a function that loads it with the given parts changed."""
    def load(source=None, only=None, profile="laptop", **entry):
        (tmp_path / "notebooks/figures").mkdir(parents=True, exist_ok=True)
        (tmp_path / "profiles").mkdir(exist_ok=True)
        nbformat.write(source or notebook(), tmp_path / "notebooks/figures/fig9_example.ipynb")
        entry = {"timeout": 10, "outputs": ["fig9_example.pdf"]} | entry
        text = yaml.safe_dump({"figures": "figures", "notebooks": {"figures/fig9_example": entry}})
        (tmp_path / "profiles/laptop.yaml").write_text(text)
        return profiles.tasks(tmp_path, profile, only)[1]

    load.root = tmp_path
    return load


def test_a_task_has_the_defaults_under_the_profiles_values_in_the_notebooks_types(project):
    (task,) = project(parameters={"rate": 1, "seeds": [], "rates": [2, 0.5]})
    assert task.parameters == {"updates": 3, "rate": 1.0, "seeds": [], "rates": [2.0, 0.5], "label": "a", "exact": True}
    assert type(task.parameters["rate"]) is float and [type(x) for x in task.parameters["rates"]] == [float, float]
    assert (task.name, task.stem, task.outputs) == ("figures/fig9_example", "fig9_example", ("fig9_example.pdf",))


@pytest.mark.parametrize("parameters, message", [
    ({"updats": 4}, r"fig9_example: parameter updats: given 4, but the notebook has no such parameter; it has: updates, .*Did you mean updates\?"),
    ({"updates": True}, r"parameter updates: given True \(bool\), wanted int"),
    ({"updates": 2.0}, r"parameter updates: given 2.0 \(float\), wanted int"),
    ({"exact": 1}, r"parameter exact: given 1 \(int\), wanted bool"),
    ({"label": 1}, r"parameter label: given 1 \(int\), wanted str"),
    ({"seeds": [1, "2"]}, r"parameter seeds: given \[1, '2'\] is a list of unlike things, wanted list of int"),
    ({"seeds": [0.5]}, r"parameter seeds: given \[0.5\] \(list of float\), wanted list of int"),
    ({"seeds": [True]}, r"parameter seeds: given \[True\] \(list of bool\), wanted list of int"),
    ({"seeds": 1}, r"parameter seeds: given 1 \(int\), wanted list of int"),
    ({"rate": float("nan")}, r"parameter rate: given nan is not a finite"),
    ({"label": None}, r"parameter label: given None is not"),
    ({"label": {"a": 1}}, r"parameter label: given \{'a': 1\} is not"),
    ({"rate": "1e-4"}, r"parameter rate: given '1e-4' \(str\), wanted float; YAML reads 1e-4 as text, write 1.0e-4"),
    ({"rates": ["2.5e3"]}, r"wanted list of float; YAML reads 2.5e3 as text, write 2.5e\+3"),
])
def test_a_parameter_that_the_notebook_does_not_take(project, parameters, message):
    with pytest.raises(ProfileError, match=message):
        project(parameters=parameters)


def test_the_spelling_that_the_hint_gives_is_a_number():
    assert yaml.safe_load("[1e-4, 1.0e-4, 2.5e+3]") == ["1e-4", 1e-4, 2500.0]


@pytest.mark.parametrize("source, message", [
    (notebook(tag="other"), "0 cells are tagged 'parameters'; wanted one"),
    (notebook("updates = 3\nhalf = updates // 2"), r"line 2 of the parameters cell is `half = updates // 2`.* next cell"),
    (notebook("import torch"), "line 1 of the parameters cell is `import torch`"),
    (notebook("seed = None"), "line 1 of the parameters cell is `seed = None`"),
    (notebook("pair = (1, 2)"), "line 1"),
    (notebook("mixed = [1, 'a']"), "line 1"),
    (notebook("a ="), "not plain Python"),
    (notebook(last="print('done')"), r'last code cell must end in `provenance.finish\("fig9_example"\)`'),
    (notebook(last='provenance.finish("fig8")'), "last code cell must end in"),
    (notebook(last='if True:\n    provenance.finish("fig9_example")'), "last code cell must end in"),
])
def test_a_notebook_that_cannot_be_trusted_to_take_its_parameters_or_to_end(project, source, message):
    with pytest.raises(ProfileError, match=f"figures/fig9_example: .*{message}"):
        project(source)


@pytest.mark.parametrize("entry, message", [
    ({"timeout": 0}, "profiles/laptop.yaml: notebooks > figures/fig9_example > timeout: Input should be greater than 0"),
    ({"timeout": "1e3"}, "timeout: Input should be a valid number"),
    ({"outputs": []}, "outputs: List should have at least 1 item"),
    ({"outputs": ["../evil.pdf"]}, r"outputs > 0: .*given '../evil.pdf', wanted a plain file name"),
    ({"outputs": ["a.pdf", "a.pdf"]}, "output 'a.pdf' stands there twice"),
    ({"output": ["a.pdf"]}, "output: Extra inputs are not permitted"),
])
def test_a_profile_that_is_not_as_described(project, entry, message):
    with pytest.raises(ProfileError, match=message):
        project(**entry)


def test_what_is_not_there_is_named_with_the_closest_that_is(project):
    project()
    for arguments, message in (
        ({"profile": "h100"}, "unknown profile 'h100'; there are: laptop"),
        ({"profile": "labtop"}, r"unknown profile 'labtop'; there are: laptop. Did you mean laptop\?"),
        ({"only": ["fig9", "fig_9_example"]}, r"--only fig_9_example: .*Did you mean fig9_example\?"),
    ):
        with pytest.raises(ProfileError, match=message):
            project(**arguments)
    assert len(project(only=["fig9"])) == 1
    (project.root / "profiles/laptop.yaml").write_text("figures: figures\nnotebooks: {figures/fig9_exemple: {timeout: 1, outputs: [a.csv]}}")
    with pytest.raises(ProfileError, match=r"there is no notebook notebooks/figures/fig9_exemple.ipynb. Did you mean figures/fig9_example\?"):
        profiles.tasks(project.root, "laptop")


def test_every_wrong_thing_is_told_at_once(project):
    with pytest.raises(ProfileError, match=r"(?s)updats.*exact"):
        project(parameters={"updats": 4, "exact": 1})
