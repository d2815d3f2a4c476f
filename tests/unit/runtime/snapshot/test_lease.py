"""One run at a time writes into a folder: real processes that live, are killed, or stand still."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dtctl import names
from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot.storage import lease, retention
from dtctl.runtime.snapshot.storage.lease import Lease
from dtctl.runtime.snapshot.storage.place import parse_place
from tests.facts import raises

HOLD = """
import sys
from pathlib import Path
from dtctl.runtime.snapshot.storage.lease import Lease
held = Lease(Path(sys.argv[1]))
held.acquire()
print("held", flush=True)
sys.stdin.readline()
held.release()
"""


def leases(folder: Path) -> list[Path]:
    return sorted(folder.glob(".lease-*"))


class Other:
    """Another process that holds a lease."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ},
        )  # fmt: skip
        assert self.process.stdout
        assert self.process.stdout.readline() == "held\n"

    def end(self, number: int | None = None) -> None:
        if number is not None:
            self.process.send_signal(number)
            self.process.wait()
        self.process.communicate("\n" if number is None else None)


def test_a_second_one_is_told_who_writes_and_may_when_it_has_ended(tmp_path: Path) -> None:
    other = Other(tmp_path, **{names.RUN_ID: "gpt-1"})
    with raises(SnapshotError, f"gpt-1 {other.process.pid}"):
        Lease(tmp_path).acquire()
    assert len(leases(tmp_path)) == 1
    other.end()
    assert leases(tmp_path) == []
    own = Lease(tmp_path)
    own.acquire()
    own.require()
    own.release()
    assert leases(tmp_path) == []


def test_one_that_was_killed_is_no_hindrance(tmp_path: Path) -> None:
    Other(tmp_path).end(signal.SIGKILL)
    assert len(leases(tmp_path)) == 1
    own = Lease(tmp_path)
    own.acquire()
    assert [path.name for path in leases(tmp_path)] == [own._path.name]
    own.release()


def test_a_number_that_was_used_again_is_another_process(tmp_path: Path) -> None:
    foreign(tmp_path, dataclasses.replace(lease.build_own_holder(), held=True, pid=os.getppid(), started="1"))
    own = Lease(tmp_path)
    own.acquire()
    own.release()


@pytest.mark.parametrize("name", [names.ATTEMPT, names.LIVE_EPOCH])
def test_a_later_attempt_of_the_same_run_takes_over_and_so_does_who_replaces_a_lost_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    other = Other(tmp_path, **{names.RUN_ID: "gpt-1", names.ATTEMPT: "0"})
    monkeypatch.setenv(names.RUN_ID, "gpt-1")
    monkeypatch.setenv(name, "1")
    own = Lease(tmp_path)
    own.acquire()
    assert len(leases(tmp_path)) == 1
    own.require()
    other.end()
    own.require()
    own.release()


def test_who_has_lost_it_does_not_commit(tmp_path: Path) -> None:
    own = Lease(tmp_path)
    own.acquire()
    own._path.unlink()
    foreign(
        tmp_path,
        dataclasses.replace(lease.build_own_holder(), held=True, run="other", host="node7", boot="b", space="s"),
    )
    with raises(SnapshotError, "node7"):
        own.require()
    own.release()


def test_one_that_was_removed_is_put_back(tmp_path: Path) -> None:
    own = Lease(tmp_path / "snapshots")
    own.acquire()
    own._path.unlink()
    own._path.parent.rmdir()
    own.require()
    assert leases(tmp_path / "snapshots") == [own._path]
    own.release()


def foreign(folder: Path, holder: lease.LeaseHolder) -> Path:
    """A lease that another machine has left."""
    path = folder / f".lease-{'ab' * 8}.json"
    path.write_text(json.dumps(dataclasses.asdict(holder)))
    return path


@pytest.fixture
def absent_keys() -> lease.LeaseHolder:
    return dataclasses.replace(lease.build_own_holder(), host="node7", boot="another", space="another", held=True)


@pytest.mark.parametrize("remote", [False, True])
def test_one_of_another_machine_is_gone_when_it_is_silent(
    tmp_path: Path, absent_keys: lease.LeaseHolder, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    for name in ("STALE_S", "STALE_REMOTE_S", "POLL_S"):
        monkeypatch.setattr(lease, name, 0.05)
    monkeypatch.chdir(tmp_path)
    left = foreign(tmp_path, absent_keys)
    own = Lease(parse_place(f"memory://{tmp_path.name}") if remote else tmp_path)
    if remote:
        with (own._folder / left.name).upload() as out:  # type: ignore[union-attr]
            out.write(left.read_bytes())
    own.acquire()
    names_left = {path.name for path in own._folder.iterdir()}
    assert names_left == {own._path.name} if remote else left.name not in names_left
    own.release()
    assert not Path("memory:").exists(), "a store has no folder here"


def test_one_of_another_machine_that_renews_it_is_there(
    tmp_path: Path, absent_keys: lease.LeaseHolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "POLL_S", 0.01)
    left, done = foreign(tmp_path, absent_keys), threading.Event()

    def renew() -> None:
        count = 0
        while not done.wait(0.01):
            count += 1
            os.utime(left, ns=(count, count))

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        with raises(SnapshotError, "node7"):
            Lease(tmp_path).acquire()
    finally:
        done.set()
        thread.join()


def test_of_many_that_come_at_once_one_holds_it(tmp_path: Path) -> None:
    """Ten processes, each of which says whether it may write while it holds on."""
    script = HOLD.replace("held.acquire()", "try: held.acquire()\nexcept Exception as exc: raise SystemExit(3)")
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(4)
    ]
    held = []
    for process in started:
        assert process.stdout
        held.append(process.stdout.readline() == b"held\n")
    assert sum(held) <= 1
    for process in started:
        process.communicate(b"\n")
    assert sorted({process.returncode for process in started}) in ([3], [0, 3])


def test_a_folder_that_cannot_be_written_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(SnapshotError, "snapshots written"):
        Lease(tmp_path / "file" / "snapshots").acquire()


def test_what_a_dead_writer_left_goes_with_drafts(tmp_path: Path) -> None:
    left = tmp_path / f".lease-{'cd' * 8}.draft"
    left.write_text("")
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "COMMIT").write_text("")
    retention.remove_expired_snapshots(tmp_path, newest=tmp_path / "step-00000001", rule=retention.RetentionRule())
    assert not left.exists()


def test_odd_leases_are_none(tmp_path: Path) -> None:
    texts: list[Any] = [b"", b"{", b"[]", b'{"run": 1}', b"\xff" * 5000]
    for number, text in enumerate(texts):
        (tmp_path / f".lease-{number:016x}.json").write_bytes(text)
    own = Lease(tmp_path)
    own.acquire()
    own.release()
    assert leases(tmp_path) == []
