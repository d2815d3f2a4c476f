"""Detection of hangs and of the worker that caused one; and the monitor that requests the workers' stacks.

In synchronous training one worker that is stuck soon holds up all others, which wait for it in a collective. So a
run hangs when no worker has noted progress for longer than steps can take, and the culprit is the one that is behind;
where all are at the same place, the one whose stack shows that it does not wait for others.

Between one step and the next, time is measured by the steps before. What has no measure (the start, compilation, the
first batches and steps) has a generous limit; evaluation and a snapshot on a slow disk are left to the time-outs of the
collectives. There is no excuse for a process that is stopped (SIGSTOP), nor for a wait for one that has left early: it
has ended, or takes no more steps, though its training has some left.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dtctl.errors import LaunchError
from dtctl.launch.control.failure import Failure
from dtctl.launch.control.progress import ReportedPhase, Standing, unheard
from dtctl.launch.records.run_writer import write_private
from dtctl.supervisor.messages.attempt import WorkerStack

ANSWER_S = 10.0
"""Seconds that the nodes may take to send the stacks of their workers."""
FRESH_S = 4.0
"""Seconds after which a node's report is too old for a verdict; other code decides whether the node is lost."""

Watched = Callable[[Sequence[Standing]], None]

HangLimit = float | Literal["auto", "off"]
FLOOR_S = 30.0
"""auto: no shorter silence is a hang, since file servers and switches have hiccups."""
FACTOR = 10.0
"""auto: nor one that is shorter than this many of the slowest step so far."""
START_S = 1800.0
"""auto: how long a start, a compilation, or one of the first steps may be silent."""
MEASURED_STEPS = 4
"""auto: steps of an attempt after which there is a measure."""

