"""A run's folder on the control machine: what was planned, what happened, what was printed, how it ended.

    .dtctl/runs/RUN/
        plan.json        the plan of the newest attempt
        spec.yaml        the spec as it was at launch, `--set` included
        run.json         what finds the run again: its token, its launcher's process, its spec
        events.jsonl     what happened, one JSON object a line, appended as it happens
        logs/NODE/rank-R.log, logs/NODE/agent.log
        logs/NODE/rank-R.times, logs/attempts.jsonl   when a log had which size
        metrics.jsonl    as rank 0 wrote it
        ledger.json      where the time went
        hangs/attempt-N/NODE/rank-R.txt   where a worker stood when the attempt made no progress

It is written by run_writer.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtctl import folders, names, shell
from dtctl.errors import LaunchError, UsageError

if TYPE_CHECKING:
    from dtctl.launch.records.events import Event

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
RUN_FILE = "run.json"
RUN_BYTES, PLAN_BYTES = 4 << 20, 64 << 20
EVENTS_BYTES = 64 << 20
"""Bytes at the beginning and at the end that are read of larger files."""
LOCK_FILE = "launcher.lock"


def new_run_id(job: str, *, now: float, salt: str | None = None) -> str:
    """Return a run id that sorts by time: job, month and day, hour minute second, four random digits."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", job).strip("-_") or "job"
    stamp = time.strftime("%m%d-%H%M%S", time.localtime(now))
    return f"{stem[:32]}-{stamp}-{salt or secrets.token_hex(2)}"


def check_run_name(name: str) -> str:
    """`name` itself, if it can be the name of a run.

    Raises:
        UsageError: it cannot be used as the name of a folder everywhere.
    """
    if not RUN_NAME.match(name):
        raise UsageError(
            f"{name!r} cannot be the name of a run",
            where="--name",
            hint="use letters, digits, `.`, `_` and `-`, at most 64, and begin with a letter or a digit",
        )
    return name


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of the system into one that names the place.

    Raises:
        LaunchError: the disk is full, read-only, or the folder belongs to another user.
    """
    try:
        yield
    except OSError as exc:
        raise LaunchError(
            f"the run's records cannot be written on this machine: {exc.strerror}",
            where=str(exc.filename or path),
            hint=f"dtctl writes below {names.STATE_DIR} in the folder of the spec; check its free space and owner",
        ) from exc


def check_no_link(base_dir: Path, *parts: str) -> None:
    """Refuse a path of dtctl's own that leads elsewhere: the author of the folder may have put a link there.

    Args:
        base_dir: The folder of the spec.
        parts: Names from its `.dtctl` on.

    Raises:
        LaunchError: A part of it is a link.
    """
    path = base_dir
    for name in (names.STATE_DIR, *parts):
        path /= name
        if path.is_symlink():
            raise LaunchError(
                "records are not written through a link, which may lead anywhere",
                where=str(path),
                hint=f"remove it (`rm {shell.quote(str(path))}`); dtctl makes a folder there",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts that find a run again from another terminal, or tomorrow."""

    run: str
    token: str
    """Marks the run's processes on the nodes; not a secret towards those who may log in there."""
    pid: int
    """Process id of the launcher."""
    started: float
    """Seconds since the epoch."""
    spec: str
    """Absolute path of the spec, or an empty string for a run without one."""
    command: list[str]
    """The command line that launched it, without values of secrets (they are never on it)."""
    detached: bool
    pid_started: int = 0
    """Start of the launcher, in clock ticks since boot, which distinguishes it from a later process of the same id; 0
    where the system does not report it."""
    boot: str = ""
    """Id of the boot since which these are counted; empty where the system does not report it."""
    slurm: bool = False
    """True if the run is a job of Slurm, which continues without a follower."""
    snapshots: dict[str, str] = field(default_factory=dict)
    """Node -> folder of the snapshots, where the run continues another one's."""
    ssh: str = ""
    """Program that connects to the nodes, `openssh` or `paramiko`; empty where they are reached otherwise."""
    sweep: dict[str, str] = field(default_factory=dict)
    """Key of the spec -> value, of a run that is one of a sweep."""
    environment: str = ""
    """Digest of the environment that its workers run in; empty: the nodes' own Python."""

    @property
    def resumes(self) -> str:
        """Name of the earlier run that this one continues; empty for one from scratch."""
        words = iter(self.command)
        for word in words:
            if word == "--resume":
                return next(words, "")
            if word.startswith("--resume="):
                return word.partition("=")[2]
            if word == "--":
                break
        return ""

    @property
    def command_line(self) -> str:
        """`command` as it was typed."""
        return shell.join(["dtctl", *self.command[1:]])


