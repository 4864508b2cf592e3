"""The runner, on real kernels: a result is taken only when it may be believed, and nothing else is touched.

The project under test is a copy of the third floor in a folder with a space in its name, started from elsewhere, with no home and with
another user's kernel of the same name in the way.
"""
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
import yaml

from logra.paper import reproduce
from logra.paper.provenance import ROOT

PARAMETERS = "updates = 3\nrate = 1e-3\nseeds = [1, 2]"
IMPORTS = "import matplotlib.pyplot as plt, numpy as np, pandas as pd\nfrom logra.paper import plots, provenance\nplots.use()"
DRAW = """
def make(folder):
    np.savetxt(folder / "curve.txt", rate * np.arange(updates))
y = np.loadtxt(provenance.cached("curve", {"updates": updates, "rate": rate}, make) / "curve.txt")
provenance.log_input(provenance.ROOT / "data.csv")
fig, ax = plt.subplots()
ax.plot(y, **plots.style("logra"))
plots.save(fig, NAME, pd.DataFrame({"y": y}), kind="toy scale", note=f"{len(seeds)} seeds")
print("drawn")
"""
PROVENANCE = "from logra.paper import provenance\nfigures = provenance.figures_folder()"
OUTPUTS = ("pdf", "svg", "png", "csv")

# name -> (cells between the parameters and the end, seconds allowed, what the runner must say)
BAD = {
    "exits": (["import sys; sys.exit(0)"], 200, "code cell 2 of 3 raised SystemExit: 0"),
    "killed": (["import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], 200, "the kernel died"),
    "raises": (["x = 1", "raise RuntimeError('no [such] luck')"], 200, "code cell 3 of 4 raised RuntimeError: no [such] luck"),
    "skipped": ([PROVENANCE, "# skipped: tagged so\nraise RuntimeError"], 200, "code cell 3 of 4 did not run"),
    "slow": (["import time; time.sleep(600)"], 8, "ran past its limit of 8 s"),
    "draws_nothing": ([PROVENANCE], 200, "declared output draws_nothing.pdf was not written"),
    "undeclared": ([PROVENANCE, "for name in ('undeclared.pdf', 'more.pdf'):\n    (figures / name).write_text('x')\n    provenance.log_output(name, 'simulated')"], 200, "wrote more.pdf, which the profile does not declare"),
    "unclassed": ([PROVENANCE, "(figures / 'unclassed.pdf').write_text('x')"], 200, "unclassed.pdf does not say what it is"),
}


def notebook(stem, cells):
    sources = [PARAMETERS, *cells, f'provenance.finish("{stem}")']
    made = [nbformat.v4.new_code_cell(source, id=f"cell-{number}") for number, source in enumerate(sources)]
    made[0].metadata["tags"] = ["parameters"]
    for cell in made:
        if cell.source.startswith("# skipped"):
            cell.metadata["tags"] = ["skip-execution"]
    return nbformat.v4.new_notebook(cells=made, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})


class Project:
    """A copy of the runner with its own notebooks and profiles, and the command line on it."""

    def __init__(self, folder):
        self.root = folder / "a project"
        self.home = folder / "home"
        shutil.copytree(ROOT / "logra/paper", self.root / "logra/paper", ignore=shutil.ignore_patterns("__pycache__"))
        (self.root / "logra/rl").mkdir()
        shutil.copy(ROOT / "logra/rl/records.py", self.root / "logra/rl")
        (self.root / "logra/__init__.py").touch()         # the runner needs nothing of the method, and no import of torch
        (self.root / "rfc3987_syntax.py").write_text("raise ImportError")  # optional in jsonschema, and a second of grammar in each of some thirty processes
        (self.root / "data.csv").write_text("x\n1\n")
        alien = self.home / "share/jupyter/kernels/python3"
        alien.mkdir(parents=True)
        (alien / "kernel.json").write_text(json.dumps({"argv": ["/bin/false", "{connection_file}"], "display_name": "alien", "language": "python"}))
        kept = {key: value for key, value in os.environ.items() if key != "HOME" and not key.startswith(("LOGRA_", "JUPYTER", "XDG", "HF_"))}
        self.environment = kept | {"PYTHONPATH": str(self.root), "JUPYTER_PATH": str(alien.parents[1]), "JUPYTER_DATA_DIR": str(alien.parents[1]), "OMP_NUM_THREADS": "1"}

    def write(self, profile, entries):
        for stem, (cells, _, _) in entries.items():
            path = self.root / f"notebooks/figures/{stem}.ipynb"
            path.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(notebook(stem, cells), path)
        self.profile(profile, {
            f"figures/{stem}": {"timeout": limit, "outputs": [f"{stem}.{suffix}" for suffix in (OUTPUTS if "plots.save" in cells[-1] else ["pdf"])], "parameters": parameters}
            for stem, (cells, limit, parameters) in entries.items()
        })

    def profile(self, name, notebooks, figures=None):
        path = self.root / f"profiles/{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump({"figures": figures or f"build/{name}/figures", "notebooks": notebooks}))

    def start(self, *arguments, **options):
        command = [sys.executable, "-P", "-m", "logra.paper.reproduce", *arguments]
        return subprocess.Popen(command, cwd="/", env=self.environment, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)

    def run(self, *arguments, **options):
        process = self.start(*arguments, **options)
        output, _ = process.communicate(timeout=900)
        return process.returncode, output

    def figures(self, profile):
        folder = self.root / f"build/{profile}/figures"
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}

    def manifest(self, profile):
        return json.loads((self.root / f"build/{profile}/figures/manifest.json").read_text())


