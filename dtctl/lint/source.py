"""Reading files to lint: which ones, as what, and which problems their comments suppress."""

from __future__ import annotations

import functools
import io
import os
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dtctl.errors import UsageError
from dtctl.folders import read_regular

Kind = Literal["python", "shell"]
MAX_BYTES = 32 << 20
"""Bytes of a file; parsing takes twenty times as much memory."""
STDIN = Path("-")
SHELL = frozenset([".sh", ".bash", ".sbatch", ".slurm", ".job"])
_SKIPPED = frozenset(
    ["__pycache__", "node_modules", "site-packages", "build", "dist", ".git", ".venv", "venv", ".tox", ".dtctl"]
)
_IGNORE = re.compile(r"#\s*dtctl:\s*ignore(?P<file>-file)?(?:\[(?P<rules>[A-Z0-9,\s]*)\])?")
_SHEBANG = re.compile(rb"#!\s*\S*?(?:/env\s+(?:-S\s+)?)?(?P<name>python|pypy|bash|sh|dash|ksh|zsh)[\d.]*(?:\s|\Z)")
_BOM = b"\xef\xbb\xbf"
NEWLINE = re.compile("\r\n|\r|\n")
"""End of a line for Python; str.splitlines splits in more places."""


@dataclass(frozen=True, slots=True)
class SourceText:
    """A file's text, and what is needed to write it as it was."""

    text: str
    encoding: str
    bom: bool

    def encoded(self, text: str) -> bytes:
        """Return the bytes of another text for the same file."""
        return (_BOM if self.bom else b"") + text.encode(self.encoding)


def kind_of(path: Path, raw: bytes | None = None) -> Kind | None:
    """Return the kind of a file by its suffix, else by its first line; None for files that are not read.

    Args:
        path: of the file; what is not a file has no kind.
        raw: its content, read if it is needed and not given.
    """
    if path.suffix in (".py", ".pyw"):
        return "python"
    if path.suffix in SHELL:
        return "shell"
    if raw is None:
        try:
            raw = read(path)[:200]
        except OSError:
            return None
    first = _SHEBANG.match(raw.removeprefix(_BOM))
    if first is not None:
        return "python" if first["name"] in (b"python", b"pypy") else "shell"
    if path == STDIN:
        return "python"
    return "shell" if b"#SBATCH " in raw and not path.suffix else None


def read(path: Path) -> bytes:
    """Return the content of a file, or of standard input.

    Raises:
        OSError: it cannot be read, or is larger than programs are.
    """
    return _standard_input() if path == STDIN else read_regular(str(path), MAX_BYTES)


@functools.cache
def _standard_input() -> bytes:
    """Standard input, which can be read only once."""
    return sys.stdin.buffer.read()


def decoded(raw: bytes, *, python: bool) -> SourceText:
    """Return the text of a file: in the encoding that a Python file names, else UTF-8.

    Raises:
        UnicodeDecodeError: the bytes are not text in it.
        SyntaxError: a Python file names an encoding that does not exist, or is none of text.
    """
    bom = raw.startswith(_BOM)
    body = raw.removeprefix(_BOM)
    encoding = "utf-8"
    if python:
        encoding = tokenize.detect_encoding(io.BytesIO(raw).readline)[0].removesuffix("-sig")
    try:
        return SourceText(body.decode(encoding), encoding, bom)
    except UnicodeDecodeError:
        raise
    except (LookupError, UnicodeError) as exc:  # Python has it, but does not read programs in it: rot13, hex, zlib
        raise SyntaxError(f"{encoding} is no encoding that a program can have") from exc


def collect(paths: Iterable[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the files that are meant, each once, and what was named or met and is not read, with the reason.

    Files as named if they are Python or shell by suffix or first line; folders with all that are by suffix;
    `-` is standard input. What is no regular file (a FIFO, a device, a link to nothing) is not opened.

    Raises:
        UsageError: a path does not exist.
    """
    files: dict[Path, None] = {}
    unread: list[tuple[Path, str]] = []
    for path in paths:
        if path == STDIN:
            files[path] = None
        elif path.is_dir():
            files.update(dict.fromkeys(_walk(path, unread)))
        elif not path.exists():
            raise UsageError(f"there is no file or folder {path}")
        elif not path.is_file():
            unread.append((path, "not a regular file"))
        elif kind_of(path) is None and os.access(path, os.R_OK):
            unread.append((path, "neither Python nor shell"))
        else:
            files[path] = None
    return list(files), unread


def _walk(folder: Path, unread: list[tuple[Path, str]]) -> Iterator[Path]:
    def denied(exc: OSError) -> None:
        unread.append((Path(exc.filename), exc.strerror or "cannot be read"))

    for current, folders, files in os.walk(folder, onerror=denied):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith(".venv"))
        for name in sorted(files):
            path = Path(current, name)
            if (path.suffix in SHELL or path.suffix in (".py", ".pyw")) and path.is_file():
                yield path


class Ignored:
    """Rules that comments of a file suppress: `# dtctl: ignore[DT004]` on the line, `ignore-file` for all of it."""

    def __init__(self, text: str, *, python: bool = False) -> None:
        self._lines: dict[int, frozenset[str]] = {}
        self._file: set[str] = set()
        self._all = False
        if "dtctl:" not in text:
            return
        for number, comment in _comments(text) if python else enumerate(text.split("\n"), 1):
            match = _IGNORE.search(comment)
            if match is None:
                continue
            rules = frozenset(rule.strip() for rule in (match["rules"] or "").split(",") if rule.strip())
            if match["file"]:
                self._file |= rules
                self._all |= not rules
            else:
                self._lines[number] = rules

    def covers(self, rule: str, line: int, end_line: int) -> bool:
        """Return whether a problem is suppressed: on its first or last line, or for the file."""
        if self._all or rule in self._file:
            return True
        lines = [self._lines[number] for number in (line, end_line) if number in self._lines]
        return any(not rules or rule in rules for rules in lines)


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments of a Python text with their lines; those before the first mistake, if it is not Python."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    except (tokenize.TokenError, SyntaxError):
        return
