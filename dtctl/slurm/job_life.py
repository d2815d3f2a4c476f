"""Life of a job, managed by the launcher inside it: waiting for Slurm, warning of the time limit, the requeue.

Followers of the job read the lines that this module writes into the job's log (batchlog.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from dtctl.names import REQUEUE_EXIT
from dtctl.slurm.addresses import ANSWER_S
from dtctl.spec import nodeset

ALIVE_FILE: Final = "alive"
"""File in the folder of this launcher's records; the launcher rewrites it as long as it lives."""
ALIVE_S: Final = 10.0
SILENT_S: Final = 60
"""Seconds without a sign of life of the launcher after which guards query Slurm for the job's nodes."""
GUARDS: Final = 2
"""Number of nodes that watch the first one, if the job outlives its nodes."""
WARN_AGAIN_S: Final = 15.0
"""Seconds until the warning is sent again, since a worker that is being started has no handler yet; doubled each
time."""
WARN_LOOK_S: Final = 3600.0
"""Seconds between two queries of the job's time limit."""
CONTROLLER_S: Final = 600.0
"""Longest wait for Slurm's controller while scontrol fails, in seconds; srun needs the controller, too."""
# A job that outlives its nodes also outlives the first one, and Slurm does not requeue it then. This script does, on up
# to GUARDS other nodes. It opens the launcher's file, since a network folder may show an old size for a long time, and
# queries Slurm last. It ignores the signal that warns workers of the time limit, which goes to all steps of the job.
GUARD: Final = r"""
trap '' USR1
job=$1 first=$2 restarts=$3 folder=$4 most=$5 before= silent=0
while sleep 10; do
  now=$(cat "$folder/alive" 2>/dev/null)
  [ "$now" = "$before" ] && silent=$((silent + 10)) || silent=0
  before=$now
  [ "$silent" -ge SILENT ] || continue
  silent=0
  runs=$(squeue --noheader --jobs="$job" --states=RUNNING --format=%i) && [ -n "$runs" ] || continue
  has=$(squeue --noheader --jobs="$job" --nodelist="$first" --format=%i) && [ -z "$has" ] || continue
  mkdir "$folder/lost-$first-$restarts" 2>/dev/null || exit 0
  echo "dtctl: a node was lost, and no other one is left for its place: the first one" >>"$folder/../job.log"
  [ "$restarts" -lt "$most" ] && scontrol requeue "$job" && exit 0
  echo "dtctl: the job ends: slurm.requeues allows to start it again $most times" >>"$folder/../job.log"
  scancel "$job"
done
""".replace("SILENT", str(SILENT_S))