class RunRecord:
    """The folder of one run, as everybody may read it; its launcher writes it (run_writer.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder.name

    def check_no_link(self) -> None:
        """Refuse a run's folder, or one of its logs, that is a link.

        Raises:
            LaunchError: It is.
        """
        base, runs = self.base_dir, (names.RUNS_DIR, self.run)
        check_no_link(base, *runs, names.LOGS_DIR)
        logs = self.folder / names.LOGS_DIR
        for path in logs.iterdir() if logs.is_dir() else ():
            check_no_link(base, *runs, names.LOGS_DIR, path.name)

    def info(self) -> RunInfo:
        """Return the facts about the launcher of the run.

        Raises:
            LaunchError: the folder is not that of a run.
        """
        from dtctl.launch.records import validate_records  # only to read a record, which a launch does not

        try:
            stored = json.loads(folders.read_regular(str(self.folder / RUN_FILE), RUN_BYTES))
            validate_records.INFO(stored)
            return RunInfo(**stored)
        except (OSError, ValueError, TypeError, RecursionError) as exc:
            raise LaunchError(f"{self.run} is not a run that dtctl can read", where=str(self.folder)) from exc

    @property
    def base_dir(self) -> Path:
        """The folder that the run was launched from."""
        return self.folder.parent.parent.parent

    def read_host_names(self) -> dict[str, str]:
        """Return the names that the nodes of the newest attempt have themselves, by node, as far as they are known."""
        return {node["name"]: node["host"] for node in self.plan().get("nodes", ()) if node.get("host")}

    def plan(self) -> dict[str, Any]:
        """Return the plan of the newest attempt as plain data; empty when none was made."""
        from dtctl.launch.records import validate_records

        try:
            stored: dict[str, Any] = json.loads(folders.read_regular(str(self.folder / names.PLAN_FILE), PLAN_BYTES))
            validate_records.PLAN(stored)
        except (OSError, ValueError, RecursionError):
            return {}
        return stored

    def whole_plan(self) -> dict[str, Any]:
        """Return the plan of the newest attempt, with all that acting on it needs.

        Raises:
            LaunchError: none was ever made, or it lacks something.
        """
        stored = self.plan()
        if not stored:
            raise LaunchError(f"run {self.run} was never started", where=str(self.folder))
        nodes = stored.get("nodes")
        needed = {"workdir", "slots", "env", "setup", "python"}
        is_whole = stored.keys() >= {"attempt", "rendezvous"} and all(needed <= node.keys() for node in nodes or ())
        if not nodes or not is_whole:
            raise LaunchError(f"the plan of run {self.run} is incomplete", where=str(self.folder / names.PLAN_FILE))
        return stored

    def code_folders(self) -> dict[str, str]:
        """Node -> folder of the pushed code there; without the nodes that were sent none."""
        from dtctl.launch.records.events import NodeChanged

        changes = (event for event in self.events() if isinstance(event, NodeChanged))
        return {event.node: event.push.path for event in changes if event.push is not None and event.push.path}

    def has_launcher(self) -> bool:
        """Return whether a living process is the run's launcher."""
        if (lock_fd := self._lock(fcntl.LOCK_SH)) is None:
            return True
        os.close(lock_fd)
        return False

    def _lock(self, kind: int) -> int | None:
        """Return a descriptor that holds the launcher's lock; None when another process holds it."""
        path = self.folder / LOCK_FILE
        with writing(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def events(self) -> Iterator[Event]:
        """Yield all events so far; a half-written last line, and what is none, is left out."""
        try:
            with os.fdopen(folders.open_regular(str(self.folder / names.EVENTS_FILE)), "rb") as file:
                data = file.read(EVENTS_BYTES // 2)
                # Of more than this the beginning and the end: how it has ended stands there.
                file.seek(max(len(data), file.seek(0, os.SEEK_END) - EVENTS_BYTES // 2))
                text = (data + file.read(EVENTS_BYTES // 2)).decode(errors="replace")
        except OSError:
            return
        from dtctl.launch.records.events import parse

        yield from filter(None, map(parse, text.splitlines()))

    def log_path(self, node: str, rank: int) -> Path:
        """Return where the output of a rank is kept; rank -1 is torchrun's agent."""
        name = "agent.log" if rank < 0 else f"rank-{rank}.log"
        return self.folder / names.LOGS_DIR / node / name


def list_runs(base_dir: Path) -> list[RunRecord]:
    """Return all runs launched from `base_dir`, oldest first; a folder that cannot be read as a run is left out.

    Raises:
        LaunchError: the folder of records is a link.
    """
    check_no_link(base_dir, names.RUNS_DIR)
    try:
        folders = list((base_dir / names.STATE_DIR / names.RUNS_DIR).iterdir())
    except OSError:
        return []
    started: dict[RunRecord, float] = {}
    for folder in folders:
        record = RunRecord(folder)
        with contextlib.suppress(LaunchError):
            record.check_no_link()
            started[record] = record.info().started
    return sorted(started, key=lambda record: (started[record], record.run))


def tasks_of(base_dir: Path, run: str) -> list[RunRecord]:
    """Return the tasks of the job array that was launched under this name; none where it is a run, or nothing."""
    records = list_runs(base_dir)
    if any(record.run == run for record in records):
        return []
    return [record for record in records if re.fullmatch(re.escape(run) + r"\.\d+", record.run) and record.info().slurm]


def find_run(base_dir: Path, run: str | None) -> RunRecord:
    """Return the run of this name, or the newest one.

    Raises:
        LaunchError: there is no such run, or none at all.
    """
    runs = list_runs(base_dir)
    if run is None:
        if not runs:
            raise LaunchError(
                "no run was launched from this folder", where=str(base_dir), hint="start one with `dtctl launch`"
            )
        return runs[-1]
    for record in runs:
        if record.run == run:
            return record
    if RUN_NAME.match(run) and (base_dir / names.STATE_DIR / names.RUNS_DIR / run).is_dir():
        record = RunRecord(base_dir / names.STATE_DIR / names.RUNS_DIR / run)
        record.check_no_link()
        record.info()  # raises if it cannot be read
    import difflib

    matches = difflib.get_close_matches(run, [record.run for record in runs], n=1)
    hint = f"did you mean {matches[0]}?" if matches else "`dtctl runs` lists the runs of this folder"
    raise LaunchError(f"there is no run {run}", where=str(base_dir / names.STATE_DIR / names.RUNS_DIR), hint=hint)
