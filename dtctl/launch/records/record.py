"""A run's folder on the control machine: its plan, its events, its output and its result.

    .dtctl/runs/RUN/
        plan.json        the plan of the newest attempt
        spec.yaml        the spec as it was at launch, `--set` included
        run.json         facts by which the run is found again: its token, its launcher's process, its spec
        events.jsonl     events, one JSON object for each line
        logs/NODE/rank-R.log, logs/NODE/agent.log
        logs/NODE/rank-R.times, logs/attempts.jsonl   sizes of a log over time
        metrics.jsonl    copy of the file of rank 0
        ledger.json      time by phase
        hangs/attempt-N/NODE/rank-R.txt   stack of a worker when the attempt made no progress

The module run_writer.py writes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtctl import folders, names, shell
from dtctl.errors import LaunchError, UsageError, suggest_name, suggest_node

if TYPE_CHECKING:
    from dtctl.launch.records.events import Event

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
RUN_FILE = "run.json"
RUN_BYTES, SPEC_BYTES, PLAN_BYTES = 4 << 20, 4 << 20, 64 << 20
EVENTS_BYTES = 64 << 20
"""Most bytes of a file of events that are read; of a larger file, its beginning and its end."""
LOCK_FILE = "launcher.lock"


def make_run_id(job: str, *, now: float, salt: str | None = None) -> str:
    """Return a run id that sorts by time: job, month and day, hour, minute and second, four random digits."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", job).strip("-_") or "job"
    stamp = time.strftime("%m%d-%H%M%S", time.localtime(now))
    return f"{stem[:32]}-{stamp}-{salt or secrets.token_hex(2)}"


def check_run_name(name: str) -> str:
    """Return `name` if it can be the name of a run.

    Raises:
        UsageError: the name cannot be used for a folder everywhere.
    """
    if not RUN_NAME.match(name):
        raise UsageError(
            f"{name!r} cannot be the name of a run",
            where="--name",
            hint="use `a` to `z`, `A` to `Z`, digits, `.`, `_` and `-`, at most 64, and begin with a letter or a digit",
        )
    return name


@contextlib.contextmanager
def translate_write_errors(path: Path) -> Iterator[None]:
    """Turn an error of the system into a LaunchError that names the path.

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
    """Refuse a path of dtctl's own files that contains a link, which the author of the folder may have made.

    Args:
        base_dir: The folder of the spec.
        parts: Names of the path below `.dtctl` of that folder.

    Raises:
        LaunchError: A part of the path is a link.
    """
    path = base_dir
    for name in (names.STATE_DIR, *parts):
        path /= name
        if path.is_symlink():
            raise LaunchError(
                "records are not written through a link, since its target is unknown",
                where=str(path),
                hint=f"remove it (`rm {shell.quote_word(str(path))}`); dtctl makes a folder there",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts by which a run is found again from another terminal or later."""

    run: str
    token: str
    """Mark of the run's processes on the nodes, which users who may log in there can read."""
    pid: int
    """Process id of the launcher."""
    started: float
    """Start of the launcher in seconds since the epoch."""
    spec: str
    """Absolute path of the spec; empty for a run without a spec file."""
    command: list[str]
    """Command line of the launch, which never has values of secrets."""
    detached: bool
    pid_started: int = 0
    """Start of the launcher in clock ticks since boot, which distinguishes it from a later process with the same id; 0
    if the system does not report it."""
    boot: str = ""
    """Id of the boot since which the clock ticks are counted; empty if the system does not report it."""
    slurm: bool = False
    """True if the run is a job of Slurm, which continues without a follower."""
    snapshots: dict[str, str] = field(default_factory=dict)
    """Folder of snapshots on each node, if the run continues another one."""
    ssh: str = ""
    """Program that connects to the nodes, `openssh` or `paramiko`; empty for other transports."""
    sweep: dict[str, str] = field(default_factory=dict)
    """Values of the swept keys of the spec, if the run is part of a sweep."""
    environment: str = ""
    """Digest of the workers' environment; empty: the nodes' own Python."""
    removed: dict[str, float] = field(default_factory=dict)
    """Node -> time at which `dtctl clean` has removed the run's files there, in seconds since the epoch."""

    @property
    def resumed_run(self) -> str:
        """Return the name of the earlier run that this one continues; empty for a run from scratch."""
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
        """Return `command` in the form in which it was typed."""
        return shell.join_command(["dtctl", *self.command[1:]])


def describe_removal(run: str, removed: Mapping[str, float], nodes: Sequence[str]) -> str:
    """Return the sentence that `dtctl clean` has removed a run's files from these nodes; empty if not from all.

    Args:
        run: name of the run.
        removed: node -> time of the removal, see `RunInfo`.
        nodes: nodes of the run.
    """
    if not nodes or not removed.keys() >= set(nodes):
        return ""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(removed[node] for node in nodes)))
    return f"`dtctl clean` has removed the files of run {run} from {', '.join(nodes)} ({when})"


