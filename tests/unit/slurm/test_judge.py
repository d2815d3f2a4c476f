"""The judge of a job's attempt, and the nodes that report to it, over real links."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dtctl.launch.control.hang import HangMonitor
from dtctl.node_facts import first_free, port_candidates
from dtctl.slurm import job_record
from dtctl.slurm.judge import AttemptRecord, Judge
from dtctl.slurm.monitor import FOLDER, _remove_abandoned
from dtctl.slurm.monitor_link import proof
from tests.unit.slurm.test_job_record import WORKER

TOKEN = "00ff" * 8


class Rig:
    """A judge of two workers on two nodes, in a thread."""

    def __init__(self, folder: Path) -> None:
        self.record = folder / "progress.jsonl"
        self.hangs = folder / "hangs"
        self.endpoint = ("127.0.0.1", first_free(port_candidates(str(folder))))
        monitor = HangMonitor(
            node_of_rank={0: "node1", 1: "node2"}, limit=1.0, start_limit="auto", folder=self.hangs, on_progress=None
        )
        self.judge = Judge(monitor, AttemptRecord(self.record, 2), self.endpoint, TOKEN)
        self.thread = threading.Thread(target=self.judge.run, daemon=True)
        self.thread.start()

    def connect(self, node: str) -> socket.socket:
        link = socket.create_connection(self.endpoint, timeout=120)
        send(link, op="hello", node=node, nonce="1", proof=proof(TOKEN, "monitor", "1"))
        welcome = json.loads(link.recv(1000))
        assert welcome == {"op": "welcome", "proof": proof(TOKEN, "judge", "1")}
        return link

    def records(self) -> list[Any]:
        found = [job_record.read(line) for line in self.record.read_text().splitlines()]
        assert None not in found
        return found


def send(link: socket.socket, **message: Any) -> None:
    link.sendall(json.dumps(message).encode() + b"\n")


def worker(rank: int, **changes: Any) -> dict[str, Any]:
    facts = asdict(replace(WORKER, rank=rank, until=9, first=0, **changes))
    del facts["node"]
    return facts


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    monkeypatch.setattr(os, "getppid", lambda: -1)  # the monitor that has started it has ended
    made.thread.join(120)
    assert not made.thread.is_alive()
    made.judge.close()


def test_a_hang_is_recorded_and_the_workers_of_all_nodes_are_ended(rig: Rig) -> None:
    links = [rig.connect("node1"), rig.connect("node2")]
    noted = time.monotonic()
    states = "ST"  # rank 1 is stopped
    links[0].settimeout(0.2)
    answer = b""
    while not answer:
        stale_s = time.monotonic() - noted
        for rank, link in enumerate(links):
            send(link, op="progress", workers=[worker(rank, stale_s=stale_s, state=states[rank])])
        try:
            answer = links[0].recv(100)
        except TimeoutError:
            continue
    assert answer == b'{"op":"stacks"}\n'
    assert links[1].recv(100) == answer
    for rank, link in enumerate(links):
        send(link, op="stack", rank=rank, state=states[rank], how="none", text="at home", flight="")
        send(link, op="stacks-end")
    links[0].settimeout(120)
    assert [link.recv(100) for link in links] == [b'{"op":"kill"}\n'] * 2
    for link in links:
        link.close()
    *_, hang, verdict = [event for event in rig.records() if not isinstance(event, job_record.RecordedProgress)]
    assert isinstance(hang, job_record.Hang)
    assert isinstance(verdict, job_record.Verdict)
    assert (verdict.attempt, verdict.failure.node, verdict.failure.rank) == (2, "node2", 1)
    assert "at home" in (rig.hangs / "node2" / "rank-1.txt").read_text()


@pytest.mark.parametrize(
    "first",
    [
        {"op": "hello", "node": "node1", "nonce": "1", "proof": proof("other", "monitor", "1")},
        {"op": "hello", "node": "node1", "nonce": "1", "proof": proof(TOKEN, "judge", "1")},
        {"op": "hello", "node": "node1", "nonce": 1, "proof": "é"},
        {"op": "hello", "node": "node1"},
        {"op": "hello", "node": "../x", "nonce": "1", "proof": proof(TOKEN, "monitor", "1")},
        {"op": "progress", "workers": []},
        [],
        "x" * 5000,
    ],
)
def test_who_does_not_belong_to_the_job_is_not_heard(rig: Rig, first: Any) -> None:
    link = socket.create_connection(rig.endpoint, timeout=120)
    link.sendall(json.dumps(first).encode() + b"\n")
    assert link.recv(100) == b""
    link.close()


def test_a_message_that_is_none_ends_the_link_and_nothing_else(rig: Rig) -> None:
    for text in (b"{\n", b'{"op": "progress"}\n', b'{"op": "exit"}\n', b"[" * 100_000 + b"\n"):
        link = rig.connect("node1")
        link.sendall(text)
        assert link.recv(100) == b""
        link.close()
    link = rig.connect("node1")
    send(link, op="progress", workers=[worker(0)])
    while not rig.record.exists():
        assert rig.thread.is_alive()
    link.close()


def test_progress_is_recorded_with_the_time_at_which_the_node_has_looked(rig: Rig) -> None:
    link = rig.connect("node1")
    now = time.time()
    for step, moment in ((4, now - 2), (5, now + 500), (6, None)):
        send(link, op="progress", time=moment, workers=[worker(0, step=step, saved=step)])
        while not rig.record.exists() or len(rig.record.read_text().splitlines()) < step - 3:
            assert rig.thread.is_alive()
    link.close()
    first, *others = [json.loads(line)["time"] for line in rig.record.read_text().splitlines()]
    assert first == pytest.approx(now - 2, abs=0.002)
    assert all(now <= other <= time.time() + 0.001 for other in others)


def test_what_a_monitor_left_that_was_killed_is_removed_by_the_next_one(tmp_path: Path) -> None:
    import fcntl

    for name in ("dead", "alive"):
        (tmp_path / f"{FOLDER}{name}").mkdir()
        (tmp_path / f"{FOLDER}{name}" / "lock").touch()
    (tmp_path / f"{FOLDER}starting").mkdir()
    with (tmp_path / f"{FOLDER}alive" / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _remove_abandoned(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{FOLDER}alive", f"{FOLDER}starting"]
