"""How a worker hears of a lost peer, and what it says, with the supervisor's own end of the pipes."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from dtctl import names
from dtctl.runtime.live.control import RendezvousPoint, SupervisorLink
from dtctl.supervisor.messages.attempt import Heal, Join, LiveReport
from dtctl.supervisor.replacement_pipes import ReplacementPipes

pytestmark = pytest.mark.torch


class Rig:
    """A supervisor's pipes, and the worker of rank 1 of two."""

    def __init__(self, folder: Path, epoch: int = 0) -> None:
        self.pipes = ReplacementPipes(str(folder), [1])
        environ = {names.LIVE: str(folder)} | ({names.LIVE_EPOCH: str(epoch)} if epoch else {})
        control = SupervisorLink.build_from_environ(environ, 1, 2)
        assert control is not None
        self.control = control
        control.trains = True
        self.met: list[RendezvousPoint | None] = []
        self.heard: list[LiveReport] = []

    def wait_for_meeting(self, obstacle: str = "") -> threading.Thread:
        thread = threading.Thread(
            target=lambda: self.met.append(self.control.wait_for_meeting(7, lambda: obstacle)), daemon=True
        )
        thread.start()
        return thread

    def said(self, state: str) -> LiveReport:
        """What the worker says, up to something of this kind."""
        while not self.heard or self.heard[0].state != state:
            self.heard = [*self.heard[1:], *self.pipes.read()] if self.heard else self.pipes.read()
        return self.heard.pop(0)


def test_a_survivor_says_that_it_is_ready_and_is_told_where_to_meet(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "live")
    waiting = rig.wait_for_meeting()
    rig.pipes.heal(Heal(epoch=1, lost=[0], host=1))
    hosting = rig.said("hosting")
    assert hosting.port > 0
    report = rig.said("ready")
    assert (report.rank, report.epoch, report.step) == (1, 1, 7)
    rig.pipes.heal(Heal(epoch=2, lost=[0], host=0))
    assert rig.said("ready").epoch == 2, "another one was lost meanwhile"
    rig.pipes.join(Join(epoch=1, address="10.0.0.1", port=5))
    rig.pipes.join(Join(epoch=2, address="10.0.0.2", port=6))
    waiting.join(60)
    assert rig.met == [RendezvousPoint(2, "10.0.0.2", 6)]
    assert rig.control.get_hosted_store(RendezvousPoint(2, "10.0.0.2", 6)) is None
    assert rig.control.is_wanted


def test_who_hosts_the_store_and_waits_in_it_is_freed_by_the_next_loss(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "live")
    rig.pipes.heal(Heal(epoch=1, lost=[0], host=1))
    rig.said("hosting")
    store = rig.control.get_hosted_store(RendezvousPoint(1, "10.0.0.1", 5))
    assert store is not None
    freed = []

    def wait() -> None:
        try:
            store.wait(["what the lost one would have set"], timedelta(seconds=300))
        except RuntimeError as exc:
            freed.append(exc)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    rig.pipes.heal(Heal(epoch=2, lost=[0], host=0))
    waiting.join(60)
    assert freed


def test_one_that_replaces_is_ready_without_being_told(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "live", epoch=3)
    assert rig.control.newcomer
    waiting = rig.wait_for_meeting()
    assert rig.said("ready").epoch == 3
    rig.pipes.join(Join(epoch=3, address="10.0.0.1", port=5))
    waiting.join(60)
    assert rig.met == [RendezvousPoint(3, "10.0.0.1", 5)]


def test_what_cannot_be_healed_is_said(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "live")
    waiting = rig.wait_for_meeting("its buffers change")
    rig.pipes.heal(Heal(epoch=1, lost=[0], host=0))
    assert rig.said("unable").why == "its buffers change"
    waiting.join(60)
    assert rig.met == [None]


def test_who_is_not_training_says_so_at_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "live")
    rig.control.trains = False
    rig.pipes.heal(Heal(epoch=1, lost=[0], host=0))
    assert rig.said("unable").epoch == 1


def test_the_end_of_the_attempt_ends_the_wait(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "live")
    waiting = rig.wait_for_meeting()
    rig.pipes.end()
    waiting.join(60)
    assert rig.met == [None]


def test_without_a_supervisor_or_alone_there_is_no_link(tmp_path: Path) -> None:
    assert SupervisorLink.build_from_environ({}, 0, 2) is None
    assert SupervisorLink.build_from_environ({names.LIVE: str(tmp_path)}, 0, 1) is None
