"""Display of a run while it is launched and runs: a table of nodes until it runs, then its lines as they come.

Listens to the events of `dtctl.launch`; decides nothing. On a terminal the table is redrawn in place, elsewhere every
change of state is one line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dtctl.cli import output
from dtctl.launch.records.events import (
    AlertChanged,
    AttemptRunning,
    Event,
    Healed,
    Hung,
    JobQueued,
    JobSubmitted,
    LauncherAway,
    NodeChanged,
    NodeLeftOut,
    NodeReplaced,
    NodesAllocated,
    Note,
    OutputLine,
    PushProgress,
    Restarting,
    RunEnded,
    RunProgress,
    Stopping,
    TimeIsUp,
    WorkerExited,
)  # fmt: skip
from dtctl.printable import printable

if TYPE_CHECKING:
    from rich.live import Live

    from dtctl.cli.common.folding import Folding
    from dtctl.launch.files.tree import Tree
    from dtctl.launch.records.record import RunRecord
    from dtctl.plan.model import Plan
    from dtctl.spec.model import Spec

STATES = {
    "connecting": "connecting",
    "connected": "connected",
    "hello": "connected",
    "pushing": "receiving code",
    "pushed": "has the code",
    "ready": "ready",
    "started": "at the rendezvous",
    "running": "running",
    "away": "unreachable, continues",
    "stopped": "stopped",
    "lost": "lost",
    "failed": "failed",
}


def list_push_warnings(spec: Spec, tree: Tree) -> list[Note]:
    """Return what the user should know about a tree before it is pushed; mostly nothing."""
    if not (tree.withheld or tree.skipped or tree.left_out or tree.is_large):
        return []
    from dtctl.cli.common.files_view import describe_push

    return [Note(text=text, warning=True) for text in describe_push(spec, tree)]


def waits(event: JobQueued) -> str:
    """Return why a job of Slurm waits, and until when Slurm thinks that it does."""
    when = f", expected to start at {time.strftime('%H:%M:%S', time.localtime(event.start))}" if event.start else ""
    reason = event.reason if event.reason not in (None, "", "None") else "for Slurm"
    from dtctl.slurm.wait_reasons import explain_wait

    return f"{explain_wait(event.job, reason)}{when}"


def _line(event: Event) -> tuple[str, str]:
    """Colour and text of the line of an event; no text where it has none."""
    match event:
        case JobSubmitted() | JobQueued() | NodesAllocated():
            return _job_line(event)
        case WorkerExited() if event.exit_code:
            process = f"rank {event.rank}" if event.rank is not None and event.rank >= 0 else "agent"
            cause = f"signal {event.signal}" if event.signal else f"exit code {event.exit_code}"
            if event.killed:
                return "dim", f"{event.node}: {process} was killed by dtctl: it did not end when it was asked to"
            return "yellow", f"{event.node}: {process} ended with {cause}"
        case Stopping():
            return "yellow", f"stopping all nodes: {event.reason}"
        case Note():
            return "yellow" if event.warning else "dim", f"{event.node}: {event.text}" if event.node else event.text
        case AlertChanged():
            colour = "red" if event.state == "firing" else "green"
            return colour, event.told
        case Hung():
            return "yellow", f"no progress for {event.silent_s:.0f} s: collecting the stacks of all workers"
        case TimeIsUp():
            return "yellow", "the job's time limit is reached (job.time_s)"
        case LauncherAway():
            return "yellow", (
                f"this launcher did not run for {event.away_s:.0f} s (it was stopped, or the machine slept), so the "
                "nodes ended the job; it starts again, which is no restart. With `--detach` a job continues meanwhile"
            )
        case Restarting():
            wait = f", in {event.wait_s:g} s" if event.wait_s else ""
            return "yellow", f"restart {event.attempt} of {event.of}{wait}: {event.cause}"
        case Healed() | NodeReplaced() | NodeLeftOut():
            return "yellow", _change(event)
    return "", ""


def _job_line(event: JobSubmitted | JobQueued | NodesAllocated) -> tuple[str, str]:
    """Return the colour and text of the line of a job of Slurm."""
    if isinstance(event, JobSubmitted):
        return "", f"job {event.job} of Slurm on {event.site}"
    if isinstance(event, JobQueued):
        return "dim", f"  waits: {waits(event)}"
    return "dim", f"  on {', '.join(event.nodes)}"


def _change(event: Healed | NodeReplaced | NodeLeftOut) -> str:
    """Return the worker or node that has replaced another one, or the node that is left out."""
    if isinstance(event, NodeReplaced):
        return f"{event.node} is replaced by {event.by}: {event.reason}"
    if isinstance(event, NodeLeftOut):
        return f"on with {_count(event.nodes, 'node')}, without {event.node}: {event.reason}"
    return event.told


_IN_TABLE = (JobSubmitted, JobQueued, NodesAllocated, Restarting, Healed, NodeReplaced, NodeLeftOut)
"""Events that print a line above the table without ending it."""


class TrainingLine:
    """Last line of the terminal, with the newest row of the run's metrics, as `status` shows it."""

    EVERY_S = 0.5

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._steps: int | None = None
        self._looked_s = 0.0

    def follow(self, event: Event) -> None:
        """See whether an event has brought news; what a training prints comes with its metrics."""
        if isinstance(event, Restarting | RunEnded | Stopping):
            output.stand("")
            return
        now = time.monotonic()
        if not isinstance(event, OutputLine) or now - self._looked_s < self.EVERY_S:
            return
        from dtctl.cli.common.progress_line import loss_text, metrics_of, progress_line, source_text, steps_of

        is_first, self._looked_s = not self._looked_s, now
        rows = metrics_of(self._record)
        if is_first:
            self._steps = steps_of(self._record)
        if not rows:
            return
        loss = loss_text(rows[-1])
        line = progress_line(rows[-1], steps=self._steps, runs=True)
        output.stand((f"{line}  loss {loss}" if loss else line) + source_text(rows[-1]))


