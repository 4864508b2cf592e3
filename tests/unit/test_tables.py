"""A table is written once, the same bytes each time, says what it is in every format, and shows text as text."""
import json

import pandas as pd
import pytest

from logra.paper import tables


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOGRA_FIGURES", str(tmp_path / "figures"))
    monkeypatch.setenv("LOGRA_OUTPUTS", str(tmp_path / "outputs"))
    return tmp_path / "figures"


DATA = pd.DataFrame({"task <b>": ["a_b & c", "d"], "count": [4868, 25], "share": [0.123456789, float("nan")]})
MARKED = pd.DataFrame({"task <b>": [False, False], "count": [False, True], "share": [False, False]})


def save(**changes):
    return tables.save(**({"data": DATA, "name": "table9_x", "kind": "recomputed here", "caption": "Table 9. α → 50 %", "note": "n = 3", "formats": {"count": "{:,}", "share": "{:.2f}"}, "marked": MARKED} | changes))


def test_a_table_in_its_three_formats(folder, tmp_path):
    save()
    csv, html, tex = ((folder / f"table9_x.{suffix}").read_text() for suffix in ("csv", "html", "tex"))
    assert csv == "task <b>,count,share\na_b & c,4868,0.123457\nd,25,\n"
    assert "<th scope=\"col\">task &lt;b&gt;</th>" in html and "a_b &amp; c" in html and '<td class="number marked">25</td>' in html and '<td class="number">4,868</td>' in html
    assert r"a\_b \& c & 4,868 & 0.12 \\" in tex and r"d & \textbf{25} & -- \\" in tex and r"\caption{Table 9. $\alpha$ $\rightarrow$ 50 \%" in tex
    assert all("recomputed here" in text and "n = 3" in text for text in (html, tex)), "each says what it is"
    assert [json.loads(line) for line in (tmp_path / "outputs").read_text().splitlines()] == [{"path": f"table9_x.{suffix}", "class": "recomputed here"} for suffix in ("csv", "html", "tex")]


def test_the_same_bytes_and_the_same_view_each_time(folder):
    views = {save().to_html()}
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    views.add(save().to_html())
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()} and len(views) == 1
    (view,) = views
    assert "4,868" in view and "task &lt;b&gt;" in view and view.count("<td") == 6


@pytest.mark.parametrize("changes, message", [
    ({"kind": "made up"}, "kind 'made up' of table table9_x is unknown; wanted one of 'recomputed here'"),
    ({"name": "../x"}, "table name '../x': wanted lower-case"),
    ({"data": DATA.iloc[:0], "marked": None}, "table table9_x: data has no row"),
    ({"marked": MARKED.iloc[:1]}, "marked has columns .* and 1 rows, wanted data's"),
])
def test_a_table_that_cannot_be(folder, changes, message):
    with pytest.raises(ValueError, match=message):
        save(**changes)
    assert not folder.exists() or not list(folder.iterdir())
