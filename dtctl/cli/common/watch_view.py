"""Screen of `dtctl watch` on a terminal, drawn again and again from the run's folder.

Reads only what the launcher has written, so any number of people may watch, also from another terminal.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from dtctl.cli.common.folding import Folding
from dtctl.cli.common.log_reader import LogFilter, LogReader
from dtctl.cli.common.progress_line import clock, experts_line, loss_text, metrics_of, progress_line, source_text
from dtctl.cli.common.run_display import STATES
from dtctl.launch.records.state import RunState, state_of, where_the_time_went
from dtctl.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dtctl.launch.records.record import RunRecord

REFRESH_S = 0.25
LOG_LINES = 10
TAIL_BYTES = 4096
"""Bytes of each log, when the picture is drawn for the first time."""
BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"running": "green", "succeeded": "green", "ready": "green", "failed": "red", "lost": "red"}


class Screen:
    """The picture of one run; remembers how far it has read."""

    def __init__(self, record: RunRecord, *, steps: int | None) -> None:
        """Show `record`, with a training of `steps` steps if that is known."""
        self._record = record
        self._steps = steps
        self._reader = LogReader(record, LogFilter(tail_bytes=TAIL_BYTES))
        self._lines: deque[tuple[str, str]] = deque(maxlen=LOG_LINES)
        self._folding = Folding()
        self.state: RunState = state_of(record)

    def draw(self, *, width: int) -> RenderableType:
        """Return the picture as of now, `width` columns wide."""
        from rich.console import Group
        from rich.text import Text

        self.state = state_of(self._record)
        for line in self._reader.read_new():
            shown = self._folding.feed(line.node, line.rank, line.text)
            self._lines.extend((f"{line.origin} ", text) for text in shown)
        rows = metrics_of(self._record)
        parts: list[RenderableType] = [self._head(), Text(), self._nodes()]
        if self.state.restarts:
            reason = f"restart {len(self.state.restarts)}: {self.state.restarts[-1]}"
            parts.append(Text(printable(reason), style="yellow"))
        if self.state.heals:
            parts.append(Text(printable(f"heal {len(self.state.heals)}: {self.state.heals[-1]}"), style="yellow"))
        if rows:
            parts += [Text(), *self._progress(rows, width)]
        if self.state.ledger is not None and self.state.ledger.goodput is not None:
            parts.append(Text(where_the_time_went(self.state.ledger), style="dim", no_wrap=True, overflow="ellipsis"))
        if self._lines:
            parts.append(Text())
            for origin, text in self._lines:
                parts.append(
                    Text.assemble((printable(origin), "dim"), printable(text), no_wrap=True, overflow="ellipsis")
                )
        return Group(*parts)

    def _head(self) -> RenderableType:
        from rich.text import Text

        state = self.state
        again = f", attempt {state.attempt}" if state.attempt else ""
        return Text.assemble(
            ("run ", "dim"), (printable(state.run), "bold"), "  ",
            (printable(state.status), COLOURS.get(state.status, "yellow")),
            (f"  {clock(state.duration_s)}{again}", "dim"),
        )  # fmt: skip

    def _nodes(self) -> RenderableType:
        """Return every node with its state; many nodes side by side."""
        from rich.columns import Columns
        from rich.text import Text

        cells = [
            Text.assemble(printable(node), " ", (STATES.get(state, printable(state)), COLOURS.get(state, "yellow")))
            for node, state in self.state.nodes.items()
        ]
        return Columns(cells, padding=(0, 3))

    def _progress(self, rows: list[dict[str, Any]], width: int) -> list[RenderableType]:
        from rich.text import Text

        facts = progress_line(rows[-1], steps=self._steps, runs=self.state.status == "running") + source_text(rows[-1])
        losses = [row.get("loss") for row in rows]
        numbers = [float("nan") if loss is None else float(loss) for loss in losses]
        rates = [float(row.get("tokens_per_s") or row.get("samples_per_s") or "nan") for row in rows]
        bars = [("loss ", loss_text(rows[-1]) or "not a number", numbers), ("rate ", f"{rates[-1]:,.0f}", rates)]
        wide = max(len(value) for _, value, _ in bars)
        lines: list[RenderableType] = [Text(facts, no_wrap=True, overflow="ellipsis")]
        for name, value, values in bars:
            if name == "loss " or any(map(math.isfinite, values)):
                line = sparkline(values, width - 20)
                lines.append(Text.assemble(name, (value.rjust(wide), "bold"), "  ", (line, "cyan"), no_wrap=True))
        if experts := experts_line(rows[-1]):
            lines.append(Text(experts, no_wrap=True, overflow="ellipsis"))
        return lines


def sparkline(values: list[float], width: int) -> str:
    """Values as bars, the newest last, averaged if there are more than `width`; a gap where there is no number."""
    width = max(8, width)
    count = len(values)
    if count > width:
        edges = [index * count // width for index in range(width + 1)]
        values = [_mean(values[low:high]) for low, high in itertools.pairwise(edges)]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    top = len(BARS) - 1
    return "".join(
        BARS[round((value - low) / span * top) if span else top // 2] if math.isfinite(value) else " "
        for value in values
    )


def _mean(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else float("nan")


def show(record: RunRecord, *, steps: int | None) -> RunState:
    """Draw the run until it is over; its last state."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    screen = Screen(record, steps=steps)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(screen.draw(width=console.width), refresh=True)
            if screen.state.over:
                return screen.state
            time.sleep(REFRESH_S)
