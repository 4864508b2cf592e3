"""The reader's page, figures/index.html: all figures and tables with what each is, the ledger of claims, the environment. No network."""

import json
import os
from collections import Counter
from pathlib import Path

import jinja2

from logra.paper import claims, provenance

_ORDER = ("fig", "table", "ext", "derivation")               # the paper's own first
_DATA = {".csv": "data", ".svg": "SVG", ".pdf": "PDF", ".html": "table", ".tex": "LaTeX"}


def render(figures: Path, profile: str) -> str:
    """The page for a folder with a manifest.json, as HTML that depends on the manifest, the ledger and which notebooks are rendered. Raises FileNotFoundError without one."""
    manifest = json.loads((figures / "manifest.json").read_text())
    ledger = claims.ledger()
    rows = [{"section": c.section, "claim": c.claim, "paper": claims.shown(c.paper, c.unit), "ours": claims.shown(c.ours, c.unit), "verdict": c.verdict,
             "how": c.how, "note": c.note, "kind": c.kind, "tolerance": _tolerance(c), "notebook": c.notebook, "link": _source(figures, c.notebook), "command": c.command} for c in ledger]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    entries = list(manifest.values())
    environment = [("device", ", ".join(sorted({entry["device"] for entry in entries})))]
    environment += [(name, ", ".join(sorted({entry["versions"][name] for entry in entries}))) for name in provenance.versions()]
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(Path(__file__).with_name("page.html.j2").read_text())
    return template.render(
        command="./reproduce.sh" + ("" if profile == "laptop" else f" --profile {profile}"), cards=[_card(name, entry, profile, figures) for name, entry in sorted(manifest.items(), key=_place)],
        claims=rows, counts=Counter(row["verdict"] for row in rows).most_common(), groups=[(kind, [row for row in rows if row["kind"] == kind]) for kind in kinds],
        environment=environment,
    )  # fmt: skip


def _place(item: tuple[str, dict]) -> tuple[int, str]:
    return next((place for place, prefix in enumerate(_ORDER) if item[0].startswith(prefix)), len(_ORDER)), item[0]


def _tolerance(claim: claims.Claim) -> str:
    return "; ".join(text for text in (claims.shown(claim.tolerance, claim.unit) if claim.tolerance else "", claim.reason) if text)


def _source(figures: Path, name: str) -> str:
    """The link to a notebook's source, by its stem; empty where there is none. Sources stand in every copy of the project, rendered ones do not."""
    found = next((provenance.ROOT / "notebooks").rglob(f"{name}.ipynb"), None) if name else None
    return os.path.relpath(found, figures) if found else ""


def _card(name: str, entry: dict, profile: str, figures: Path) -> dict:
    files = {Path(label).suffix: (Path(label).name, digest) for label, digest in entry["outputs"].items()}
    stem = Path(entry["notebook"]).name
    picture, table = (files[suffix][0] if suffix in files else None for suffix in (".png", ".html"))
    rendered = f"notebooks/{stem}.html"
    links = [("notebook, rendered", rendered)] if (figures / rendered).is_file() else []
    links += [("notebook, source", source)] if (source := _source(figures, stem)) else []
    links += [(label, files[suffix][0]) for suffix, label in _DATA.items() if suffix in files]
    option = "" if profile == "laptop" else f" --profile {profile}"
    return {"name": name, "kind": entry["class"], "missing": not (figures / rendered).is_file(), "picture": picture, "table": table, "links": links, "seconds": f"{entry['seconds']:.0f}", "hash": files[".csv"][1][:12],
            "command": f"./reproduce.sh{option} --only {stem}"}
