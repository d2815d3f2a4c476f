"""Application of edits to files."""

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
from dtctl.lint.source import NEWLINE, Kind, decode_source, detect_file_kind


@dataclass(frozen=True, slots=True)
class FixResult:
    """Result for one file."""

    mended: tuple[Problem, ...] = ()
    refused: str = ""
    """Reason why a file with fixable problems was left unchanged; empty if it was not."""


def fixed_text(text: str, problems: Sequence[Problem]) -> tuple[str, list[Problem]]:
    """Return a text with the edits of some problems applied, and the problems that this fixes.

    A problem whose edits overlap those of an earlier one is left for the next run. Edits that several problems share
    are made once. New lines have the line end of the text's first line.
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
        if any(_is_conflicting_edit(begin, end, new, edited) for begin, end, new in spans):
            continue
        for begin, end, new in spans:
            edited.setdefault((begin, end), set()).add(new)
        mended.append(problem)
    for (begin, end), texts in sorted(edited.items(), reverse=True):
        raw = raw[:begin] + "".join(sorted(texts)).replace("\n", newline).encode() + raw[end:]
    return raw.decode(), mended


def _is_conflicting_edit(begin: int, end: int, new: str, edited: dict[tuple[int, int], set[str]]) -> bool:
    """Return whether an edit changes the same text as another one, but differently."""
    for (other_begin, other_end), texts in edited.items():
        same_span = (begin, end) == (other_begin, other_end)
        if same_span and (new in texts):
            continue
        if same_span and begin == end and new.endswith("\n"):  # two imports at one position
            continue
        if same_span or (begin < other_end and other_begin < end):
            return True
    return False


def apply_fixes(path: Path, problems: Sequence[Problem]) -> FixResult:
    """Fix a file in place; it is replaced completely, or not at all.

    For a link, the file that it points to is fixed. Encoding, byte order mark, line ends and mode are kept. A result
    that Python or the shell cannot parse is not written.
    """
    try:
        if not path.is_file():
            return FixResult(refused="not a regular file")
        raw = path.read_bytes()
        kind = detect_file_kind(path, raw)
        source = decode_source(raw, python=kind == "python")
        after, mended = fixed_text(source.text, problems)
        if not mended or after == source.text:
            return FixResult()
        wrong = _find_refusal_reason(after, kind)
        if wrong:
            return FixResult(refused=wrong)
        _replace_file_content(path.resolve(), source.encoded(after))
    except OSError as exc:
        return FixResult(refused=exc.strerror or str(exc))
    except (SyntaxError, ValueError, IndexError) as exc:
        return FixResult(refused=f"it has changed since it was read ({exc})")
    return FixResult(tuple(mended))


def _find_refusal_reason(text: str, kind: Kind | None) -> str:
    """Return the reason why a fixed text must not be written; empty if it may be written."""
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


def _replace_file_content(path: Path, content: bytes) -> None:
    """Replace the content of a file, and keep its mode."""
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
