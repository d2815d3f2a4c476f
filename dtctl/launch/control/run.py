"""A run on nodes with a link to each, from the first connection to the last process: a back end of controller.py.

Reads top to bottom: all nodes are prepared; attempts follow each other until one succeeds, the restarts are used up or
somebody stops it; then nothing is left, and that is proven.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import dtctl
from dtctl import names
from dtctl.errors import ConnectError, LaunchError, PlanError
from dtctl.launch.control import failure as failures
from dtctl.launch.control.attempt import Attempt, AttemptOutcome
from dtctl.launch.control.controller import Result, control
from dtctl.launch.control.failure import AGENT, Failure
from dtctl.launch.control.gang import PING_S, Gang
from dtctl.launch.control.hang import HangLimit, HangMonitor
from dtctl.launch.control.link import NodeLink
from dtctl.launch.control.session import NodeMessage, NodeSetup, Session
from dtctl.launch.records.events import (
    AttemptRunning,
    AttemptStarting,
    Emit,
    LauncherAway,
    NodeReplaced,
    Note,
    OutputLine,
    Outputs,
    PushProgress,
    Restarting,
)
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import Logs
from dtctl.launch.records.record import RunRecord
from dtctl.plan import environment, rendezvous
from dtctl.plan.model import NodePlan, Plan, Threads
from dtctl.supervisor.messages.attempt import Attach, RunOrigin, StandBy, StartAttempt, WorkerSpec
from dtctl.supervisor.messages.setup import NodeDescription, Prepare, Sweep
from dtctl.transport.base import Target, Transport

if TYPE_CHECKING:
    from dtctl.launch.control.healing import Healing
    from dtctl.launch.control.node_pool import CallRule, NodePool, Substitute
    from dtctl.launch.control.restart_policy import RestartDecision, RestartPolicy


GATHERINGS = 5
"""How often the nodes of an attempt are gathered, if some are lost again before it begins."""
NODES_NAMED = 4
"""In a note; of more, their number."""


class MakePlan(Protocol):
    """Makes the plan of an attempt with what only the nodes know."""

    def __call__(
        self,
        attempt: int,
        nodes: Sequence[str],
        address: str,
        port: int,
        *,
        gpus: Mapping[str, int],
        cores: Mapping[str, int] | None = None,
        threads: Threads | None = None,
    ) -> Plan:
        """See `PlanFacts` for what is known of nodes; these are in rank order, the first has the address."""


Push = Callable[[NodeLink, Callable[[int], None]], PushProgress]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchJob:
    """All that `launch` needs to know, decided before the first connection."""

    run: str
    token: str
    first_plan: Plan
    """The plan as a dry run shows it."""
    make_plan: MakePlan
    make_script: Callable[[Plan, NodePlan], str]
    transport: Transport
    targets: Mapping[str, Target]
    """Of nodes and spares."""
    spares: Mapping[str, NodePlan]
    """Nodes that stand by, in the order in which they are used; their ranks mean nothing."""
    min_nodes: int
    """Nodes that the run needs."""
    return_s: float
    """For how long nodes that the run needs are called again when they are lost."""
    push: Push | None
    code_folder: str = ""
    """Where the code lies on every node, if it is not pushed."""
    is_shared: bool = False
    """Whether that is one folder for all nodes, in which the workers start, and what nodes keep is the run's alone."""
    fixed_port: int | None
    fixed_address: str
    """The head node's address, if the spec names it, so that the nodes need not be asked; empty: they are."""
    secrets: Mapping[str, str]
    link_timeout_s: float
    hang_s: HangLimit
    hang_start_s: HangLimit
    """When a job that makes no progress hangs."""
    heal_s: float
    """How long replacing lost workers may take."""
    time_s: float | None
    """When the run is stopped with snapshots; None: never."""
    trains: bool
    """Whether the spec has a section `train`, which dtctl.runtime reads in the workers."""
    snapshots: Mapping[str, str]
    """Node -> folder of snapshots, of nodes that go on from another run's; the others have their own run's."""
    outputs: tuple[str, ...] = ()
    """Paths in the working folder that are worth keeping; see `job.outputs`."""
    origin: RunOrigin | None = None
    """Who launches the run, for other control machines."""
    log_bytes: int = 0
    """Most that is kept of the output of a rank; 0: all of it."""
    earlier: str = ""
    """The run whose outputs this one goes on in."""
    keep: bool
    """Whether nodes go on when the link is lost (`--detach`)."""


