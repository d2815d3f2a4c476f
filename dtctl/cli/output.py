"""All that dtctl prints: the only module that writes to standard output and standard error.

Results go to standard output, everything about the way there to standard error. With `--json`, standard output carries
JSON and nothing else. Colour only on a terminal, and never with NO_COLOR (https://no-color.org).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import IO

from dtctl.errors import DtctlError, NodeFailures
from dtctl.printable import printable

LAST_COLUMN = 30
"""Characters that a table leaves to its last column, which may be cut, before it gives up others."""
SHOWN_NAMES = 6
_STYLES = {
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
    "bold": "1",
    "dim": "2",
}


def size(number: float) -> str:
    """Return a human-readable number of bytes: `640 B`, `3.1 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def is_terminal(stream: IO[str]) -> bool:
    """Return whether people look at this stream, in a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def columns() -> int:
    """Characters of a line of standard output; many where it is no terminal."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 1 << 20


def styled(text: str, *styles: str, stream: IO[str]) -> str:
    """`text` in colours, if `stream` shows colours."""
    if not styles or not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    codes = ";".join(_STYLES[style] for style in styles)
    return f"\x1b[{codes}m{text}\x1b[0m"


def out(text: str, *styles: str, fold: bool = False) -> None:
    """Print one line of result; a sentence may be folded at words, where a terminal is narrower."""
    _print(sys.stdout, text, *styles, fold=fold)


def err(text: str, *styles: str, fold: bool = False) -> None:
    """Print one line about what is going on; a sentence may be folded as with `out`."""
    _print(sys.stderr, text, *styles, fold=fold)


def _print(stream: IO[str], text: str, *styles: str, fold: bool) -> None:
    text = printable(text)
    lines = _fold(text, stream) if fold else [text]
    _write(stream, "".join(styled(line, *styles, stream=stream) + "\n" for line in lines))


def _fold(text: str, stream: IO[str], *, first: int = 0, indent: int = 2) -> list[str]:
    """Return the lines of a sentence on a terminal; words stay whole, so that commands and paths can be copied.

    Args:
        text: the sentence.
        stream: where it is printed.
        first: characters that stand before its first line.
        indent: blanks before the others.
    """
    if not is_terminal(stream):
        return [text]
    width = max(40, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(
        " " * first + text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
    return [line[first:] if number == 0 else line for number, line in enumerate(lines or [""])]


_last: list[str] = []
_refused: list[str] = []
"""The line that stands below all others, if there is one."""


def stand(text: str) -> None:
    """Let one line stand below all that is printed from now on; empty: none any more. On a terminal only."""
    if not is_terminal(sys.stderr):
        return
    shown = printable(text)[: shutil.get_terminal_size().columns - 1]
    if [shown] == _last or not (shown or _last):
        return
    _last[:] = [shown] if shown else []
    _write(sys.stderr, "" if shown else "\r\x1b[K")


def raw(text: str) -> None:
    """Result text that brings its own line ends, a script or a page: as it is, but for a terminal."""
    _write(sys.stdout, printable(text) if sys.stdout.isatty() else text)


def pass_on(data: bytes, *, as_is: bool = False, err: bool = False) -> None:
    """Print the output of a command on a node: untouched into a file or a pipe, else without control sequences.

    Args:
        data: a piece of it.
        as_is: whether the command has a terminal of its own, such as a shell, so that its output is passed unchanged.
        err: to standard error.
    """
    stream = sys.stderr if err else sys.stdout
    if not as_is and stream.isatty():
        _write(stream, printable(data.decode(errors="replace")))
        return
    try:
        stream.flush()
        stream.buffer.write(data)
        stream.flush()
    except BrokenPipeError:
        _discard(stream)


def emit_json(value: object) -> None:
    """One JSON value on one line of standard output; a Record in it as an object with all of its keys."""
    _write(sys.stdout, json.dumps(value, separators=(", ", ": "), default=vars) + "\n")


def _write(stream: IO[str], text: str) -> None:
    if _last and stream.isatty():
        text = f"\r\x1b[K{text}{styled(_last[0], 'dim', stream=stream)}"
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again when it flushes at exit.
        _discard(stream)
    except OSError as exc:
        # A full disk behind `> train.log`. What is shown must not end what is running; the run's folder has it too.
        _discard(stream)
        if stream is not sys.stderr:
            _refused.append(exc.strerror or "")
            err(f"warning: no more is shown on standard output: {exc.strerror}", "yellow")
    except UnicodeEncodeError:
        stream.write(text.encode("ascii", "replace").decode("ascii"))


def is_cut() -> bool:
    """Return whether something was not shown on standard output because it could not be written."""
    return bool(_refused)


def _discard(stream: IO[str]) -> None:
    """Discard whatever else is written there."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def table(rows: list[list[str]], *, header: list[str], cut: bool = False, spare: Sequence[str] = ()) -> None:
    """Columns of text, as wide as they need to be; no lines, so that it can be cut and pasted.

    Args:
        rows: cells.
        header: names of the columns.
        cut: whether a terminal shows as much of a row as fits on one of its lines.
        spare: columns that a narrow terminal does not show, the least important first.
    """
    rows = [[printable(" ".join(cell.splitlines())) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    room = columns() if cut or spare else 1 << 20
    for name in spare:
        needed = [*widths[:-1], min(widths[-1], LAST_COLUMN) if cut else widths[-1]]
        if sum(needed) + 2 * (len(needed) - 1) <= room:
            break
        gone = header.index(name)
        header, rows = _without(header, gone), [_without(row, gone) for row in rows]
        del widths[gone]

    def line(row: list[str]) -> str:
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        return f"{text[: room - 1]}…" if room < len(text) else text

    out(line(header), "bold")
    for row in rows:
        out(line(row))


def _without(row: list[str], column: int) -> list[str]:
    return row[:column] + row[column + 1 :]


def error(exc: DtctlError) -> None:
    """An error as people see it: fact, place, what to do next."""
    if isinstance(exc, NodeFailures):
        _error(exc.message, None, None)
        alike: dict[tuple[str, str | None], list[str]] = {}
        for node, failure in exc.failures.items():
            alike.setdefault((failure.message, failure.hint), []).append(node)
        for (message, advice), nodes in alike.items():
            err(f"  {shorten_names(nodes)}: {message}", fold=True)
            if advice:
                _labelled("    ", "hint:", advice, "cyan")
        return
    _error(exc.message, exc.where, exc.hint)


def _error(message: str, where: str | None, hint: str | None) -> None:
    _labelled("", "error:", message, "red", "bold")
    if where:
        _labelled("", "where:", where, "bold")
    if hint:
        _labelled("", "hint: ", hint, "cyan")


def hint(text: str) -> None:
    """Print the next thing to do."""
    _labelled("", "hint: ", text, "cyan")


def _labelled(before: str, label: str, text: str, *styles: str) -> None:
    indent = len(before) + len(label) + 1
    first, *others = _fold(printable(text), sys.stderr, first=indent, indent=indent)
    lines = [f"{before}{styled(label, *styles, stream=sys.stderr)} {first}", *others]
    _write(sys.stderr, "\n".join(lines) + "\n")


def shorten_names(names: Sequence[str]) -> str:
    """Return a list of names for a line: the first ones, and how many more there are."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:SHOWN_NAMES])} and {more} more"
