"""The launchers: what is gone on with and what is not, on a node of one's own and in Slurm's queue; around a stand-in for reproduce.sh, squeue and scontrol."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console
from runs_of_a_small_model import configured

from logra.paper import node
from logra.paper.provenance import ROOT

# says what it was called with; ends with the next of the given codes, or, for "wait", when a signal tells it to
STAND_IN = """#!/usr/bin/env bash
if [[ "$*" == *--json* ]]; then echo '{"runs": [{"name": "big", "fits": false}, {"name": "one", "fits": true}, {"name": "two", "fits": true}]}'; exit; fi
echo "$@" >> called
code=$(head -1 codes); sed -i 1d codes
[[ $code != wait ]] && exit "$code"
trap 'echo USR1 >> called; exit 75' USR1
trap 'echo TERM >> called; exit 75' TERM
trap 'echo INT >> called; exit 130' INT
touch waiting
while :; do sleep 0.05; done
"""


@pytest.fixture
def place(tmp_path):
    """A folder with the launchers, the stand-in, which ends with `codes`, and Slurm's commands."""
    def made(*codes):
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        return tmp_path

    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "logra" / "rl").mkdir(parents=True)
    shutil.copy(ROOT / "logra" / "rl" / "stopping.py", tmp_path / "logra" / "rl")
    (tmp_path / "bin").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, text in (("reproduce.sh", STAND_IN), ("bin/squeue", '#!/bin/sh\necho "$LEFT"\n'), ("bin/scontrol", '#!/bin/sh\necho scontrol "$@" >> called\n'),
                       (".venv/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return made


def started(folder, script, *arguments, **variables):
    environment = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "WAIT": "0"} | variables
    return subprocess.Popen(["bash", str(folder / "launch" / script), *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def called(folder):
    return (folder / "called").read_text().splitlines()


def told(process, folder, number):
    """The exit code after a signal that comes while the run is at work."""
    until = time.monotonic() + 30
    while not (folder / "waiting").exists():
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    return process.wait(timeout=30)


@pytest.mark.parametrize("codes, tries, end", [([1, 1, 0], 3, 0), ([1] * 9, 4, 1), ([1, 75, 0], 2, 75), ([65, 0], 1, 65), ([2, 0], 1, 2), ([130, 0], 1, 130), ([137, 0], 2, 0)])
def test_a_node_goes_on_with_what_broke_off_and_with_nothing_else(place, codes, tries, end):
    folder = place(*codes)
    process = started(folder, "node.sh", "--only", "main", TRIES="4")
    assert process.wait(timeout=60) == end and called(folder) == ["--profile h100 --only main"] * tries


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_to_a_nodes_launcher_reaches_the_run_and_is_the_end(place, number, code):
    folder = place("wait", 0)
    assert told(started(folder, "node.sh"), folder, number) == code
    assert called(folder) == ["--profile h100", number.name.removeprefix("SIG")]


def test_a_job_has_its_own_run_and_its_time_less_what_a_checkpoint_takes(place):
    slurm = dict(SLURM_JOB_ID="77", SLURM_ARRAY_TASK_ID="1")
    for left, limit in (("1-00:00:00", " --wall-clock 86100"), ("10:05", " --wall-clock 305"), ("0:30", " --wall-clock 0"), ("UNLIMITED", "")):
        folder = place(0)
        (folder / "called").unlink(missing_ok=True)
        process = started(folder, "slurm.sh", "mine", SLURM_SUBMIT_DIR=str(folder), LEFT=left, **slurm)
        assert process.wait(timeout=60) == 0
        assert called(folder) == [f"--profile mine --only two{limit}"]


@pytest.mark.parametrize("codes, number, end, told_slurm", [(["wait"], signal.SIGUSR1, 75, ["scontrol requeue 77"]), (["wait"], signal.SIGTERM, 75, ["scontrol requeue 77"]),
                                                            ([75], None, 75, ["scontrol requeue 77"]), ([65], None, 65, []), ([1], None, 1, [])])
def test_a_job_goes_back_into_the_queue_for_want_of_time_alone(place, codes, number, end, told_slurm):
    folder = place(*codes)
    process = started(folder, "slurm.sh", SLURM_SUBMIT_DIR=str(folder), LEFT="UNLIMITED", SLURM_JOB_ID="77", SLURM_ARRAY_TASK_ID="0")
    assert (told(process, folder, number) if number else process.wait(timeout=60)) == end
    assert called(folder) == ["--profile h100 --only one", *(["USR1"] if number else []), *told_slurm]


@pytest.mark.parametrize("prints, wanted, message", [("echo 8", 8, None), ("echo INFO; echo 0", 8, "sees 0 GPUs, and the schedule wants 8: make one with a CUDA build"), ("echo 0", 0, None),
                                                     ("echo No module named vllm >&2; exit 1", 8, "cannot import vllm, ray and torch: No module named vllm")])
def test_an_interpreter_without_vllm_or_with_its_cpu_build_is_refused(tmp_path, monkeypatch, prints, wanted, message):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$2" = "import vllm, ray, torch; print(torch.cuda.device_count())" ] || exit 9\n{prints}\n')
    python.chmod(0o755)
    monkeypatch.setenv("LOGRA_VLLM_PYTHON", str(python))
    wrong = node._engines(wanted)
    assert [message in line for line in wrong] == [True] if message else wrong == []
    monkeypatch.setenv("LOGRA_VLLM_PYTHON", str(tmp_path / "none"))
    assert "does not exist" in node._engines(wanted)[0]


@pytest.mark.parametrize("codes, end", [((65, 65), 65), ((65, 1), 1), ((0, 65), 65), ((65, 75), 75), ((0, 0), 0)])
def test_numbers_that_are_not_finite_have_an_exit_code_of_their_own(tmp_path, monkeypatch, codes, end):
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path))
    ended = {f"run{i}": code for i, code in enumerate(codes)}

    def command(run, config, folder, left):
        told = json.dumps({"code": ended[run.name], "why": "so"})
        said = "pass" if ended[run.name] in (0, 1) else f"open('stopped.json', 'w').write({told!r})"
        return [sys.executable, "-c", f"import os; os.chdir({str(folder)!r}); {said}; raise SystemExit({int(ended[run.name] > 0)})"]

    monkeypatch.setattr(node, "command", command)
    runs = [SimpleNamespace(name=name, hours=1.0, config=SimpleNamespace(record=name, model_dump=lambda mode: {})) for name in ended]
    assert node.make(runs, None, Console(quiet=True)) == end


def test_a_run_is_not_begun_in_less_time_than_one_of_its_updates_takes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LOGRA_RECORDS", str(tmp_path))
    begun = []
    monkeypatch.setattr(node, "command", lambda run, config, folder, left: begun.append(run.name) or [sys.executable, "-c", ""])
    runs = [SimpleNamespace(name=name, hours=1.0, config=SimpleNamespace(record=name, updates=updates, model_dump=lambda mode: {})) for name, updates in (("short", 36), ("long", 2))]
    assert node.make(runs, 1000, Console(width=200)) == 75 and begun == ["short"]
    assert "long is not begun: " in (said := capsys.readouterr().out) and "an update takes 1800 at the paper's printed rate" in said
    assert node.make(runs, 2000, Console(quiet=True)) == 0 and begun == ["short", "short", "long"]


def test_two_nodes_agents_make_one_run(folder, tmp_path):
    config, made = configured(folder, updates=1, prompts=4, evaluate_every=1), tmp_path / "made"
    (tmp_path / "run.json").write_text(json.dumps(config.model_dump(mode="json")))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}",
               "--local-addr", "localhost", "-m", "logra.rl.train", str(tmp_path / "run.json"), "--resume", "--no-logs", "--folder", str(made)]
    agents = [subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        assert [agent.wait(timeout=300) for agent in agents] == [0, 0]
    finally:
        for agent in agents:
            agent.kill()
    assert json.loads((made / "environment.json").read_text())["ranks"] == 2 and (made / "metrics.parquet").exists()