def launch(
    job: LaunchJob, record: RunRecord, *, emit: Emit, signals: list[int], ledger: Ledger, under_way: Plan | None = None
) -> Result:
    """Run a job on its nodes to its end.

    Args:
        job: what to run, where.
        record: the run's folder on this machine.
        emit: told everything that happens, `emit(event)`.
        signals: signals that this process receives are appended here by its handlers.
        ledger: started when the process was.
        under_way: an attempt that nodes go on with although its launcher is gone, to be taken up; None to begin anew.

    Raises:
        DtctlError: a node could not be made ready; nothing was started anywhere.
    """
    return control(NodesBackend(job, record, emit=emit, signals=signals, ledger=ledger, under_way=under_way), signals)


class NodesBackend:
    """See `Backend`: nodes with a link to each."""

    def __init__(
        self,
        job: LaunchJob,
        record: RunRecord,
        *,
        emit: Emit,
        signals: list[int],
        ledger: Ledger,
        under_way: Plan | None,
    ) -> None:
        """Call nobody yet; see `launch` for the arguments."""
        self.job = job
        self.under_way = under_way
        self.record = record
        self.emit = emit
        self.ledger = ledger
        self.ledger.path = record.folder / names.LEDGER_FILE
        self.inbox: queue.Queue[NodeMessage] = queue.Queue(maxsize=10_000)
        self.logs = Logs(record, job.log_bytes)
        self.gang = Gang([self._session(node) for node in job.first_plan.nodes], self.inbox, logs=self.logs, emit=emit)
        self.gang.signals = signals
        self.gang.time_s = job.time_s
        self.launch_s: float | None = None
        self.restart_policy: RestartPolicy | None = None
        self.descriptions: dict[str, NodeDescription] = {}
        """What nodes have said about themselves."""
        self._earlier_host_names: dict[str, str] = {}
        """How nodes called themselves when an earlier launcher asked."""
        self.replaced_nodes: dict[str, NodePlan] = {}
        """Nodes that took part and do no longer."""
        self._visited = {node.name for node in job.first_plan.nodes} | {
            node.name for node in (under_way or job.first_plan).nodes
        }
        """Nodes that know of the run."""
        self._committed_step = 0
        self._lost_output = Counter[str]()
        self._outputs: dict[str, Outputs] = {}
        self.plan = job.first_plan
        """Of the attempt that is on, or was the last."""
        self.attempt: Attempt | None = None
        """None while there is none, and when it could not be started."""
        self.outcome = AttemptOutcome()
        self.failure: Failure | None = None
        self._number = job.first_plan.attempt if under_way is None else under_way.attempt
        self._unblamed = job.first_plan.attempt
        """Attempts that ended because this launcher was away, or before it came."""
        self._started = False
        """Whether all nodes have started the attempt."""
        self._attempt_begun = time.monotonic()

    # -- the loop of controller.py ----------------------------------------------------------------------------------

    def start(self) -> bool:
        """Prepare all nodes, and start the first attempt on them."""
        plan = self.under_way or self._prepare()
        self.plan = plan
        if self.gang.signals:
            self._end()
            return False
        self._earlier_host_names = {} if self.under_way is None else self.record.read_host_names()
        self.record.write_plan(plan, self.host_names)
        if self.under_way is not None:
            self._take_up(plan)
        else:
            self._attempt(plan)
        return True

    @property
    def host_names(self) -> dict[str, str]:
        """How each node calls itself."""
        return self._earlier_host_names | {name: each.host for name, each in self.descriptions.items() if each.host}

    @property
    def is_running(self) -> bool:
        """Whether a node is waited for."""
        return self.attempt is not None and bool(self.attempt.open)

    def poll(self) -> None:
        """Act on the next message of a node."""
        attempt = self.attempt
        if attempt is None:
            return
        message = self.gang.next_message(0.2)
        attempt.excuse_absence()
        if message is not None:
            attempt.handle(message)
        if attempt.all_started and not self._started:
            self._on_started()
        attempt.check_deadlines()

    def interrupt(self, number: int, *, again: bool) -> None:
        """Tell the nodes to stop."""
        if self.attempt is not None:
            self.attempt.interrupt(number, hard=again)

    def restart(self) -> bool:
        """Start the next attempt, unless the last one has succeeded, was stopped, or no other one would do better."""
        if self.attempt is not None:
            for node, rank, text in self.logs.flush():
                self.emit(OutputLine(node=node, rank=rank, text=text))
            self.outcome = self.attempt.close()
        self.failure = self._first_failure(self.outcome)
        self._count(self.outcome)
        goes_on = self._is_next()
        if goes_on:
            self.plan = self._next_plan(self.plan, self._number, self.outcome)
            goes_on = not self.gang.signals
        if not goes_on:
            self._end()
            return False
        self.record.write_plan(self.plan, self.host_names)
        self._attempt(self.plan)
        return True

    def _is_next(self) -> bool:
        """Whether another attempt follows, once what it waits for on purpose is over; `_number` is its number then."""
        plan, outcome, failure = self.plan, self.outcome, self.failure
        if outcome.away_s and failure is None and outcome.stopped_by is None:
            self._number, self._unblamed = self._number + 1, self._unblamed + 1
            self.emit(LauncherAway(away_s=round(outcome.away_s, 1), attempt=self._number))
            self.ledger.enter("restart")
            return True
        if failure is None or outcome.stopped_by is not None:
            return False
        if self._is_stop(failure):
            subject = "the agent" if failure.rank is None else f"rank {failure.rank}"
            self.emit(Note(node=failure.node, text=f"{subject} {failures.describe(failure)}"))
            return False
        if self._number - self._unblamed >= plan.max_restarts:
            return False
        decision = self._judge(outcome, failure)
        if decision.give_up_reason:
            self.emit(Note(node=failure.node, text=f"not restarted: {decision.give_up_reason}"))
            return False
        self._number += 1
        self.ledger.enter("idle" if decision.wait_s else "restart")
        reason = failures.describe(failure)
        self.emit(
            Restarting(
                attempt=self._number, of=plan.max_restarts + self._unblamed, reason=reason, wait_s=decision.wait_s,
                node=failure.node, rank=failure.rank, exit_code=failure.exit_code,
            )
        )  # fmt: skip
        self.gang.idle(decision.wait_s)
        self.ledger.enter("restart")
        return True

    def _end(self) -> None:
        """No attempt follows."""
        self.ledger.enter("stop")
        has_succeeded = self.failure is None and self.outcome.stopped_by is None
        self.ledger.close(succeeded=has_succeeded)
        if has_succeeded and self.outcome.is_unmet:
            text = (
                f"no worker has ever opened {self.plan.rendezvous.endpoint}, where they meet: the "
                f"{self.plan.world_size} workers were separate programs, unless theirs meets elsewhere"
            )
            self.emit(Note(text=text))
        self._sweep_lost_nodes(self.plan, self.outcome)

    def _judge(self, outcome: AttemptOutcome, failure: Failure) -> RestartDecision:
        """Whether, and when, to start again after an attempt that has failed."""
        from dtctl.launch.control.restart_policy import RestartPolicy  # most runs need none

        self.restart_policy = self.restart_policy or RestartPolicy(trains=self.job.trains)
        step = self._last_step(outcome)
        return self.restart_policy.judge(failure, step=step, first=outcome.first_step, lasted_s=self._lasted_s())

    def _count(self, outcome: AttemptOutcome) -> None:
        """Tell the ledger that an attempt is over."""
        failed = min((failure.time for failure in outcome.failures), default=None)
        failed_s = 0.0 if failed is None else max(0.0, time.time() - failed)
        self.ledger.ended(failed_s=failed_s, hung_s=outcome.hung_s)
        self._lost_output.update(outcome.lost_output)
        self._outputs |= outcome.outputs
        self._committed_step = max(self._committed_step, outcome.committed_step)

    def _last_step(self, outcome: AttemptOutcome) -> int | None:
        logged = self.logs.last_step()
        return logged if outcome.last_step is None else max(outcome.last_step, logged or 0)

    def _lasted_s(self) -> float:
        return time.monotonic() - self._attempt_begun

    def close(self) -> None:
        """Tell all nodes to quit, drop all links and close all files."""
        self.gang.quit()
        for session in self.gang.sessions.values():
            session.close()
        self.logs.close()

    # -- before the first attempt -----------------------------------------------------------------------------------

    def _session(
        self,
        node: NodePlan,
        *,
        is_new: bool = True,
        attach: Attach | None = None,
        code: str = "",
        sweep: Sweep | None = None,
    ) -> Session:
        job = self.job
        head = node.node_rank == 0

        def prepare(cwd: str) -> Prepare:
            return Prepare(
                run=job.run,
                fresh=is_new and not job.is_shared,
                cwd=cwd,
                pushed=job.push is not None,
                shared=job.is_shared,
                files=list(node.files),
                programs=list(node.programs),
                path=node.path,
                outputs=list(job.outputs),
                earlier=job.earlier,
            )

        setup = NodeSetup(
            python=node.python,
            workdir=node.workdir,
            ports=rendezvous.port_candidates(job.run, job.first_plan.attempt, job.fixed_port) if head else (),
            push=job.push,
            prepare=prepare,
            code=code or job.code_folder,
            attach=attach,
            sweep=sweep,
        )
        return Session(job.targets[node.name], job.transport, setup, self.inbox)

    def _prepare(self) -> Plan:
        for session in self.gang.sessions.values():
            session.start()
        for node in self.job.first_plan.nodes:  # a wrong template is found now, while the nodes are being connected
            self.job.make_script(self.job.first_plan, node)
        self.descriptions |= self.gang.gather()
        self._tell_of_other_runs()
        if self.gang.signals:
            return self.job.first_plan
        head = self.job.first_plan.head
        port = self.descriptions[head.name].port
        if port == 0:
            tried = rendezvous.port_candidates(self.job.run, self._number, self.job.fixed_port)
            raise PlanError(
                f"no port for the rendezvous is free on the head node (tried {', '.join(map(str, tried))})",
                where=f"node {head.name}",
                hint="free it, or leave `network.rendezvous_port` to dtctl",
            )
        nodes = [node.name for node in self.job.first_plan.nodes]
        cores = {name: description.cores for name, description in self.descriptions.items()}
        plan = self.job.make_plan(self._number, nodes, self._address(head), port, gpus=self._gpus(), cores=cores)
        rendezvous.check_reachable(plan.rendezvous.address, node=head.name, nodes=len(plan.nodes))
        return plan

    def _tell_of_other_runs(self) -> None:
        nodes: dict[str, list[str]] = {}
        for node in self.job.first_plan.nodes:
            description = self.descriptions.get(node.name)
            for run in description.running if description is not None else ():
                nodes.setdefault(run, []).append(node.name)
        for run in sorted(nodes.keys() - {self.job.run}):
            where = ", ".join(nodes[run]) if len(nodes[run]) <= NODES_NAMED else f"{len(nodes[run])} of these nodes"
            self.emit(Note(text=f"{run} is running on {where}, too: both share their GPUs, cores and memory"))

    def _gpus(self) -> dict[str, int]:
        return {name: description.gpus for name, description in self.descriptions.items()}

    def _address(self, head: NodePlan) -> str:
        """Numeric address of the head node, for the other nodes."""
        first = self.job.first_plan
        planned = first.rendezvous.address if head.name == first.head.name else rendezvous.numeric(head.address)
        if (self.job.fixed_address and head.name == first.head.name) or rendezvous.is_numeric(planned):
            return planned
        # Behind a jump host the name means something only there; the node knows the address it was reached at.
        description = self.descriptions.get(head.name)
        return (description.address if description is not None else "") or planned

    # -- attempts ---------------------------------------------------------------------------------------------------

    def _attempt(self, plan: Plan) -> None:
        meeting = plan.rendezvous
        self._attempt_begun = time.monotonic()
        self.emit(AttemptStarting(attempt=plan.attempt, rendezvous=meeting.endpoint, world_size=plan.world_size))
        self.ledger.enter("start")
        self.ledger.attempts = plan.attempt + 1
        try:
            self.gang.start({node.name: self._start_message(plan, node) for node in plan.nodes})
        except ConnectError as exc:
            failure = Failure(node=exc.node, rank=None, exit_code=None, signal=None, time=time.time(), summary=str(exc))
            self.attempt = None
            self.outcome = AttemptOutcome(failures=[failure], lost_nodes=[exc.node], left_behind={exc.node: None})
        else:
            self._watch(plan, under_way=False)

    def _watch(self, plan: Plan, *, under_way: bool) -> None:
        hang_monitor = HangMonitor(
            node_of_rank={rank: node.name for node in plan.nodes for rank in node.ranks},
            limit=self.job.hang_s,
            start_limit=self.job.hang_start_s,
            folder=self.logs.folder / names.HANGS_DIR / f"attempt-{plan.attempt}",
            on_progress=self.ledger.watch,
        )
        self._started = under_way
        self.attempt = Attempt(
            self.gang,
            plan,
            self.job.link_timeout_s,
            hang_monitor=hang_monitor,
            healing=self._healing(plan) if plan.live else None,
            pool=self._pool if plan.live or self.job.keep else None,
            keeps_nodes=self.job.keep,
            under_way=under_way,
            confirms_silence=not self.job.spares,
        )

    @cached_property
    def _pool(self) -> NodePool:
        from dtctl.launch.control.node_pool import NodePool  # few runs need it
        from dtctl.launch.control.spares import Spares

        return NodePool(self.gang, Spares(list(self.job.spares), self.emit), self._call, self._warm_up)

    def _call(self, name: str, rule: CallRule) -> Session:
        """Open a session with a node that was lost or is a spare; see `NodePool`."""
        from dtctl.launch.control.node_pool import KEPT, LIVE

        attach = Attach(run=self.job.run, offsets=self._offsets(name)) if rule is KEPT else None
        is_new = self._visit(name)
        sweep = Sweep(run=self.job.run, token=self.job.token, grace_s=0.0) if rule is LIVE and not is_new else None
        node, code = self._known_nodes()[name], self._code_on(name)
        return self._session(node, is_new=is_new, attach=attach, code=code, sweep=sweep)

    def _offsets(self, name: str) -> dict[str, int]:
        """Return how much of each rank's output has arrived from a node."""
        return {str(rank): size for rank, size in self.logs.offsets.get(name, {}).items() if rank >= AGENT}

    def _healing(self, plan: Plan) -> Healing:
        """What replaces lost workers."""
        from dtctl.launch.control.healing import Healing  # few runs need it

        return Healing(
            self.gang,
            {rank: node.name for node in plan.nodes for rank in node.ranks},
            limit_s=self.job.heal_s,
            ledger=self.ledger,
            address=lambda name: self._address(self._known_nodes()[name]),
            pool=None if self.job.keep else self._pool,
            place=self._place,
        )

    def _place(self, substitute: Substitute, epoch: int) -> None:
        """Give a node the place of a lost one, and start the workers of an epoch there.

        Raises:
            NotHealed: it cannot have the same workers.
        """
        lost, name = substitute.lost, substitute.session.name
        known = self._known_nodes()
        assert substitute.description is not None  # noqa: S101  # it was prepared
        new = self._plan_with(lost, name, substitute.description)
        order = [node.name for node in new.nodes]
        sessions = self.gang.sessions | {name: substitute.session}
        self.gang.sessions = {each: sessions[each] for each in order}
        if name != lost:
            self.replaced_nodes[lost] = known[lost]
            self.replaced_nodes.pop(name, None)
            self.emit(NodeReplaced(node=lost, by=name, reason=substitute.reason))
        self.plan = new
        self.record.write_plan(new, self.host_names)
        if self.attempt is not None:
            self.attempt.replace_node(lost, name, new)
        node = next(node for node in new.nodes if node.name == name)
        substitute.session.send(self._start_message(new, node, live_epoch=epoch))
        substitute.session.send(Attach(run=self.job.run, offsets=self._offsets(name)))

    def _plan_with(self, lost: str, name: str, description: NodeDescription) -> Plan:
        """The plan that is followed, with another node in the place of a lost one.

        Raises:
            NotHealed: it cannot have the same workers.
        """
        from dtctl.launch.control.spares import NotHealed

        plan, meeting = self.plan, self.plan.rendezvous
        order = [name if node.name == lost else node.name for node in plan.nodes]
        self.descriptions[name] = description
        address = self._address(self._known_nodes()[name]) if lost == plan.head.name else meeting.address
        try:
            new = self.job.make_plan(
                plan.attempt, order, address, meeting.port, gpus=self._gpus(), threads=plan.threads
            )  # fmt: skip
        except PlanError as exc:
            raise NotHealed(f"{name} does not fit: {exc.message}") from exc
        if [node.ranks for node in new.nodes] != [node.ranks for node in plan.nodes]:
            raise NotHealed(f"{name} does not have as many workers as {lost}")
        return new

    def _warm_up(self, session: Session, description: NodeDescription) -> None:
        """Let a spare import what workers need; as the last node, since nobody knows which one will be lost.

        Raises:
            NotHealed: it cannot have the same workers.
        """
        plan = self._plan_with(self.plan.nodes[-1].name, session.name, description)
        session.send(self._start_message(plan, plan.nodes[-1], kind=StandBy))

    def _visit(self, name: str) -> bool:
        """Whether the run is new to a node, which knows of it from now on."""
        is_new = name not in self._visited
        self._visited.add(name)
        return is_new

    def _known_nodes(self) -> dict[str, NodePlan]:
        return {**self.job.spares, **self.replaced_nodes, **{node.name: node for node in self.plan.nodes}}

    def _code_on(self, name: str) -> str:
        return self.gang.sessions[name].code if name in self.gang.sessions else ""

    def _take_up(self, plan: Plan) -> None:
        """Watch an attempt that another launcher has started; a node that cannot be reached is called again."""
        self._attempt_begun = time.monotonic()
        for node in plan.nodes:  # as far as the launcher before has counted
            gpus = 0 if environment.ON_CPUS in node.env else node.slots
            self.descriptions[node.name] = NodeDescription(gpus=gpus, address="", port=0)
        self.ledger.resume(self.record.folder / names.LEDGER_FILE)
        self.logs.rejoin()
        code = self.record.code_folders()
        for name, session in self.gang.sessions.items():
            session.code = code.get(name, "")
            self._pool.call_kept(name)
        self._watch(plan, under_way=True)

    def _on_started(self) -> None:
        self._started = True
        if self.launch_s is None:
            self.launch_s = self.ledger.total_s()
        self.ledger.started()
        self.emit(AttemptRunning(attempt=self.plan.attempt, launch_s=round(self.launch_s, 3)))

    def _start_message(
        self, plan: Plan, node: NodePlan, *, live_epoch: int = 0, kind: type[StartAttempt] = StartAttempt
    ) -> StartAttempt:
        workers = [
            WorkerSpec(
                rank=node.first_rank + local_rank if plan.kind != "torchrun" else AGENT,
                env=environment.worker_variables(
                    plan.kind, rank=str(node.first_rank + local_rank), local_rank=str(local_rank)
                ),
            )
            for local_rank in range(node.processes)
        ]
        meets_here = plan.per_worker and plan.world_size > 1 and node.name == plan.head.name and not live_epoch
        return kind(
            run=plan.run,
            token=self.job.token,
            attempt=plan.attempt,
            script=self.job.make_script(plan, node),
            workers=workers,
            preload=list(node.preload),
            split_ranks=plan.kind == "torchrun",
            env={**self.job.secrets, **self._history_env(), names.VERSION: dtctl.__version__},
            live=plan.live,
            live_epoch=live_epoch,
            outputs=list(self.job.outputs),
            log_bytes=self.job.log_bytes,
            origin=self.job.origin,
            peer=plan.rendezvous.address,
            meeting_port=plan.rendezvous.port if meets_here else 0,
            grace_s=plan.grace_s,
            snapshots=self.job.snapshots.get(node.name, ""),
            keep=self.job.keep,
            link_timeout_s=self._fence_s(),
        )

    def _fence_s(self) -> float:
        """Seconds of silence after which a node ends its workers: before a spare has their ranks."""
        limit_s = self.job.link_timeout_s
        return limit_s - min(PING_S, limit_s / 4) if self.job.spares else limit_s

    def _first_failure(self, outcome: AttemptOutcome) -> Failure | None:
        if not outcome.failures:
            return None
        from dtctl.launch.control.culprit import first_failure  # most runs need none
        from dtctl.launch.records.host_names import HostNames

        return first_failure(outcome.failures, outcome.left_early, self.logs, HostNames(self.host_names))

    def _history_env(self) -> dict[str, str]:
        """What workers cannot know of earlier attempts if the node that knew is gone."""
        return {names.COMMITTED_STEP: str(self._committed_step)} if self._committed_step else {}

    def _is_stop(self, failure: Failure) -> bool:
        return failures.is_stop(failure, trains=self.job.trains)

    def _next_plan(self, plan: Plan, attempt: int, outcome: AttemptOutcome) -> Plan:
        """The plan of the next attempt, with a rendezvous that no straggler of the last one knows."""
        known_nodes = self._known_nodes()
        unreachable = {*outcome.lost_nodes, *outcome.already_ended}
        ports = rendezvous.port_candidates(plan.run, attempt, self.job.fixed_port)
        for _ in range(GATHERINGS):  # while some are waited for, others may be lost
            next_nodes = self._pool.choose_nodes(unreachable, min_nodes=self.job.min_nodes, return_s=self.job.return_s)
            self.replaced_nodes |= {name: known_nodes[name] for name in next_nodes.replaced}
            self.descriptions |= next_nodes.descriptions
            head = known_nodes[next_nodes.names[0]]
            port = self.gang.probe(head.name, ports)
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
        address = plan.rendezvous.address if same_head else self._address(head)
        return self.job.make_plan(
            attempt, next_nodes.names, address, port or 0, gpus=self._gpus(), threads=plan.threads
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def _sweep_lost_nodes(self, plan: Plan, outcome: AttemptOutcome) -> None:
        """On nodes whose link was lost, if they can be reached again, end the processes that are left."""
        outcome.left_behind |= dict.fromkeys(self.replaced_nodes)
        nodes = [*plan.nodes, *self.replaced_nodes.values()]
        unreachable = [
            node for node in nodes if node.name in outcome.left_behind and outcome.left_behind[node.name] is None
        ]
        if not unreachable or self.job.keep:
            return
        from dtctl.launch.sweep import SweepTarget, sweep

        targets = [
            SweepTarget(
                target=replace(self.job.targets[node.name], connect_timeout_s=3.0),
                python=node.python,
                workdir=node.workdir,
            )
            for node in unreachable
        ]
        grace_s = min(plan.grace_s, 3.0)
        answers = sweep(targets, self.job.transport, run=plan.run, token=self.job.token, grace_s=grace_s)
        for name, answer in answers.items():
            if isinstance(answer, int):
                outcome.left_behind[name] = answer

    def result(self) -> Result:
        """How it ended; computed last, so that the ledger has all of its time."""
        counts = list(self.outcome.left_behind.values())
        with contextlib.suppress(LaunchError):  # a full disk changes nothing about how the run ended
            path = self.record.folder / names.LEDGER_FILE
            self.record.with_room(lambda: self.ledger.write(path, attempts=self._number + 1))
        return Result(
            run=self.job.run,
            failure=self.failure,
            stopped_by=self.outcome.stopped_by or (self.gang.signals[-1] if self.gang.signals else None),
            asked_to_stop=self.failure is not None and self._is_stop(self.failure),
            attempts=self._number + 1,
            launch_s=self.launch_s,
            duration_s=self.ledger.total_s(),
            goodput=self.ledger.facts().goodput,
            left_behind=None if None in counts else sum(count or 0 for count in counts),
            lost_output=dict(self._lost_output + Counter(self.logs.lost)),
            cut_output=self.logs.cut,
            log_mib=self.job.log_bytes >> 20,
            outputs=self._outputs,
            is_local=self.job.first_plan.transport == "local",
            nodes=len(self.gang.sessions),
        )
