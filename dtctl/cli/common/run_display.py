"""Display of a run during its launch and afterwards: a table of nodes until the workers run, then lines as they arrive.

It receives the events of `dtctl.launch` and decides nothing. On a terminal the table is redrawn in place; elsewhere
each change of state is one line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dtctl.cli import output
from dtctl.launch.records.events import (
    AlertChanged,
    AttemptRestarting,
    AttemptRunning,
    Event,
    HangDetected,
    JobQueued,
    JobSubmitted,
    LauncherPaused,
    NodeChanged,
    NodeDropped,
    NodeReplaced,
    NodesAllocated,
    Note,
    OutputLine,
    PushAdvanced,
    PushProgress,
    RunEnded,
    RunProgress,
    RunStopping,
    TimeLimitReached,
    WorkerExited,
    WorkersReplaced,
)  # fmt: skip
from dtctl.printable import format_count, make_printable

if TYPE_CHECKING:
    from rich.live import Live

    from dtctl.cli.common.traceback_filter import TracebackFilter
    from dtctl.launch.files.tree import FileTree
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


def list_push_warnings(spec: Spec, tree: FileTree) -> list[Note]:
    """Return the notes about a tree that the user should read before the push; usually none."""
    if not (tree.withheld or tree.skipped or tree.left_out or tree.is_large):
        return []
    from dtctl.cli.common.files_view import describe_push

    return [Note(text=text, warning=True) for text in describe_push(spec, tree)]


def describe_job_wait(event: JobQueued) -> str:
    """Return the reason why a job of Slurm waits, and Slurm's estimate of its start."""
    when = f", expected to start at {time.strftime('%H:%M:%S', time.localtime(event.start))}" if event.start else ""
    reason = event.reason if event.reason not in (None, "", "None") else "for Slurm"
    from dtctl.slurm.wait_reasons import explain_wait

    return f"{explain_wait(event.job, reason)}{when}"


def _format_event_line(event: Event) -> tuple[str, str]:
    """Return colour and text of the line for an event; an empty text if the event has no line."""
    match event:
        case JobSubmitted() | JobQueued() | NodesAllocated():
            return _job_line(event)
        case WorkerExited() if event.exit_code:
            return "dim" if event.killed else "yellow", event.event_text
        case RunStopping():
            return "yellow", event.event_text
        case Note():
            return "yellow" if event.warning else "dim", f"{event.node}: {event.text}" if event.node else event.text
        case AlertChanged():
            colour = "red" if event.state == "firing" else "green"
            return colour, event.event_text
        case HangDetected():
            return "yellow", f"no progress for {event.silent_s:.0f} s: collecting the stacks of all workers"
        case TimeLimitReached():
            return "yellow", "the job's time limit is reached (job.time_s)"
        case LauncherPaused():
            return "yellow", (
                f"this launcher did not run for {event.away_s:.0f} s (it was stopped, or the machine slept), so the "
                "nodes ended the job; it starts again; this is not a restart. With `--detach` it would continue"
            )
        case AttemptRestarting():
            wait = f", in {event.wait_s:g} s" if event.wait_s else ""
            return "yellow", f"restart {event.attempt} of {event.of}{wait}: {event.cause}"
        case WorkersReplaced() | NodeReplaced() | NodeDropped():
            return "yellow", _describe_node_change(event)
    return "", ""


def _job_line(event: JobSubmitted | JobQueued | NodesAllocated) -> tuple[str, str]:
    """Return colour and text of the line for an event of a Slurm job."""
    if isinstance(event, JobSubmitted):
        return "", f"job {event.job} of Slurm on {event.site}"
    if isinstance(event, JobQueued):
        return "dim", f"  waits: {describe_job_wait(event)}"
    return "dim", f"  on {', '.join(event.nodes)}"


def _describe_node_change(event: WorkersReplaced | NodeReplaced | NodeDropped) -> str:
    """Return the worker or node that has replaced another one, or the node that is no longer used."""
    if isinstance(event, NodeReplaced):
        return f"{event.node} is replaced by {event.by}: {event.reason}"
    if isinstance(event, NodeDropped):
        return f"on with {format_count(event.nodes, 'node')}, without {event.node}: {event.reason}"
    return event.event_text


