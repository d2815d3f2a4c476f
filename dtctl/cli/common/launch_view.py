"""What people see while a run is launched and runs: a table of nodes until it runs, then its lines as they come.

Listens to the events of `dtctl.launch`; decides nothing. On a terminal the table is redrawn in place, elsewhere every
change of state is one line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dtctl.cli import output
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


def waits(facts: dict[str, Any]) -> str:
    """Why a job of Slurm waits, and until when Slurm thinks that it does."""
    start = facts["start"]
    when = f", expected to start at {time.strftime('%H:%M:%S', time.localtime(start))}" if start else ""
    reason = facts["reason"] if facts["reason"] not in ("", "None") else "for Slurm"
    return f"{reason}{when}"


def _exit(facts: dict[str, Any]) -> str:
    process = f"rank {facts['rank']}" if facts["rank"] is not None and facts["rank"] >= 0 else "agent"
    ending = f"signal {facts['signal']}" if facts["signal"] else f"exit code {facts['exit_code']}"
    return f"{facts['node']}: {process} ended with {ending}"


def _restart(facts: dict[str, Any]) -> str:
    wait = f", in {facts['wait_s']:g} s" if facts.get("wait_s") else ""
    from dtctl.launch.records.state import why_again

    return f"restart {facts['attempt']} of {facts['of']}{wait}: {why_again(facts)}"


def _left_out(facts: dict[str, Any]) -> str:
    return f"on with {_count(facts['nodes'], 'node')}, without {facts['node']}: {facts['reason']}"


_LINES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "submitted": ("", lambda facts: f"job {facts['job']} of Slurm on {facts['site']}"),
    "queued": ("dim", lambda facts: f"  waits: {waits(facts)}"),
    "allocated": ("dim", lambda facts: f"  on {', '.join(facts['nodes'])}"),
    "exit": ("yellow", _exit),
    "stopping": ("yellow", lambda facts: f"stopping all nodes: {facts['reason']}"),
    "note": ("dim", lambda facts: f"{facts['node']}: {facts['text']}"),
    "hang": (
        "yellow",
        lambda facts: f"no progress for {facts['silent_s']:.0f} s: collecting the stacks of all workers",
    ),
    "time-is-up": ("yellow", lambda _: "the job's time limit is reached (job.time_s)"),
    "restart": ("yellow", _restart),
    "replaced": ("yellow", lambda facts: f"{facts['node']} is replaced by {facts['by']}: {facts['reason']}"),
    "left-out": ("yellow", _left_out),
}
"""Event -> colour and text of its line."""
_ENDS_TABLE = frozenset({"exit", "stopping", "note", "hang", "time-is-up"})


class LaunchView:
    """Shows one run."""

    def __init__(self, *, json_lines: bool) -> None:
        self._json = json_lines
        self._states: dict[str, str] = {}
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
        self._states = {node.name: "connecting" for node in plan.nodes}
        if output.is_terminal(sys.stderr) and not self._json:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True), auto_refresh=False, transient=True, get_renderable=self._table
            )
            self._live.start(refresh=True)

    def expect(self, nodes: Iterable[str]) -> None:
        """Show these nodes, of a run that another process has begun."""
        self._states = dict.fromkeys(nodes, "connecting")

    def event(self, event: str, facts: dict[str, Any]) -> None:
        """Show one event."""
        if event == "log":
            self._log(facts)
        elif event == "node":
            self._node(facts)
        elif event == "started":
            self.end_table()
            nodes = _count(len(self._states), "node")
            when = f"after {facts['launch_s']:.2f} s" if not facts["attempt"] else f"again, attempt {facts['attempt']}"
            output.err(f"started on {nodes} {when}", "green")
        elif event in _LINES and (event != "exit" or facts["exit_code"]):
            if event in _ENDS_TABLE:
                self.end_table()
            colour, text = _LINES[event]
            output.err(text(facts), *([colour] if colour else []))
        if event == "replaced":
            self._states[facts["by"]] = self._states.pop(facts["node"], "ready")
        elif event == "left-out":
            self._states.pop(facts["node"], None)
        elif event == "allocated":
            self._states = dict.fromkeys(facts["nodes"], "started")

    def end_table(self) -> None:
        """From now on, lines."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _log(self, facts: dict[str, Any]) -> None:
        self.end_table()
        rank = facts["rank"] if facts["rank"] >= 0 else "agent"
        line = f"[{facts['node']}:{rank}] {facts['text']}"
        if self._json:
            output.err(line)
        else:
            output.out(line)

    def _node(self, facts: dict[str, Any]) -> None:
        node, state = facts["node"], facts["state"]
        if node not in self._states or (self._states[node] == state and state != "pushing"):
            return
        self._states[node] = state
        push = facts.get("push", {})
        if state == "pushing":
            self._details[node] = _size(push.get("sent", 0))
        elif state == "pushed":
            self._details[node] = _pushed(push)
        elif state == "failed":
            self._details[node] = facts.get("error", "")
        if self._live is not None:
            self._live.refresh()
        elif state in ("pushed", "ready", "lost", "away") and not self._json:
            detail = self._details.get(node, "") if state == "pushed" else ""
            output.err(f"  {node}: {STATES[state]}{f' ({detail})' if detail else ''}", "dim")

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=False)
        for node, state in self._states.items():
            colour = {"ready": "green", "running": "green", "failed": "red", "lost": "red"}.get(state, "yellow")
            # Text, and no markup: an error that a node tells of may have brackets in it.
            detail = Text(printable(self._details.get(node, "")), style="dim")
            table.add_row(Text(f"  {printable(node)}"), Text(STATES.get(state, "?"), style=colour), detail)
        table.add_row(Text(f"  {time.monotonic() - self._begun:.1f} s", style="dim"), "", "")
        return table


def _pushed(push: dict[str, Any]) -> str:
    if push.get("state") == "have":
        return "unchanged"
    return f"{_count(push.get('files', 0), 'file')}, {_size(push.get('bytes', 0))} sent"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"
