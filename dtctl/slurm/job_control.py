"""The launcher inside of a job: it replaces lost workers while the others continue, and restarts the rest.

The batch file runs it on the job's first node, from the zip in the job's folder (launcher_files.py). Any Python of
version 3.10 or newer will do. The launch is the same as over SSH (dtctl/launch/control), with three differences: srun
reaches the nodes and starts a supervisor on each; code, snapshots and records lie in the job's folder, which all nodes
share; and nodes of the job beyond those of the spec are spares. A follower of the job copies its records
(record_sync.py); the job works without one.
"""

from __future__ import annotations

import functools
import json
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
from dtctl.errors import DtctlError, LaunchError, NodeFailures, TransportError
from dtctl.launch.control.controller import run_backend_to_end
from dtctl.launch.control.launch_job import LaunchJob
from dtctl.launch.control.run import NodesBackend
from dtctl.launch.records.events import (
    AttemptRestarting,
    AttemptStarting,
    Event,
    FirstFailure,
    HangDetected,
    NodesAllocated,
    Note,
    OutputLine,
    RunEnded,
    RunProgress,
    WorkersReplaced,
    decide_end_status,
    describe_failure_subject,
)
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import BEGUN_FILE
from dtctl.launch.records.run_writer import RunWriter
from dtctl.plan import environment, rendezvous
from dtctl.plan.bind import AttemptFacts, PlanTemplate, bind_plan
from dtctl.plan.model import Plan, ThreadCount
from dtctl.printable import format_count
from dtctl.slurm.addresses import read_addresses
from dtctl.slurm.job_file import JobFile, read_job_file
from dtctl.slurm.job_life import JobLifecycle, write_line
from dtctl.slurm.job_step import JobStep
from dtctl.spec.nodeset import fold_node_names
from dtctl.supervisor import run_workdir
from dtctl.supervisor.messages.setup import EnvironmentOrder
from dtctl.transport.base import Target
from dtctl.transport.srun import SrunTransport

CONTROL_FOLDER: Final = "control"
"""Folder of this launcher's records, below the folder of the run."""
NODES_FOLDER: Final = "nodes"
"""Folder with one working folder for each node's supervisor, below the folder of the run."""
RETURN_S: Final = 10.0
"""Longest time to reconnect to a lost node before a restart, in seconds. A node that went down no longer belongs to the
job."""
OF_TASKS: Final = (
    "SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS", "SLURM_NPROCS",
    "SLURM_TASKS_PER_NODE",
)  # fmt: skip
"""Variables that sbatch sets for tasks, which are the workers; srun would apply them to the supervisors."""
FOR_WORKERS: Final = ("SLURM_CPUS_PER_TASK",)
"""Variables of `OF_TASKS` that workers nevertheless get: programs derive the number of data loader processes from
them."""
HEEDLESS: Final = "trap '' USR1"
"""Shell command that ignores the warning of the time limit. The signal reaches all processes: workers with a handler
react, and the signal must not kill the others."""
SAYS: Final = "dtctl: launcher: "
"""Prefix of the launcher's lines in the job's log."""
ANYWHERE: Final = "192.0.2.1"
"""Address that no machine has (RFC 5737); nothing is sent to it."""
CANNOT_WRITE: Final = 73
"""Exit code of a job whose folder cannot be written: EX_CANTCREAT of sysexits.h."""
REQUEUED: Final = "Slurm requeued it"
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    """Run the job of this allocation, and exit with the code of the batch script."""
    environ = {**os.environ}
    # Workers must not get the passwords of package indexes. sbatch also passes on the variables of the submitting
    # shell.
    for name in (*OF_TASKS, names.INDEX_CREDENTIALS, *json.loads(environ.get(names.INDEX_CREDENTIALS, "{}"))):
        os.environ.pop(name, None)
    os.environ[names.UMASK] = f"{os.umask(0o077):03o}"  # srun would pass on the umask of this process
    raise SystemExit(run(Path(sys.argv[0]), Path(environ[names.RUN_DIR]), environ))


