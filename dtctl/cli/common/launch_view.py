"""What people see while a run is launched and runs: a table of nodes until it runs, then its lines as they come.

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
    AttemptRunning,
    Event,
    Hung,
    JobQueued,
    JobSubmitted,
    NodeChanged,
    NodeLeftOut,
    NodeReplaced,
    NodesAllocated,
    Note,
    OutputLine,
    PushProgress,
    Restarting,
    RunProgress,
    Stopping,
    TimeIsUp,
    WorkerExited,
)  # fmt: skip
from dtctl.printable import printable

if TYPE_CHECKING:
    from rich.live import Live

    from dtctl.launch.files.tree import Tree
    from dtctl.plan.model import Plan

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


def show_left_out(tree: Tree) -> None:
    """Name the files that are not pushed although they are not excluded."""
    for kind, paths in (("looks like a secret", tree.withheld), ("cannot be pushed", tree.skipped)):
        if paths:
            suffix = f" and {len(paths) - 5} more" if len(paths) > 5 else ""
            output.err(f"not pushed, {kind}: {', '.join(paths[:5])}{suffix}", "yellow")


def waits(event: JobQueued) -> str:
    """Why a job of Slurm waits, and until when Slurm thinks that it does."""
    when = f", expected to start at {time.strftime('%H:%M:%S', time.localtime(event.start))}" if event.start else ""
    reason = event.reason if event.reason not in (None, "", "None") else "for Slurm"
    return f"{reason}{when}"


def _line(event: Event) -> tuple[str, str]:
    """Colour and text of the line of an event; no text where it has none."""
    match event:
        case JobSubmitted():
            return "", f"job {event.job} of Slurm on {event.site}"
        case JobQueued():
            return "dim", f"  waits: {waits(event)}"
        case NodesAllocated():
            return "dim", f"  on {', '.join(event.nodes)}"
        case WorkerExited() if event.exit_code:
            process = f"rank {event.rank}" if event.rank is not None and event.rank >= 0 else "agent"
            cause = f"signal {event.signal}" if event.signal else f"exit code {event.exit_code}"
            return "yellow", f"{event.node}: {process} ended with {cause}"
        case Stopping():
            return "yellow", f"stopping all nodes: {event.reason}"
        case Note():
            return "dim", f"{event.node}: {event.text}"
        case Hung():
            return "yellow", f"no progress for {event.silent_s:.0f} s: collecting the stacks of all workers"
        case TimeIsUp():
            return "yellow", "the job's time limit is reached (job.time_s)"
        case Restarting():
            wait = f", in {event.wait_s:g} s" if event.wait_s else ""
            return "yellow", f"restart {event.attempt} of {event.of}{wait}: {event.cause}"
        case NodeReplaced():
            return "yellow", f"{event.node} is replaced by {event.by}: {event.reason}"
        case NodeLeftOut():
            return "yellow", f"on with {_count(event.nodes, 'node')}, without {event.node}: {event.reason}"
    return "", ""


_IN_TABLE = (JobSubmitted, JobQueued, NodesAllocated, Restarting, NodeReplaced, NodeLeftOut)
"""Events whose line stands above a table that goes on."""


class LaunchView:
    """Shows one run."""

    def __init__(self, *, json_lines: bool) -> None:
        self._json = json_lines
        self._progress = RunProgress()
        self._details: dict[str, str] = {}
        self._live: Live | None = None
        self._begun = time.monotonic()

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
                colour, text = _line(event)
                if text and not isinstance(event, _IN_TABLE):
                    self.end_table()
                if text:
                    output.err(text, *([colour] if colour else []))

    def end_table(self) -> None:
        """From now on, lines."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _log(self, event: OutputLine) -> None:
        self.end_table()
        line = f"[{event.node}:{event.rank if event.rank >= 0 else 'agent'}] {event.text}"
        if self._json:
            output.err(line)
        else:
            output.out(line)

    def _node(self, event: NodeChanged) -> None:
        push = event.push or PushProgress()
        if event.state == "pushing":
            self._details[event.node] = _size(push.sent or 0)
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
            # Text, and no markup: an error that a node tells of may have brackets in it.
            detail = Text(printable(self._details.get(node, "")), style="dim")
            table.add_row(Text(f"  {printable(node)}"), Text(STATES.get(state, "?"), style=colour), detail)
        table.add_row(Text(f"  {time.monotonic() - self._begun:.1f} s", style="dim"), "", "")
        return table


def _pushed(push: PushProgress) -> str:
    if push.state == "have":
        return "unchanged"
    return f"{_count(push.files or 0, 'file')}, {_size(push.bytes or 0)} sent"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
