"""The power fails at any step: what is read afterwards is right, and nothing older is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from dtctl.launch.records.record import find_run, list_run_records
from dtctl.runtime.snapshot import load, write
from tests import forked
from tests.security import power

ROOT = Path(__file__).parents[2]
SAVES = """
import torch
from dtctl.runtime.snapshot import write
for step, salt in {steps}:
    parts = {{"model": {{"w": torch.full((9,), float(step * 1000 + salt))}}, "random": {{"r": torch.ones(9)}}}}
    write.save_snapshot_parts(folder / "run" / "snapshots", step, parts, facts={{"salt": salt}}, keep={keep})
    say(f"{{step}} {{salt}}")
"""
RECORDS = """
from dtctl.launch.records.run_writer import write_private
from dtctl.launch.records.record import RunInfo
from dtctl.launch.records.run_writer import RunWriter
for name in ("one", "two"):
    info = RunInfo(run=name, token="x", pid=1, started=1.0, spec="", command=[], detached=False)
    record = RunWriter.create(folder / "project", info)
    say(f"{name} 1.0")
    record.write_spec("job: {script: t.py}\\n")
    say(f"{name} 1.0 spec")
    record.write_info(RunInfo(run=name, token="x", pid=1, started=2.0, spec="", command=[], detached=False))
    say(f"{name} 2.0 spec")
"""
Point = tuple[Path, list[str]]


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a disk would have is computed; waiting for this machine's adds nothing."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def failures(folder: Path, program: str) -> Iterator[Point]:
    """All that the disk could have after a power failure, with what the program had done by then."""
    (folder / "disk").mkdir()
    (folder / "out").mkdir()
    (folder / "program.py").write_text(program)
    argv = [power.__file__, folder / "disk", folder / "out", folder / "program.py"]
    done = forked.launch(argv, 1, cwd=ROOT)
    assert done.code == 0, done.output
    points = sorted((folder / "out").glob("*.done"))
    assert len(points) > 15
    for point in points:
        for kind in ("least", "most", "some"):
            yield folder / "out" / f"{point.stem}-{kind}", point.read_text().splitlines()


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("steps", [[(1, 0), (2, 0), (3, 0)], [(1, 0), (2, 0), (2, 1)], [(1, 0), (1, 1)]])
def test_a_snapshot_that_was_saved_is_there_and_no_other_is_taken_for_it(
    tmp_path: Path, keep: int, steps: list[tuple[int, int]]
) -> None:
    for disk, done in failures(tmp_path, SAVES.format(steps=steps, keep=keep)):
        folder = disk / "run" / "snapshots"
        found = load.newest(folder) if folder.is_dir() else None
        assert found is not None or not done, disk
        if found is not None:
            step, salt = found.step, found.facts["salt"]
            assert (step, salt) in steps
            assert found.parts["model"]["w"].tolist() == [float(step * 1000 + salt)] * 9
            last = tuple(map(int, done[-1].split())) if done else (0, 0)
            assert (step, salt) >= last, f"{disk}: {last} was saved"
        write.save_snapshot_parts(folder, 9, {"model": {"w": torch.ones(9)}}, facts={"salt": 9}, keep=1)
        again = load.newest(folder)
        assert again is not None
        assert again.step == 9
        assert [path.name for path in folder.iterdir()] == ["step-00000009"]


def test_a_run_that_was_written_down_is_found_again(tmp_path: Path) -> None:
    for disk, done in failures(tmp_path, RECORDS):
        told = {line.split()[0]: line.split()[1:] for line in done}
        for name, (started, *spec) in told.items():
            record = find_run(disk / "project", name)
            assert record.info().started >= float(started), disk
            assert not spec or (record.folder / "spec.yaml").read_text().startswith("job:")
        for record in list_run_records(disk / "project"):
            assert record.info().token == "x"
            assert record.plan() == {}


ATOMIC: dict[str, str] = {
    "private": "from dtctl.launch.records.run_writer import write_private as put\nput(folder / 'x', {text!r})",
    "named": "from dtctl.cli.common.files import write_named\nwrite_named(folder / 'x', {text!r}, option='--out')",
    "supervisor": (
        "from dtctl.supervisor.records import write_atomically\nwrite_atomically(str(folder / 'x'), {text!r}.encode())"
    ),
}


@pytest.mark.parametrize("kind", ATOMIC)
def test_a_file_that_is_replaced_is_the_old_or_the_new_one(tmp_path: Path, kind: str) -> None:
    program = "".join(f"{ATOMIC[kind].format(text=text)}\nsay({text!r})\n" for text in ("one", "two", "three"))
    order: Callable[[str], int] = ["", "one", "two", "three"].index
    for disk, done in failures(tmp_path, program):
        text = (disk / "x").read_text() if (disk / "x").exists() else ""
        assert order(text) >= order(done[-1] if done else ""), disk


def test_what_was_not_synced_is_lost_here(tmp_path: Path) -> None:
    """The disk of these tests forgets: without fsync nothing stays, and a name that was not synced does not."""
    program = (
        "import os\n(folder / 'a').write_text('a')\nos.mkdir(folder / 'b')\nsay('made')\n"
        "with open(folder / 'c', 'w') as file:\n    file.write('c')\n    file.flush()\n    os.fsync(file.fileno())\n"
        "say('synced')\n" + "os.mkdir(folder / 'd')\nos.rmdir(folder / 'd')\n" * 6
    )
    kinds = {disk.name.split("-")[1]: disk for disk, done in failures(tmp_path, program) if done[-1:] == ["synced"]}
    assert list(kinds["least"].iterdir()) == []
    assert (kinds["most"] / "a").read_text() == ""
    assert (kinds["most"] / "c").read_text() == "c"