def run(launcher: Path, folder: Path, environ: Mapping[str, str]) -> int:
    """Launch a job on the nodes of this allocation, wait for its end, and return the exit code.

    Args:
        launcher: the zip that this program runs from.
        folder: folder of the run, on a disk that all nodes share.
        environ: environment with the variables of Slurm and of the batch file.
    """
    life = JobLifecycle(
        read_job_name(environ), number=environ["SLURM_JOB_ID"], restarts=int(environ.get("SLURM_RESTART_COUNT") or 0)
    )
    record = RunWriter(folder / CONTROL_FOLDER)
    try:
        (record.folder / names.LOGS_DIR).mkdir(mode=0o700, parents=True, exist_ok=True)
        record.reserve_disk_space()
    except (OSError, DtctlError) as exc:
        write_line(f"error: the run's folder {folder} cannot be written on {socket.gethostname()}: {exc}")
        return life.finish_job(CANNOT_WRITE, lost=False, is_ended=True)
    emit = _RecordingEmitter(record)
    signals: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _frame: signals.append(number))
    lost = False
    try:
        file = read_job_file(launcher, environ.get("SLURM_ARRAY_TASK_ID", ""))
        emit.is_followed = file.is_followed
        life.requeues, life.warn_s, life.nodes_needed = file.requeues, file.warn_s, len(file.template.nodes)
        has_controller = life.wait_for_controller(record.folder)
        addresses = resolve_allocation_nodes(file, environ, asks=has_controller)
        life.start_guards(record.folder, [*addresses])
        ledger = open_ledger(record, file)
        code, lost = _launch_allocated_job(file, addresses, folder, environ, record, emit, signals, ledger)
    except DtctlError as exc:
        status = decide_end_status(is_stopped=bool(signals), has_failed=True)
        code = 128 + signals[-1] if signals else exc.exit_code
        lines = _describe_error(exc)
        emit(RunEnded(run=environ[names.RUN_ID], status=status, exit_code=code, error=lines[-1]))
        for line in lines:
            write_line(f"error: {line}")
        lost = isinstance(exc, TransportError) and emit.has_started and not signals
    return life.finish_job(code, lost=lost, is_ended=bool(signals))


def _launch_allocated_job(
    file: JobFile,
    addresses: Mapping[str, str],
    folder: Path,
    environ: Mapping[str, str],
    record: RunWriter,
    emit: _RecordingEmitter,
    signals: list[int],
    ledger: Ledger,
) -> tuple[int, bool]:
    """Launch the job; return its exit code, and True if the first failure was the loss of a node.

    Raises:
        DtctlError: the job could not be started or restarted.
    """
    before = RunProgress()
    for event in record.events():
        before.apply(event)
    attempt = before.attempt + 1
    if file.template.live and not _has_pipes(folder):
        write_line(f"lost workers are not replaced alone: the disk of {folder} has no named pipes")
        file = replace(file, template=replace(file.template, live=False))
    job = build_job_in_allocation(file, addresses, folder, environ, attempt=attempt)
    is_told = bool(before.restarts) and before.restarts[-1].attempt == attempt
    if attempt and not is_told:  # otherwise the previous launcher has emitted the restart, and found no nodes
        emit(AttemptRestarting(attempt=attempt, of=attempt + file.template.max_restarts, reason=REQUEUED))
    emit(NodesAllocated(nodes=tuple(node.name for node in job.first_plan.nodes)))
    backend = NodesBackend(job, record, emit=emit, signals=signals, ledger=ledger, under_way=None)
    if (record.folder / BEGUN_FILE).exists():
        backend.logs.continue_attempt_logs()
    result = run_backend_to_end(backend, signals)
    emit(result.to_event())
    first = result.first_failure
    return result.exit_code, first is not None and first.node in backend.outcome.lost_nodes


