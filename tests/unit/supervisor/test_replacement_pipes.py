"""The pipes between a supervisor and workers whose lost peers are replaced."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from dtctl import names
from dtctl.supervisor import replacement_pipes
from dtctl.supervisor.messages.attempt import Heal, Join
from dtctl.supervisor.replacement_pipes import ReplacementPipes

control = pytest.importorskip("dtctl.runtime.live.control", reason="it needs torch")


def heard(folder: Path, rank: int) -> list[dict[str, object]]:
    """What a worker that opens its pipe now has been told."""
    pipe = os.open(folder / f"rank-{rank}", os.O_RDONLY | os.O_NONBLOCK)
    try:
        return [json.loads(line) for line in os.read(pipe, 1 << 16).splitlines()]
    except BlockingIOError:
        return []
    finally:
        os.close(pipe)


def test_both_ends_know_the_same_names() -> None:
    assert (replacement_pipes.LIVE, replacement_pipes.LIVE_EPOCH, replacement_pipes.REPORTS) == (
        names.LIVE,
        names.LIVE_EPOCH,
        control.REPORTS,
    )


def test_those_that_stay_are_freed_and_the_lost_one_gets_a_pipe_of_its_own(tmp_path: Path) -> None:
    pipes = ReplacementPipes(str(tmp_path / "live"), [2, 3])
    pipes.send_to_worker(3, op="for the lost one")
    pipes.undecided = {3}
    pipes.heal(Heal(epoch=1, lost=[3, 9], host=2))
    assert (pipes.missing, pipes.undecided) == ([3], set())
    assert heard(tmp_path / "live", 2) == [{"op": "heal", "epoch": 1, "host": 2}]
    pipes.join(Join(epoch=1, address="10.0.0.1", port=5))
    assert heard(tmp_path / "live", 3) == [{"op": "join", "epoch": 1, "address": "10.0.0.1", "port": 5}]
    pipes.close()


def test_a_loss_that_the_launcher_has_not_heard_of_stays_undecided(tmp_path: Path) -> None:
    pipes = ReplacementPipes(str(tmp_path / "live"), [2, 3])
    pipes.undecided = {3}
    pipes.heal(Heal(epoch=1, lost=[2], host=0))
    assert (pipes.missing, pipes.undecided) == ([2], {3})
    pipes.end()
    assert (pipes.missing, pipes.undecided) == ([], set())
    pipes.close()


@pytest.mark.parametrize("foreign", [b"nonsense\n", b"[]\n", b'{"rank": 7, "pid": 1, "epoch": 1, "state": "ready"}\n'])
def test_workers_are_heard_and_what_is_not_theirs_is_left_out(tmp_path: Path, foreign: bytes) -> None:
    pipes = ReplacementPipes(str(tmp_path / "live"), [0])
    assert pipes.read() == []
    worker = os.open(tmp_path / "live" / control.REPORTS, os.O_WRONLY | os.O_NONBLOCK)
    os.write(worker, foreign + b'{"rank": 0, "pid": 1, "epoch": 1, "state": "ready", "step": -1}\n{"rank": 0,')
    os.close(worker)
    assert [(report.state, report.step) for report in pipes.read()] == [("ready", -1)]
    pipes.close()
