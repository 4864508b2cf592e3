"""One set of pins: what conda users get, what pip users get and what the package asks for agree."""
import re
import tomllib

import yaml

from logra.paper.provenance import ROOT


def _pins(lines):
    found = dict(line.strip().split("==") for line in lines if line.strip() and not line.startswith(("#", "-c")))
    return {_plain(name): version for name, version in found.items()}


def _plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


LOCK = _pins((ROOT / "requirements/cpu.lock").read_text().splitlines())


def test_conda_users_get_the_locks_versions():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    (pip,) = [entry["pip"] for entry in dependencies if isinstance(entry, dict)]
    assert "-c requirements/cpu.lock" in pip
    pins = _pins(pip)
    assert pins == {name: LOCK[name] for name in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + project["optional-dependencies"]["paper"]
    assert pins.keys() == {_plain(re.match(r"[\w.-]+", name)[0]) for name in asked}


def test_the_lock_names_no_index_and_leaves_out_what_is_installed_without_its_dependencies():
    apart = _pins((ROOT / "requirements/cpu-nodeps.lock").read_text().splitlines())
    assert apart and not apart.keys() & LOCK.keys()
    for file in ("cpu.lock", "cpu-nodeps.lock"):
        assert "://" not in (ROOT / "requirements" / file).read_text()
    assert "+" not in LOCK["torch"], "a local version would tie the lock to one index"
