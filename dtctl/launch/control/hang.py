"""Detection of hangs and of the worker that caused one, and the monitor that requests the workers' stacks.

In synchronous training, one worker that is stuck soon holds up all others, which wait for it in a collective. So a
run hangs when no worker has recorded progress for longer than steps can take, and the cause is the worker that is
behind; if all are at the same place, it is the worker whose stack shows that it does not wait for others.

The limit for a step follows from the steps before it. Phases that cannot be compared with earlier ones (the start,
compilation, the first batches and steps) have a generous limit; evaluation and snapshots, which may go to a slow disk,
are limited only by the time-outs of the collectives. These exceptions do not apply to a process that is stopped
(SIGSTOP), nor to workers that wait for one that left early: one that takes no more steps although steps remain.
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
from dtctl.launch.control.progress import RankProgress, ReportedPhase, build_unreported_standing
from dtctl.launch.records.run_writer import write_private
from dtctl.supervisor.messages.attempt import WorkerStack

ANSWER_S = 10.0
"""Seconds that the nodes may take to send the stacks of their workers."""
FRESH_S = 4.0
"""Seconds after which a node's report is too old for a verdict; other code decides whether the node is lost."""

Watched = Callable[[Sequence[RankProgress]], None]

HangLimit = float | Literal["auto", "off"]
FLOOR_S = 30.0
"""Least seconds of silence that count as a hang with `auto`, since file servers and switches can stall for a while."""
FACTOR = 10.0
"""Least silence that counts as a hang with `auto`, in multiples of the slowest step so far."""
START_S = 1800.0
"""Seconds that a start, a compilation, or one of the first steps may be silent with `auto`."""
MEASURED_STEPS = 4
"""Steps of an attempt after which `auto` compares with the slowest step."""

