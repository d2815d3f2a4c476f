"""Output that could not be stored, on a real disk that is full, is said with the end of the run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.hosts import DTCTL, Finished, Project

SPEC = """\
cluster: {{transport: local, slots: {slots}, workdir: "{workdir}"}}
job: {{name: test, script: train.py, kind: direct, preload: []}}
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


def launch(project: Project, small: Path, *, mib: int, slots: int = 2) -> Finished:
    """A launch whose folder `small` is a disk of so many MiB."""
    project.write("train.py", PRINTS)
    project.write("dtctl.yaml", SPEC.format(workdir=project.folder.parent / "work", slots=slots))
    small.mkdir(parents=True)
    mount = f'mount -t tmpfs -o size={mib}m,mode=755 none "$1" && shift && "$@"; code=$?; '
    mount += "cat .dtctl/runs/*/events.jsonl; exit $code"
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
    (lost,) = event["lost_output"].values()  # type: ignore[attr-defined]
    kept = sum(path.stat().st_size for path in (project.folder / ".dtctl").rglob("rank-*.log"))
    printed = sum(len(f"{n} ") + 991 for n in range(32_000))
    assert lost == printed - kept > 0, "every byte is here or counted"
    assert f"{lost:,} bytes from localhost" in done.err
    assert list(event["lost_output"]) == ["localhost"]  # type: ignore[call-overload]


def test_here(project: Project) -> None:
    done = launch(project, project.folder / ".dtctl" / "runs", mib=3, slots=30)
    assert done.code == 0, done.err
    assert "bytes from localhost" in done.err
    # The disk that is full is the one that the events lie on, and 30 ends are more than the page that they have.
    assert "events of the run could not be written" in done.err


def test_nothing_is_lost_where_there_is_room(project: Project) -> None:
    done = launch(project, project.folder.parent / "work", mib=64)
    assert done.code == 0, done.err
    assert "lost_output" not in last_event(done)
    assert "output is lost" not in done.err
