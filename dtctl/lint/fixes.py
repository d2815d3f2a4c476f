"""Applying edits to files."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtctl.lint.model import Problem
from dtctl.lint.source import NEWLINE, Kind, decoded, kind_of


@dataclass(frozen=True, slots=True)
class Fixed:
    """The result for one file."""

    mended: tuple[Problem, ...] = ()
    refused: str = ""
    """Reason why the file was left as it was although there was something to fix; empty if nothing was refused."""


def fixed_text(text: str, problems: Sequence[Problem]) -> tuple[str, list[Problem]]:
    """Return a text with the edits of some problems applied, and the problems that this fixes.

    A problem whose edits overlap those of an earlier one is left for the next run. Edits that several problems share
    are made once. New lines end as the first line of the text does.
    """
    starts, at, newline = [0], 0, "\n"
    for number, match in enumerate(NEWLINE.finditer(text)):
        newline = match[0] if number == 0 else newline
        starts.append(starts[-1] + len(text[at : match.end()].encode()))
        at = match.end()
    raw = text.encode()
    edited: dict[tuple[int, int], set[str]] = {}
    mended = []
    for problem in problems:
        if not problem.edits:
            continue
        spans = [
            (starts[edit.start[0] - 1] + edit.start[1], starts[edit.end[0] - 1] + edit.end[1], edit.text)
            for edit in problem.edits
        ]
        if any(_clashes(begin, end, new, edited) for begin, end, new in spans):
            continue
        for begin, end, new in spans:
            edited.setdefault((begin, end), set()).add(new)
        mended.append(problem)
    for (begin, end), texts in sorted(edited.items(), reverse=True):
        raw = raw[:begin] + "".join(sorted(texts)).replace("\n", newline).encode() + raw[end:]
    return raw.decode(), mended


def _clashes(begin: int, end: int, new: str, edited: dict[tuple[int, int], set[str]]) -> bool:
    """Return whether an edit changes what another one changes, in another way."""
    for (other_begin, other_end), texts in edited.items():
        same_span = (begin, end) == (other_begin, other_end)
        if same_span and (new in texts):
            continue
        if same_span and begin == end and new.endswith("\n"):  # two imports at one place
            continue
        if same_span or (begin < other_end and other_begin < end):
            return True
    return False


def apply(path: Path, problems: Sequence[Problem]) -> Fixed:
    """Fix a file in place; it is replaced whole, or not at all.

    A link stays, and the file that it points to is fixed. Encoding, byte order mark, line ends and mode stay. A result
    that Python or the shell would not read is not written.
    """
    try:
        if not path.is_file():
            return Fixed(refused="not a regular file")
        raw = path.read_bytes()
        kind = kind_of(path, raw)
        source = decoded(raw, python=kind == "python")
        after, mended = fixed_text(source.text, problems)
        if not mended or after == source.text:
            return Fixed()
        wrong = _wrong(after, kind)
        if wrong:
            return Fixed(refused=wrong)
        _replace(path.resolve(), source.encoded(after))
    except OSError as exc:
        return Fixed(refused=exc.strerror or str(exc))
    except (SyntaxError, ValueError, IndexError) as exc:
        return Fixed(refused=f"it has changed since it was read ({exc})")
    return Fixed(tuple(mended))


def _wrong(text: str, kind: Kind | None) -> str:
    """Return why a fixed text must not be written; empty if it may be."""
    if kind == "python":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compile(text, "fixed", "exec", dont_inherit=True)  # more than parsing: where __future__ may stand
        except (SyntaxError, ValueError, MemoryError, RecursionError) as exc:
            return f"the result would not be Python: {exc}"
        return ""
    bash = shutil.which("bash")
    if bash is None:
        return ""
    completed = subprocess.run([bash, "-n"], input=text.encode(), capture_output=True, check=False)
    message = completed.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
    return f"bash would not read the result: {message}" if completed.returncode or message else ""


def _replace(path: Path, content: bytes) -> None:
    """Put other content in place of a file's, with its mode."""
    temporary = path.with_name(f".{path.name}.dtctl-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(path.stat().st_mode & 0o7777)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
