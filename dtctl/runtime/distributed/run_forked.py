"""Work in a forked process, so that nothing that it changes or breaks remains: random numbers, caches, data sets."""

from __future__ import annotations

import json
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from dtctl.errors import WorkerFailed


def run_in_forked_process(work: Callable[[], dict[str, Any]], *, limit_s: float) -> dict[str, Any]:
    """Return the JSON result of `work` from a forked process without output and GPU, and with one thread.

    Raises:
        WorkerFailed: the work raised an error, died, or took too long; the message states which.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns that threads of this process are missing in the fork
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _run_child_and_exit(work, writing)
    os.close(writing)
    try:
        text = _read_pipe_with_timeout(reading, limit_s)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)  # the process was not waited for yet, so its id has not been reused
        os.waitpid(child, 0)
    if text is None:
        raise WorkerFailed(f"it takes more than {limit_s:.0f} s")
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        raise WorkerFailed("its process died") from None
    if "failed" in answer:
        raise WorkerFailed(str(answer["failed"]))
    return answer


def _run_child_and_exit(work: Callable[[], dict[str, Any]], writing: int) -> None:
    """Do the work in the forked process, send the result, and end without the exit handlers of a process."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        torch.set_num_threads(1)  # threads of OpenMP are missing in the fork, and torch would wait for them
        warnings.simplefilter("ignore")
        answer = work()
    except BaseException as exc:  # noqa: BLE001  # any error is the answer
        answer = {"failed": f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"}
    with os.fdopen(writing, "w") as file:
        json.dump(answer, file)
    os._exit(0)


def _read_pipe_with_timeout(reading: int, limit_s: float) -> bytes | None:
    """Return all data that is written, or None after a time limit."""
    text, end_s = b"", time.monotonic() + limit_s
    while select.select([reading], [], [], max(0.0, end_s - time.monotonic()))[0]:
        part = os.read(reading, 1 << 16)
        if not part:
            return text
        text += part
    return None
