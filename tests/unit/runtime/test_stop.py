"""Signals that ask a training to stop."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from dtctl.runtime.stop import REQUEUE_EXIT, SIGNALS, Outcome, StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_noted_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest().handling_stop_signals() as asked:
        assert asked.signal is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert asked.signal == number
    assert signal.getsignal(number) is before


def test_who_has_stopped_is_not_ended_by_a_second_signal() -> None:
    """It comes from a launcher that has seen another worker end."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopRequest().handling_stop_signals() as asked:
            assert asked.build_stop_outcome() is Outcome.STOPPED
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, before)


def test_other_threads_listen_to_nothing() -> None:
    heard: list[object] = []

    def body() -> None:
        with StopRequest().handling_stop_signals() as asked:
            heard.append(asked.signal)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join()
    assert heard == [None]


def test_exit_codes_are_the_contract() -> None:
    assert Outcome.FINISHED.exit_code == 0
    assert Outcome.STOPPED.exit_code == REQUEUE_EXIT == 75