def _describe_error(error: DtctlError) -> list[str]:
    """Return the lines of an error; if nodes failed, each reason is one line with the nodes that have it."""
    if not isinstance(error, NodeFailures):
        return [str(error)]
    return [
        "; ".join(filter(None, (f"{fold_node_names(nodes)}: {message}", hint)))
        for (message, hint), nodes in error.nodes_by_reason.items()
    ]


def _has_pipes(folder: Path) -> bool:
    """Return whether the disk of the job's folder supports named pipes, through which workers learn of lost workers."""
    path = folder / f"pipe-{os.getpid()}"
    try:
        os.mkfifo(path)
        path.unlink()
    except OSError:
        return False
    return True


class _RecordingEmitter:
    """Emitter that records events, and writes lines into the job's log. Safe to call from any thread."""

    def __init__(self, record: RunWriter) -> None:
        self._record, self._lock = record, threading.Lock()
        self.is_followed = True
        """True if a follower reads the records; if not, the workers' output is written to the job's output."""
        self.has_started = False
        """True if workers were started, so all nodes were reachable at that time."""

    def __call__(self, event: Event) -> None:
        with self._lock:
            if event.recorded:
                self._record.append_event(event)
            self.has_started = self.has_started or isinstance(event, AttemptStarting)
            match event:
                case WorkersReplaced():
                    text = event.event_text
                case AttemptRestarting():
                    text = f"attempt {event.attempt}: {event.cause}"
                case Note():
                    text = f"{event.node}: {event.text}" if event.node else event.text
                case OutputLine() if not self.is_followed:
                    sys.stdout.write(f"[{event.node}:{event.rank}] {event.text}\n")
                    sys.stdout.flush()
                    return
                case HangDetected() if not self.is_followed:
                    text = f"no progress for {event.silent_s:.0f} s; stacks: {self._record.folder / names.HANGS_DIR}"
                case RunEnded() if not self.is_followed and event.first_failure is not None:
                    text = f"first failure: {_describe_first_failure(event.first_failure)}"
                case _:
                    return
            sys.stdout.write(f"{SAYS}{text}\n")
            sys.stdout.flush()


def _describe_first_failure(first: FirstFailure) -> str:
    """Describe the first failure, for the output of a job without a follower."""
    subject = describe_failure_subject(first.node, first.rank, first.exit_code, hang=first.hang)
    ended = "was lost" if first.exit_code is None else f"ended with exit code {first.exit_code}"
    how = "made no progress" if first.hang else ended
    return f"{subject} {how}{f': {first.summary}' if first.summary else ''}"


def read_job_name(environ: Mapping[str, str]) -> str:
    """Return Slurm's name of the job: its number, or for a task of an array the array's number and its index."""
    array = environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{environ['SLURM_ARRAY_TASK_ID']}" if array else environ["SLURM_JOB_ID"]


def resolve_allocation_nodes(file: JobFile, environ: Mapping[str, str], *, asks: bool) -> dict[str, str]:
    """Return the nodes of this allocation in Slurm's order, with addresses; nodes beyond the plan are spares.

    Args:
        file: file that describes the job.
        environ: environment with Slurm's variables.
        asks: whether Slurm's controller answers.

    Raises:
        DtctlError: Slurm does not name the nodes, or they are too few.
    """
    found, needed = read_addresses(environ, asks=asks), len(file.template.nodes)
    if len(found) < needed:
        raise LaunchError(
            f"the job has {format_count(len(found), 'node')}, and needs {needed}", where="SLURM_JOB_NODELIST"
        )
    # This process runs on the first node, whose own name may resolve to its loopback address here.
    first, *_, last = [*found, *found]
    return {**found, first: own_address(found[last], last) or found[first]}


def own_address(*peers: str) -> str:
    """Return this machine's numeric address on the route to the first peer on another machine; empty if there is none.

    The last peer is an address outside: on some machines all names of nodes resolve to the loopback interface.
    """
    for peer in (*peers, ANYWHERE):
        try:
            found = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)
        except OSError:
            continue
        address = node_facts.find_address_towards(str(found[0][4][0]))
        if address and not ip_address(address).is_loopback:
            return address
    return ""


