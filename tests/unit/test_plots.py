"""Figures: the same bytes in every process, honest about what they are, and told apart without colour."""
import hashlib
import os
import re
import subprocess
import sys

import ipywidgets
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from logra.paper import plots

DRAW = r"""
import sys
import matplotlib.pyplot as plt, numpy as np, pandas as pd
from logra.paper import plots
plots.use()
x = np.linspace(0, 1, 40)
fig, (left, right) = plt.subplots(1, 2, figsize=(plots.PAGE, 2.2))
for entity in ("logra", "dense"):
    left.plot(x, np.sin(x), label=entity, **plots.style(entity))
left.fill_between(x, x, 2 * x, alpha=0.2)
left.legend(title=r"$\alpha$")
right.imshow(np.outer(x, x))
right.bar([0, 1], [30, 20], hatch=plots.HATCHES["lora"], color=plots.COLOURS["lora"])
plots.save(fig, "example", pd.DataFrame({"x": x, "y": np.sin(x)}), kind="toy scale", note="3 seeds, 200 updates")
"""


@pytest.fixture(autouse=True)
def _figures(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_FIGURES", str(tmp_path / "figures"))
    plots.use()
    yield
    plt.close("all")


def test_drawing_from_records_imports_neither_torch_nor_transformers():
    """`--draw` would spend more time on these imports than on drawing."""
    modules = "from logra.paper import learner_runs, planned_runs, plots, printed, provenance, simulated, tables; from logra.rl import bases, runs"
    made = subprocess.run([sys.executable, "-c", f"import sys; {modules}; print({{'torch', 'transformers', 'rfc3987_syntax.syntax_helpers'}} & set(sys.modules))"], capture_output=True, text=True, check=True)
    assert made.stdout == "set()\n"


def test_two_processes_write_the_same_bytes(tmp_path):
    digests = []
    for number, environment in enumerate(({"PYTHONHASHSEED": "1", "TZ": "UTC"}, {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo"})):
        folder = tmp_path / str(number)
        subprocess.run([sys.executable, "-c", DRAW], env=os.environ | environment | {"LOGRA_FIGURES": str(folder)}, check=True)
        digests.append({path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()})
    assert set(digests[0]) == {"example.pdf", "example.svg", "example.png", "example.csv"}
    assert digests[0] == digests[1]


def test_no_file_says_when_or_with_what_it_was_drawn(tmp_path):
    fig, ax = plt.subplots()
    ax.plot([0, 1], [0, 1])
    paths = plots.save(fig, "plain", pd.DataFrame({"x": [0, 1]}), "simulated")
    for suffix in ("pdf", "svg", "png"):
        content = paths[suffix].read_bytes()
        assert matplotlib.__version__.encode() not in content, suffix
        assert not re.search(rb"CreationDate|dc:date|tIME|20\d\d-\d\d-\d\d", content), suffix
    assert b"/Subtype /Type3" not in paths["pdf"].read_bytes(), "fonts must be embedded as TrueType, not as drawings"
    assert paths["svg"].read_text().count("<text") == 0, "SVG text must not depend on the reader's fonts"


@pytest.mark.parametrize("note", ["", "3 seeds, 200 updates", "a long note about scale, seeds and shapes, " * 4])
@pytest.mark.parametrize("layout", ["constrained", "none"])
def test_the_kind_stands_below_everything_and_inside_the_page(note, layout):
    fig, ax = plt.subplots(layout=layout)
    ax.set_xlabel("updates\n(two lines)")
    ax.annotate("outside", (0, 0), xytext=(0, -60), textcoords="offset points")
    for _ in range(2):                                    # saving again replaces the stamp, it does not add one
        paths = plots.save(fig, "stamped", pd.DataFrame({"x": [0.0]}), "recorded run", note)
    (stamp,) = [text for text in fig.texts if text.get_gid() == "kind of figure"]
    assert stamp.get_text().replace("\n", " ").startswith("recorded run" + (" · " + note[:20] if note else ""))
    renderer = FigureCanvasAgg(fig).get_renderer()
    extent = stamp.get_window_extent(renderer)
    assert extent.y1 <= ax.get_tightbbox(renderer).y0
    assert 0 <= extent.x0 and extent.x1 <= fig.get_size_inches()[0] * fig.dpi
    height, width, _ = plt.imread(paths["png"]).shape
    assert width == pytest.approx(plots.COLUMN * matplotlib.rcParams["savefig.dpi"], abs=2), "the page keeps the column's width"
    assert height > width * fig.get_size_inches()[1] / fig.get_size_inches()[0], "the page grew by the small print"


def test_the_data_are_written_with_six_digits_and_named_indices():
    fig, _ = plt.subplots()
    data = pd.DataFrame({"method": ["dense", "logra"], "value": [np.pi * 1e-7, np.float32(1 / 3)], "count": [1, 10_000_000]})
    assert plots.save(fig, "six", data, "simulated")["csv"].read_bytes() == b"method,value,count\ndense,3.14159e-07,1\nlogra,0.333333,10000000\n"
    assert plots.save(fig, "six", data.set_index("method"), "simulated")["csv"].read_text().startswith("method,value,count\n")


def test_what_a_figure_is_must_be_said():
    fig, _ = plt.subplots()
    data = pd.DataFrame({"x": [1]})
    with pytest.raises(ValueError, match="'real' of figure f is unknown; wanted one of 'recomputed here'"):
        plots.save(fig, "f", data, "real")
    with pytest.raises(ValueError, match="no suffix"):
        plots.save(fig, "f.pdf", data, "simulated")
    with pytest.raises(ValueError, match="no row"):
        plots.save(fig, "f", data[:0], "simulated")


def test_entities_differ_in_colour_and_without_it():
    names = set(plots.COLOURS)
    assert names == set(plots.MARKERS) == set(plots.LINES) == set(plots.HATCHES)
    assert len(set(plots.COLOURS.values())) == len(names)
    assert len({(plots.MARKERS[n], plots.LINES[n]) for n in names}) == len(names) == len(set(plots.HATCHES.values()))
    assert len({plots.LINES[n] for n in ("logra", "dense", "lora")}) == 3
    with pytest.raises(KeyError, match="no colour"):
        plots.style("sgd")


def test_sliders_draw_their_defaults_outside_of_any_output_widget_and_again_when_one_is_moved(monkeypatch):
    entered, shown = [], []
    monkeypatch.setattr(ipywidgets.Output, "__enter__", lambda self: entered.append(self))     # where nbclient can lose the kernel's reply
    monkeypatch.setattr(ipywidgets.Output, "__exit__", lambda self, *error: None)
    rank, kind = ipywidgets.IntSlider(4, 1, 8), ipywidgets.Dropdown(options=[("signs", "rademacher"), ("Gaussian", "gaussian")])
    plots.sliders(lambda **values: shown.append(values), rank=rank, kind=kind, count=ipywidgets.fixed(3))
    assert shown == [{"rank": 4, "kind": "rademacher", "count": 3}] and not entered
    rank.value = 5
    assert shown[1:] == [{"rank": 5, "kind": "rademacher", "count": 3}]


def test_a_stacks_pieces_lie_on_each_other_in_the_columns_order():
    data = pd.DataFrame({"weights": [3.0, 1.0], "gradients": [0.5, 2.0]})
    for horizontal in (False, True):
        ax = plt.figure().subplots()
        plots.stacked(ax, data, horizontal)
        ends = [(p.get_x(), p.get_width()) if horizontal else (p.get_y(), p.get_height()) for p in ax.patches]
        assert ends == [(0, 3), (0, 1), (3, 0.5), (1, 2)] and ax.get_legend_handles_labels()[1] == ["weights", "gradients"]
