"""Lines that rank 0 writes to metrics.jsonl, sent over the link by offset like logs. Stdlib only, Python 3.8."""

from __future__ import annotations

import os

from dtctl.supervisor import frames
from dtctl.supervisor.frames import METRICS
from dtctl.supervisor.link import CHUNK, ControlLink
from dtctl.supervisor.messages.attempt import MetricsBegin


class MetricsTail:
    """The file of metrics, and the number of its bytes that were queued for the link."""

    def __init__(self, run_dir: str) -> None:
        """Begin before the first byte of the file."""
        self.path = os.path.join(run_dir, "metrics.jsonl")
        self.sent = 0

    def feed(self, link: ControlLink) -> None:
        """Queue bytes that were not queued yet, as many as the link can take."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except OSError:
            return
        try:
            if os.fstat(fd).st_size < self.sent:  # A resume has truncated the file to the snapshot's step.
                self.sent = 0
            while len(link.out) < CHUNK:
                data = os.pread(fd, CHUNK, self.sent)
                if not data:
                    return
                if self.sent == 0:
                    link.out += frames.pack_json(MetricsBegin())
                self.sent += len(data)
                link.out += frames.pack_frame(frames.LOG, data, METRICS)
        finally:
            os.close(fd)
