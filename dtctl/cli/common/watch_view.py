"""What `dtctl watch` shows on a terminal: one screen that is drawn again and again from the run's folder.

Reads only what the launcher has written, so any number of people may watch, also from another terminal.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtctl import folders, names
from dtctl.cli.common.launch_view import STATES
from dtctl.launch.records.logs import rank_of
from dtctl.launch.records.state import RunState, state_of, where_the_time_went
from dtctl.launch.records.validate_records import number
from dtctl.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from dtctl.launch.records.record import RunRecord

REFRESH_S = 0.25
LOG_LINES = 10
BARS = "▁▂▃▄▅▆▇█"
TAIL_BYTES = 1 << 16
COLOURS = {"running": "green", "succeeded": "green", "ready": "green", "failed": "red", "lost": "red"}


class Screen:
    """The picture of one run; remembers how far it has read."""

    def __init__(self, record: RunRecord, *, steps: int | None) -> None:
        """Show `record`, whose training has `steps` steps if that is known."""
        self._record = record
        self._steps = steps
        self._read: dict[Path, int] = {}
        self._lines: deque[tuple[str, str]] = deque(maxlen=LOG_LINES)
        self.state: RunState = state_of(record)

    def draw(self, *, width: int) -> RenderableType:
        """The picture as of now, `width` columns wide."""
        from rich.console import Group
        from rich.text import Text

        self.state = state_of(self._record)
        self._read_logs()
        rows = tail_of_metrics(self._record.folder / names.METRICS_FILE)
        parts: list[RenderableType] = [self._head(), Text(), self._nodes(width)]
        if self.state.restarts:
            reason = f"restart {len(self.state.restarts)}: {self.state.restarts[-1]}"
            parts.append(Text(printable(reason), style="yellow"))
        if rows:
            parts += [Text(), *self._progress(rows, width)]
        if self.state.ledger is not None and self.state.ledger.get("goodput") is not None:
            parts.append(Text(where_the_time_went(self.state.ledger), style="dim", no_wrap=True, overflow="ellipsis"))
        if self._lines:
            parts.append(Text())
            for origin, line in self._lines:
                parts.append(
                    Text.assemble((printable(origin), "dim"), printable(line), no_wrap=True, overflow="ellipsis")
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

    def _nodes(self, width: int) -> RenderableType:
        """Every node with its state; many nodes side by side."""
        from rich.columns import Columns
        from rich.text import Text

        cells = [
            Text.assemble(printable(node), " ", (STATES.get(state, printable(state)), COLOURS.get(state, "yellow")))
            for node, state in self.state.nodes.items()
        ]
        return Columns(cells, padding=(0, 3), width=None if len(cells) > 1 else width)

    def _progress(self, rows: list[dict[str, Any]], width: int) -> list[RenderableType]:
        from rich.text import Text

        last = rows[-1]
        step, step_s = int(last["step"]), float(last.get("step_s") or "nan")
        line = f"step {step:,}"
        if self._steps:
            runs = self.state.status == "running" and math.isfinite(step_s)
            remaining = clock((self._steps - step) * step_s) if runs else ""
            line += f" of {self._steps:,}  {step / self._steps:.0%}" + (f"  {remaining} to go" if remaining else "")
        speed = last.get("tokens_per_s")
        samples = last.get("samples_per_s")
        rate = f"{speed:,.0f} tokens/s" if speed else f"{samples:,.0f} samples/s" if samples else ""
        facts = "  ".join([line, *([f"{step_s * 1e3:.1f} ms/step"] if math.isfinite(step_s) else []), rate]).rstrip()
        losses = [row.get("loss") for row in rows]
        numbers = [float("nan") if loss is None else float(loss) for loss in losses]
        loss_text = "not a number" if math.isnan(numbers[-1]) else f"{numbers[-1]:.4f}"
        rates = [float(row.get("tokens_per_s") or row.get("samples_per_s") or "nan") for row in rows]
        bars = [("loss ", loss_text, numbers), ("rate ", f"{rates[-1]:,.0f}", rates)]
        wide = max(len(loss_text) for _, loss_text, _ in bars)
        lines: list[RenderableType] = [Text(facts, no_wrap=True, overflow="ellipsis")]
        for name, loss_text, values in bars:
            if name == "loss " or any(map(math.isfinite, values)):
                line = sparkline(values, width - 20)
                lines.append(Text.assemble(name, (loss_text.rjust(wide), "bold"), "  ", (line, "cyan"), no_wrap=True))
        return lines

    def _read_logs(self) -> None:
        for path in sorted((self._record.folder / names.LOGS_DIR).glob("*/*.log")):
            size = path.stat().st_size
            start = self._read.get(path, max(0, size - TAIL_BYTES // 16))
            if size <= start:
                continue
            with os.fdopen(folders.open_regular(str(path)), "rb") as file:
                file.seek(start)
                complete, newline, _ = file.read(TAIL_BYTES).rpartition(b"\n")
            self._read[path] = start + len(complete) + len(newline)
            rank = rank_of(path)
            origin = f"[{path.parent.name}:{'agent' if rank < 0 else rank}] "
            for line in complete.decode(errors="replace").splitlines()[-LOG_LINES:]:
                self._lines.append((origin, line.rsplit("\r", 1)[-1]))


def tail_of_metrics(path: Path) -> list[dict[str, Any]]:
    """The last rows of metrics.jsonl, oldest first; none when there are none yet."""
    try:
        with os.fdopen(folders.open_regular(str(path)), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[1 if size > TAIL_BYTES else 0 : -1]
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue  # cut by the beginning of the tail, or being written
        if isinstance(row, dict) and number(row.get("step")):
            rows.append({key: value for key, value in row.items() if isinstance(value, float) or number(value)})
    return rows


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


def clock(seconds: float) -> str:
    """A time span for people: 0:07, 12:34, 3:04:05."""
    total_s = max(0, int(seconds))
    hours, minutes = divmod(total_s // 60, 60)
    return f"{hours}:{minutes:02}:{total_s % 60:02}" if hours else f"{minutes}:{total_s % 60:02}"


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