class JobLifecycle:
    """A start of a job, managed from its first node."""

    def __init__(self, job: str, *, number: str, restarts: int) -> None:
        """Store the job's identity; no request is sent to Slurm.

        Args:
            job: Slurm's name of the job: its number, or `NUMBER_INDEX` of a task of an array.
            number: number of the job; each task of an array has its own number.
            restarts: number of times that Slurm has restarted the job.
        """
        self.job, self.number, self.restarts = job, number, restarts
        self.requeues = 0
        """Number of times that the job may be requeued."""
        self.warn_s = 0
        """Seconds between the warning to the workers and the end of the job's time."""
        self.nodes_needed = 1
        """Number of nodes that the job needs; with fewer left, it is requeued."""
        self._warned, self._over = threading.Event(), threading.Event()
        self._ends: float | None = None
        """Latest end of the job, in seconds since the epoch; None while it is not known."""
        self._guards: list[subprocess.Popen[bytes]] = []

    def wait_for_controller(self, folder: Path) -> bool:
        """Handle the warning of the time limit, and wait for Slurm's controller; return whether it has answered.

        Args:
            folder: folder of the records.
        """
        signal.signal(signal.SIGUSR1, lambda *_: self._warned.set())
        has_answered = self._wait_for_controller()
        for work in (self._warn_workers, lambda: self._stay_alive(folder / ALIVE_FILE)):
            threading.Thread(target=work, daemon=True).start()
        return has_answered

    def start_guards(self, folder: Path, nodes: Sequence[str]) -> None:
        """Start guards on other nodes that watch this node, the first of `nodes`."""
        for node in nodes[1 : 1 + GUARDS]:
            argv = ["srun", "--jobid", self.number, "--overlap", "--mem=0", f"--nodelist={node}", "--nodes=1"]
            argv += ["--ntasks=1", "--export=ALL", "--quiet", "--job-name=dtctl-guard", "bash", "-c", GUARD, "guard"]
            argv += [self.job, nodes[0], str(self.restarts), str(folder), str(self.requeues)]
            quiet = subprocess.DEVNULL
            self._guards.append(subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet))

    def finish_job(self, code: int, *, lost: bool, is_ended: bool) -> int:
        """Requeue the job if its end calls for that; return its exit code.

        Args:
            code: exit code of the launcher, unless the job is requeued.
            lost: whether a node was lost and no spare can replace it.
            is_ended: whether Slurm or a user ends the job.
        """
        self._over.set()
        for guard in self._guards:
            guard.terminate()
        if is_ended:
            write_line(f"ended with exit code {code}, {_format_current_time()}")
            return code
        if code and (lost or self._has_too_few_nodes()):
            lost = True
            write_line("a node was lost, and no other one is left for its place")
        if code == REQUEUE_EXIT or lost or (self._warned.is_set() and code):
            if self.restarts < self.requeues:
                write_line(f"to be started again, {_format_current_time()}")
                refusal = _find_command_error("scontrol", "requeue", self.job)
                if not refusal:
                    return 0
                write_line(f"Slurm does not start it again: {refusal}")
            else:
                write_line(f"started {self.requeues} times again, which is all that slurm.requeues allows")
        write_line(f"ended with exit code {code}, {_format_current_time()}")
        return code

    def _wait_for_controller(self) -> bool:
        names = "names of nodes stand for their addresses"
        if shutil.which("scontrol") is None:
            write_line(f"there is no scontrol on this node: {names}, and nothing is requeued")
            return False
        until, is_told = time.monotonic() + CONTROLLER_S, False
        while True:
            try:
                if self._read_end():
                    return True
            except subprocess.TimeoutExpired:
                # A missing controller would make scontrol fail by itself, so srun may work.
                write_line(
                    f"scontrol has printed nothing for {ANSWER_S:g} s: the launcher goes on without it, {names}, and "
                    "only Slurm's own signal warns of the time limit"
                )
                return False
            if not is_told:
                write_line(f"waiting for Slurm's controller, which does not answer, {_format_current_time()}")
                is_told = True
            if self._warned.wait(5.0) or time.monotonic() > until:
                return False

    def _warn_workers(self) -> None:
        """Warn the workers, which then save and exit, once Slurm warns this process or the time is nearly over.

        Slurm sends its signal once, up to a minute early, perhaps before this process has installed its handler.
        """
        while not self._warned.wait(self._until_warning()):
            if self._over.is_set():
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._read_end()  # a user may have extended the job's time limit
            if self._until_warning() == 0.0:
                self._warned.set()
        write_line("the time is nearly over, the workers save")
        again_s = WARN_AGAIN_S
        while not self._over.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                _run_slurm_command("scancel", "--signal=USR1", self.job)
            self._over.wait(again_s)
            again_s *= 2

    def _until_warning(self) -> float:
        """Return the seconds until the workers must be warned, at most an hour."""
        remaining_s = WARN_LOOK_S if self._ends is None else self._ends - self.warn_s - time.time()
        return min(max(0.0, remaining_s), WARN_LOOK_S)

    def _read_end(self) -> bool:
        """Query Slurm for the latest end of the job; return whether it has answered.

        Raises:
            subprocess.TimeoutExpired: scontrol does not end in time.
        """
        told = _run_slurm_command("scontrol", "show", "job", "-o", self.job)
        if told is None:
            return False
        found = re.search(r"\bEndTime=(\d[\dT:-]+)", told)
        self._ends = datetime.fromisoformat(found[1]).timestamp() if found else None
        return True

    def _stay_alive(self, path: Path) -> None:
        while not self._over.wait(ALIVE_S):
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with os.fdopen(fd, "w", encoding="ascii") as file:
                    file.write(str(time.time()))
            except OSError:
                continue  # the disk may be full

    def _has_too_few_nodes(self) -> bool:
        """Return whether Slurm has taken so many nodes from the job that it cannot continue."""
        try:
            held = (_run_slurm_command("squeue", "--noheader", f"--jobs={self.job}", "--format=%N") or "").strip()
        except subprocess.TimeoutExpired:
            return False
        return bool(held) and len(nodeset.expand_nodeset(held)) < self.nodes_needed


def write_line(text: str) -> None:
    """Write a line into the job's log."""
    sys.stdout.write(f"dtctl: {text}\n")
    sys.stdout.flush()


def _format_current_time() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _find_command_error(*argv: str) -> str:
    """Run a command of Slurm; return its error message if it fails, or an empty text."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    return "" if done.returncode == 0 else done.stderr.strip() or f"{argv[0]} exited with status {done.returncode}"


def _run_slurm_command(*argv: str) -> str | None:
    """Run a command of Slurm; return its output, or None if it fails or does not exist.

    Raises:
        subprocess.TimeoutExpired: the command does not end in time.
    """
    try:
        env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=ANSWER_S, env=env)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