class RunRecord:
    """The folder of one run for reading; only its launcher writes to it (run_writer.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder.name

    def check_no_link(self) -> None:
        """Refuse a run's folder, or one of its logs, that is a link.

        Raises:
            LaunchError: The folder or a log is a link.
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
        from dtctl.launch.records import validate_records  # A launch reads no record and does not need this module.

        try:
            stored = json.loads(folders.read_regular(str(self.folder / RUN_FILE), RUN_BYTES))
            validate_records.INFO(stored)
            return RunInfo(**stored)
        except (OSError, ValueError, TypeError, RecursionError) as exc:
            raise LaunchError(f"{self.run} is not a run that dtctl can read", where=str(self.folder)) from exc

    @property
    def base_dir(self) -> Path:
        """Return the folder from which the run was launched."""
        return self.folder.parent.parent.parent

    def read_host_names(self) -> dict[str, str]:
        """Return the host names of the newest attempt's nodes, as far as they are known."""
        return {node["name"]: node["host"] for node in self.plan().get("nodes", ()) if node.get("host")}

    def plan(self) -> dict[str, Any]:
        """Return the plan of the newest attempt as plain data; empty if there is none."""
        from dtctl.launch.records import validate_records

        try:
            stored: dict[str, Any] = json.loads(folders.read_regular(str(self.folder / names.PLAN_FILE), PLAN_BYTES))
            validate_records.PLAN(stored)
        except (OSError, ValueError, RecursionError):
            return {}
        return stored

    def whole_plan(self) -> dict[str, Any]:
        """Return the plan of the newest attempt if it is complete enough to act on it.

        Raises:
            LaunchError: there is no plan, or it is incomplete.
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

    def read_code_folders(self) -> dict[str, str]:
        """Return the folder of the pushed code on each node to which code was pushed."""
        from dtctl.launch.records.events import NodeChanged

        changes = (event for event in self.events() if isinstance(event, NodeChanged))
        return {event.node: event.push.path for event in changes if event.push is not None and event.push.path}

    def has_launcher(self) -> bool:
        """Return whether a living process is the run's launcher."""
        if (lock_fd := self._acquire_launcher_lock(fcntl.LOCK_SH)) is None:
            return True
        os.close(lock_fd)
        return False

    def _acquire_launcher_lock(self, kind: int) -> int | None:
        """Return a descriptor that holds the launcher's lock; None when another process holds it."""
        path = self.folder / LOCK_FILE
        with translate_write_errors(path):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        return fd

    def events(self) -> Iterator[Event]:
        """Yield all events so far; an incomplete last line and lines without an event are left out."""
        try:
            with os.fdopen(folders.open_regular(str(self.folder / names.EVENTS_FILE)), "rb") as file:
                data = file.read(EVENTS_BYTES // 2)
                # Of a larger file, the beginning and the end are read, because the end has the result.
                file.seek(max(len(data), file.seek(0, os.SEEK_END) - EVENTS_BYTES // 2))
                text = (data + file.read(EVENTS_BYTES // 2)).decode(errors="replace")
        except OSError:
            return
        from dtctl.launch.records.events import parse_event

        yield from filter(None, map(parse_event, text.splitlines()))

    def log_path(self, node: str, rank: int) -> Path:
        """Return the path of a rank's log; rank -1 is torchrun's agent."""
        from dtctl.supervisor.frames import format_log_name  # Most commands read no log.

        return self.folder / names.LOGS_DIR / node / format_log_name(rank)


def list_run_records(base_dir: Path) -> list[RunRecord]:
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


def list_array_tasks(base_dir: Path, run: str) -> list[RunRecord]:
    """Return the tasks of the job array that was launched with this name; empty if the name is not an array's."""
    records = list_run_records(base_dir)
    if any(record.run == run for record in records):
        return []
    return [record for record in records if re.fullmatch(re.escape(run) + r"\.\d+", record.run) and record.info().slurm]


def build_node_error(run: str, node: str | None, nodes: Iterable[str], where: str) -> LaunchError:
    """Return the error for a node that a run does not have."""
    known = list(nodes)
    hint = suggest_node(node or "", known, f"its nodes are {', '.join(known)}")
    return LaunchError(f"run {run} has no node {node}", where=where, hint=hint)


def find_run(base_dir: Path, run: str | None) -> RunRecord:
    """Return the run with this name; None: the newest run.

    Raises:
        LaunchError: there is no such run, or no run at all.
    """
    runs = list_run_records(base_dir)
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
        record.info()  # This call raises an error if the record cannot be read.
    if not RUN_NAME.match(run):
        raise LaunchError(f"{run!r} is not the name of a run", hint="`dtctl runs` lists the runs of this folder")
    hint = suggest_name(run, (record.run for record in runs), "`dtctl runs` lists the runs of this folder")
    raise LaunchError(f"there is no run {run}", where=str(base_dir / names.STATE_DIR / names.RUNS_DIR), hint=hint)
