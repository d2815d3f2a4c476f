"""`python -m dtctl.metrics FOLDER`: collects the figures of a run and sends them, until its launcher is gone.

Started by metrics_process.py. Prints events, a JSON object a line, and reads nothing: the end of standard input is the
end of the launcher.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Final

from dtctl.launch.records.record import RunRecord
from dtctl.launch.run_spec import load_run_spec
from dtctl.metrics.service import LOOK_S, MetricsService

FINISH_S: Final = 6.0
"""Seconds for sending the remaining messages."""


def _watch_launcher(gone: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    gone.set()


def main(folder: Path) -> None:
    """Collect and send until the launcher is gone."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the end of the launcher must be reported, too
    gone = threading.Event()
    threading.Thread(target=_watch_launcher, args=(gone,), daemon=True).start()
    record = RunRecord(folder)
    service = MetricsService(record, load_run_spec(record))
    while True:
        is_last = gone.is_set()
        service.evaluate_new_figures()
        if service.is_over or (is_last and not service.is_behind):
            break
        if not service.is_behind:
            gone.wait(LOOK_S)
    service.finish(time.monotonic() + FINISH_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
