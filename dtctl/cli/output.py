"""All output of dtctl: the only module that writes to standard output and standard error.

Results are written to standard output, all other messages to standard error. With `--json`, standard output has only
JSON. Colour appears only on a terminal, and never with NO_COLOR (https://no-color.org).
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import IO

from dtctl.errors import DtctlError, NodeFailures
from dtctl.printable import make_printable

LAST_COLUMN = 30
"""Smallest width of a table's last column, which may be cut, before other columns are omitted."""
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


def format_size(number: float) -> str:
    """Return a human-readable number of bytes: `640 B`, `3.1 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} GiB"


def is_terminal(stream: IO[str]) -> bool:
    """Return whether the stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def count_output_columns() -> int:
    """Return the number of columns of standard output; a large number if it is no terminal."""
    return shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 1 << 20


def apply_text_styles(text: str, *styles: str, stream: IO[str]) -> str:
    """Return `text` in colours, if `stream` shows colours."""
    if not styles or not is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    codes = ";".join(_STYLES[style] for style in styles)
    return f"\x1b[{codes}m{text}\x1b[0m"


def print_stdout(text: str, *styles: str, fold: bool = True) -> None:
    """Print one line of the result, folded at words to fit the terminal, unless `fold` is false."""
    _print_styled_lines(sys.stdout, text, *styles, fold=fold)


def format_line_origin(node: str, rank: int) -> str:
    """Return the prefix of a line from a worker, or from torchrun's agent if the rank is negative."""
    return f"[{node}:{rank if rank >= 0 else 'agent'}]"


def print_worker_line(node: str, rank: int, text: str, *, err: bool = False) -> None:
    """Print a line of a worker after its prefix; a progress bar is shortened to the width of the terminal."""
    stream = sys.stderr if err else sys.stdout
    origin = format_line_origin(node, rank)
    text = make_printable(text)
    if is_terminal(stream):
        from dtctl.launch.records.progress_bars import shorten_progress_bar  # not needed for `dtctl --help`

        text = shorten_progress_bar(text, shutil.get_terminal_size().columns - len(origin) - 1)
    _print_styled_lines(stream, f"{origin} {text}", fold=False)


def print_stderr(text: str, *styles: str, fold: bool = True) -> None:
    """Print one line about the progress of the command, folded like those of `print_stdout`."""
    _print_styled_lines(sys.stderr, text, *styles, fold=fold)


def _print_styled_lines(stream: IO[str], text: str, *styles: str, fold: bool) -> None:
    text = make_printable(text)
    lines = [part for line in text.split("\n") for part in _wrap_line(line, stream)] if fold else [text]
    _write_stream_text(stream, "".join(apply_text_styles(line, *styles, stream=stream) + "\n" for line in lines))


def _wrap_line(text: str, stream: IO[str]) -> list[str]:
    """Split a line to fit the terminal; the other lines are indented two blanks more than the first."""
    if not is_terminal(stream) or len(text) <= shutil.get_terminal_size().columns:
        return [text]
    return _wrap_sentence(text, stream, indent=len(text) - len(text.lstrip(" ")) + 2)