class LaunchView:
    """Shows one run."""

    def __init__(self, *, json_lines: bool, record: RunRecord | None = None) -> None:
        """Show nothing yet.

        Args:
            json_lines: whether standard output is for programs.
            record: the run's, to show how far its training is. None: that is not shown.
        """
        self._json = json_lines
        self._training = TrainingLine(record) if record and output.is_terminal(sys.stderr) and not json_lines else None
        self._progress = RunProgress()
        self._details: dict[str, str] = {}
        self._live: Live | None = None
        self._begun = time.monotonic()
        self._folding: Folding | None = None

    def begin(self, plan: Plan) -> None:
        """Say what is about to be launched."""
        nodes, workers = len(plan.nodes), plan.world_size
        output.err(
            f"run {plan.run}: {_count(nodes, 'node')}, {_count(workers, 'worker')} ({plan.kind} over {plan.transport})",
            "bold",
        )
        self._progress.nodes = {node.name: "connecting" for node in plan.nodes}
        if output.is_terminal(sys.stderr) and not self._json:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True), auto_refresh=False, transient=True, get_renderable=self._table
            )
            self._live.start(refresh=True)

    def expect(self, nodes: Iterable[str]) -> None:
        """Show these nodes, of a run that another process has begun."""
        self._progress.nodes = dict.fromkeys(nodes, "connecting")

    def event(self, event: Event) -> None:
        """Show one event."""
        before = self._progress.nodes.get(event.node) if isinstance(event, NodeChanged) else None
        if not isinstance(event, NodeChanged) or before is not None:  # a node that was replaced may have a last word
            self._progress.apply(event)
        match event:
            case OutputLine():
                self._log(event)
            case NodeChanged() if before is not None and (before != event.state or event.state == "pushing"):
                self._node(event)
            case AttemptRunning():
                self.end_table()
                nodes = _count(len(self._progress.nodes), "node")
                first = not event.attempt and event.launch_s is not None
                when = f"after {event.launch_s:.2f} s" if first else f"again, attempt {event.attempt}"
                output.err(f"started on {nodes} {when}", "green")
            case _:
                if isinstance(event, Restarting | RunEnded):
                    self._show_held()
                colour, text = _line(event)
                if text and not isinstance(event, _IN_TABLE):
                    self.end_table()
                if text:
                    output.err(text, *([colour] if colour else []))

        if self._training is not None:
            self._training.follow(event)

    def end_table(self) -> None:
        """Print lines from now on instead of the table."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def close(self) -> None:
        """Nothing more comes."""
        self.end_table()
        output.stand("")
        self._show_held()

    def _log(self, event: OutputLine) -> None:
        self.end_table()
        if self._folding is None:
            from dtctl.cli.common.folding import Folding

            self._folding = Folding()
        for text in self._folding.feed(event.node, event.rank, event.text):
            self._print(event.node, event.rank, text)

    def _print(self, node: str, rank: int, text: str) -> None:
        line = f"[{node}:{rank if rank >= 0 else 'agent'}] {text}"
        if self._json:
            output.err(line)
        else:
            output.out(line)

    def _show_held(self) -> None:
        """Print the lines that were held back as part of a traceback that has not ended."""
        for node, rank, text in self._folding.flush() if self._folding is not None else ():
            self._print(node, rank, text)

    def _node(self, event: NodeChanged) -> None:
        push = event.push or PushProgress()
        if event.state == "pushing":
            self._details[event.node] = output.size(push.sent or 0)
        elif event.state == "pushed":
            self._details[event.node] = _pushed(push)
        elif event.state == "failed":
            self._details[event.node] = event.error or ""
        if self._live is not None:
            self._live.refresh()
        elif event.state in ("pushed", "ready", "lost", "away") and not self._json:
            detail = self._details.get(event.node, "") if event.state == "pushed" else ""
            output.err(f"  {event.node}: {STATES[event.state]}{f' ({detail})' if detail else ''}", "dim")

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=False)
        for node, state in self._progress.nodes.items():
            colour = {"ready": "green", "running": "green", "failed": "red", "lost": "red"}.get(state, "yellow")
            # Text, and no markup: an error from a node may have brackets in it.
            detail = Text(printable(self._details.get(node, "")), style="dim")
            table.add_row(Text(f"  {printable(node)}"), Text(STATES.get(state, "?"), style=colour), detail)
        table.add_row(Text(f"  {time.monotonic() - self._begun:.1f} s", style="dim"), "", "")
        return table


def _pushed(push: PushProgress) -> str:
    if push.state == "have":
        return "unchanged"
    return f"{_count(push.files or 0, 'file')}, {output.size(push.bytes or 0)} sent"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