_WAITING = (
    "/torch/distributed/", "/torch/autograd/graph.py", "/torch/nn/parallel/", "/dtctl/runtime/distributed/agreement.py",
    "/dtctl/runtime/strategies/elastic.py", "/dtctl/runtime/guards/oom.py", "/dtctl/runtime/guards/nonfinite.py",
    "/dtctl/runtime/telemetry/report.py", "/dtctl/runtime/strategies/gradients.py",
    "/dtctl/runtime/distributed/worker.py",
)  # fmt: skip
"""Files of code that waits for other workers, if it is the innermost Python code that runs; with GPUs also by waiting
for a number that depends on an exchange."""
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_SPY_FRAME = re.compile(r"^ {4}(?P<name>.+) \((?P<file>[^()]+):(?P<line>\d+)\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Position of a worker when its stack was taken."""

    state: str
    tool: str
    """py-spy, faulthandler or none"""
    text: str
    flight: str
    """The last collectives, JSON of torch's flight recorder; empty when it did not answer."""

    @property
    def frames(self) -> list[tuple[str, int, str]]:
        """Frames of the main thread as (file, line, function), the innermost first."""
        blocks = re.split(r"(?m)^(?=(?:Stack|Thread) )", self.text)
        blocks = [block for block in blocks if block.startswith(("Thread ", "Stack "))]
        if not blocks:
            return []
        # The main thread is the last one, or py-spy names it.
        main = next((block for block in blocks if '"MainThread"' in block.split("\n", 1)[0]), blocks[-1])
        matches = _FRAME.findall(main) or [(file, line, name) for name, file, line in _SPY_FRAME.findall(main)]
        return [(file, int(line), name) for file, line, name in matches]

    @property
    def is_waiting(self) -> bool | None:
        """Return whether it waits for other workers; None when unknown."""
        frames = self.frames
        return any(marker in frames[0][0] for marker in _WAITING) if frames else None


def silence(
    workers: Collection[Standing], *, world_size: int, limit: HangLimit, start_limit: HangLimit = "auto"
) -> float | None:
    """Return the seconds for which the run has been hanging; None if it does not, or if that is not known.

    Args:
        workers: those that have reported their progress, also if they have ended since.
        world_size: workers that there should be.
        limit: `job.hang_s`.
        start_limit: `job.hang_start_s`.
    """
    active = [worker for worker in workers if not worker.finished]
    if limit == "off" or not active:
        return None
    slowest_s = max(worker.slowest_s for worker in active)
    limit_s = max(FLOOR_S, FACTOR * slowest_s) if limit == "auto" else limit
    stopped = [worker.stale_s for worker in active if worker.state == "T" and worker.phase != ReportedPhase.STARTING]
    if stopped and min(stopped) >= limit_s:
        return min(stopped)
    if any(worker.phase in (ReportedPhase.EVALUATION, ReportedPhase.SNAPSHOT) for worker in active):
        return None
    steps = all(worker.phase == ReportedPhase.STEPPING for worker in active)
    done = min(worker.step - worker.first for worker in active)
    measured = len(workers) >= world_size and done >= (MEASURED_STEPS if limit == "auto" else 1)
    if not (steps and (measured or any(worker.until for worker in left_early(workers)))):
        if start_limit == "off":
            return None
        limit_s = max(limit_s, START_S if start_limit == "auto" else start_limit)
    silent_s = min(worker.stale_s for worker in active)
    return silent_s if silent_s >= limit_s else None


def left_early(workers: Collection[Standing]) -> list[Standing]:
    """Workers that take no more steps although their training has some left, by rank.

    One that never began is none if others have taken steps since: they can do without it.
    """
    trained = any(worker.step > worker.first for worker in workers if not worker.left_early)
    leavers = [worker for worker in workers if worker.left_early and (worker.until or not trained)]
    return sorted(leavers, key=lambda worker: worker.rank)


def culprits(workers: Collection[Standing], stacks: Mapping[int, Stack]) -> list[Standing]:
    """Return the workers that the others wait for, by rank; none when all are in the same place and all wait."""
    everyone = sorted(workers, key=lambda worker: worker.rank)
    stopped = [worker for worker in everyone if worker.state == "T"]
    if stopped:
        return stopped
    leavers = left_early(everyone)
    if leavers:
        return leavers
    everyone = [worker for worker in everyone if not worker.finished]
    waits = {worker.rank: stacks[worker.rank].is_waiting for worker in everyone if worker.rank in stacks}
    awake = [worker for worker in everyone if waits.get(worker.rank) is False]
    lowest = min(worker.position for worker in everyone)
    behind = [worker for worker in everyone if worker.position == lowest]
    if len(behind) < len(everyone):
        # One that is ahead and computes holds up those that are behind and wait: it went past a collective of theirs.
        all_wait = all(waits.get(worker.rank) for worker in behind)
        return awake if all_wait and awake else behind
    return awake if len(awake) < len(everyone) else []


def hang_failure(
    workers: Collection[Standing],
    stacks: Mapping[int, Stack],
    *,
    silent_s: float,
    now: float,
    silent: Mapping[int, str] | None = None,
) -> Failure:
    """Return the failure that describes a run that hangs.

    Args:
        workers: those that have reported their progress, also if they have ended since.
        stacks: the workers' stacks.
        silent_s: for how long nothing had moved.
        now: the time of day.
        silent: workers that have reported no progress yet, rank -> node.
    """
    active = [worker for worker in workers if not worker.finished]
    begun = [worker for worker in active if worker.phase != ReportedPhase.STARTING]
    text = f"no progress for {silent_s:.0f} s "
    text += f"in step {min(worker.step for worker in begun) + 1}" if begun else "before the first step"
    blamed = culprits(workers, stacks)
    if silent and not any(worker.state == "T" or worker.left_early for worker in blamed):
        culprit_names = ", ".join(f"rank {rank} on {node}" for rank, node in sorted(silent.items())[:8])
        rank, node = min(silent.items())
        verb = "has" if len(silent) == 1 else "have"
        text += f": {culprit_names} {verb} not reached the training{_waiting_text(len(active))}"
        return Failure(node=node, rank=rank, exit_code=None, signal=None, time=now, summary=text, hang=True)
    if not blamed:
        first = min(active, key=lambda worker: worker.rank)
        text += ": all workers wait for each other at the same place; the network between them may be broken"
        return Failure(node=first.node, rank=None, exit_code=None, signal=None, time=now, summary=text, hang=True)
    first = blamed[0]
    culprit_names = ", ".join(f"rank {worker.rank} on {worker.node}" for worker in blamed[:8])
    stack = stacks.get(first.rank)
    frames = stack.frames if stack is not None else []
    location = (
        f"{', and is now' if first.left_early else ''} at {frames[0][0]}:{frames[0][1]} in {frames[0][2]}"
        if frames
        else ""
    )
    consequence = _waiting_text(len([worker for worker in active if worker not in blamed]))
    return Failure(
        node=first.node,
        rank=first.rank,
        exit_code=None,
        signal=None,
        time=now,
        summary=f"{text}: {culprit_names} {_state_text(first)}{location}{consequence}",
        tail=tuple(f"{file}:{line} in {name}" for file, line, name in frames[:8]),
        hang=True,
    )


def early_exit(worker: Standing) -> str:
    """Describe a worker that left early: `left the training after step 3 of 12, before the others`.

    The text leaves open whether its process has ended, too: the others lose their connections to it while it is still
    ending, and which of the two is noticed first is chance.
    """
    if not worker.until:  # it reports no steps: maybe it is no training, or has not come so far
        return "ended while others ran"
    return f"left the training after step {worker.step} of {worker.until}, before the others"


def _state_text(worker: Standing) -> str:
    if worker.state == "T":
        return "is stopped (SIGSTOP)"
    return early_exit(worker) if worker.left_early else f"is stuck {worker.place_text}"


def _waiting_text(waiting: int) -> str:
    return {0: "", 1: "; the other one waits for it"}.get(waiting, f"; the {waiting} others wait for it")


def write_stack(folder: Path, node: str, rank: int, stack: Stack) -> Path:
    """Write what a worker has shown below `folder`; where its stack is.

    Raises:
        LaunchError: it cannot be written.
    """
    below = folder / node
    below.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = below / f"rank-{rank}.txt"
    head = f"state {stack.state or 'gone'}, stack by {stack.tool}\n\n"
    write_private(path, head + stack.text)
    if stack.flight:
        write_private(below / f"trace_rank_{rank}.json", stack.flight)  # which `dtctl doctor --log` knows
    return path


class HangMonitor:
    """The last report of each worker of one attempt, and the stacks that are requested if they hang."""

    def __init__(
        self,
        *,
        node_of_rank: Mapping[int, str],
        limit: HangLimit,
        start_limit: HangLimit,
        output_limit_s: float | None = None,
        folder: Path,
        on_progress: Watched | None,
    ) -> None:
        """Create a detector without reports.

        Args:
            node_of_rank: workers of the attempt, rank -> node.
            limit: `job.hang_s`.
            start_limit: `job.hang_start_s`.
            output_limit_s: `job.hang_output_s`.
            folder: where stacks are kept, if there will be any.
            on_progress: called with the workers' progress, whenever a node reports it.
        """
        self.node_of_rank = node_of_rank
        self.limit: HangLimit = limit
        self.start_limit: HangLimit = start_limit
        self.output_limit_s = output_limit_s
        self.printed_at = time.monotonic()
        """Time when a worker last printed something, or none had begun."""
        self.folder = folder
        self.on_progress = on_progress
        self.workers: dict[int, Standing] = {}
        self.silent_s: float | None = None
        """Seconds for which nothing had moved when the question was asked; None: it was not."""
        self._ended: set[int] = set()
        """Ranks that have ended well."""
        self._before_stop: dict[int, Standing] | None = None
        self._last_report: dict[str, float] = {}
        self._stacks: dict[int, Stack] = {}
        self._awaited: set[str] = set()
        self._deadline = 0.0
        self._asked = 0.0

    def update(self, reports: Sequence[Standing], *, node: str, before_stop: bool = False) -> None:
        """Take in a node's report of its workers' progress; `before_stop`: before it has asked them to end."""
        if before_stop and self._before_stop is not None:
            self._before_stop |= {worker.rank: self._as_ended(worker) for worker in reports}
        if self.silent_s is not None:
            return  # what is judged is how things stood when the question was asked
        self._last_report[node] = time.monotonic()
        self.workers |= {worker.rank: self._as_ended(worker) for worker in reports}
        if reports and self.on_progress is not None:
            self.on_progress(reports)

    def _as_ended(self, worker: Standing) -> Standing:
        """Return its number may be another process's by now."""
        return replace(worker, state="") if worker.rank in self._ended else worker

    def worker_ended(self, rank: int) -> None:
        """Record that a worker has ended successfully; the others may continue without it, or wait for it."""
        if rank not in self.node_of_rank:
            return  # torchrun's agent
        self._ended.add(rank)
        worker = self.workers.get(rank) or unheard(self.node_of_rank[rank], rank)
        self.workers[rank] = self._as_ended(worker)

    def left_early(self) -> list[Standing]:
        """Workers that had left, when the attempt was ended, though their training had steps left; by rank.

        Their exit codes may be any; torchrun keeps them to itself.
        """
        workers = self.workers if self._before_stop is None else self._before_stop
        return left_early(workers.values())

    def stopping(self) -> None:
        """Record that the nodes are asked to end the attempt: workers may end because of that from now on."""
        if self._before_stop is None:
            self._before_stop = dict(self.workers)

    def hangs(self, now: float) -> bool:
        """Return whether the attempt hangs, and the workers should be asked where they stand."""
        if self.silent_s is not None or any(
            now - self._last_report.get(worker.node, 0.0) > FRESH_S
            for worker in self.workers.values()
            if not worker.exited
        ):
            return False
        if self._tells_progress():
            self.silent_s = silence(
                self.workers.values(), world_size=len(self.node_of_rank), limit=self.limit, start_limit=self.start_limit
            )
        elif self.output_limit_s is not None and now - self.printed_at > self.output_limit_s:
            self.silent_s = now - self.printed_at
        return self.silent_s is not None

    def _tells_progress(self) -> bool:
        """Return whether a worker that has not ended has noted progress; other programs have their output alone."""
        return not self.workers.keys() <= self._ended

    def is_stuck(self, rank: int, *, asked_s: float, again: bool) -> bool:
        """Return whether a worker alone has been silent for longer than a step can take.

        Args:
            rank: of the worker.
            asked_s: how long ago it was asked to move, in seconds.
            again: whether it was so in this attempt before, and moved: then its first step is no excuse.
        """
        worker = self.workers.get(rank)
        if worker is None or time.monotonic() - self._last_report.get(worker.node, 0.0) > FRESH_S:
            return False
        first = worker.step - MEASURED_STEPS if again else worker.first
        asked = replace(worker, stale_s=min(worker.stale_s, asked_s), first=first)
        return silence([asked], world_size=1, limit=self.limit, start_limit=self.start_limit) is not None

    def begin_again(self) -> None:
        """Workers were replaced, or freed from what they waited for: nothing is known of any."""
        self.workers.clear()
        self._stacks.clear()
        self.silent_s = None
        self.printed_at = time.monotonic()

    def begin_collecting(self, nodes: Collection[str]) -> None:
        """Stacks were requested from these nodes."""
        self._awaited = set(nodes)
        self._asked = time.monotonic()
        self._deadline = self._asked + ANSWER_S

    def silent_until(self, now: float) -> float:
        """Return the seconds for which nothing has moved, once stacks were requested."""
        return (self.silent_s or 0.0) + max(0.0, now - self._asked)

    def add_stack(self, stack: WorkerStack) -> None:
        """A worker's stack has arrived."""
        self._stacks[stack.rank] = Stack(state=stack.state, tool=stack.how, text=stack.text, flight=stack.flight)

    def node_finished(self, node: str) -> None:
        """A node has sent all of its stacks."""
        self._awaited.discard(node)

    def verdict(self, now: float) -> Failure | None:
        """Return the culprit, once all nodes have answered or the time limit has passed; the stacks are saved then."""
        if self.silent_s is None or (self._awaited and now < self._deadline):
            return None
        if not self._tells_progress():
            summary = (
                f"no worker has printed anything for {self.silent_s:.0f} s (job.hang_output_s); which one is stuck is "
                "not known, since the program tells no progress"
            )
            first = self.node_of_rank[min(self.node_of_rank)]
            return Failure(
                node=first, rank=None, exit_code=None, signal=None, time=time.time(), summary=summary, hang=True
            )
        silent = {rank: node for rank, node in self.node_of_rank.items() if rank not in self.workers}
        failure = hang_failure(
            self.workers.values(), self._stacks, silent_s=self.silent_s, now=time.time(), silent=silent
        )
        for rank, stack in sorted(self._stacks.items()):
            try:
                path = write_stack(self.folder, self.workers[rank].node, rank, stack)
            except (LaunchError, OSError):
                continue  # a full disk; the verdict is worth more
            if rank == failure.rank:
                failure = replace(failure, log=str(path))
        return failure
