"""A folder from elsewhere: no command but a launch runs a program of it, or writes through its links, unasked."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from dtctl.cli.app import SECTIONS
from dtctl.launch.records.record import RunInfo
from dtctl.launch.records.run_writer import RunWriter
from tests import command_line
from tests.unit.report.runs import append

COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "init": (("init", "."),),
    "launch": (("launch", "--dry-run"), ("launch", "--dry-run", "--out", "out")),
    "stop": (("stop", "one"), ("stop",)),
    "sbatch": (("sbatch",), ("sbatch", "--out", "job.sh"), ("sbatch", "--submit")),
    "render": (("render", "--target", "kubernetes"),),
    "runs": (("runs",), ("runs", "--nodes"), ("runs", "--json")),
    "status": (("status", "one"), ("status", "one", "--json")),
    "logs": (("logs", "one"), ("logs", "one", "--rank", "0")),
    "watch": (("watch", "one"),),
    "report": (("report", "one"),),
    "fetch": (("fetch", "one"),),
    "exec": (("exec", "one", "--", "true"),),
    "validate": (("validate",), ("validate", "--json")),
    "doctor": (("doctor", "--quick"), ("doctor",), ("doctor", "--log", "one"), ("doctor", "--json")),
    "lint": (("lint", "t.py"), ("lint", "--spec", "dtctl.yaml", "t.py")),
    "bench": (("bench", "--op", "broadcast", "--sizes", "8:8"),),
    "advise": (("advise",), ("advise", "--measure")),
    "nccl": (("nccl", "env"), ("nccl", "explain", "NCCL_DEBUG")),
    "clean": (("clean",), ("clean", "--yes"), ("clean", "--older", "0d", "--yes")),
    "sandbox": (("sandbox", "ls"),),
    "snapshot": (
        ("snapshot", "ls", "one"), ("snapshot", "ls"), ("snapshot", "verify", "one"), ("snapshot", "show", "one"),
        ("snapshot", "digest", "one"), ("snapshot", "prune", "one", "--keep", "1"),
        ("snapshot", "export", "one", "--out", "exported"),
    ),
}  # fmt: skip
"""Every command that there is, as somebody would type it who looks around in a folder that was downloaded."""
ALL = [words for several in COMMANDS.values() for words in several]
CLUSTERS = {
    "python": "{transport: local, slots: 1, python: FOLDER/bin/python3}",
    "relative python": "{transport: local, slots: 1, python: bin/python3}",
    "python of a node": "{transport: local, nodes: [{name: a, slots: 1, python: FOLDER/bin/python3}]}",
    "python behind a link": "{transport: local, slots: 1, python: ABOVE/way/python3}",
    "python of an environment": "{transport: local, slots: 1, python: FOLDER/env/bin/python3}",
}
JOBS = {
    "PYTHONPATH": "PYTHONPATH: FOLDER/lib",
    "relative PYTHONPATH": "PYTHONPATH: 'lib:other'",
    "LD_PRELOAD": "LD_PRELOAD: FOLDER/lib/evil.so",
    "PATH": "PATH: 'FOLDER/bin:/usr/bin:/bin'",
    "BASH_ENV": "BASH_ENV: FOLDER/lib/rc",
    "PS4": "SHELLOPTS: xtrace, PS4: '$(touch TRACE)'",
}


def test_every_command_is_walked() -> None:
    assert set(COMMANDS) == {name for section in SECTIONS.values() for name in section}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a run, that somebody else has made: all programs of it leave a trace."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "project"
    for name in ("bin", "lib"):
        (folder / name).mkdir(parents=True, mode=0o700)
    (tmp_path / "way").symlink_to(folder / "bin")
    folder.chmod(0o700)
    for program in ("python3", "bash", "sh", "nvidia-smi", "ip", "ssh"):
        path = folder / "bin" / program
        path.write_text(f'#!/bin/sh\n/usr/bin/touch {tmp_path}/it-ran\nexec /usr/bin/env -i {sys.executable} "$@"\n')
        path.chmod(0o755)
    (folder / "lib" / "sitecustomize.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')\n")
    (folder / "lib" / "rc").write_text(f"/usr/bin/touch {tmp_path}/it-ran\n")
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "bin" / "python3").symlink_to(sys.executable)
    packages = folder / "env" / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    packages.mkdir(parents=True)
    (folder / "env" / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    (packages / "evil.pth").write_text(f"import os; open({str(tmp_path / 'it-ran')!r}, 'w')\n")
    (folder / "t.py").write_text("print('it ran')\n")
    return folder


def write_spec(folder: Path, cluster: str, env: str = "A: b", setup: tuple[str, ...] = ()) -> None:
    spec = f"cluster: {cluster}\njob: {{script: t.py, kind: direct, env: {{{env}}}}}\n"
    for name, path in {"FOLDER": folder, "ABOVE": folder.parent, "TRACE": folder.parent / "it-ran"}.items():
        spec = spec.replace(name, str(path))
    (folder / "dtctl.yaml").write_text(spec)
    info = RunInfo(run="one", token="x", pid=1, started=1.0, spec=str(folder / "dtctl.yaml"), command=[], detached=True)
    record = RunWriter.create(folder, info)
    record.write_spec(spec)
    node = {"name": "localhost", "slots": 1, "first_rank": 0, "workdir": str(folder / "node"), "python": None}
    python = re.search(r"python: ([^,}]+)", cluster)
    plan = {
        "nodes": [{**node, "python": python and python[1], "setup": setup, "argv": [], "env": []}],
        "attempt": 0, "grace_s": 1, "rendezvous": {"address": "127.0.0.1", "port": 1}, "transport": "local",
    }  # fmt: skip
    (record.folder / "plan.json").write_text(json.dumps(plan))
    append(record, {"event": "plan", "time": 1.0, "nodes": ["localhost"]})


def mostly_slow(kinds: Iterable[str], *quick: str) -> list[Any]:
    """A walk over all commands takes half a minute on a busy machine."""
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@pytest.mark.parametrize("kind", mostly_slow(CLUSTERS, "relative python"))
def test_no_command_runs_a_python_of_the_folder(folder: Path, kind: str) -> None:
    write_spec(folder, CLUSTERS[kind])
    ran = []
    for words in ALL:
        done = command_line.dtctl(*words, cwd=folder, timeout=60)
        assert "bug in dtctl" not in done.stderr, f"{words}: {done.stderr}"
        if (folder.parent / "it-ran").exists():
            (folder.parent / "it-ran").unlink()
            ran.append(" ".join(words))
    assert ran == []


@pytest.mark.parametrize("kind", mostly_slow(JOBS, "PYTHONPATH"))
def test_no_command_sets_a_variable_that_runs_something_of_the_folder(folder: Path, kind: str) -> None:
    write_spec(folder, f"{{transport: local, slots: 1, python: {sys.executable}}}", JOBS[kind])
    ran = []
    for words in ALL:
        if words[0] in ("doctor", "nccl", "bench", "exec", "sbatch", "runs", "clean", "fetch", "stop"):
            command_line.dtctl(*words, cwd=folder, timeout=60)
            if (folder.parent / "it-ran").exists():
                (folder.parent / "it-ran").unlink()
                ran.append(" ".join(words))
    assert ran == []


def test_a_plan_of_other_nodes_is_no_bug(folder: Path) -> None:
    write_spec(folder, f"{{transport: local, slots: 1, python: {sys.executable}}}")
    path = folder / ".dtctl" / "runs" / "one" / "plan.json"
    plan = json.loads(path.read_text())
    plan["nodes"][0]["name"] = "another"
    for text in (json.dumps(plan), '{"nodes": [{"name": "localhost"}]}'):
        path.write_text(text)
        for words in (("stop", "one"), ("snapshot", "ls", "one"), ("fetch", "one"), ("exec", "one", "--", "true")):
            done = command_line.dtctl(*words, cwd=folder, timeout=60)
            assert "bug in dtctl" not in done.stderr, f"{words}: {done.stderr}"
            assert done.returncode not in (0, 1) or words[0] == "stop"


def test_a_record_that_came_along_runs_nothing(folder: Path) -> None:
    """Set-up lines and the Python that stand in its plan alone."""
    write_spec(folder, f"{{transport: local, slots: 1, python: {sys.executable}}}", setup=("touch TRACE",))
    plan = folder / ".dtctl" / "runs" / "one" / "plan.json"
    plan.write_text(plan.read_text().replace("TRACE", str(folder.parent / "it-ran")))
    for words in ALL:
        command_line.dtctl(*words, cwd=folder, timeout=60)
        assert not (folder.parent / "it-ran").exists(), words


def test_a_launch_is_consent_and_its_run_can_be_looked_at(folder: Path) -> None:
    (folder / "dtctl.yaml").write_text(
        f"cluster: {{transport: local, slots: 1, python: {folder}/bin/python3, workdir: {folder}/node}}\n"
        f"job: {{script: t.py, kind: direct, setup: ['true']}}\n"
    )
    assert command_line.dtctl("doctor", "--quick", cwd=folder).returncode == 7
    done = command_line.dtctl("launch", "--no-doctor", "--name", "mine", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder.parent / "it-ran").exists()
    for words in (["doctor", "--quick"], ["snapshot", "ls", "mine"], ["fetch", "mine"], ["stop", "mine"]):
        again = command_line.dtctl(*words, cwd=folder)
        assert "beyond" not in again.stderr, f"{words}: {again.stderr}"


def test_a_launch_runs_where_no_consent_can_be_written(folder: Path) -> None:
    """A home that is read-only is no reason to refuse."""
    (folder / "dtctl.yaml").write_text(
        f"cluster: {{transport: local, slots: 1, python: {folder}/bin/python3}}\njob: {{script: t.py, kind: direct}}\n"
    )
    (folder.parent / "file").touch()
    env = {"XDG_STATE_HOME": str(folder.parent / "file")}
    assert command_line.dtctl("launch", "--no-doctor", cwd=folder, env=env).returncode == 0
    done = command_line.dtctl("doctor", "--quick", "--yes", cwd=folder, env=env)
    assert done.returncode == 7
    assert "set XDG_STATE_HOME" in done.stderr


FILES = (
    ".dtctl/.gitignore", ".dtctl/.two.launcher.log", ".dtctl/doctor.json", ".dtctl/runs/one/run.json",
    ".dtctl/runs/one/spec.yaml", ".dtctl/runs/one/plan.json", ".dtctl/runs/one/events.jsonl",
    ".dtctl/runs/one/ledger.json", ".dtctl/runs/one/launcher.log", ".dtctl/runs/one/launcher.lock",
    ".dtctl/runs/one/metrics.jsonl", ".dtctl/runs/one/report.html", ".dtctl/runs/one/logs/localhost/rank-0.log",
    ".dtctl/runs/one/logs/localhost/agent.log", "report.html", "out/localhost/node.sh",
)  # fmt: skip
FOLDERS = (
    ".dtctl", ".dtctl/runs", ".dtctl/cache", ".dtctl/environment", ".dtctl/slurm", ".dtctl/prometheus",
    ".dtctl/runs/one", ".dtctl/runs/one/logs", ".dtctl/runs/one/logs/localhost", ".dtctl/runs/one/outputs",
    ".dtctl/runs/two",
)  # fmt: skip
WRITING = (
    ("init", "."), ("stop", "one"), ("watch", "one"), ("report", "one"), ("fetch", "one"), ("sbatch", "--submit"),
    ("clean", "--older", "0d", "--yes"), ("launch", "--no-doctor", "--name", "two"),
    ("launch", "--no-doctor", "--detach", "--name", "two"),
    ("launch", "--doctor", "--name", "three"), ("take-up", ".dtctl/runs/one"),
)  # fmt: skip


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "name", mostly_slow([*FILES, *FOLDERS], ".dtctl", ".dtctl/cache", ".dtctl/.two.launcher.log", ".dtctl/runs/one")
)
def test_no_command_writes_through_a_link(folder: Path, name: str) -> None:
    """Not even a launch: consent to run its programs is none to write elsewhere by dtctl's hand."""
    write_spec(folder, f"{{transport: local, slots: 1, python: {sys.executable}}}")
    victim, link = folder.parent / "victim", folder / name
    victim.mkdir(mode=0o700)
    (victim / "mine").write_text("mine")
    if name in FOLDERS:
        if link.is_dir():  # the same, behind the link
            shutil.copytree(link, victim, dirs_exist_ok=True)
            shutil.rmtree(link)
        target = victim
    else:
        shutil.copy(link, victim / "mine") if link.is_file() else None
        link.unlink(missing_ok=True)
        target = victim / "mine"
    link.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    link.symlink_to(target)
    before, wrote = contents(victim), []
    for words in WRITING:
        done = command_line.dtctl(*words, cwd=folder, timeout=60)
        assert "bug in dtctl" not in done.stderr, f"{words}: {done.stderr}"
        if contents(victim) != before:
            wrote.append(" ".join(words))
            before = contents(victim)
    assert wrote == []