def _wrap_sentence(text: str, stream: IO[str], *, first: int = 0, indent: int = 2) -> list[str]:
    """Split a sentence to fit the terminal; words stay whole, so that commands and paths can be copied.

    Args:
        text: the sentence.
        stream: stream on which the sentence is printed.
        first: number of characters in front of the first line.
        indent: number of blanks in front of the other lines.
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
"""Line at the bottom of the terminal, below all others, if there is one."""


def set_status_line(text: str) -> None:
    """Keep one line below all later output, on a terminal only; an empty text removes it."""
    if not is_terminal(sys.stderr):
        return
    shown = make_printable(text)[: shutil.get_terminal_size().columns - 1]
    if [shown] == _last or not (shown or _last):
        return
    _last[:] = [shown] if shown else []
    _write_stream_text(sys.stderr, "" if shown else "\r\x1b[K")


def print_raw_text(text: str) -> None:
    """Print a result that has its own line ends, such as a script or a page; a terminal gets no control sequences."""
    _write_stream_text(sys.stdout, make_printable(text) if sys.stdout.isatty() else text)


def pass_on(data: bytes, *, as_is: bool = False, err: bool = False) -> None:
    """Print the output of a command on a node: unchanged into a file or a pipe, else without control sequences.

    Args:
        data: a part of the output.
        as_is: whether to pass the output unchanged, since the command, such as a shell, has a terminal of its own.
        err: whether to print to standard error.
    """
    stream = sys.stderr if err else sys.stdout
    if not as_is and stream.isatty():
        _write_stream_text(stream, make_printable(data.decode(errors="replace")))
        return
    try:
        stream.flush()
        stream.buffer.write(data)
        stream.flush()
    except BrokenPipeError:
        _discard_stream(stream)


def emit_json(value: object) -> None:
    """Print a JSON value on one line of standard output; a Record becomes an object with all of its keys."""
    import json

    _write_stream_text(sys.stdout, json.dumps(value, separators=(", ", ": "), default=vars) + "\n")


def _write_stream_text(stream: IO[str], text: str) -> None:
    if _last and stream.isatty():
        text = f"\r\x1b[K{text}{apply_text_styles(_last[0], 'dim', stream=stream)}"
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe. Python would report another error when it flushes at exit.
        _discard_stream(stream)
    except OSError as exc:
        # The disk behind `> train.log` may be full. Lost output must not end the run, whose folder has it, too.
        _discard_stream(stream)
        if stream is not sys.stderr:
            warn_of_lost_output(exc)
    except UnicodeEncodeError:
        stream.write(text.encode("ascii", "replace").decode("ascii"))


def warn_of_lost_output(error: OSError) -> None:
    """Discard all later standard output, and warn that it cannot be written."""
    _discard_stream(sys.stdout)
    _refused.append(error.strerror or "")
    print_stderr(f"warning: standard output cannot be written any more: {error.strerror}", "yellow")


def is_cut() -> bool:
    """Return whether part of standard output is lost because it could not be written."""
    return bool(_refused)


def _discard_stream(stream: IO[str]) -> None:
    """Discard all later output to a stream."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def print_table(rows: list[list[str]], *, header: list[str], cut: bool = False, spare: Sequence[str] = ()) -> None:
    """Print columns of text with the width of their content, without rules, so that they can be copied.

    Args:
        rows: cells of each row.
        header: names of the columns.
        cut: whether rows are cut to the width of the terminal.
        spare: columns that are omitted on a narrow terminal, the least important first.
    """
    rows = [[make_printable(" ".join(cell.splitlines())) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    room = count_output_columns() if cut or spare else 1 << 20
    for name in spare:
        needed = [*widths[:-1], min(widths[-1], LAST_COLUMN) if cut else widths[-1]]
        if sum(needed) + 2 * (len(needed) - 1) <= room:
            break
        gone = header.index(name)
        header, rows = _drop_column(header, gone), [_drop_column(row, gone) for row in rows]
        del widths[gone]

    def line(row: list[str]) -> str:
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        return f"{text[: room - 1]}…" if room < len(text) else text

    print_stdout(line(header), "bold", fold=False)
    for row in rows:
        print_stdout(line(row), fold=False)


def _drop_column(row: list[str], column: int) -> list[str]:
    return row[:column] + row[column + 1 :]


def print_error_with_hint(exc: DtctlError) -> None:
    """Print an error for the user: fact, place, hint."""
    if isinstance(exc, NodeFailures):
        _print_error_parts(exc.message, None, None)
        for (message, advice), nodes in exc.nodes_by_reason.items():
            print_stderr(f"  {shorten_names(nodes)}: {message}")
            if advice:
                _print_labelled_text("    ", "hint:", advice, "cyan")
        return
    _print_error_parts(exc.message, exc.where, exc.hint)


def _print_error_parts(message: str, where: str | None, hint: str | None) -> None:
    _print_labelled_text("", "error:", message, "red", "bold")
    if where:
        _print_labelled_text("", "where:", where, "bold")
    if hint:
        _print_labelled_text("", "hint: ", hint, "cyan")


def print_hint(text: str) -> None:
    """Print a hint about the next step."""
    _print_labelled_text("", "hint: ", text, "cyan")


def _print_labelled_text(before: str, label: str, text: str, *styles: str) -> None:
    indent = len(before) + len(label) + 1
    first, *others = _wrap_sentence(make_printable(text), sys.stderr, first=indent, indent=indent)
    lines = [f"{before}{apply_text_styles(label, *styles, stream=sys.stderr)} {first}", *others]
    _write_stream_text(sys.stderr, "\n".join(lines) + "\n")


def shorten_names(names: Sequence[str]) -> str:
    """Return a list of names for one line: the first names, and the number of the others."""
    more = len(names) - SHOWN_NAMES
    return ", ".join(names) if more <= 1 else f"{', '.join(names[:SHOWN_NAMES])} and {more} more"
