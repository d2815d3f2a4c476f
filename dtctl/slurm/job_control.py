"""The launcher inside of a job: replaces lost workers while the others stay, and restarts what cannot be replaced.

Run by the batch file on the job's first node, from the zip in the job's folder (launcher_files.py), by any Python of
version 3.10 or newer, if a lost worker is to be replaced alone. It is a launch as over SSH (dtctl/launch/control), with
three differences: nodes are reached by srun, a supervisor on each; code, snapshots and records lie in the job's folder,
which all nodes see; and the nodes that the job has beyond those of the spec are the spares. A follower of the job
copies its records (mirror.py); the job works without one.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from dtctl import names, node_facts
from dtctl.errors import DtctlError, LaunchError, TransportError
from dtctl.launch.control.controller import control
from dtctl.launch.control.launch_job import LaunchJob
from dtctl.launch.control.run import NodesBackend
from dtctl.launch.records.events import (
    AttemptStarting,
    Event,
    FirstFailure,
    Healed,
    Hung,
    NodesAllocated,
    Note,
    OutputLine,
    Restarting,
    RunEnded,
    RunProgress,
    subject_of,
)
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import BEGUN_FILE
from dtctl.launch.records.run_writer import RunWriter
from dtctl.plan import environment, rendezvous
from dtctl.plan.bind import Attempt, PlanTemplate, bind_plan
from dtctl.plan.model import Plan, Threads
from dtctl.slurm.addresses import read_addresses
from dtctl.slurm.job_file import JobFile, read_job_file
from dtctl.slurm.job_life import JobLife, write_line
from dtctl.supervisor import work
from dtctl.transport.base import Target
from dtctl.transport.srun import SrunTransport

CONTROL_FOLDER: Final = "control"
"""Below the folder of the run: this launcher's records."""
NODES_FOLDER: Final = "nodes"
"""Below the job's folder: of each of its nodes, what its supervisor keeps."""
RETURN_S: Final = 10.0
"""Seconds that a lost node is called again before a restart: one that was off is no longer the job's."""
OF_TASKS: Final = (
    "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE",
)  # fmt: skip
"""Variables that sbatch sets for tasks, which are workers there; srun would take them for the supervisors."""
FOR_WORKERS: Final = ("SLURM_CPUS_PER_TASK",)
"""Those of them that workers get all the same: programs take them for the number of their data set's readers."""
HEEDLESS: Final = "trap '' USR1"
"""Shell command that ignores the warning of the time limit. The signal reaches all processes: workers with a handler
react, and it must not kill the others."""
SAYS: Final = "dtctl: launcher: "
"""Prefix of the launcher's lines in the job's log."""
ANYWHERE: Final = "192.0.2.1"
"""An address that no machine has (RFC 5737); nothing is sent to it."""
CANNOT_WRITE: Final = 73
"""Exit code, EX_CANTCREAT of sysexits.h."""
REQUEUED: Final = "Slurm requeued it"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the job of this allocation, and exit as its batch script does."""
    environ = {**os.environ}
    for name in OF_TASKS:
        os.environ.pop(name, None)
    os.environ["DTCTL_UMASK"] = f"{os.umask(0o077):03o}"  # srun would hand on this process's own
    raise SystemExit(run(Path(sys.argv[0]), Path(environ[names.RUN_DIR]), environ))


def run(launcher: Path, folder: Path, environ: Mapping[str, str]) -> int:
    """Launch a job on the nodes of this allocation, to its end; return the exit code.

    Args:
        launcher: the zip that this is run from.
        folder: of the run, which all nodes see.
        environ: with Slurm's variables, and those of the batch file.
    """
    life = JobLife(
        read_job_name(environ), number=environ["SLURM_JOB_ID"], restarts=int(environ.get("SLURM_RESTART_COUNT") or 0)
    )
    record = RunWriter(folder / CONTROL_FOLDER)
    try:
        (record.folder / names.LOGS_DIR).mkdir(mode=0o700, parents=True, exist_ok=True)
        record.reserve()
    except (OSError, DtctlError) as exc:
        write_line(f"error: the run's folder {folder} cannot be written on {socket.gethostname()}: {exc}")
        return life.finish_job(CANNOT_WRITE, lost=False, is_ended=True)
    emit = _Emitter(record)
    signals: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: signals.append(number))
    lost = False
    try:
        file = read_job_file(launcher)
        emit.is_followed = file.is_followed
        life.requeues, life.warn_s, life.nodes_needed = file.requeues, file.warn_s, len(file.template.nodes)
        has_controller = life.await_controller(record.folder)
        addresses = addresses_of(file, environ, asks=has_controller)
        life.start_guards(record.folder, [*addresses])
        ledger = open_ledger(record, file)
        code, lost = _launch(file, addresses, folder, environ, record, emit, signals, ledger)
    except DtctlError as exc:
        status, code = ("stopped", 128 + signals[-1]) if signals else ("failed", exc.exit_code)
        emit(RunEnded(run=environ[names.RUN_ID], status=status, exit_code=code, error=str(exc)))
        write_line(f"error: {exc}")
        lost = isinstance(exc, TransportError) and emit.has_started and not signals
    return life.finish_job(code, lost=lost, is_ended=bool(signals))


def _launch(
    file: JobFile,
    addresses: Mapping[str, str],
    folder: Path,
    environ: Mapping[str, str],
    record: RunWriter,
    emit: _Emitter,
    signals: list[int],
    ledger: Ledger,
) -> tuple[int, bool]:
    """Launch the job; return its exit code, and whether it has failed of a lost node.

    Raises:
        DtctlError: it could not be started, or not again.
    """
    before = RunProgress()
    for event in record.events():
        before.apply(event)
    attempt = before.attempt + 1
    if file.template.live and not _has_pipes(folder):
        write_line(f"lost workers are not replaced alone: the disk of {folder} has no named pipes")
        file = replace(file, template=replace(file.template, live=False))
    job = job_in(file, addresses, folder, environ, attempt=attempt)
    is_told = bool(before.restarts) and before.restarts[-1].attempt == attempt
    if attempt and not is_told:  # else the launcher before has emitted it, and found no nodes
        emit(Restarting(attempt=attempt, of=attempt + file.template.max_restarts, reason=REQUEUED))
    emit(NodesAllocated(nodes=tuple(node.name for node in job.first_plan.nodes)))
    backend = NodesBackend(job, record, emit=emit, signals=signals, ledger=ledger, under_way=None)
    if (record.folder / BEGUN_FILE).exists():
        backend.logs.rejoin()
    result = control(backend, signals)
    emit(result.to_event())
    first = result.first_failure
    return result.exit_code, first is not None and first.node in backend.outcome.lost_nodes


def _has_pipes(folder: Path) -> bool:
    """Return whether the disk of the job's folder has named pipes, by which losses are reported to workers."""
    path = folder / f"pipe-{os.getpid()}"
    try:
        os.mkfifo(path)
        path.unlink()
    except OSError:
        return False
    return True