_IN_TABLE = (
    JobSubmitted, JobQueued, NodesAllocated, AttemptRestarting, WorkersReplaced, NodeReplaced, NodeDropped, Note,
)  # fmt: skip
"""Events that print a line above the table without ending it."""


def print_run_header(run: str, kind: str, transport: str, *, nodes: int, workers: int) -> None:
    """Print the first line about a launch: the run, its size and how it is started."""
    output.print_stderr(
        f"run {run}: {format_count(nodes, 'node')}, {format_count(workers, 'worker')} ({kind} over {transport})", "bold"
    )


class TrainingProgressLine:
    """Last line of the terminal, which shows the newest row of the run's metrics like `status`."""

    EVERY_S = 0.5

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._steps: int | None = None
        self._looked_s = 0.0

    def follow(self, event: Event) -> None:
        """Redraw the line after new output, and remove it when the run stops or restarts."""
        if isinstance(event, AttemptRestarting | RunEnded | RunStopping):
            output.set_status_line("")
            return
        now = time.monotonic()
        if not isinstance(event, OutputLine) or now - self._looked_s < self.EVERY_S:
            return
        from dtctl.cli.common.progress_line import (
            format_figure_source,
            format_loss,
            format_progress_line,
            read_newest_metrics,
            read_training_steps,
        )

        is_first, self._looked_s = not self._looked_s, now
        rows = read_newest_metrics(self._record)
        if is_first:
            self._steps = read_training_steps(self._record)
        if not rows:
            return
        loss = format_loss(rows[-1])
        line = format_progress_line(rows[-1], steps=self._steps, runs=True)
        output.set_status_line((f"{line}  loss {loss}" if loss else line) + format_figure_source(rows[-1]))


