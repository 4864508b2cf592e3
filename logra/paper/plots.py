"""The look of every figure, and the one way to write it: PDF, SVG, PNG and the CSV of what is drawn, the same bytes each time.

    plots.use()
    fig, ax = plt.subplots()
    ax.plot(x, y, label="LoGRA", **plots.style("logra"))
    plots.save(fig, "fig2_learning", data, kind="toy scale", note="3 seeds, 200 updates")
"""
from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import ipywidgets
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from IPython.display import Image, display
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from logra.paper import provenance

KINDS = provenance.CLASSES
COLUMN, PAGE = 3.35, 6.95                                # widths in inches: one column, both

# One colour an entity, the same in every figure (Okabe and Ito), and a second channel always: a marker and a line, or a hatch.
COLOURS = {
    "logra": "#0072B2", "dense": "#000000", "lora": "#E69F00", "rademacher": "#009E73", "fixed": "#D55E00", "gaussian": "#CC79A7", "hadamard": "#56B4E9",
    "theory": "#7F7F7F", "paper": "#B8A500",
}
MARKERS = {"logra": "o", "dense": "s", "lora": "^", "rademacher": "D", "fixed": "v", "gaussian": "P", "hadamard": "X", "theory": "", "paper": "*"}
LINES = {
    "logra": "-", "dense": "--", "lora": "-.", "rademacher": "-", "fixed": (0, (5, 1, 1, 1, 1, 1)), "gaussian": ":", "hadamard": (0, (3, 1)), "theory": (0, (1, 1)),
    "paper": "None",
}
HATCHES = {"logra": "", "dense": "////", "lora": "\\\\\\\\", "rademacher": "....", "fixed": "xxxx", "gaussian": "oo", "hadamard": "++++", "theory": "----", "paper": "**"}

_STAMP = "kind of figure"
_NO_DATES = {"pdf": {"Creator": None, "Producer": None, "CreationDate": None}, "svg": {"Creator": None, "Date": None}, "png": {"Software": None}}


def use() -> None:
    """Sets the paper's style over matplotlib's own defaults, whatever the user's matplotlibrc says."""
    plt.style.use(["default", str(Path(__file__).with_name("paper.mplstyle"))])


def style(entity: str) -> dict[str, object]:
    """Colour, marker and line of an entity, as keywords of `Axes.plot`. Raises KeyError, with the known ones, for another."""
    if entity not in COLOURS:
        raise KeyError(f"entity {entity!r} has no colour; there are {', '.join(COLOURS)}: add it in logra/paper/plots.py")
    return {"color": COLOURS[entity], "marker": MARKERS[entity], "linestyle": LINES[entity]}


def save(fig: Figure, name: str, data: pd.DataFrame, kind: str, note: str = "") -> dict[str, Path]:
    """Writes `<name>.pdf`, `.svg`, `.png` and `.csv` into the figure folder, with `kind` and `note` in small print under the figure.

    data: every number that is drawn, one row a point; floats are written with six significant digits. kind: one of `KINDS`.
    The page is the figure's own width; it grows downwards by the small print. In a notebook the file is what is shown: `plt.show` has no more to draw.
    Returns the paths by suffix.
    Raises ValueError on an unknown kind, on a name that is no plain file name, and on data without a row.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} of figure {name} is unknown; wanted one of {', '.join(map(repr, KINDS))}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"figure name {name!r}: wanted lower-case letters, digits, _ and -, no suffix, such as 'fig2_learning'")
    if not len(data):
        raise ValueError(f"figure {name}: data has no row; give what is drawn, one row a point")
    folder = provenance.figures_folder()
    page = _stamp(fig, provenance.stamp(kind, note))
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in ("pdf", "svg", "png", "csv")}
    for suffix, metadata in _NO_DATES.items():
        fig.savefig(paths[suffix], metadata=metadata, bbox_inches=page)
    named = any(level is not None for level in data.index.names)
    data.to_csv(paths["csv"], index=named, float_format="%.6g", lineterminator="\n")
    for path in paths.values():
        provenance.log_output(path, kind)
    plt.close(fig)
    display(Image(paths["png"], retina=True))
    return paths


def _stamp(fig: Figure, text: str) -> Bbox:
    """Puts `text` below all that is drawn, wrapped to the figure's width; returns the page in inches. A stamp from before is replaced."""
    for old in [artist for artist in fig.texts if artist.get_gid() == _STAMP]:
        old.remove()
    fig.draw_without_rendering()                          # lays the axes out, once for all formats
    fig.set_layout_engine("none")
    width, height = fig.get_size_inches()
    drawn = Bbox.union([fig.get_tightbbox(), Bbox.from_bounds(0, 0, width, height)])
    gap = 0.03
    stamp = fig.text(0.05 / width, (drawn.y0 - gap) / height, text, ha="left", va="top", fontsize=6, color="#555555", linespacing=1.15, gid=_STAMP)
    stamp.set_in_layout(False)                            # the layout is done: the stamp must not move it
    limit, columns = (width - 0.1) * fig.dpi, len(text)
    if (whole := stamp.get_window_extent().width) > limit:
        columns = int(1.3 * columns * limit / whole)      # nearly a third more than fit on average; from there, until all lines do
    while (extent := stamp.get_window_extent()).width > limit and columns > 12:
        columns -= 2
        stamp.set_text(textwrap.fill(text, columns))
    return Bbox([[drawn.x0, extent.y0 / fig.dpi - gap], [drawn.x1, drawn.y1]])


def stacked(ax: Axes, data: pd.DataFrame, horizontal: bool = False) -> None:
    """Stacked bars: one a row, at 0, 1, …, and a piece of it a column, in this order; the columns are the legend's labels."""
    shades, ends = plt.get_cmap("cividis")(np.linspace(0.05, 0.95, data.shape[1])), data.cumsum(axis=1)
    bar, start = (ax.barh, "left") if horizontal else (ax.bar, "bottom")
    for column, shade in zip(data, shades):
        bar(range(len(data)), data[column], 0.6, **{start: ends[column] - data[column]}, color=shade, edgecolor="white", linewidth=0.4, label=column)


def sliders(show: Callable[..., None], **controls: ipywidgets.Widget | list) -> None:
    """Draws `show` with the controls' first values, as plain output, and under it the controls, which draw it again when they are moved.

    `ipywidgets.interact` would call `show` inside an output widget, and a notebook that runs without a reader can then wait forever for
    a reply that nbclient has lost (jupyter/nbclient issue 312).
    """
    widget = ipywidgets.interactive(show, {"manual": True}, **controls)
    widget.manual_button.layout.display = "none"
    for control in widget.kwargs_widgets:
        control.observe(widget.update, names="value")
    show(**{control._kwarg: control.value for control in widget.kwargs_widgets})
    display(widget)
