"""A launcher in the background: the process that `dtctl launch --detach` starts on the control machine.

The same command is started again in a session of its own, and its output is written to a file in the run's folder. The
nodes keep the job running even when this launcher dies; while it lives, it restarts all workers and collects logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from dtctl import children, names
from dtctl.errors import LaunchError
from dtctl.launch.records.events import AttemptRunning, Emit
from dtctl.launch.records.record import RunRecord, translate_write_errors
from dtctl.launch.records.run_writer import RunWriter, prepare_state_folder
from dtctl.launch.records.state import read_run_state

OUTPUT_FILE = "launcher.log"
POLL_S = 0.05


def take_up_in_background(record: RunRecord) -> str:
    """Start a new launcher for a run without one, and wait until it has taken over; return an error text or nothing."""
    with os.fdopen(RunWriter(record.folder).open_output(OUTPUT_FILE), "rb") as log:
        log.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            children.build_module_argv(sys.executable, "dtctl", "take-up", str(record.folder)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        while process.poll() is None:
            if record.info().pid == process.pid:
                return ""
            time.sleep(POLL_S)
        # The run may have ended at once, or another launcher may have been faster: then the record shows it.
        has_taken_over = (
            record.info().pid == process.pid or record.has_launcher() or read_run_state(record).done is not None
        )
        return "" if has_taken_over else log.read().decode(errors="replace").strip()


def launch_in_background(base_dir: Path, run: str, *, on_event: Emit) -> tuple[int, str]:
    """Start the launcher and wait until the job runs on all nodes or has failed; return the exit code and output.

    Args:
        base_dir: folder of the spec.
        run: run id.
        on_event: called with every event of the run until the job runs.
    """
    # Another launch may use the same name at the same time, so the file has the id of this process in its name.
    partial = prepare_state_folder(base_dir, names.RUNS_DIR).parent / f".{run}.{os.getpid()}.launcher.log"
    # A launcher that was killed before its run had a folder has left this file, or another user has put a link here.
    partial.unlink(missing_ok=True)
    with translate_write_errors(partial):
        opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "wb") as log:
        process = subprocess.Popen(
            children.build_module_argv(sys.executable, "dtctl", *sys.argv[1:]),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, names.BACKGROUND: run},
        )
    record = RunRecord(base_dir / names.STATE_DIR / names.RUNS_DIR / run)
    handled = 0
    while True:
        # The process is checked before its events are read, so that the last one is not missed.
        ended = process.poll() is not None
        events = list(record.events()) if _is_launched_by(record, process.pid) else []
        for event in events[handled:]:
            on_event(event)
            if isinstance(event, AttemptRunning):
                partial.replace(record.folder / OUTPUT_FILE)
                return 0, ""
        handled = len(events)
        if ended:
            break
        time.sleep(POLL_S)
    output = partial.read_text(encoding="utf-8", errors="replace")
    partial.unlink()
    return process.returncode, output


def _is_launched_by(record: RunRecord, pid: int) -> bool:
    """Return whether a process has made the record; another launch of the same name may have been faster."""
    try:
        return record.info().pid == pid
    except LaunchError:
        return False