def good(stem):
    return [IMPORTS, f'NAME = "{stem}"' + DRAW]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return Project(tmp_path_factory.mktemp("runner"))


def test_only_a_run_that_may_be_believed_is_taken_and_the_others_go_on(project):
    entries = {stem: (cells, limit, {}) for stem, (cells, limit, _) in BAD.items()} | {"good": (good("good"), 200, {"updates": 5, "rate": 1})}
    project.write("bad", entries)
    folder = project.root / "build/bad/figures"
    folder.mkdir(parents=True)
    (folder / "killed.pdf").write_text("from a run before")
    code, output = project.run("--profile", "bad")
    assert code == 1, output
    lines = {line.split()[1]: line for line in output.splitlines() if line.startswith(("FAILED", "recomputed"))}
    for stem, (_, _, said) in BAD.items():
        assert lines[stem].startswith("FAILED") and said in lines[stem], output
    assert lines["good"].startswith("recomputed") and "not made here yet; 4 files, new" in lines["good"]
    assert "1 recomputed, 8 FAILED" in output.splitlines()[-1]
    assert set(project.figures("bad")) == {"good.pdf", "good.svg", "good.png", "good.csv", "manifest.json", "killed.pdf"}
    assert (folder / "killed.pdf").read_text() == "from a run before"
    assert list(project.manifest("bad")) == ["good"]
    assert not list((project.root / "build/bad/aside").iterdir()), "nothing is left aside"
    assert [path.name for path in (project.root / "build/bad/figures/notebooks").iterdir()] == ["good.html"]
    assert "drawn" in (project.root / "build/bad/logs/good.log").read_text()


def test_the_manifest_says_where_everything_came_from_and_is_the_same_again(project):
    project.write("twice", {"one": (good("one"), 200, {"updates": 4})})
    source = (project.root / "notebooks/figures/one.ipynb").read_bytes()
    assert project.run("--profile", "twice")[0] == 0
    first, files = project.manifest("twice"), project.figures("twice")
    entry = first["one"]
    assert entry["notebook"] == "figures/one" and entry["class"] == "toy scale"
    assert entry["parameters"] == {"updates": 4, "rate": 0.001, "seeds": [1, 2]}
    assert set(entry["outputs"]) == {f"build/twice/figures/one.{x}" for x in OUTPUTS}
    record, data = sorted(entry["inputs"])
    assert record.startswith("curve-") and data == "data.csv" and (project.root / "records" / record / "config.json").is_file()
    assert set(entry) == {"notebook", "notebook_sha256", "parameters", "inputs", "outputs", "class", "seconds", "versions", "device", "code_sha256"}
    assert str(project.root) not in json.dumps(first), "no path of this machine"

    code, output = project.run("--profile", "twice", "--draw")
    assert code == 0 and "--draw; 4 files, identical to the manifest's" in output, output
    again = project.manifest("twice")
    for artifact in (*first.values(), *again.values()):
        artifact.pop("seconds")
    assert first == again
    assert {k: v for k, v in files.items() if k != "manifest.json"} == {k: v for k, v in project.figures("twice").items() if k != "manifest.json"}
    assert (project.root / "notebooks/figures/one.ipynb").read_bytes() == source

    png = project.root / "build/twice/figures/one.png"
    for change, said in (
        (lambda: None, "cached"),
        (png.unlink, "output missing: build/twice/figures/one.png; 4 files, identical"),
        (lambda: project.write("twice", {"one": (good("one"), 200, {"updates": 4, "seeds": [7]})}), "parameter seeds changed; 3 of 4 files differ"),
    ):
        change()
        code, output = project.run("--profile", "twice")
        assert code == 0 and said in output, output