class _Emitter:
    """Writes events down, and into the job's log what people look for there. From any thread."""

    def __init__(self, record: RunWriter) -> None:
        self._record, self._lock = record, threading.Lock()
        self.is_followed = True
        """True if a follower reads the records; if not, the workers' output goes into the job's output."""
        self.has_started = False
        """True if workers were started: all nodes were there then."""

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.recorded:
                self._record.append_event(event)
            self.has_started = self.has_started or isinstance(event, AttemptStarting)
            match event:
                case Healed():
                    text = event.told
                case Restarting():
                    text = f"attempt {event.attempt}: {event.cause}"
                case Note():
                    text = f"{event.node}: {event.text}" if event.node else event.text
                case OutputLine() if not self.is_followed:
                    sys.stdout.write(f"[{event.node}:{event.rank}] {event.text}\n")
                    sys.stdout.flush()
                    return
                case Hung() if not self.is_followed:
                    text = f"no progress for {event.silent_s:.0f} s; stacks: {self._record.folder / names.HANGS_DIR}"
                case RunEnded() if not self.is_followed and event.first_failure is not None:
                    text = f"first failure: {_describe(event.first_failure)}"
                case _:
                    return
            sys.stdout.write(f"{SAYS}{text}\n")
            sys.stdout.flush()


def _describe(first: FirstFailure) -> str:
    """Describe the first failure, for the output of a job without a follower."""
    subject = subject_of(first.node, first.rank, first.exit_code)
    ended = "was lost" if first.exit_code is None else f"ended with exit code {first.exit_code}"
    how = "made no progress" if first.hang else ended
    return f"{subject} {how}{f': {first.summary}' if first.summary else ''}"


