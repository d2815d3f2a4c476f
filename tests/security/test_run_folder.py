"""A run's folder from elsewhere: what is no file in it is not waited for, and what is too large is not read."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dtctl.launch.records.record import RunInfo
from dtctl.launch.records.run_writer import RunWriter
from tests import command_line
from tests.unit.report.runs import append

FILES = ("run.json", "spec.yaml", "plan.json", "events.jsonl", "ledger.json", "metrics.jsonl", "logs/a/rank-0.log")
COMMANDS = (
    ["status", "one"],
    ["runs"],
    ["logs", "one"],
    ["report", "one", "--out", "page.html"],
    ["snapshot", "ls", "one"],
)


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def deep(path: Path) -> None:
    path.write_text("[" * 200_000 + "\n")


def laughs(path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    path.write_text("\n".join(rows) + "\n")


def itself(path: Path) -> None:
    path.write_text("a: &a {b: *a}\n")


def many_workers(path: Path) -> None:
    path.write_text('{"nodes": [{"name": "a", "address": "a", "slots": 1000000000000, "first_rank": 0}]}')


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "circle": lambda path: path.symlink_to(path),
    "huge": huge,
    "deep": deep,
    "laughs": laughs,
    "itself": itself,
    "many workers": many_workers,
    "nothing": lambda path: path.touch(),
}


def made(folder: Path) -> Path:
    """A run of which every file is in order."""
    folder.chmod(0o700)
    info = RunInfo(run="one", token="x", pid=1, started=1.0, spec="", command=[], detached=False)
    record = RunWriter.create(folder, info)
    record.write_spec("cluster: {transport: local}\njob: {script: t.py}\n")
    (record.folder / "plan.json").write_text('{"nodes": [{"name": "a", "slots": 1, "first_rank": 0, "env": []}]}')
    append(record, {"event": "plan", "time": 1.0, "nodes": ["a"]})
    (record.folder / "ledger.json").write_text('{"phases_s": {}, "wall_s": 0}')
    (record.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    (record.folder / "logs" / "a").mkdir()
    (record.folder / "logs" / "a" / "rank-0.log").write_text("here\n")
    return record.folder


LIMITED = partial(resource.setrlimit, resource.RLIMIT_AS, (3 << 30, 3 << 30))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("which", [FILES[:1], FILES[1:]], ids=["run.json", "the others"])
def test_no_file_of_a_run_makes_a_command_hang_or_break(tmp_path: Path, kind: str, which: tuple[str, ...]) -> None:
    folder = made(tmp_path)
    for name in which:
        if (kind, name) == ("huge", FILES[-1]):
            continue  # `logs` prints all of a log
        (folder / name).unlink()
        KINDS[kind](folder / name)
    for words in COMMANDS:
        done = command_line.dtctl(*words, cwd=tmp_path, before=LIMITED)
        said = done.stdout + done.stderr
        assert "bug in dtctl" not in said, f"{words}: {said}"
        assert "Traceback" not in said, f"{words}: {said}"
        assert "MemoryError" not in said, f"{words}: {said}"


@pytest.mark.parametrize("kind", ["pipe", "device", "huge", "folder"])
@pytest.mark.parametrize(
    "place", ["script", "hostfile", "config", "imported", "ssh configuration", "seen", "plan of logs"]
)
def test_no_file_beside_a_spec_makes_a_command_hang_or_break(tmp_path: Path, kind: str, place: str) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / ".dtctl").mkdir(mode=0o700)
    (tmp_path / "t.py").write_text("import torch.distributed as dist, helper\ndist.init_process_group()\n")
    (tmp_path / "a.log").write_text("x\n")
    spec, job = "transport: ssh, nodes: [a], slots: 1", "job: {script: t.py, kind: direct}\n"
    (tmp_path / "dtctl.yaml").write_text(f"cluster: {{{spec}}}\n{job}")
    odd, words = tmp_path / "odd", ["launch", "--dry-run"]
    if place == "script":
        odd = tmp_path / "t.py"
        odd.unlink()
    elif place == "hostfile":
        (tmp_path / "dtctl.yaml").write_text(f"cluster: {{transport: ssh, hostfile: odd}}\n{job}")
    elif place == "config":
        words = ["advise", "--config", "odd"]
    elif place == "imported":
        odd, words = tmp_path / "helper.py", ["lint", "t.py"]
    elif place == "ssh configuration":
        (tmp_path / "dtctl.yaml").write_text(f"cluster: {{{spec}, ssh_config: odd}}\n{job}")
    elif place == "seen":
        odd, words = tmp_path / ".dtctl" / "doctor.json", ["launch"]
        (tmp_path / "dtctl.yaml").write_text(f"cluster: {{{spec}, connect_timeout_s: 1, ssh_config: none}}\n{job}")
    else:
        odd, words = tmp_path / "plan.json", ["doctor", "--log", "a.log"]
    KINDS[kind](odd)
    done = command_line.dtctl(*words, cwd=tmp_path, before=LIMITED)
    assert "bug in dtctl" not in done.stderr
    assert "Traceback" not in done.stderr
