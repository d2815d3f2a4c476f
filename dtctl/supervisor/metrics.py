"""Lines that rank 0 writes to metrics.jsonl, given to the link by offset as logs are. Stdlib only, Python 3.8."""

from __future__ import annotations

import os

from dtctl.supervisor import frames
from dtctl.supervisor.link import CHUNK, ControlLink
from dtctl.supervisor.messages.attempt import MetricsBegin

METRICS = -2
"""Rank under which the lines of metrics.jsonl travel."""


class MetricsTail:
    """One file and how much of it the link has been given."""

    def __init__(self, run_dir: str) -> None:
        """Nothing was given yet."""
        self.path = os.path.join(run_dir, "metrics.jsonl")
        self.sent = 0

    def feed(self, link: ControlLink) -> None:
        """Queue what the link has not been given, as much as it can take."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError:
            return
        try:
            if os.fstat(fd).st_size < self.sent:  # cut back to the step that a snapshot resumed at
                self.sent = 0
            while len(link.out) < CHUNK:
                data = os.pread(fd, CHUNK, self.sent)
                if not data:
                    return
                if self.sent == 0:
                    link.out += frames.pack_json(MetricsBegin())
                self.sent += len(data)
                link.out += frames.pack(frames.LOG, data, METRICS)
        finally:
            os.close(fd)