def read_job_name(environ: Mapping[str, str]) -> str:
    """Return what Slurm calls the job: its number, or that of its array and its index."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environ['SLURM_ARRAY_TASK_ID']}" if array else environ["SLURM_JOB_ID"]


def addresses_of(file: JobFile, environ: Mapping[str, str], *, asks: bool) -> dict[str, str]:
    """Return the nodes of this allocation, in Slurm's order, and the address of each; those beyond the plan are spares.

    Args:
        file: what is launched.
        environ: with Slurm's variables.
        asks: whether Slurm's controller answers.

    Raises:
        DtctlError: Slurm does not name them, or they are fewer.
    """
    found, needed = read_addresses(environ, asks=asks), len(file.template.nodes)
    if len(found) < needed:
        raise LaunchError(f"the job has {len(found)} nodes, and needs {needed}", where="SLURM_JOB_NODELIST")
    # This is the first of them, and its own name may mean its loopback address here.
    first, *_, last = [*found, *found]
    return {**found, first: own_address(found[last], last) or found[first]}


def own_address(*peers: str) -> str:
    """Return this machine's numeric address on the way to the first of these that is elsewhere; empty without one.

    The last resort is the way to anywhere: on some machines all names of nodes mean the loopback interface.
    """
    for peer in (*peers, ANYWHERE):
        try:
            found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        address = node_facts.address_towards(str(found[0][4][0]))
        if address and not ip_address(address).is_loopback:
            return address
    return ""


def job_in(
    file: JobFile, addresses: Mapping[str, str], folder: Path, environ: Mapping[str, str], *, attempt: int
) -> LaunchJob:
    """Make what is to be launched; `attempt` is the number of the first attempt.

    Raises:
        DtctlError: no job can be made of it on these nodes.
    """
    run, settings = environ[names.RUN_ID], file.settings
    given = {name: environ[name] for name in FOR_WORKERS if name in environ}
    granted = granted_cores([*addresses], environ)
    count = len(file.template.nodes)
    planned, spares = [*addresses][:count], [*addresses][count:]

    def placed(nodes: Sequence[str]) -> PlanTemplate:
        """Return the template for these nodes of the allocation."""
        return replace(
            file.template,
            run=run,
            nodes=tuple(
                replace(each, name=name, address=addresses[name], workdir=str(folder / NODES_FOLDER / name))
                for each, name in zip(file.template.nodes, nodes, strict=False)  # a restart may do with fewer
            ),
        )

    def make_plan(
        attempt: int,
        nodes: Sequence[str],
        address: str,
        port: int,
        *,
        gpus: Mapping[str, int],
        cores: Mapping[str, int] | None = None,
        threads: Threads | None = None,
    ) -> Plan:
        meeting = rendezvous.rendezvous(run, attempt, address=settings["fixed_address"] or address, port=port)
        own = {name: min(count, granted.get(name, count)) for name, count in (cores or {}).items()}
        known = Attempt(number=attempt, rendezvous=meeting, gpus=gpus, cores=own, threads=threads)
        return bind_plan(placed(nodes), known)

    def first_plan(nodes: Sequence[str]) -> Plan:
        port = rendezvous.port_candidates(run, attempt, settings["fixed_port"])[0]
        return make_plan(attempt, nodes, rendezvous.numeric(addresses[nodes[0]]), port, gpus={})

    return LaunchJob(
        run=run,
        token=secrets.token_hex(16),
        first_plan=first_plan(planned),
        make_plan=make_plan,
        make_script=functools.partial(file.make_script, given=given),
        transport=SrunTransport(environ["SLURM_JOB_ID"]),
        targets={name: Target(name=name, address=address) for name, address in addresses.items()},
        # As in the place of the last node: a plan of spares alone would be another training.
        spares={spare: first_plan([*planned[:-1], spare]).nodes[-1] for spare in spares},
        push=None,
        code_folder=file.code or str(folder / work.FOLDER),
        is_shared=True,
        secrets=environment.read_secrets(file.template.secrets, environ),
        snapshots=dict.fromkeys(addresses, file.snapshots or str(folder / "snapshots")),
        origin=file.origin,
        keep=False,
        **{**settings, "return_s": min(settings["return_s"], RETURN_S)},
    )


def granted_cores(nodes: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    """Return the processors that Slurm has given to the job on each of its nodes, as far as it reports them.

    At a site that binds no processes a process sees all cores of a node, though the job may have only a few.
    """
    counts: list[int] = []
    for group in environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(","):  # 72(x2),36
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group):
            counts += [int(match[1])] * int(match[2] or 1)
    return dict(zip(nodes, counts, strict=False))


def open_ledger(record: RunWriter, file: JobFile) -> Ledger:
    """Return a ledger that continues that of the job's last start.

    It begins with the command that has launched the run, or with the first start of a job that was submitted by hand.
    """
    since = file.started if file.is_followed else next((event.time for event in record.events()), time.time())
    path = record.folder / names.LEDGER_FILE
    ledger = Ledger(time.monotonic, begun=time.monotonic() - max(0.0, time.time() - since))
    if path.exists():
        away_s = max(0.0, time.time() - path.stat().st_mtime)
        ledger.resume(path)
        ledger.move(ledger.phase, "restart", away_s)
        ledger.enter("restart")
    return ledger
