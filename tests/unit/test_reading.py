"""An executed notebook reads as a page of its own: formulas without a script, nothing fetched from anywhere."""
import re

import nbformat
import pytest
from nbformat import v4

from logra.paper import reading
from logra.paper.provenance import ROOT

FETCHED = re.compile(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//|@import|url\(\s*["']?(?:https?:)?//|import\(""")


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").rglob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_formula_becomes_mathml_and_nothing_is_fetched(path):
    notebook = nbformat.read(path, as_version=4)
    prose = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    page = reading.html(notebook)
    assert not FETCHED.findall(page)
    assert page.count("<math") == len(re.findall(r"\$\$.+?\$\$|(?<!\$)\$[^$\n]+\$(?!\$)", prose, re.DOTALL))
    left = [command for formula in re.findall(r"<math.*?</math>", page, re.DOTALL) for command in re.findall(r"\\[A-Za-z]+", formula)]
    assert not left, f"LaTeX that was not understood: {left}"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_slider_leaves_a_word_and_a_symbolic_result_its_formula():
    widget = v4.new_output("display_data", {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "interactive(...)"})
    formula = v4.new_output("display_data", {"text/latex": r"$\displaystyle \frac{\delta}{4}$", "text/plain": "delta/4"})
    page = reading.html(v4.new_notebook(cells=[v4.new_code_cell("1", outputs=[widget, formula])], metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {"state": {"1": {}}}}}))
    assert "Sliders: run the notebook" in page and "<mfrac>" in page and not FETCHED.findall(page)
