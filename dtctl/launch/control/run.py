"""A run from the first connection to the last process: attempts, restarts, the end, and its result.

Reads top to bottom: `launch` prepares all nodes, then runs attempts until one succeeds, the restarts are used up or
somebody stops it, and then proves that nothing is left.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dtctl import names
from dtctl.errors import ConnectError, LaunchError, PlanError
from dtctl.launch.control import failure as failures
from dtctl.launch.control.attempt import AttemptOutcome, watch
from dtctl.launch.control.failure import AGENT, Failure
from dtctl.launch.control.gang import Gang
from dtctl.launch.control.session import NodeMessage, NodeSetup, Session
from dtctl.launch.job import LaunchJob, Result
from dtctl.launch.records.events import AttemptRunning, AttemptStarting, Emit, Note, Restarting
from dtctl.launch.records.ledger import Ledger
from dtctl.launch.records.logs import Logs
from dtctl.launch.records.record import RunRecord
from dtctl.plan import environment, rendezvous
from dtctl.plan.model import NodePlan, Plan

if TYPE_CHECKING:
    from dtctl.launch.control.restart_policy import RestartDecision, RestartPolicy


def launch(
    job: LaunchJob, record: RunRecord, *, emit: Emit, signals: list[int], ledger: Ledger, under_way: Plan | None = None
) -> Result:
    """Run a job to its end.

    Args:
        job: what to run, where.
        record: the run's folder on this machine.
        emit: told everything that happens, `emit(event, **facts)`.
        signals: signals that this process receives are appended here by its handlers.
        ledger: started when the process was.
        under_way: an attempt that nodes go on with although its launcher is gone, to be taken up; None to begin anew.

    Raises:
        DtctlError: a node could not be made ready; nothing was started anywhere.
    """
    launcher = _Launcher(job, record, emit=emit, signals=signals, ledger=ledger)
    try:
        outcome, failure, attempt = launcher.run(under_way)
    finally:
        launcher.gang.quit()
        launcher.close()
    return launcher.result(outcome, failure, attempt)


class _Launcher:
    """The state of one run; its methods are the steps of `launch`, in order."""

    def __init__(self, job: LaunchJob, record: RunRecord, *, emit: Emit, signals: list[int], ledger: Ledger) -> None:
        self.job = job
        self.record = record
        self.emit = emit
        self.ledger = ledger
        self.ledger.path = record.folder / names.LEDGER_FILE
        self.inbox: queue.Queue[NodeMessage] = queue.Queue(maxsize=10_000)
        self.logs = Logs(record)
        self.gang = Gang([self._session(node) for node in job.first_plan.nodes], self.inbox, logs=self.logs, emit=emit)
        self.gang.signals = signals
        self.gang.time_s = job.time_s
        if job.keep:
            self.gang.reattach = self._reattach
        self.launch_s: float | None = None
        self.restart_policy: RestartPolicy | None = None
        self.hellos: dict[str, Mapping[str, Any]] = {}
        """What nodes have said about themselves."""
        self.spares = list(job.spares)
        self.replaced_nodes: dict[str, NodePlan] = {}
        """Nodes that took part and do no longer."""
        self._committed_step = 0
        self._lost_output = Counter[str]()
        self._attempt_number = 0
        self._attempt_begun = time.monotonic()

    def run(self, under_way: Plan | None) -> tuple[AttemptOutcome, Failure | None, int]:
        """Prepare, then attempt until it is over; how the last attempt ended, what failed first, and its number."""
        plan = under_way or self._prepare()
        attempt, outcome, failure = plan.attempt, AttemptOutcome(), None
        while not self.gang.signals:
            self.record.write_plan(plan)
            outcome = self._take_up(plan) if plan is under_way else self._attempt(plan)
            failure = self._first_failure(outcome)
            self._count(outcome)
            if failure is None or outcome.stopped_by is not None:
                break
            if self._is_stop(failure):
                subject = "the agent" if failure.rank is None else f"rank {failure.rank}"
                self.emit(Note(node=failure.node, text=f"{subject} {failures.describe(failure)}"))
                break
            if attempt >= plan.max_restarts:
                break
            decision = self._judge(outcome, failure)
            if decision.give_up_reason:
                self.emit(Note(node=failure.node, text=f"not restarted: {decision.give_up_reason}"))
                break
            attempt += 1
            self.ledger.enter("idle" if decision.wait_s else "restart")
            reason = failures.describe(failure)
            self.emit(
                Restarting(
                    attempt=attempt, of=plan.max_restarts, reason=reason, wait_s=decision.wait_s,
                    node=failure.node, rank=failure.rank,
                )
            )  # fmt: skip
            self.gang.idle(decision.wait_s)
            self.ledger.enter("restart")
            plan = self._next_plan(plan, attempt, outcome)
        self.ledger.enter("stop")
        self.ledger.close(succeeded=failure is None and outcome.stopped_by is None)
        self._sweep_lost_nodes(plan, outcome)
        return outcome, failure, attempt

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
        self._committed_step = max(self._committed_step, outcome.committed_step)

    def _last_step(self, outcome: AttemptOutcome) -> int | None:
        logged = self.logs.last_step()
        return logged if outcome.last_step is None else max(outcome.last_step, logged or 0)

    def _lasted_s(self) -> float:
        return time.monotonic() - self._attempt_begun

    def close(self) -> None:
        """Drop all links and close all files."""
        for session in self.gang.sessions.values():
            session.close()
        self.logs.close()

    # -- before the first attempt -----------------------------------------------------------------------------------

    def _session(
        self, node: NodePlan, *, is_new: bool = True, attach: dict[str, Any] | None = None, code: str = ""
    ) -> Session:
        job = self.job
        head = node.node_rank == 0
        prepare = {
            "op": "prepare",
            "run": job.run,
            "fresh": is_new,
            "cwd": code,
            "files": list(node.files),
            "programs": list(node.programs),
        }
        setup = NodeSetup(
            python=node.python,
            workdir=node.workdir,
            ports=rendezvous.port_candidates(job.run, job.first_plan.attempt, job.fixed_port) if head else (),
            push=job.push,
            prepare=prepare,
            attach=attach,
        )
        session = Session(job.targets[node.name], job.transport, setup, self.inbox)
        session.code = code
        return session

    def _prepare(self) -> Plan:
        for session in self.gang.sessions.values():
            session.start()
        for node in self.job.first_plan.nodes:  # a wrong template is found now, while the nodes are being connected
            self.job.make_script(self.job.first_plan, node)
        hellos = self.gang.gather()
        if self.gang.signals:
            return self.job.first_plan
        head = self.job.first_plan.head
        facts = hellos[head.name]
        port = int(facts["port"])
        if port == 0:
            tried = rendezvous.port_candidates(self.job.run, 0, self.job.fixed_port)
            raise PlanError(
                f"no port for the rendezvous is free on the head node (tried {', '.join(map(str, tried))})",
                where=f"node {head.name}",
                hint="free it, or leave `network.rendezvous_port` to dtctl",
            )
        self.hellos |= hellos
        nodes = [node.name for node in self.job.first_plan.nodes]
        plan = self.job.make_plan(0, self._address(head), port, self._gpus(), nodes)
        rendezvous.check_reachable(plan.rendezvous.address, node=head.name, nodes=len(plan.nodes))
        return plan

    def _gpus(self) -> dict[str, int]:
        return {name: int(hello["gpus"]) for name, hello in self.hellos.items()}

    def _address(self, head: NodePlan) -> str:
        """Numeric address of the head node, for the other nodes."""
        first = self.job.first_plan
        planned = first.rendezvous.address if head.name == first.head.name else rendezvous.numeric(head.address)
        if (self.job.fixed_address and head.name == first.head.name) or rendezvous.is_numeric(planned):
            return planned
        # Behind a jump host the name means something only there; the node knows the address it was reached at.
        return str(self.hellos.get(head.name, {}).get("address", "")) or planned

    # -- attempts ---------------------------------------------------------------------------------------------------

    def _attempt(self, plan: Plan) -> AttemptOutcome:
        meeting = plan.rendezvous
        self._attempt_number, self._attempt_begun = plan.attempt, time.monotonic()
        self.emit(AttemptStarting(attempt=plan.attempt, rendezvous=meeting.endpoint, world_size=plan.world_size))
        self.ledger.enter("start")
        self.ledger.attempts = plan.attempt + 1
        try:
            self.gang.start({node.name: self._start_message(plan, node) for node in plan.nodes})
        except ConnectError as exc:
            return AttemptOutcome(
                failures=[
                    Failure(node=exc.node, rank=None, exit_code=None, signal=None, time=time.time(), summary=str(exc))
                ],
                lost_nodes=[exc.node],
                left_behind={exc.node: None},
            )
        return self._watch(plan, on_started=self._on_started)

    def _watch(self, plan: Plan, *, on_started: Callable[[], None] | None) -> AttemptOutcome:
        return watch(
            self.gang,
            plan,
            link_timeout_s=self.job.link_timeout_s,
            hang_s=self.job.hang_s,
            hang_start_s=self.job.hang_start_s,
            on_started=on_started,
            on_progress=self.ledger.watch,
        )

    def _take_up(self, plan: Plan) -> AttemptOutcome:
        """Watch an attempt that another launcher has started; a node that cannot be reached is called again."""
        self._attempt_number, self._attempt_begun = plan.attempt, time.monotonic()
        self.hellos |= {node.name: {"gpus": node.slots} for node in plan.nodes}
        self.ledger.resume(self.record.folder / names.LEDGER_FILE)
        self.logs.rejoin()
        code = self.record.code_folders()
        for name, session in self.gang.sessions.items():
            session.code = code.get(name, "")
            self._reattach(name)
        return self._watch(plan, on_started=None)

    def _on_started(self) -> None:
        if self.launch_s is None:
            self.launch_s = self.ledger.total_s()
        self.ledger.started()
        self.emit(AttemptRunning(attempt=self._attempt_number, launch_s=round(self.launch_s, 3)))

    def _start_message(self, plan: Plan, node: NodePlan) -> dict[str, Any]:
        workers = [
            {
                "rank": node.first_rank + local_rank if plan.kind != "torchrun" else AGENT,
                "env": environment.worker_variables(plan.kind, node.first_rank, local_rank),
            }
            for local_rank in range(node.processes)
        ]
        code = self.gang.sessions[node.name].code
        return {
            "run": plan.run,
            "token": self.job.token,
            "attempt": plan.attempt,
            "script": self.job.make_script(plan, node),
            "workers": workers,
            "preload": list(node.preload),
            "split_ranks": plan.kind == "torchrun",
            "env": {**self.job.secrets, **self._history_env()},
            "cwd": code,
            "peer": plan.rendezvous.address,
            "grace_s": plan.grace_s,
            "snapshots": self.job.snapshots.get(node.name, ""),
            "keep": self.job.keep,
            "link_timeout_s": self.job.link_timeout_s,
        }

    def _first_failure(self, outcome: AttemptOutcome) -> Failure | None:
        if not outcome.failures:
            return None
        from dtctl.launch.control.culprit import first_failure  # most runs need none

        return first_failure(outcome.failures, outcome.left_early, self.logs)

    def _history_env(self) -> dict[str, str]:
        """What workers cannot know of earlier attempts if the node that knew is gone."""
        return {names.COMMITTED_STEP: str(self._committed_step)} if self._committed_step else {}

    def _is_stop(self, failure: Failure) -> bool:
        return failures.is_stop(failure, trains=self.job.trains)

    def _reattach(self, name: str) -> None:
        node = next(node for node in self.job.first_plan.nodes if node.name == name)
        previous = self.gang.sessions[name]
        previous.close()
        offsets = {str(rank): received for rank, received in self.logs.offsets.get(name, {}).items() if rank >= AGENT}
        attach = {"op": "attach", "run": self.job.run, "offsets": offsets}
        session = self._session(node, is_new=False, attach=attach, code=previous.code)
        self.gang.sessions[name] = session
        session.start()

    def _next_plan(self, plan: Plan, attempt: int, outcome: AttemptOutcome) -> Plan:
        """The plan of the next attempt, with a rendezvous that no straggler of the last one knows."""
        known_nodes = {**self.job.spares, **{node.name: node for node in plan.nodes}}
        code = {name: session.code for name, session in self.gang.sessions.items()}

        def call(name: str, is_new: bool) -> Session:
            return self._session(known_nodes[name], is_new=is_new, code=code.get(name, ""))

        unreachable = {*outcome.lost_nodes, *outcome.already_ended}
        from dtctl.launch.control.replace_nodes import choose_nodes

        next_nodes = choose_nodes(
            self.gang, unreachable, self.spares, min_nodes=self.job.min_nodes, return_s=self.job.return_s, call=call
        )
        self.replaced_nodes |= {name: known_nodes[name] for name in next_nodes.replaced}
        self.hellos |= next_nodes.hellos
        head = known_nodes[next_nodes.names[0]]
        port = self.gang.probe(head.name, rendezvous.port_candidates(plan.run, attempt, self.job.fixed_port))
        if port == 0 and not self.gang.signals:
            raise PlanError("no port for the rendezvous is free on the head node", where=f"node {head.name}")
        same_head = head.name == plan.head.name
        address = plan.rendezvous.address if same_head else self._address(head)
        return self.job.make_plan(attempt, address, port, self._gpus(), next_nodes.names)

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

    def result(self, outcome: AttemptOutcome, failure: Failure | None, attempt: int) -> Result:
        """The result of the run; computed last, so that the ledger has all of its time."""
        stopped_by = outcome.stopped_by or (self.gang.signals[-1] if self.gang.signals else None)
        counts = list(outcome.left_behind.values())
        left_behind = None if None in counts else sum(count or 0 for count in counts)
        if stopped_by is not None:
            # SIGUSR1 is how batch systems say that the time is nearly up, and ours is: the run is to be launched again.
            status, exit_code = "stopped", names.REQUEUE_EXIT if stopped_by == signal.SIGUSR1 else 128 + stopped_by
        elif failure is not None and self._is_stop(failure):
            status, exit_code = "stopped", names.REQUEUE_EXIT
        elif failure is not None:
            status, exit_code = "failed", 8
        else:
            status, exit_code = "succeeded", 0
        with contextlib.suppress(LaunchError):  # a full disk changes nothing about how the run ended
            self.ledger.write(self.record.folder / names.LEDGER_FILE, attempts=attempt + 1)
        return Result(
            run=self.job.run,
            status=status,
            exit_code=exit_code,
            attempts=attempt + 1,
            first_failure=failure if status == "failed" else None,
            launch_s=self.launch_s,
            duration_s=self.ledger.total_s(),
            goodput=self.ledger.facts()["goodput"],
            left_behind=left_behind,
            lost_output=dict(self._lost_output + Counter(self.logs.lost)),
            nodes=len(self.gang.sessions),
        )
