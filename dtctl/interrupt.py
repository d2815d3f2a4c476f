"""Handling of Ctrl-C before a command begins; it imports little, since Python prints a traceback until then."""

import _signal  # type: ignore[import-not-found]  # `signal` loads enum, which takes longer than all before it
import os


def exit_immediately(number: int, _frame: object) -> None:
    """End the process immediately: it has begun no work, or the user does not wait for an orderly end."""
    try:
        os.write(2, b"stopped\n")
    finally:
        os._exit(128 + number)


def leave_when_interrupted() -> None:
    """End the process at Ctrl-C, unless the parent process has set the signal to be ignored."""
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
        _signal.signal(_signal.SIGINT, exit_immediately)
