"""The reader's page links to what is there, says what is not, and shows how each claim was checked."""
import json
import re

import pytest

from logra.paper import claims, page
from logra.paper.provenance import ROOT


@pytest.mark.parametrize("rendered", [True, False])
def test_every_link_leads_somewhere_and_what_is_missing_is_said(rendered, tmp_path, monkeypatch):
    name, entry = next((name, entry) for name, entry in json.loads((ROOT / "figures" / "manifest.json").read_text()).items() if name == "fig5_rank")
    (tmp_path / "manifest.json").write_text(json.dumps({name: entry}))
    (tmp_path / "notebooks").mkdir()
    for file in [label.rpartition("/")[2] for label in entry["outputs"]] + (["notebooks/fig5_rank.html"] if rendered else []):
        (tmp_path / file).touch()
    some = claims.ledger(["saving-1.5b", "memory-7b-logra-peak", "rank-gain", "selection"])
    monkeypatch.setattr(claims, "ledger", lambda: some)
    text = page.render(tmp_path, "laptop")
    links = re.findall(r'(?:href|src)="([^"]+)"', text)
    assert links and all((tmp_path / link).exists() for link in links)
    assert any(link.endswith("notebooks/figures/fig5_rank.ipynb") for link in links), "the source, which a clone has"
    assert ("notebooks/fig5_rank.html" in links) == rendered and ("not rendered yet" in text) != rendered
    assert "./reproduce.sh --draw" in text
    for claim in some:
        for shown in filter(None, (claim.reason, claim.notebook, claim.command)):
            assert shown.replace("'", "&#39;") in text, (claim.id, shown)
    assert "4.98 GiB; the printed sd" in text
