"""Stacks of workers, written while their threads run: complete, and nothing ends a worker that is only asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtctl.launch.control.hang import StackTrace
from dtctl.supervisor import processes, progress
from dtctl.supervisor.stacks import StackDump

TOKEN = "stacks-of-a-test"
WORKER = """
import ctypes, sys, threading, time
from dtctl.runtime.telemetry.progress import ProgressFile

def deeper(levels):
    return deeper(levels - 1) if levels else [str(n) for n in range(9)]

def work():
    number = 0
    while True:
        number = number % 90 + 1
        deeper(4 * number)

def waits_for_the_end():
    time.sleep(1000)

ProgressFile(0, folder=sys.argv[1])
if sys.argv[2] == "ends":  # without threads: with them, Python 3.10 itself fails after its end
    c = ctypes.CDLL(None)
    getattr(c, "__cxa_atexit")(c.pause, None, None)  # after the interpreter
    print("ready", flush=True)
else:
    for _ in range(3):
        threading.Thread(target=work, daemon=True).start()
    threading.Thread(target=waits_for_the_end).start()
    print("ready", flush=True)  # the main thread has ended, and waits for this one
"""


@contextmanager
def worker(folder: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    """A worker, whose threads never rest if it waits."""
    env = {**os.environ, processes.TOKEN: TOKEN}
    argv = [sys.executable, "-c", WORKER, str(folder), how]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_who_is_asked_for_its_stacks_lives_on(tmp_path: Path) -> None:
    with worker(tmp_path, "waits") as process:
        (report,) = progress.read_worker_progress(str(tmp_path))
        for _ in range(2000):
            os.kill(process.pid, report.signal)
            time.sleep(0.0005)
        assert process.poll() is None, process.stderr and process.stderr.read()
        dump = StackDump(str(tmp_path), TOKEN)
        while not dump.ready():
            time.sleep(0.05)
        (answer,) = dump.answers()
    stack = StackTrace(state=answer.state, tool=answer.how, flight=answer.flight, text=answer.text)
    assert stack.frames[0][2] == "_shutdown"
    assert answer.text.count(" in work\n") == 3
    assert " in waits_for_the_end\n" in answer.text
    assert "_answer" not in answer.text


def test_an_interpreter_that_has_ended_ignores_the_question(tmp_path: Path) -> None:
    with worker(tmp_path, "ends") as process:
        (report,) = progress.read_worker_progress(str(tmp_path))
        bit = 1 << (report.signal - 1)
        status = Path(f"/proc/{process.pid}/status")

        def signals(kind: str) -> int:
            rows = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            return int(rows[kind], 16) & bit

        deadline = time.monotonic() + 60
        while signals("SigCgt") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert signals("SigIgn")
        os.kill(process.pid, report.signal)
        assert process.poll() is None