def test_drawing_makes_no_record_and_a_request_that_cannot_be_met_runs_nothing(project):
    project.write("draw", {"lonely": (good("lonely"), 200, {"updates": 9, "rate": 0.5})})
    code, output = project.run("--profile", "draw", "--draw")
    assert code == 1 and "lonely" in output and "MissingRecord: record curve-" in output and "./reproduce.sh --profile draw --only lonely" in output, output
    before = set(project.root.rglob("*"))
    for arguments, said in (
        (["--profile", "drew"], "unknown profile 'drew'; there are: "),
        (["--profile", "draw", "--only", "lonly"], "Did you mean lonely?"),
    ):
        code, output = project.run(*arguments)
        assert code == 2 and said in output, output
    project.profile("draw", {"figures/lonely": {"timeout": 200, "outputs": ["lonely.pdf"], "parameters": {"updates": "9"}}})
    code, output = project.run("--profile", "draw")
    assert code == 2 and "figures/lonely: parameter updates: given '9' (str), wanted int" in output, output
    assert set(project.root.rglob("*")) == before


def test_an_interrupted_run_leaves_no_process_and_nothing_taken(project):
    child = "import subprocess, time\nworker = subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('worker', worker.pid, flush=True)\ntime.sleep(600)"
    project.write("stop", {"endless": ([child], 600, {})})
    process = project.start("--profile", "stop")
    log, deadline = project.root / "build/stop/logs/endless.log", time.monotonic() + 120
    while not (log.exists() and "worker " in log.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    worker = int(log.read_text().split("worker ")[1].split()[0])
    code, output = project.run("--profile", "stop")
    assert code == 2 and "being reproduced by another process" in output
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 130 and "interrupted in endless" in output and "goes on from there" in output
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(project.root) in " ".join(p.info["cmdline"] or [])]
    assert project.figures("stop") == {}


def test_a_full_disk_changes_no_result(project, tmp_path, monkeypatch):
    project.write("full", {"stored": (good("stored"), 200, {})})
    assert project.run("--profile", "full")[0] == 0
    before, html = project.figures("full"), project.root / "build/full/figures/notebooks/stored.html"
    limit = html.stat().st_size // 2                     # the figures fit below it, the page does not: the kernel itself refuses the write
    assert max(map(len, before.values())) < limit
    code, output = project.run("--profile", "full", "--force", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    assert code == 1 and "FAILED     stored" in output and "could not be stored" in output and "File too large" in output, output
    assert project.figures("full") == before
    assert not (project.root / "build/full/state/stored.json").exists(), "the next run must not take it for done"

    # A disk that fills between two files of one notebook: neither target changes, nothing partial stays.
    moves = {}
    for name in ("a", "b"):
        (tmp_path / f"{name}.new").write_text("new")
        (tmp_path / name).write_text("old")
        moves[tmp_path / f"{name}.new"] = tmp_path / name

    def copy(source, target):
        Path(target).write_text("ne")
        if Path(source).name == "b.new":
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", copy)
    with pytest.raises(OSError, match="No space left"):
        reproduce._move_in(moves)
    assert sorted((path.name, path.read_text()) for path in tmp_path.iterdir()) == [("a", "old"), ("a.new", "new"), ("b", "old"), ("b.new", "new")]