def build_job_in_allocation(
    file: JobFile, addresses: Mapping[str, str], folder: Path, environ: Mapping[str, str], *, attempt: int
) -> LaunchJob:
    """Return the job to launch; `attempt` is the number of the first attempt.

    Raises:
        DtctlError: the file does not fit these nodes.
    """
    run, settings = environ[names.RUN_ID], file.settings
    credentials = json.loads(environ.get(names.INDEX_CREDENTIALS, "{}"))
    order = EnvironmentOrder.parse({**file.environment, "credentials": credentials}) if file.environment else None
    given = {name: environ[name] for name in FOR_WORKERS if name in environ}
    granted = read_granted_cores([*addresses], environ)
    count = len(file.template.nodes)
    planned, spares = [*addresses][:count], [*addresses][count:]

    def placed(nodes: Sequence[str]) -> PlanTemplate:
        """Return the template with these nodes of the allocation."""
        return replace(
            file.template,
            run=run,
            nodes=tuple(
                replace(each, name=name, address=addresses[name], workdir=str(folder / NODES_FOLDER / name))
                for each, name in zip(file.template.nodes, nodes, strict=False)  # a restart may have fewer nodes
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
        threads: ThreadCount | None = None,
    ) -> Plan:
        meeting = rendezvous.build_rendezvous(run, attempt, address=settings["fixed_address"] or address, port=port)
        own = {name: min(count, granted.get(name, count)) for name, count in (cores or {}).items()}
        known = AttemptFacts(number=attempt, rendezvous=meeting, gpus=gpus, cores=own, threads=threads)
        return bind_plan(placed(nodes), known)

    def first_plan(nodes: Sequence[str]) -> Plan:
        port = rendezvous.list_rendezvous_ports(run, attempt, settings["fixed_port"])[0]
        return make_plan(attempt, nodes, rendezvous.resolve_numeric_address(addresses[nodes[0]]), port, gpus={})

    return LaunchJob(
        run=run,
        token=secrets.token_hex(16),
        first_plan=first_plan(planned),
        make_plan=make_plan,
        make_script=functools.partial(file.make_script, given=given),
        transport=_make_transport(environ["SLURM_JOB_ID"], [*addresses]),
        targets={name: Target(name=name, address=address) for name, address in addresses.items()},
        # Each spare is planned in the place of the last node: a plan of spares alone would be a different job.
        spares={spare: first_plan([*planned[:-1], spare]).nodes[-1] for spare in spares},
        push=None,
        code_folder=file.code or str(folder / run_workdir.FOLDER),
        is_shared=True,
        environment=lambda: order,
        secrets=environment.read_job_secrets(file.template.secrets, environ),
        snapshots=dict.fromkeys(addresses, file.snapshots or str(folder / "snapshots")),
        origin=file.origin,
        keep=False,
        **{**settings, "return_s": min(settings["return_s"], RETURN_S)},
    )


def _make_transport(job: str, nodes: Sequence[str]) -> SrunTransport:
    """Return the transport to the nodes: one job step for all of them, or plain srun for a single node."""
    if len(nodes) == 1:
        return SrunTransport(job)
    step = JobStep(job, nodes, note=write_line)
    step.start()
    return SrunTransport(job, step)


def read_granted_cores(nodes: Sequence[str], environ: Mapping[str, str]) -> dict[str, int]:
    """Return the number of processors that Slurm has given to the job on each node, for nodes that Slurm reports.

    At a site that does not bind processes, a process sees all cores of a node, though the job may have only a few.
    """
    counts: list[int] = []
    for group in environ.get("SLURM_JOB_CPUS_PER_NODE", "").split(","):  # such as 72(x2),36
        if match := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group):
            counts += [int(match[1])] * int(match[2] or 1)
    return dict(zip(nodes, counts, strict=False))


def open_ledger(record: RunWriter, file: JobFile) -> Ledger:
    """Return a ledger that continues the ledger of the job's last start.

    A new ledger begins at the time of the command that launched the run, or at the first start of a job that was
    submitted by hand.
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
