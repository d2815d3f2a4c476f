"""Ctrl-C before a command has begun. Imports next to nothing: until then Python prints a traceback."""

import _signal  # type: ignore[import-not-found]  # `signal` loads enum, which takes longer than all before it
import os


def leave(number: int, _frame: object) -> None:
    """End the process at once: nothing was begun yet, or the user does not want to wait for an orderly end."""
    try:
        os.write(2, b"stopped\n")
    finally:
        os._exit(128 + number)


def leave_when_interrupted() -> None:
    """Let Ctrl-C do so, unless the parent process has set it to be ignored."""
    if _signal.getsignal(_signal.SIGINT) != _signal.SIG_IGN:
        _signal.signal(_signal.SIGINT, leave)
