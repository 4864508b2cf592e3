"""The one way to write a table: CSV, HTML and LaTeX, each saying what the table is, and the same table styled for the notebook.

    tables.save(data, "table3_reasoning_gym", kind="recomputed here", caption="Table 3. …", note="…", marked=differs)
"""
from __future__ import annotations

import html
import re
from collections.abc import Mapping

import pandas as pd
from pandas.io.formats.style import Styler

from logra.paper import provenance

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #111; --paper: #fff; --rule: #111; --faint: #666; --mark: #fde8c8; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #e6e6e6; --paper: #16181c; --rule: #e6e6e6; --faint: #9a9a9a; --mark: #5a3d10; }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 1.5rem; }}
figure {{ margin: 0; overflow-x: auto; }}
table {{ border-collapse: collapse; border-top: 2px solid var(--rule); border-bottom: 2px solid var(--rule); font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; padding-bottom: .6em; max-width: 60em; }}
thead th {{ border-bottom: 1px solid var(--rule); text-align: left; vertical-align: bottom; }}
th, td {{ padding: .25em .9em .25em 0; text-align: left; vertical-align: top; }}
td.number, th.number {{ text-align: right; }}
td.marked {{ background: var(--mark); font-weight: 600; }}
figcaption {{ color: var(--faint); font-size: .85em; margin-top: .6em; max-width: 70em; }}
</style>
</head>
<body>
<figure>
{table}
<figcaption>{stamp}</figcaption>
</figure>
</body>
</html>
"""


def save(data: pd.DataFrame, name: str, kind: str, caption: str, note: str = "", formats: Mapping[str, str] | None = None, marked: pd.DataFrame | None = None) -> Styler:
    """Writes `<name>.csv`, `.html` and `.tex` into the figure folder and returns the table, styled, for the notebook's last line.

    data: one row a line, no index. kind: one of `provenance.CLASSES`; it stands under the table with `note`. formats: format
    strings by column for HTML and LaTeX (the CSV has six significant digits). marked: booleans of data's shape; such a cell is set bold and
    shaded. Raises ValueError on an unknown kind, on a name that is no plain file name, on data without a row, and on a `marked` of another shape.
    """
    if kind not in provenance.CLASSES:
        raise ValueError(f"kind {kind!r} of table {name} is unknown; wanted one of {', '.join(map(repr, provenance.CLASSES))}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name):
        raise ValueError(f"table name {name!r}: wanted lower-case letters, digits, _ and -, no suffix, such as 'table3_reasoning_gym'")
    if not len(data):
        raise ValueError(f"table {name}: data has no row")
    if marked is not None and (marked.shape != data.shape or list(marked.columns) != list(data.columns)):
        raise ValueError(f"table {name}: marked has columns {list(marked.columns)} and {len(marked)} rows, wanted data's {list(data.columns)} and {len(data)}")
    data = data.reset_index(drop=True)
    marks = pd.DataFrame(False, data.index, data.columns) if marked is None else marked.reset_index(drop=True)
    stamp = provenance.stamp(kind, note)
    folder = provenance.figures_folder()
    paths = {suffix: folder / f"{name}.{suffix}" for suffix in ("csv", "html", "tex")}
    data.to_csv(paths["csv"], index=False, float_format="%.6g", lineterminator="\n")
    paths["html"].write_text(_PAGE.format(title=html.escape(name), table=_html(data, formats, marks, caption), stamp=html.escape(stamp)), encoding="utf-8")
    paths["tex"].write_text(_latex(data, formats, marks, caption, stamp, name), encoding="utf-8")
    for path in paths.values():
        provenance.log_output(path, kind)
    styled = _styled(data, formats, name).set_caption(html.escape(f"{caption} [{stamp}]"))
    bold = marks.map(lambda on: "font-weight: bold; outline: 1px solid #E69F00" if on else "")
    return styled.apply(lambda _: bold, axis=None)


def _styled(data: pd.DataFrame, formats: Mapping[str, str] | None, name: str) -> Styler:
    return Styler(data, uuid=name, cell_ids=False).format(formats, na_rep="–", escape="html").format_index(escape="html", axis=1).hide(axis="index")


def _texts(data: pd.DataFrame, formats: Mapping[str, str] | None) -> pd.DataFrame:
    """Every cell as it is to be read."""
    def text(value, column):
        if pd.isna(value):
            return "–"
        return (formats or {}).get(column, "{}").format(value)

    return pd.DataFrame({column: [text(value, column) for value in data[column]] for column in data.columns}, dtype=str)


def _html(data: pd.DataFrame, formats: Mapping[str, str] | None, marks: pd.DataFrame, caption: str) -> str:
    number = {column: pd.api.types.is_numeric_dtype(data[column]) for column in data.columns}
    lines = ["<table>", f"<caption>{html.escape(caption)}</caption>", "<thead><tr>"]
    lines += [f'<th scope="col"{_class(number[c] and "number")}>{html.escape(str(c))}</th>' for c in data.columns] + ["</tr></thead>", "<tbody>"]
    for row, line in _texts(data, formats).iterrows():
        cells = (f"<td{_class(number[c] and 'number', marks.at[row, c] and 'marked')}>{html.escape(line[c])}</td>" for c in data.columns)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody>", "</table>"])


def _class(*names: str | bool) -> str:
    chosen = " ".join(name for name in names if name)
    return f' class="{chosen}"' if chosen else ""


_TEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "→": r"$\rightarrow$", "×": r"$\times$", "±": r"$\pm$", "·": r"$\cdot$", "–": "--", "≠": r"$\neq$", "α": r"$\alpha$", "β": r"$\beta$", "δ": r"$\delta$", "ε": r"$\varepsilon$",
        "₁": "$_1$", "₂": "$_2$", "²": "$^2$", "−": "$-$", "‖": r"$\Vert$", "Δ": r"$\Delta$", "κ": r"$\kappa$"}


def _tex(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)


def _latex(data: pd.DataFrame, formats: Mapping[str, str] | None, marks: pd.DataFrame, caption: str, stamp: str, name: str) -> str:
    """A booktabs table; `\\usepackage{booktabs}` is all that it needs."""
    align = "".join("r" if pd.api.types.is_numeric_dtype(data[c]) else "l" for c in data.columns)
    rows = [" & ".join(rf"\textbf{{{_tex(line[c])}}}" if marks.at[row, c] else _tex(line[c]) for c in data.columns) + r" \\" for row, line in _texts(data, formats).iterrows()]
    return "\n".join([r"\begin{table}", r"\centering", rf"\caption{{{_tex(caption)} {{\small [{_tex(stamp)}]}}}}", rf"\label{{tab:{name}}}", rf"\begin{{tabular}}{{{align}}}", r"\toprule",
                      " & ".join(_tex(str(c)) for c in data.columns) + r" \\", r"\midrule", *rows, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])