_WAITING = (
    "/torch/distributed/", "/torch/autograd/graph.py", "/torch/nn/parallel/", "/dtctl/runtime/distributed/agreement.py",
    "/dtctl/runtime/strategies/elastic.py", "/dtctl/runtime/guards/oom.py", "/dtctl/runtime/guards/nonfinite.py",
    "/dtctl/runtime/telemetry/report.py", "/dtctl/runtime/strategies/gradients.py",
    "/dtctl/runtime/distributed/worker.py",
)  # fmt: skip
"""Paths of code that waits for other workers, if it is the innermost Python code on the stack. With GPUs this can also
be code that waits for a number that depends on an exchange."""
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
_SPY_FRAME = re.compile(r"^ {4}(?P<name>.+) \((?P<file>[^()]+):(?P<line>\d+)\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTrace:
    """Position of a worker when its stack was taken."""

    state: str
    tool: str
    """Tool that took the stack: py-spy, faulthandler or none."""
    text: str
    flight: str
    """The last collectives, as JSON of torch's flight recorder; empty if the recorder returned nothing."""

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
        """Return whether the worker waits for other workers; None when unknown."""
        frames = self.frames
        return any(marker in frames[0][0] for marker in _WAITING) if frames else None


def compute_hang_duration(
    workers: Collection[RankProgress], *, world_size: int, limit: HangLimit, start_limit: HangLimit = "auto"
) -> float | None:
    """Return the seconds for which the run has been hanging; None if it does not hang, or if that is not known.

    Args:
        workers: workers that have reported their progress, also if they have ended since.
        world_size: number of workers of the attempt.
        limit: `job.hang_s`.
        start_limit: `job.hang_start_s`.
    """
    active = [worker for worker in workers if not worker.finished]
    if limit == "off" or not active:
        return None
    limit_s: float
    if limit == "auto":
        limit_s = max(FLOOR_S, FACTOR * max(worker.slowest_s for worker in active))
        needed_steps = MEASURED_STEPS
    else:
        limit_s, needed_steps = limit, 1
    stopped = [worker.stale_s for worker in active if worker.state == "T" and worker.phase != ReportedPhase.STARTING]
    if stopped and min(stopped) >= limit_s:
        return min(stopped)
    phases = {worker.phase for worker in active}
    if phases & {ReportedPhase.EVALUATION, ReportedPhase.SNAPSHOT}:
        return None
    done_steps = min(worker.step - worker.first for worker in active)
    is_measured = len(workers) >= world_size and done_steps >= needed_steps
    lacks_workers = any(worker.until for worker in find_early_leavers(workers))
    if phases != {ReportedPhase.STEPPING} or not (is_measured or lacks_workers):
        if start_limit == "off":
            return None
        limit_s = max(limit_s, START_S if start_limit == "auto" else start_limit)
    silent_s = min(worker.stale_s for worker in active)
    return silent_s if silent_s >= limit_s else None


def find_early_leavers(workers: Collection[RankProgress]) -> list[RankProgress]:
    """Return the workers that take no more steps although steps remain, by rank.

    A worker that never began does not count if others have taken steps since: they do not depend on it.
    """
    trained = any(worker.step > worker.first for worker in workers if not worker.left_early)
    leavers = [worker for worker in workers if worker.left_early and (worker.until or not trained)]
    return sorted(leavers, key=lambda worker: worker.rank)


def find_blocking_workers(workers: Collection[RankProgress], stacks: Mapping[int, StackTrace]) -> list[RankProgress]:
    """Return the workers that the others wait for, by rank; none if all are at the same place and all wait."""
    everyone = sorted(workers, key=lambda worker: worker.rank)
    stopped = [worker for worker in everyone if worker.state == "T"]
    if stopped:
        return stopped
    leavers = find_early_leavers(everyone)
    if leavers:
        return leavers
    everyone = [worker for worker in everyone if not worker.finished]
    waits = {worker.rank: stacks[worker.rank].is_waiting for worker in everyone if worker.rank in stacks}
    awake = [worker for worker in everyone if waits.get(worker.rank) is False]
    lowest = min(worker.position for worker in everyone)
    behind = [worker for worker in everyone if worker.position == lowest]
    if len(behind) < len(everyone):
        # A worker that is ahead and computes holds up waiting workers behind it: it skipped a collective of theirs.
        all_wait = all(waits.get(worker.rank) for worker in behind)
        return awake if all_wait and awake else behind
    return awake if len(awake) < len(everyone) else []


def build_hang_failure(
    workers: Collection[RankProgress],
    stacks: Mapping[int, StackTrace],
    *,
    silent_s: float,
    now: float,
    silent: Mapping[int, str] | None = None,
) -> Failure:
    """Return the failure that describes a run that hangs.

    Args:
        workers: workers that have reported their progress, also if they have ended since.
        stacks: the workers' stacks.
        silent_s: seconds without progress of any worker.
        now: the time, in seconds since the epoch.
        silent: workers that have reported no progress yet, rank -> node.
    """
    active = [worker for worker in workers if not worker.finished]
    begun = [worker.step for worker in active if worker.phase != ReportedPhase.STARTING]
    position = f"in step {min(begun) + 1}" if begun else "before the first step"
    blamed = find_blocking_workers(workers, stacks)
    rank: int | None
    frames: list[tuple[str, int, str]] = []
    if silent and not any(worker.state == "T" or worker.left_early for worker in blamed):
        rank, node = min(silent.items())
        unreported = ", ".join(f"rank {rank} on {node}" for rank, node in sorted(silent.items())[:8])
        verb = "has" if len(silent) == 1 else "have"
        cause = f"{unreported} {verb} not reached the training{_waiting_text(len(active))}"
    elif not blamed:
        rank, node = None, min(active, key=lambda worker: worker.rank).node
        cause = "all workers wait for each other at the same place; the network between them may be broken"
    else:
        first = blamed[0]
        rank, node = first.rank, first.node
        if rank in stacks:
            frames = stacks[rank].frames
        named = ", ".join(f"rank {worker.rank} on {worker.node}" for worker in blamed[:8])
        consequence = _waiting_text(len([worker for worker in active if worker not in blamed]))
        cause = f"{named} {_state_text(first)}{_describe_location(first, frames)}{consequence}"
    return Failure(
        node=node,
        rank=rank,
        exit_code=None,
        signal=None,
        time=now,
        summary=f"no progress for {silent_s:.0f} s {position}: {cause}",
        tail=tuple(f"{file}:{line} in {name}" for file, line, name in frames[:8]),
        hang=True,
    )


def _describe_location(worker: RankProgress, frames: Sequence[tuple[str, int, str]]) -> str:
    """Return the place of a worker in the program, as the end of a sentence; empty if its stack is not known."""
    if not frames:
        return ""
    file, line, name = frames[0]
    return f"{', and is now' if worker.left_early else ''} at {file}:{line} in {name}"


def describe_early_exit(worker: RankProgress) -> str:
    """Describe a worker that left early: `left the training after step 3 of 12, before the others`.

    The text leaves open whether the worker's process has ended, too: the others lose their connections to it while it
    is still ending, and either event may be noticed first.
    """
    # A worker without steps may be no training, or has ended before the first step.
    if not worker.until:
        return "ended while others ran"
    return f"left the training after step {worker.step} of {worker.until}, before the others"


def _state_text(worker: RankProgress) -> str:
    if worker.state == "T":
        return "is stopped (SIGSTOP)"
    return describe_early_exit(worker) if worker.left_early else f"is stuck {worker.place_text}"


def _waiting_text(waiting: int) -> str:
    return {0: "", 1: "; the other one waits for it"}.get(waiting, f"; the {waiting} others wait for it")


def write_stack(folder: Path, node: str, rank: int, stack: StackTrace) -> Path:
    """Write the stack and the last collectives of a worker below `folder`; return the path of the stack.

    Raises:
        LaunchError: a file cannot be written.
    """
    below = folder / node
    below.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = below / f"rank-{rank}.txt"
    head = f"state {stack.state or 'gone'}, stack by {stack.tool}\n\n"
    write_private(path, head + stack.text)
    if stack.flight:
        write_private(below / f"trace_rank_{rank}.json", stack.flight)  # `dtctl doctor --log` reads files of this name.
    return path


class HangMonitor:
    """The last report of each worker of one attempt, and the stacks that are requested if the attempt hangs."""

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
        """Create a monitor without reports.

        Args:
            node_of_rank: workers of the attempt, rank -> node.
            limit: `job.hang_s`.
            start_limit: `job.hang_start_s`.
            output_limit_s: `job.hang_output_s`.
            folder: folder for stacks, if any are requested.
            on_progress: called with the workers' progress whenever a node reports it.
        """
        self.node_of_rank = node_of_rank
        self.limit: HangLimit = limit
        self.start_limit: HangLimit = start_limit
        self.output_limit_s = output_limit_s
        self.printed_at = time.monotonic()
        """Time when a worker last printed something, or when the attempt began or workers were replaced."""
        self.folder = folder
        self.on_progress = on_progress
        self.workers: dict[int, RankProgress] = {}
        self.silent_s: float | None = None
        """Seconds without progress when the stacks were requested; None: they were not requested."""
        self._ended: set[int] = set()
        """Ranks of the workers that have ended successfully."""
        self._before_stop: dict[int, RankProgress] | None = None
        self._last_report: dict[str, float] = {}
        self._stacks: dict[int, StackTrace] = {}
        self._awaited: set[str] = set()
        self._deadline = 0.0
        self._asked = 0.0

    def update(self, reports: Sequence[RankProgress], *, node: str, before_stop: bool = False) -> None:
        """Record a node's report of its workers' progress; `before_stop`: from before the node sent them SIGTERM."""
        if before_stop and self._before_stop is not None:
            self._before_stop |= {worker.rank: self._as_ended(worker) for worker in reports}
        if self.silent_s is not None:
            return  # The verdict is about the state when the stacks were requested.
        self._last_report[node] = time.monotonic()
        self.workers |= {worker.rank: self._as_ended(worker) for worker in reports}
        if reports and self.on_progress is not None:
            self.on_progress(reports)

    def _as_ended(self, worker: RankProgress) -> RankProgress:
        """Return the worker without its process state if it has ended, since the process id may be in use again."""
        return replace(worker, state="") if worker.rank in self._ended else worker

    def record_worker_end(self, rank: int) -> None:
        """Record that a worker has ended successfully; the others may continue without it, or wait for it."""
        if rank not in self.node_of_rank:
            return  # The process is torchrun's agent.
        self._ended.add(rank)
        worker = self.workers.get(rank) or build_unreported_standing(self.node_of_rank[rank], rank)
        self.workers[rank] = self._as_ended(worker)

    def left_early(self) -> list[RankProgress]:
        """Return the workers that had left before the attempt was ended although steps remained, by rank.

        They may have any exit code; torchrun does not report it.
        """
        workers = self.workers if self._before_stop is None else self._before_stop
        return find_early_leavers(workers.values())

    def record_stop_request(self) -> None:
        """Record that the nodes got the request to end the attempt: workers may end because of it from now on."""
        if self._before_stop is None:
            self._before_stop = dict(self.workers)

    def hangs(self, now: float) -> bool:
        """Return whether the attempt hangs, so that the workers' stacks should be requested."""
        if self.silent_s is not None or any(
            now - self._last_report.get(worker.node, 0.0) > FRESH_S
            for worker in self.workers.values()
            if not worker.exited
        ):
            return False
        if self._tells_progress():
            self.silent_s = compute_hang_duration(
                self.workers.values(), world_size=len(self.node_of_rank), limit=self.limit, start_limit=self.start_limit
            )
        elif self.output_limit_s is not None and now - self.printed_at > self.output_limit_s:
            self.silent_s = now - self.printed_at
        return self.silent_s is not None

    def _tells_progress(self) -> bool:
        """Return whether a worker that has not ended reports progress; for other programs only output is monitored."""
        return not self.workers.keys() <= self._ended

    def is_stuck(self, rank: int, *, asked_s: float, again: bool) -> bool:
        """Return whether a worker alone has been silent for longer than a step can take.

        Args:
            rank: rank of the worker.
            asked_s: seconds since the worker got a request that it has to react to.
            again: whether workers were replaced in this attempt before; then the limit of first steps does not apply.
        """
        worker = self.workers.get(rank)
        if worker is None or time.monotonic() - self._last_report.get(worker.node, 0.0) > FRESH_S:
            return False
        first = worker.step - MEASURED_STEPS if again else worker.first
        asked = replace(worker, stale_s=min(worker.stale_s, asked_s), first=first)
        return compute_hang_duration([asked], world_size=1, limit=self.limit, start_limit=self.start_limit) is not None

    def reset_worker_progress(self) -> None:
        """Discard all reports, because workers were replaced or their wait was interrupted."""
        self.workers.clear()
        self._stacks.clear()
        self.silent_s = None
        self.printed_at = time.monotonic()

    def begin_collecting(self, nodes: Collection[str]) -> None:
        """Record that stacks were requested from these nodes."""
        self._awaited = set(nodes)
        self._asked = time.monotonic()
        self._deadline = self._asked + ANSWER_S

    def compute_silence_s(self, now: float) -> float:
        """Return the seconds without progress, once stacks were requested."""
        return (self.silent_s or 0.0) + max(0.0, now - self._asked)

    def add_stack(self, stack: WorkerStack) -> None:
        """Record a worker's stack."""
        self._stacks[stack.rank] = StackTrace(state=stack.state, tool=stack.how, text=stack.text, flight=stack.flight)

    def record_node_stacks(self, node: str) -> None:
        """Record that a node has sent all of its stacks."""
        self._awaited.discard(node)

    def verdict(self, now: float) -> Failure | None:
        """Return the failure of the worker that caused the hang, once all nodes have answered or the limit has passed.

        The stacks are saved at the same time.
        """
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
        failure = build_hang_failure(
            self.workers.values(), self._stacks, silent_s=self.silent_s, now=time.time(), silent=silent
        )
        for rank, stack in sorted(self._stacks.items()):
            try:
                path = write_stack(self.folder, self.workers[rank].node, rank, stack)
            except (LaunchError, OSError):
                continue  # The disk may be full; the verdict is needed all the same.
            if rank == failure.rank:
                failure = replace(failure, log=str(path))
        return failure
