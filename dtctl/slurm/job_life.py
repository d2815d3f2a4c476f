"""Work of a launcher inside a job for the job: it waits for Slurm, warns of the time limit, has the job requeued.

Followers of the job read its lines in the job's log (batchlog.py).
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
"""File in the folder of this launcher's records that it rewrites as long as it lives."""
ALIVE_S: Final = 10.0
SILENT_S: Final = 60
"""Seconds without a sign of life of the launcher after which guards ask Slurm whether its node is still the job's."""
GUARDS: Final = 2
"""Nodes that look after the first one, if the job outlives its nodes."""
WARN_AGAIN_S: Final = 15.0
"""A worker that is just being started does not listen yet. Twice as long after each time."""
WARN_LOOK_S: Final = 3600.0
"""Seconds between two looks when the job ends."""
CONTROLLER_S: Final = 600.0
"""Seconds that Slurm's controller is waited for while scontrol fails: without a controller srun would, too."""
# A job that outlives its nodes outlives the first one, too, and Slurm does not start it again then. So this script
# does, on up to GUARDS other nodes. It opens the launcher's file, since a network folder may show an old size for long,
# and queries Slurm last. It ignores the signal that warns workers of the time limit, which goes to all steps of the
# job.
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


class JobLife:
    """One start of a job, from its first node."""

    def __init__(self, job: str, *, number: str, restarts: int) -> None:
        """Nothing is asked of Slurm yet.

        Args:
            job: what Slurm calls it: its number, or `NUMBER_INDEX` of a task of an array.
            number: its number, which such a task has for itself, too.
            restarts: how often Slurm has started it again.
        """
        self.job, self.number, self.restarts = job, number, restarts
        self.requeues = 0
        """Number of times that it may be started again."""
        self.warn_s = 0
        """Seconds before its end at which the workers are warned."""
        self.nodes_needed = 1
        """Nodes that it needs; with fewer left, it is started again."""
        self._warned, self._over = threading.Event(), threading.Event()
        self._ends: float | None = None
        """Time when the job ends at the latest, in seconds since the epoch; None while that is not known."""
        self._guards: list[subprocess.Popen[bytes]] = []

    def await_controller(self, folder: Path) -> bool:
        """Listen for the warning of the time limit, and wait for Slurm's controller; return whether it has answered.

        Args:
            folder: of the records.
        """
        signal.signal(signal.SIGUSR1, lambda *_: self._warned.set())
        has_answered = self._wait_for_controller()
        for work in (self._warn, lambda: self._stay_alive(folder / ALIVE_FILE)):
            threading.Thread(target=work, daemon=True).start()
        return has_answered

    def start_guards(self, folder: Path, nodes: Sequence[str]) -> None:
        """Have others look after this node, the first of `nodes`."""
        for node in nodes[1 : 1 + GUARDS]:
            argv = ["srun", "--jobid", self.number, "--overlap", "--mem=0", f"--nodelist={node}", "--nodes=1"]
            argv += ["--ntasks=1", "--export=ALL", "--quiet", "--job-name=dtctl-guard", "bash", "-c", GUARD, "guard"]
            argv += [self.job, nodes[0], str(self.restarts), str(folder), str(self.requeues)]
            quiet = subprocess.DEVNULL
            self._guards.append(subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet))

    def finish_job(self, code: int, *, lost: bool, is_ended: bool) -> int:
        """Have the job started again where that is right; return its exit code.

        Args:
            code: with which the launcher would end.
            lost: whether a node was lost, and there is none for its place.
            is_ended: whether Slurm or a user ends the job.
        """
        self._over.set()
        for guard in self._guards:
            guard.terminate()
        if is_ended:
            write_line(f"ended with exit code {code}, {_now()}")
            return code
        if code and (lost or self._has_too_few_nodes()):
            lost = True
            write_line("a node was lost, and no other one is left for its place")
        if code == REQUEUE_EXIT or lost or (self._warned.is_set() and code):
            if self.restarts < self.requeues:
                write_line(f"to be started again, {_now()}")
                refusal = _refusal("scontrol", "requeue", self.job)
                if not refusal:
                    return 0
                write_line(f"Slurm does not start it again: {refusal}")
            else:
                write_line(f"started {self.requeues} times again, which is all that slurm.requeues allows")
        write_line(f"ended with exit code {code}, {_now()}")
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
                # Without a controller it would have failed by itself: srun may be well.
                write_line(
                    f"scontrol has printed nothing for {ANSWER_S:g} s: the launcher goes on without it, {names}, and "
                    "Slurm's own signal alone warns of the time limit"
                )
                return False
            if not is_told:
                write_line(f"waiting for Slurm's controller, which does not answer, {_now()}")
                is_told = True
            if self._warned.wait(5.0) or time.monotonic() > until:
                return False

    def _warn(self) -> None:
        """Warn the workers, which save and end, once Slurm warns this process or the time is nearly over.

        Slurm sends its signal once, up to a minute early, and so perhaps before a handler is installed here.
        """
        while not self._warned.wait(self._until_warning()):
            if self._over.is_set():
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._read_end()  # a user may have given the job more time
            if self._until_warning() == 0.0:
                self._warned.set()
        write_line("the time is nearly over, the workers save")
        again_s = WARN_AGAIN_S
        while not self._over.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                _ask("scancel", "--signal=USR1", self.job)
            self._over.wait(again_s)
            again_s *= 2

    def _until_warning(self) -> float:
        """Return the seconds until the workers are to be warned, at most an hour."""
        remaining_s = WARN_LOOK_S if self._ends is None else self._ends - self.warn_s - time.time()
        return min(max(0.0, remaining_s), WARN_LOOK_S)

    def _read_end(self) -> bool:
        """Ask Slurm when the job ends at the latest; return whether it has answered.

        Raises:
            subprocess.TimeoutExpired: the program has printed nothing.
        """
        told = _ask("scontrol", "show", "job", "-o", self.job)
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
                continue  # a full disk

    def _has_too_few_nodes(self) -> bool:
        """Return whether Slurm has taken nodes from the job, so that it could not continue."""
        try:
            held = (_ask("squeue", "--noheader", f"--jobs={self.job}", "--format=%N") or "").strip()
        except subprocess.TimeoutExpired:
            return False
        return bool(held) and len(nodeset.expand(held)) < self.nodes_needed


def write_line(text: str) -> None:
    """Write a line into the job's log."""
    sys.stdout.write(f"dtctl: {text}\n")
    sys.stdout.flush()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _refusal(*argv: str) -> str:
    """Run a command of Slurm; return why it fails, in its own words, or nothing."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    return "" if done.returncode == 0 else done.stderr.strip() or f"{argv[0]} exited with status {done.returncode}"


def _ask(*argv: str) -> str | None:
    """Run a command of Slurm; return what it prints, or None where it fails or is not there.

    Raises:
        subprocess.TimeoutExpired: it does not end in time.
    """
    try:
        env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=ANSWER_S, env=env)
    except OSError:
        return None
    return done.stdout if done.returncode == 0 else None
