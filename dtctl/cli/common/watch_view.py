"""Screen of `dtctl watch` on a terminal, redrawn from the run's folder.

It reads only files that the launcher has written, so several users can watch a run from several terminals.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dtctl.cli import output
from dtctl.cli.common.log_reader import LogFilter, LogReader
from dtctl.cli.common.progress_line import (
    format_elapsed_time,
    format_experts_line,
    format_figure_source,
    format_loss,
    format_progress_line,
    read_newest_metrics,
)
from dtctl.cli.common.run_display import STATES
from dtctl.cli.common.traceback_filter import TracebackFilter
from dtctl.launch.records.progress_bars import shorten_progress_bar
from dtctl.launch.records.state import RunState, read_run_state, summarize_time_shares
from dtctl.printable import make_printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dtctl.launch.records.record import RunRecord

REFRESH_S = 0.25
LOG_LINES = 10
TAIL_BYTES = 4096
"""Number of bytes at the end of each log that are read for the first picture."""
BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"running": "green", "succeeded": "green", "ready": "green", "failed": "red", "lost": "red"}


class WatchScreen:
    """Picture of one run; the object stores the offset up to which each file was read."""

    def __init__(self, record: RunRecord, *, steps: int | None) -> None:
        """Create the screen of `record`; `steps` is the number of training steps, None if it is not known."""
        self._record = record
        self._steps = steps
        self._reader = LogReader(record, LogFilter(tail_bytes=TAIL_BYTES))
        self._lines: deque[tuple[str, str]] = deque(maxlen=LOG_LINES)
        self._folding = TracebackFilter()
        self.state: RunState = read_run_state(record)

    def draw(self, *, width: int) -> RenderableType:
        """Return the current picture, `width` columns wide."""
        from rich.console import Group
        from rich.text import Text

        self.state = read_run_state(self._record)
        for line in self._reader.read_new():
            shown = self._folding.feed(line.node, line.rank, line.text)
            self._lines.extend((f"{output.format_line_origin(line.node, line.rank)} ", text) for text in shown)
        rows = read_newest_metrics(self._record)
        parts: list[RenderableType] = [self._render_run_header(), Text(), self._render_node_states()]
        if self.state.restarts:
            reason = f"restart {len(self.state.restarts)}: {self.state.restarts[-1]}"
            parts.append(Text(make_printable(reason), style="yellow"))
        if self.state.heals:
            parts.append(Text(make_printable(f"heal {len(self.state.heals)}: {self.state.heals[-1]}"), style="yellow"))
        if rows:
            parts += [Text(), *self._render_progress(rows, width)]
        if self.state.ledger is not None and self.state.ledger.goodput is not None:
            parts.append(Text(summarize_time_shares(self.state.ledger), style="dim", no_wrap=True, overflow="ellipsis"))
        if self._lines:
            parts.append(Text())
            for origin, text in self._lines:
                fitting = shorten_progress_bar(make_printable(text), width - len(origin))
                parts.append(Text.assemble((make_printable(origin), "dim"), fitting, no_wrap=True, overflow="ellipsis"))
        return Group(*parts)

    def _render_run_header(self) -> RenderableType:
        from rich.text import Text

        state = self.state
        again = f", attempt {state.attempt}" if state.attempt else ""
        return Text.assemble(
            ("run ", "dim"), (make_printable(state.run), "bold"), "  ",
            (make_printable(state.status), COLOURS.get(state.status, "yellow")),
            (f"  {format_elapsed_time(state.duration_s)}{again}", "dim"),
        )  # fmt: skip

    def _render_node_states(self) -> RenderableType:
        """Return each node with its state; many nodes share a row."""
        from rich.columns import Columns
        from rich.text import Text

        cells = [
            Text.assemble(
                make_printable(node), " ", (STATES.get(state, make_printable(state)), COLOURS.get(state, "yellow"))
            )
            for node, state in self.state.nodes.items()
        ]
        return Columns(cells, padding=(0, 3))

    def _render_progress(self, rows: list[dict[str, Any]], width: int) -> list[RenderableType]:
        from rich.text import Text

        facts = format_progress_line(
            rows[-1], steps=self._steps, runs=self.state.status == "running"
        ) + format_figure_source(rows[-1])
        losses = [row.get("loss") for row in rows]
        numbers = [float("nan") if loss is None else float(loss) for loss in losses]
        rates = [float(row.get("tokens_per_s") or row.get("samples_per_s") or "nan") for row in rows]
        bars = [("loss ", format_loss(rows[-1]) or "not a number", numbers), ("rate ", f"{rates[-1]:,.0f}", rates)]
        wide = max(len(value) for _, value, _ in bars)
        lines: list[RenderableType] = [Text(facts, no_wrap=True, overflow="ellipsis")]
        for name, value, values in bars:
            if name == "loss " or any(map(math.isfinite, values)):
                line = render_sparkline(values, width - 20)
                lines.append(Text.assemble(name, (value.rjust(wide), "bold"), "  ", (line, "cyan"), no_wrap=True))
        if experts := format_experts_line(rows[-1]):
            lines.append(Text(experts, no_wrap=True, overflow="ellipsis"))
        return lines


def render_sparkline(values: list[float], width: int) -> str:
    """Return values as bars, the newest last, averaged if there are more than `width`; a missing number is a gap."""
    width = max(8, width)
    count = len(values)
    if count > width:
        edges = [index * count // width for index in range(width + 1)]
        values = [_compute_finite_mean(values[low:high]) for low, high in itertools.pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(BARS) - 1
    return "".join(
        BARS[round((value - low) / span * top) if span else top // 2] if math.isfinite(value) else " "
        for value in values
    )


def _compute_finite_mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else float("nan")


def display_live_run(record: RunRecord, *, steps: int | None) -> RunState:
    """Redraw the run's screen until the run is over; return its last state."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    screen = WatchScreen(record, steps=steps)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(screen.draw(width=console.width), refresh=True)
            if screen.state.over:
                return screen.state
            time.sleep(REFRESH_S)
