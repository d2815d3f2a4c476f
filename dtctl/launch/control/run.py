"""A run on nodes with a link to each, from the first connection to the last process: a back end of controller.py.

The launcher prepares all nodes and starts attempts until one succeeds, the restarts are used up or the user stops the
run; then it checks that no process of the run is left.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING

from dtctl import names
from dtctl.errors import ConnectError, LaunchError, PlanError
from dtctl.launch.control.attempt import Attempt
from dtctl.launch.control.attempt_nodes import AttemptOutcome
from dtctl.launch.control.attempts import AttemptTracker
from dtctl.launch.control.controller import Result, run_backend_to_end
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.hang import HangMonitor
from dtctl.launch.control.launch_job import LaunchJob, make_start_message
from dtctl.launch.control.run_nodes import RunNodes
from dtctl.launch.records.events import AttemptRunning, AttemptStarting, Emit, Note, OutputLine
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import RunLogs
from dtctl.launch.records.run_writer import RunWriter
from dtctl.plan import environment, rendezvous
from dtctl.plan.model import Plan
from dtctl.supervisor.messages.setup import NodeDescription

if TYPE_CHECKING:
    from dtctl.launch.control.copying import CheckpointCopier
    from dtctl.launch.control.placement import NodeReplacer

BURST_S = 0.1
"""Seconds for which messages that have arrived together are handled before the time limits are checked once: both the
messages and the cost of a check grow with the number of nodes."""
GATHERINGS = 5
"""Number of times that the nodes of an attempt are gathered, if some are lost again before the attempt begins."""


def run_launch_job(
    job: LaunchJob, record: RunWriter, *, emit: Emit, signals: list[int], ledger: Ledger, under_way: Plan | None = None
) -> Result:
    """Run a job on its nodes to its end.

    Args:
        job: the job, with its nodes.
        record: the run's folder on this machine.
        emit: called with every event, `emit(event)`.
        signals: signals that this process receives are appended here by its handlers.
        ledger: record of the run's time, which began with the run.
        under_way: plan of an attempt that nodes continue without its launcher; None for a new run.

    Raises:
        DtctlError: a node could not be made ready; nothing was started on any node.
    """
    return run_backend_to_end(
        NodesBackend(job, record, emit=emit, signals=signals, ledger=ledger, under_way=under_way), signals
    )


class NodesBackend:
    """Back end for nodes with a link to each; see `Backend`."""

    def __init__(
        self,
        job: LaunchJob,
        record: RunWriter,
        *,
        emit: Emit,
        signals: list[int],
        ledger: Ledger,
        under_way: Plan | None,
    ) -> None:
        """Open sessions without calling a node; see `run_launch_job` for the arguments."""
        self.job = job
        self.under_way = under_way
        self.record = record
        self.emit = emit
        self.ledger = ledger
        self.ledger.path = record.folder / names.LEDGER_FILE
        self.logs = RunLogs(record, job.log_bytes)
        self.nodes = RunNodes(job, logs=self.logs, emit=emit, signals=signals, under_way=under_way)
        self.gang = self.nodes.gang
        self.launch_s: float | None = None
        first = job.first_plan.attempt
        number = first if under_way is None else under_way.attempt
        self.attempts = AttemptTracker(self.nodes, ledger, first=first, number=number)
        self.attempt: Attempt | None = None
        """The current attempt; None before the first one."""
        self.outcome = AttemptOutcome()
        self.failure: Failure | None = None
        self._started = False
        """True if all nodes have started the attempt."""
        self.copying: CheckpointCopier | None = None
        """Copies of `job.shared`; None if the job needs no copies."""
        if job.copies is not None:
            from dtctl.launch.control.copying import CheckpointCopier  # Few runs need this module.

            self.copying = CheckpointCopier(self.nodes, job.copies, ledger)

    # -- the loop of controller.py ----------------------------------------------------------------------------------

    def start(self) -> bool:
        """Prepare all nodes, and start the first attempt on them."""
        plan = self.under_way or self._prepare_nodes()
        self.nodes.plan = plan
        if self.gang.signals:
            self._finish_run()
            return False
        if self.under_way is not None:
            self.nodes.earlier_host_names = self.record.read_host_names()
        self.record.write_plan(plan, self.nodes.host_names)
        if self.under_way is not None:
            self._take_up(plan)
        else:
            self._start_attempt(plan)
        return True

    @property
    def is_running(self) -> bool:
        """Return whether a node has not ended the attempt yet."""
        return self.attempt is not None and bool(self.attempt.nodes.open)

    def poll(self) -> None:
        """Act on the next message of a node."""
        attempt = self.attempt
        if attempt is None:
            return
        message = self.gang.next_message(0.2)
        if self.copying is not None:
            self.copying.report()
        attempt.nodes.reset_node_deadlines()
        burst_end = time.monotonic() + BURST_S
        while message is not None:
            attempt.handle(message)
            if self.gang.signals or not self.is_running or time.monotonic() > burst_end:
                break
            message = self.gang.next_message(0.0)
        if attempt.nodes.all_started and not self._started:
            self._started = True
            if self.launch_s is None:
                self.launch_s = self.ledger.total_s()
            self.ledger.record_processes_started()
            self.emit(AttemptRunning(attempt=self.nodes.plan.attempt, launch_s=round(self.launch_s, 3)))
        attempt.deadlines.check()

    def interrupt(self, number: int, *, again: bool) -> None:
        """Stop the attempt because of a signal; at a second one (`again`), do not wait for the workers."""
        if self.attempt is not None:
            self.attempt.nodes.interrupt(number, hard=again)

    def restart(self) -> bool:
        """Start the next attempt, unless the last one has succeeded or was stopped, or a restart would not help."""
        if self.copying is not None:
            self.copying.end_attempt()
        if self.attempt is not None:
            for node, rank, text in self.logs.flush():
                self.emit(OutputLine(node=node, rank=rank, text=text))
            self.outcome = self.attempt.close()
        self.failure = self.attempts.first_failure(self.outcome)
        self.attempts.count(self.outcome)
        goes_on = self.attempts.wait_for_next_attempt(self.outcome, self.failure)
        if goes_on:
            self.nodes.plan = self._next_plan(self.nodes.plan, self.attempts.number, self.outcome)
            goes_on = not self.gang.signals
        if not goes_on:
            self._finish_run()
            return False
        self.record.write_plan(self.nodes.plan, self.nodes.host_names)
        self._start_attempt(self.nodes.plan)
        return True

    def _finish_run(self) -> None:
        """Finish the records after the last attempt."""
        self.ledger.enter("stop")
        has_succeeded = self.failure is None and self.outcome.stopped_by is None
        self.ledger.close(succeeded=has_succeeded)
        if has_succeeded and self.outcome.is_unmet:
            plan = self.nodes.plan
            text = (
                f"no worker has ever opened {plan.rendezvous.endpoint}, where they meet: the "
                f"{plan.world_size} workers were separate programs, unless they use another rendezvous"
            )
            self.emit(Note(text=text))
        self.nodes.sweep_lost(self.outcome)

    def close(self) -> None:
        """Send all nodes the order to exit, drop all links and close all files."""
        if self.copying is not None:
            self.copying.stop()
        self.gang.quit_supervisors()
        for session in self.gang.sessions.values():
            session.close()
        self.logs.close()

    # -- before the first attempt -----------------------------------------------------------------------------------

    def _prepare_nodes(self) -> Plan:
        for session in self.gang.sessions.values():
            session.start()
        # This finds errors in a template and compiles it while the nodes are being connected.
        self.job.make_script(self.job.first_plan, self.job.first_plan.head)
        self.nodes.descriptions |= self.gang.gather()
        self.nodes.report_other_runs()
        if self.gang.signals:
            return self.job.first_plan
        head = self.job.first_plan.head
        port = self.nodes.descriptions[head.name].port
        if port == 0:
            tried = rendezvous.list_rendezvous_ports(self.job.run, self.attempts.number, self.job.fixed_port)
            raise PlanError(
                f"no port for the rendezvous is free on the head node (tried {', '.join(map(str, tried))})",
                where=f"node {head.name}",
                hint="free it, or leave `network.rendezvous_port` to dtctl",
            )
        nodes = [node.name for node in self.job.first_plan.nodes]
        cores = {name: description.cores for name, description in self.nodes.descriptions.items()}
        plan = self.job.make_plan(
            self.attempts.number, nodes, self.nodes.address(head), port, gpus=self.nodes.gpus(), cores=cores
        )
        rendezvous.check_reachable(plan.rendezvous.address, node=head.name, nodes=len(plan.nodes))
        return plan

    # -- attempts ---------------------------------------------------------------------------------------------------

    def _start_attempt(self, plan: Plan) -> None:
        meeting = plan.rendezvous
        if self.copying is not None:
            self.copying.copy_earlier_files(plan)
        self.attempts.begin()
        self.emit(AttemptStarting(attempt=plan.attempt, rendezvous=meeting.endpoint, world_size=plan.world_size))
        self.ledger.enter("start")
        self.ledger.attempts = plan.attempt + 1
        try:
            step = self.attempts.committed_step
            messages = {node.name: make_start_message(self.job, plan, node, committed_step=step) for node in plan.nodes}
            self.gang.start(messages)
        except ConnectError as exc:
            failure = Failure(node=exc.node, rank=None, exit_code=None, signal=None, time=time.time(), summary=str(exc))
            self.attempt = None
            self.outcome = AttemptOutcome(failures=[failure], lost_nodes=[exc.node], left_behind={exc.node: None})
        else:
            self._watch_attempt(plan, under_way=False)

    def _watch_attempt(self, plan: Plan, *, under_way: bool) -> None:
        if self.copying is not None:
            self.copying.watch()
        hang_monitor = HangMonitor(
            node_of_rank={rank: node.name for node in plan.nodes for rank in node.ranks},
            limit=self.job.hang_s,
            start_limit=self.job.hang_start_s,
            output_limit_s=self.job.hang_output_s,
            folder=self.record.folder / names.HANGS_DIR / f"attempt-{plan.attempt}",
            on_progress=self.ledger.record_worker_progress,
        )
        self._started = under_way
        self.attempt = Attempt(
            self.gang,
            plan,
            self.job.link_timeout_s,
            hang_monitor=hang_monitor,
            healing=self.placement.make_healing(plan) if plan.live else None,
            pool=self.placement.pool if plan.live or self.job.keep else None,
            keeps_nodes=self.job.keep,
            under_way=under_way,
            confirms_silence=not self.job.spares,
        )
        if plan.live:
            self.placement.attempt = self.attempt

    @cached_property
    def placement(self) -> NodeReplacer:
        """Replacement of lost nodes, made at the first use."""
        from dtctl.launch.control.placement import NodeReplacer  # Few runs need this module.

        return NodeReplacer(self.nodes, self.attempts, self.record, self.ledger)

    def _take_up(self, plan: Plan) -> None:
        """Watch an attempt that another launcher has started; a node that cannot be reached is called again."""
        self.attempts.begin()
        # The plan has the number of GPUs that the earlier launcher found.
        for node in plan.nodes:
            gpus = 0 if environment.ON_CPUS in node.env else node.slots
            self.nodes.descriptions[node.name] = NodeDescription(gpus=gpus, address="", port=0)
        self.ledger.resume(self.record.folder / names.LEDGER_FILE)
        self.logs.continue_attempt_logs()
        code = self.record.read_code_folders()
        for name, session in self.gang.sessions.items():
            session.code = code.get(name, "")
            self.placement.pool.reconnect_detached_node(name)
        self._watch_attempt(plan, under_way=True)

    def _next_plan(self, plan: Plan, attempt: int, outcome: AttemptOutcome) -> Plan:
        """Return the plan of the next attempt, with a new rendezvous that late workers of the last one cannot join."""
        nodes = self.nodes
        known_nodes = nodes.known()
        unreachable = {*outcome.lost_nodes, *outcome.already_ended}
        ports = rendezvous.list_rendezvous_ports(plan.run, attempt, self.job.fixed_port)
        for _ in range(GATHERINGS):  # While the launcher waits for some nodes, others may be lost.
            next_nodes = self.placement.pool.choose_nodes(
                unreachable, min_nodes=self.job.min_nodes, return_s=self.job.return_s
            )
            nodes.replaced |= {name: known_nodes[name] for name in next_nodes.replaced}
            nodes.descriptions |= next_nodes.descriptions
            head = known_nodes[next_nodes.names[0]]
            port = self.gang.find_free_node_port(head.name, ports)
            unreachable = {name for name, session in self.gang.sessions.items() if session.is_over}
            unreachable |= {head.name} if port is None else set()
            if not unreachable or self.gang.signals:
                break
        if unreachable and not self.gang.signals:
            raise ConnectError(
                f"it was lost again each of the {GATHERINGS} times that the next attempt was prepared",
                node=min(unreachable),
            )
        if port == 0 and not self.gang.signals:
            raise PlanError("no port for the rendezvous is free on the head node", where=f"node {head.name}")
        same_head = head.name == plan.head.name
        address = plan.rendezvous.address if same_head else nodes.address(head)
        return self.job.make_plan(
            attempt, next_nodes.names, address, port or 0, gpus=nodes.gpus(), threads=plan.threads
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def result(self) -> Result:
        """Return the result of the run; called last, so that the ledger includes all of its time."""
        counts = list(self.outcome.left_behind.values())
        with contextlib.suppress(LaunchError):  # A full disk does not change the result of the run.
            path = self.record.folder / names.LEDGER_FILE
            self.record.retry_with_reserve(lambda: self.ledger.write(path, attempts=self.attempts.number + 1))
        return Result(
            run=self.job.run,
            failure=self.failure,
            stopped_by=self.outcome.stopped_by or (self.gang.signals[-1] if self.gang.signals else None),
            asked_to_stop=self.failure is not None and self.attempts.is_stop(self.failure),
            attempts=self.attempts.number + 1,
            launch_s=self.launch_s,
            duration_s=self.ledger.total_s(),
            goodput=self.ledger.facts().goodput,
            left_behind=None if None in counts else sum(count or 0 for count in counts),
            lost_output=dict(self.attempts.lost_output + Counter(self.logs.lost)),
            cut_output=self.logs.cut,
            log_mib=self.job.log_bytes >> 20,
            outputs=self.attempts.outputs,
            is_local=self.job.first_plan.transport == "local",
            nodes=len(self.gang.sessions),
        )
