"""Executed notebooks as HTML that needs no network: formulas as MathML, no scripts, a word where sliders would be."""
import re
from pathlib import Path

from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode


def html(notebook: NotebookNode) -> str:
    """The page of an executed notebook."""
    exporter = HTMLExporter(template_name="notebook", extra_template_basedirs=[str(Path(__file__).parent)])
    exporter.register_filter("markdown2html", lambda source: MarkdownWithMath(_Renderer(escape=False)).render(source))
    exporter.register_filter("mathml", lambda latex: _mathml(latex.strip().strip("$"), "block"))    # what sympy shows
    return exporter.from_notebook_node(notebook)[0]


def _mathml(latex: str, display: str) -> str:
    math = convert(re.sub(r"\\tag\{(.*?)\}", r"\\qquad(\1)", latex), display=display)
    return math.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "", 1)    # HTML needs none, and headings would turn it into a prefix


class _Renderer(IPythonRenderer):
    def inline_math(self, body: str) -> str:
        return _mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return _mathml(body, "block")

    def latex_environment(self, name: str, body: str) -> str:
        return _mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")
