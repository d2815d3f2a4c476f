"""The loop of every run, and what its end means, whichever back end has run it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

import pytest

from dtctl.errors import LaunchError
from dtctl.launch.control.controller import Result, run_backend_to_end
from dtctl.launch.control.failure import Failure

FAILURE = Failure(node="a", rank=0, exit_code=1, signal=None, time=0.0)


def result(
    failure: Failure | None = None, stopped_by: int | None = None, *, asked_to_stop: bool = False, attempts: int = 1
) -> Result:
    return Result(
        run="r", failure=failure, stopped_by=stopped_by, asked_to_stop=asked_to_stop, attempts=attempts, launch_s=None,
        duration_s=0.0, left_behind=0, nodes=1, goodput=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("end", "status", "exit_code"),
    [
        (result(), "succeeded", 0),
        (result(FAILURE), "failed", 8),
        (result(FAILURE, asked_to_stop=True), "stopped", 75),
        (result(None, signal.SIGTERM), "stopped", 143),
        (result(FAILURE, signal.SIGINT), "stopped", 130),
        (result(None, signal.SIGUSR1), "stopped", 75),
    ],
)
def test_what_an_end_means(end: Result, status: str, exit_code: int) -> None:
    assert (end.status, end.exit_code) == (status, exit_code)
    assert end.first_failure == (FAILURE if status == "failed" else None)


@dataclass
class Script:
    """A back end whose attempts take some polls each; at a poll, a signal may arrive."""

    polls: list[int]
    signals: list[int]
    signal_at: int = -1
    breaks_at: int = -1
    calls: list[str] = field(default_factory=list)
    attempts: int = 0
    stopped_by: int | None = None

    def start(self) -> bool:
        self.calls.append("start")
        self.attempts = 1
        return not self.signals

    @property
    def is_running(self) -> bool:
        return self.polls[self.attempts - 1] > 0

    def poll(self) -> None:
        count = self.calls.count("poll")
        self.calls.append("poll")
        if count == self.breaks_at:
            raise LaunchError("broken")
        if count == self.signal_at:
            self.signals.append(signal.SIGTERM)
        self.polls[self.attempts - 1] -= 1

    def interrupt(self, number: int, *, again: bool) -> None:
        self.calls.append("interrupt again" if again else "interrupt")
        self.stopped_by = number

    def restart(self) -> bool:
        self.calls.append("restart")
        if self.stopped_by is not None or self.attempts == len(self.polls):
            return False
        self.attempts += 1
        return True

    def close(self) -> None:
        self.calls.append("close")

    def result(self) -> Result:
        return result(stopped_by=self.stopped_by, attempts=self.attempts)


def test_attempts_follow_each_other_until_the_back_end_has_no_more() -> None:
    backend = Script([2, 1], [])
    end = run_backend_to_end(backend, backend.signals)
    assert backend.calls == ["start", "poll", "poll", "restart", "poll", "restart", "close"]
    assert (end.status, end.attempts) == ("succeeded", 2)


def test_a_signal_ends_the_attempt_and_no_other_one_follows() -> None:
    backend = Script([3, 1], [], signal_at=0)
    end = run_backend_to_end(backend, backend.signals)
    assert backend.calls == ["start", "poll", "interrupt", "poll", "interrupt", "poll", "restart", "close"]
    assert (end.status, end.exit_code, end.attempts) == ("stopped", 143, 1)


def test_a_signal_before_the_start_starts_nothing() -> None:
    backend = Script([1], [signal.SIGTERM])
    run_backend_to_end(backend, backend.signals)
    assert backend.calls == ["start", "close"]


def test_whatever_goes_wrong_the_back_end_is_closed() -> None:
    backend = Script([2], [], breaks_at=1)
    with pytest.raises(LaunchError):
        run_backend_to_end(backend, backend.signals)
    assert backend.calls[-1] == "close"