class LaunchView:
    """View of a run, printed as its events arrive."""

    PUSH_LINE_S = 5.0
    """Seconds between two lines about a push if standard error is no terminal."""

    def __init__(self, *, json_lines: bool, record: RunRecord | None = None) -> None:
        """Create the view without printing anything.

        Args:
            json_lines: whether standard output has JSON for programs.
            record: record of the run, for the progress of its training; None: the progress is not shown.
        """
        self._json = json_lines
        self._training = (
            TrainingProgressLine(record) if record and output.is_terminal(sys.stderr) and not json_lines else None
        )
        self._progress = RunProgress()
        self._details: dict[str, str] = {}
        self._live: Live | None = None
        self._begun = self._push_line = time.monotonic()
        self._push: PushAdvanced | None = None
        """Progress of the files to all nodes; None after all nodes have them."""
        self._folding: TracebackFilter | None = None

    def begin(self, plan: Plan) -> None:
        """Print a line about the launch, and start the table of nodes."""
        print_run_header(plan.run, plan.kind, plan.transport, nodes=len(plan.nodes), workers=plan.world_size)
        self._progress.nodes = {node.name: "connecting" for node in plan.nodes}
        if output.is_terminal(sys.stderr) and not self._json:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True), auto_refresh=False, transient=True, get_renderable=self._build_node_table
            )
            self._live.start(refresh=True)

    def expect(self, nodes: Iterable[str]) -> None:
        """Show these nodes of a run that another process has started."""
        self._progress.nodes = dict.fromkeys(nodes, "connecting")

    def event(self, event: Event) -> None:
        """Show an event of the run."""
        before = self._progress.nodes.get(event.node) if isinstance(event, NodeChanged) else None
        is_of_replaced_node = isinstance(event, NodeChanged) and before is None
        if not is_of_replaced_node:
            self._progress.apply(event)
        match event:
            case OutputLine():
                self._print_output_line(event)
            case NodeChanged() if before is not None and before != event.state:
                self._update_node_line(event)
            case PushAdvanced():
                self._update_push(event)
            case AttemptRunning():
                self.end_table()
                nodes = format_count(len(self._progress.nodes), "node")
                if event.attempt == 0 and event.launch_s is not None:
                    when = f"after {event.launch_s:.2f} s"
                else:
                    when = f"again, attempt {event.attempt}"
                output.print_stderr(f"started on {nodes} {when}", "green")
            case _:
                if isinstance(event, AttemptRestarting | RunEnded):
                    self._show_held()
                colour, text = _format_event_line(event)
                if text and not isinstance(event, _IN_TABLE):
                    self.end_table()
                if text:
                    output.print_stderr(text, *([colour] if colour else []))

        if self._training is not None:
            self._training.follow(event)

    def end_table(self) -> None:
        """Remove the table and print lines from now on."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def close(self) -> None:
        """Remove the table of nodes and the status line, and print the lines that were held back."""
        self.end_table()
        output.set_status_line("")
        self._show_held()

    def _print_output_line(self, event: OutputLine) -> None:
        self.end_table()
        if self._folding is None:
            from dtctl.cli.common.traceback_filter import TracebackFilter

            self._folding = TracebackFilter()
        for text in self._folding.feed(event.node, event.rank, event.text):
            output.print_worker_line(event.node, event.rank, text, err=self._json)

    def _show_held(self) -> None:
        """Print the lines that were held back as part of an incomplete traceback."""
        for node, rank, text in self._folding.flush() if self._folding is not None else ():
            output.print_worker_line(node, rank, text, err=self._json)

    def _update_node_line(self, event: NodeChanged) -> None:
        if event.state == "pushed":
            self._details[event.node] = _describe_push_result(event.push or PushProgress())
        elif event.state == "failed":
            self._details[event.node] = event.error or ""
        if self._live is not None:
            self._live.refresh()
        elif event.state in ("pushed", "ready", "lost", "away") and not self._json:
            detail = self._details.get(event.node, "") if event.state == "pushed" else ""
            output.print_stderr(f"  {event.node}: {STATES[event.state]}{f' ({detail})' if detail else ''}", "dim")

    def _update_push(self, event: PushAdvanced) -> None:
        """Show the progress of all pushes in the table, else in the terminal's last line, else in a line of output."""
        self._push = event if event.nodes_done < event.nodes else None
        text = f"files: {_format_push(event)}"
        if self._live is not None:
            self._live.refresh()
        elif output.is_terminal(sys.stderr):
            output.set_status_line(text if self._push is not None else "")
        elif not self._json and time.monotonic() - self._push_line >= self.PUSH_LINE_S:
            self._push_line = time.monotonic()
            output.print_stderr(f"  {text}", "dim")

    def _build_node_table(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=False)
        for node, state in self._progress.nodes.items():
            colour = {"ready": "green", "running": "green", "failed": "red", "lost": "red"}.get(state, "yellow")
            # A plain text without markup, since an error from a node may have brackets in it.
            detail = Text(make_printable(self._details.get(node, "")), style="dim")
            table.add_row(Text(f"  {make_printable(node)}"), Text(STATES.get(state, "?"), style=colour), detail)
        table.add_row(Text(f"  {time.monotonic() - self._begun:.1f} s", style="dim"), "", "")
        if self._push is None:
            return table
        bar = Table.grid(padding=(0, 1))
        part = ProgressBar(total=max(1, self._push.of), completed=self._push.bytes, width=20)
        bar.add_row(Text(" "), part, Text(_format_push(self._push), style="dim"))
        return Group(bar, table)  # the bar stands first, since there may be more nodes than lines


def _format_push(event: PushAdvanced) -> str:
    """Return the progress of a push in the form `48.1 of 122.1 MiB, 3 of 8 nodes, 11.2 MiB/s`."""
    whole, got = output.format_size(event.of), output.format_size(event.bytes)
    amount = f"{got.removesuffix(whole[-4:])} of {whole}" if got[-4:] == whole[-4:] else f"{got} of {whole}"
    nodes = f"{event.nodes_done:,} of {format_count(event.nodes, 'node')}"
    return f"{amount}, {nodes}, {output.format_size(event.bytes_per_s)}/s"


def _describe_push_result(push: PushProgress) -> str:
    if push.state == "have":
        return "unchanged"
    return f"{format_count(push.files or 0, 'file')}, {output.format_size(push.bytes or 0)} sent"
