"""Records a command in a terminal and draws what it has printed, when it did, as an animated SVG.

    python docs/recorder.py docs/pictures/demo.svg -- python examples/demo.py

Everything in the picture was printed by that command, with its colours and at its pace; waits of more than a second are
cut to one. Whoever asks for less motion sees the end of it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pyte

CHARACTER, LINE, MARGIN = 7.8, 18, 14
"""Width of a character, height of a line, and space around, in pixels."""
LONGEST_WAIT_S = 1.0
COLOURS = {
    "default": "#e6edf3", "black": "#6e7681",
    "red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341", "blue": "#79c0ff",
    "magenta": "#d2a8ff", "cyan": "#a5d6ff", "white": "#e6edf3",
}  # fmt: skip
"""pyte's names, on a dark ground."""
GROUND = "#0d1117"
STYLE = """\
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}
.row{opacity:0;animation:on 0s forwards}
.row.gone{animation:on 0s forwards,off 0s forwards}
@keyframes on{to{opacity:1}}
@keyframes off{to{opacity:0}}
@media (prefers-reduced-motion:reduce){.row{animation:none;opacity:1}.row.gone{display:none}}
"""


@dataclass
class Row:
    """What stood in a line of the terminal, from when and until when."""

    line: int
    drawn: str
    since_s: float
    until_s: float | None = None


def played(command: Sequence[str], columns: int, lines: int, code: int) -> Iterator[tuple[float, bytes]]:
    """Run a command in a terminal of its own: seconds since its start, without long waits, and what it has printed."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": str(lines)}
    process = subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    clock, before = 0.0, time.monotonic()
    while True:
        ready, _, _ = select.select([master], [], [], 0.05)
        now = time.monotonic()
        if not ready:
            if process.poll() is not None:
                break
            continue
        clock, before = clock + min(now - before, LONGEST_WAIT_S), now
        try:
            printed = os.read(master, 65536)
        except OSError:  # EIO: the last one that had the terminal has closed it
            break
        yield clock, printed
    os.close(master)
    if process.wait() != code:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}: nothing is drawn")


def rows(chunks: Iterator[tuple[float, bytes]], columns: int, lines: int) -> list[Row]:
    """What stood where and when."""
    screen = pyte.Screen(columns, lines)
    stream = pyte.ByteStream(screen)
    stands: dict[int, Row] = {}
    kept: list[Row] = []
    for clock, printed in chunks:
        stream.feed(printed)
        for line in sorted(screen.dirty):
            text = _spans(screen, line)
            old = stands.get(line)
            if old is not None and old.drawn == text:
                continue
            if old is not None:
                old.until_s = clock
                del stands[line]
            if text:
                stands[line] = Row(line, text, clock)
                kept.append(stands[line])
        screen.dirty.clear()
    # What stood for less than a blink nobody has seen.
    return [row for row in kept if row.until_s is None or row.until_s - row.since_s > 0.02]


def _spans(screen: pyte.Screen, line: int) -> str:
    """A line as tspans, one for each run of a colour; empty if there is nothing in it."""
    cells = [screen.buffer[line][column] for column in range(screen.columns)]
    while cells and cells[-1].data == " ":
        cells.pop()
    spans: list[tuple[str, str]] = []
    for cell in cells:
        colour = COLOURS.get(cell.fg, f"#{cell.fg}" if len(cell.fg) == 6 else COLOURS["default"])
        style = f'fill="{colour}"' + (' font-weight="bold"' if cell.bold else "")
        if spans and spans[-1][0] == style:
            spans[-1] = (style, spans[-1][1] + cell.data)
        else:
            spans.append((style, cell.data))
    return "".join(f"<tspan {style}>{escape(text, quote=False)}</tspan>" for style, text in spans)


def picture(found: Sequence[Row], columns: int, shown: int, title: str) -> str:
    """The SVG: lines appear when they were printed, and move up when there are more than fit."""
    width = round(columns * CHARACTER + 2 * MARGIN)
    used = 1 + max(row.line for row in found)
    height = min(shown, used) * LINE + 2 * MARGIN + 24
    end_s = max(row.until_s or row.since_s for row in found) + 0.01
    drawn = []
    for row in found:
        gone = row.until_s is not None
        delays = f"{row.since_s:.2f}s,{row.until_s:.2f}s" if gone else f"{row.since_s:.2f}s"
        at = f'x="{MARGIN}" y="{row.line * LINE + 13}"'
        drawn.append(
            f'<text class="row{" gone" if gone else ""}" {at} style="animation-delay:{delays}">{row.drawn}</text>'
        )
    moved = _scrolled(found, shown, end_s)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}{moved}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>\n'
        f'<text x="{MARGIN}" y="20"><tspan fill="#8b949e">$ {escape(title)}</tspan></text>\n'
        f'<svg y="{MARGIN + 20}" width="{width}" height="{height - 2 * MARGIN - 20}"><g id="page">\n'
        + "\n".join(drawn)
        + "\n</g></svg>\n</svg>\n"
    )


def _scrolled(found: Sequence[Row], shown: int, end_s: float) -> str:
    """The rule that moves the page up whenever a line appears below what is shown."""
    lowest, steps = shown - 1, []
    for row in sorted(found, key=lambda row: row.since_s):
        if row.line > lowest:
            lowest = row.line
            steps.append(f"{100 * row.since_s / end_s:.2f}%{{transform:translateY({-(lowest - shown + 1) * LINE}px)}}")
    if not steps:
        return ""
    last = steps[-1].partition("{")[2]
    return (
        f"#page{{animation:page {end_s:.2f}s step-end forwards}}\n@keyframes page{{{''.join(steps)}100%{{{last}}}\n"
        f"@media (prefers-reduced-motion:reduce){{#page{{animation:none;{last.rstrip('}')}}}}}\n"
    )


def record(
    command: Sequence[str], out: Path, *, title: str = "", columns: int = 100, shown: int = 28, code: int = 0
) -> None:
    """Record a command into a file.

    Args:
        command: its argv.
        out: the SVG.
        title: what is said to be typed. Empty: the command itself.
        columns: width of the terminal.
        shown: lines of the picture; more of them scroll.
        code: the exit code that it ends with.
    """
    tall = 400  # nothing scrolls in the recorded terminal, so that every line is drawn once
    found = rows(played(command, columns, tall, code), columns, tall)
    out.write_text(picture(found, columns, shown, title or " ".join(command)), encoding="utf-8")


def main() -> None:
    """Record what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--shown", type=int, default=28, help="lines of the picture; more of them scroll")
    parser.add_argument("--title", default="", help="what is said to be typed; the command itself unless given")
    parser.add_argument("--code", type=int, default=0, help="the exit code that it ends with")
    parser.add_argument("command", nargs="+")
    told = parser.parse_args()
    record(told.command, told.out, title=told.title, columns=told.columns, shown=told.shown, code=told.code)


if __name__ == "__main__":
    main()
