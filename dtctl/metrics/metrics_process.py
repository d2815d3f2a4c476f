"""The launcher's side of the process that collects and sends figures: started and read, but not waited for.

The process reads the run's folder and gets nothing from the launcher but the end of its standard input, which shows
that the launcher is gone, however it ended. It returns its messages as events, a line each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Final

from dtctl import children
from dtctl.launch.records.events import AlertChanged, Emit, Note, parse_event
from dtctl.launch.records.record import RunRecord

OUTPUT_FILE: Final = "metrics.log"
"""File in the run's folder with the output of a bug."""
FINISH_S: Final = 8.0
"""Seconds that the launcher waits at its own end for messages that have not been sent."""
LINE_BYTES: Final = 1 << 16


class MetricsProcess:
    """The process of one run."""

    def __init__(self, record: RunRecord, emit: Emit) -> None:
        """Start it.

        Args:
            record: of the run.
            emit: called with its events, from another thread.

        Raises:
            OSError: no process can be started, or the run's folder cannot be written to.
        """
        self._emit, self._ending = emit, False
        log = os.open(record.folder / OUTPUT_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            self._process = subprocess.Popen(
                children.build_module_argv(sys.executable, "dtctl.metrics", str(record.folder)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is meant for the launcher; this process reports what follows
            )
        finally:
            os.close(log)
        self._hearing = threading.Thread(target=self._receive_events, name="metrics", daemon=True)
        self._hearing.start()

    def _receive_events(self) -> None:
        stdout = self._process.stdout
        while stdout is not None and (line := stdout.readline(LINE_BYTES)):
            event = parse_event(line.decode(errors="replace"))
            if isinstance(event, Note | AlertChanged):
                self._emit(event)
        code = self._process.wait()
        if not self._ending:
            text = f"metrics are no longer sent: their process has ended with code {code}; see {OUTPUT_FILE} of the run"
            self._emit(Note(text=text))

    def finish(self) -> None:
        """Give it some time to send the remaining messages, and end it."""
        self._ending = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(FINISH_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._hearing.join()
