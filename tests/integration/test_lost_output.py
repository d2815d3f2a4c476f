"""Output that could not be stored, on a real disk that is full, is said with the end of the run."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.hosts import DTCTL, Finished, Project

SPEC = """\
cluster: {{transport: local, slots: {slots}, workdir: "{workdir}"}}
job: {{name: test, script: train.py, kind: direct, preload: [], log_mib: {log_mib}}}
"""
PRINTS = """\
import os, pathlib, time
done = pathlib.Path(os.environ["DTCTL_RUN_DIR"]) / "done"
if os.environ["RANK"] == "0":
    for n in range(32000):
        print(n, "x" * 990, flush=True)
    done.mkdir()
while not done.exists():
    time.sleep(0.01)
"""


def launch(project: Project, small: Path, *, mib: int, slots: int = 2, log_mib: int = 0) -> Finished:
    """A launch whose folder `small` is a disk of so many MiB."""
    project.write("train.py", PRINTS)
    project.write("dtctl.yaml", SPEC.format(workdir=project.folder.parent / "work", slots=slots, log_mib=log_mib))
    small.mkdir(parents=True)
    mount = f'mount -t tmpfs -o size={mib}m,mode=755 none "$1" && shift && "$@"; code=$?; '
    mount += "cat .dtctl/runs/*/events.jsonl; mkdir ../exit; cp -r ../work/runs/*/attempt-* ../exit; exit $code"
    done = subprocess.run(
        [
            *["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", small],
            *[*DTCTL, "launch", "--name", project.unique],
        ],
        cwd=project.folder,
        env=project.env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


def last_event(done: Finished) -> dict[str, object]:
    return json.loads(done.out.splitlines()[-1])


def test_on_the_node(project: Project) -> None:
    done = launch(project, project.folder.parent / "work", mib=20)
    assert done.code == 0, done.err
    event = last_event(done)
    assert event["status"] == "succeeded"
    assert "lost_output" not in event
    (log,) = (project.folder / ".dtctl").rglob("rank-0.log")
    lines = [line.split(" ", 1)[0] for line in log.read_text().splitlines()]
    assert lines == [str(n) for n in range(32_000)], "what the node could not store was sent on"
    notes = [json.loads(line) for line in done.out.splitlines() if '"event":"note"' in line]
    (note,) = [note for note in notes if note["node"] == "localhost" and "disk" in note["text"]]
    told = int(re.search(r"[\d,]{7,}", note["text"])[0].replace(",", ""))  # type: ignore[index]
    assert 10_000_000 < told < 32_000 * 1000, "what it could not store is counted"
    (record,) = (project.folder.parent / "exit").glob("*/exit.json")
    assert json.loads(record.read_text())["log_bytes_unstored"] == told


def test_here(project: Project) -> None:
    done = launch(project, project.folder / ".dtctl" / "runs", mib=3, slots=30)
    assert done.code == 0, done.err
    assert "bytes from localhost" in done.err
    # The disk that is full is the one that the events lie on: room was kept for them.
    assert "events of the run could not be written" not in done.err
    events = [json.loads(line) for line in done.out.splitlines() if line.startswith('{"event"')]
    assert [event["event"] for event in events].count("exit") == 30
    assert events[-1]["status"] == "succeeded"
    assert events[-1]["lost_output"]["localhost"] > 10_000_000


def test_nothing_is_lost_where_there_is_room(project: Project) -> None:
    done = launch(project, project.folder.parent / "work", mib=64)
    assert done.code == 0, done.err
    assert "lost_output" not in last_event(done)
    assert "output is lost" not in done.err


def test_a_node_and_this_machine_cut_alike(project: Project) -> None:
    done = launch(project, project.folder.parent / "work", mib=64, log_mib=8)
    assert done.code == 0, done.err
    printed = sum(len(f"{n} ") + 991 for n in range(32_000))
    (node_s,) = (project.folder.parent / "exit").rglob("rank-0.log")
    (here,) = (project.folder / ".dtctl").rglob("rank-0.log")
    for log in (node_s, here):
        text = log.read_bytes()
        assert len(text) <= 8 << 20
        (mark,) = [line for line in text.splitlines() if line.startswith(b"[dtctl: ")]
        kept = len(text) - len(mark) - 2
        assert kept + int(mark.split()[1]) == printed, "the node waits for the link before it cuts"
        assert (text[:2], text.splitlines()[-1][:6]) == (b"0 ", b"31999 ")
    cut = last_event(done)["cut_output"]
    assert cut == {"localhost": printed - (len(here.read_bytes()) - len(mark) - 2)}
