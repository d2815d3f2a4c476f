"""Selection and reading of the files to lint, and comments that suppress problems."""

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
"""Size of the largest file that is read, in bytes; parsing takes twenty times as much memory."""
STDIN = Path("-")
SHELL = frozenset([".sh", ".bash", ".sbatch", ".slurm", ".job"])
_SKIPPED = frozenset(
    ["__pycache__", "node_modules", "site-packages", "build", "dist", ".git", ".venv", "venv", ".tox", ".dtctl"]
)
_IGNORE = re.compile(r"#\s*dtctl:\s*ignore(?P<file>-file)?(?:\[(?P<rules>[A-Z0-9,\s]*)\])?")
_SHEBANG = re.compile(rb"#!\s*\S*?(?:/env\s+(?:-S\s+)?)?(?P<name>python|pypy|bash|sh|dash|ksh|zsh)[\d.]*(?:\s|\Z)")
_BOM = b"\xef\xbb\xbf"
NEWLINE = re.compile("\r\n|\r|\n")
"""Line end for Python; str.splitlines splits in more places."""


@dataclass(frozen=True, slots=True)
class SourceText:
    """Text of a file, with the encoding and line ends that are needed to write it."""

    text: str
    encoding: str
    bom: bool

    def encoded(self, text: str) -> bytes:
        """Return the bytes of a new text for the same file."""
        return (_BOM if self.bom else b"") + text.encode(self.encoding)


def detect_file_kind(path: Path, raw: bytes | None = None) -> Kind | None:
    """Return the kind of a file by its suffix, or else by its first line; None for files that are not read.

    Args:
        path: path of the file; a path that is not a file has no kind.
        raw: content of the file; None: it is read if necessary.
    """
    if path.suffix in (".py", ".pyw"):
        return "python"
    if path.suffix in SHELL:
        return "shell"
    if raw is None:
        try:
            raw = read_source_bytes(path)[:200]
        except OSError:
            return None
    first = _SHEBANG.match(raw.removeprefix(_BOM))
    if first is not None:
        return "python" if first["name"] in (b"python", b"pypy") else "shell"
    if path == STDIN:
        return "python"
    return "shell" if b"#SBATCH " in raw and not path.suffix else None


def read_source_bytes(path: Path) -> bytes:
    """Return the content of a file, or of standard input.

    Raises:
        OSError: the file cannot be read, or is larger than `MAX_BYTES`.
    """
    return _standard_input() if path == STDIN else read_regular(str(path), MAX_BYTES)


@functools.cache
def _standard_input() -> bytes:
    """Return standard input, which can be read only once."""
    return sys.stdin.buffer.read()


def decode_source(raw: bytes, *, python: bool) -> SourceText:
    """Return the text of a file, in the encoding that a Python file names, or else in UTF-8.

    Raises:
        UnicodeDecodeError: the bytes are not text in this encoding.
        SyntaxError: a Python file names an encoding that does not exist, or is not an encoding of text.
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
    # Python has codecs such as rot13, hex and zlib, but does not read programs in them
    except (LookupError, UnicodeError) as exc:
        raise SyntaxError(f"{encoding} is no encoding that a program can have") from exc


def collect_source_files(paths: Iterable[Path]) -> tuple[list[Path], list[tuple[Path, str]]]:
    """Return the files to lint without repetitions, and paths that are not read, with the reasons.

    A named file is linted if it is Python or shell by its suffix or first line, a file in a folder only by its suffix;
    `-` is standard input. Paths that are not regular files (a FIFO, a device, a dangling link) are not opened.

    Raises:
        UsageError: a path does not exist.
    """
    files: dict[Path, None] = {}
    unread: list[tuple[Path, str]] = []
    for path in paths:
        if path == STDIN:
            files[path] = None
        elif path.is_dir():
            files.update(dict.fromkeys(_list_folder_sources(path, unread)))
        elif not path.exists():
            raise UsageError(f"there is no file or folder {path}")
        elif not path.is_file():
            unread.append((path, "not a regular file"))
        elif detect_file_kind(path) is None and os.access(path, os.R_OK):
            unread.append((path, "neither Python nor shell"))
        else:
            files[path] = None
    return list(files), unread


def _list_folder_sources(folder: Path, unread: list[tuple[Path, str]]) -> Iterator[Path]:
    def denied(exc: OSError) -> None:
        unread.append((Path(exc.filename), exc.strerror or "cannot be read"))

    for current, folders, files in os.walk(folder, onerror=denied):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith(".venv"))
        for name in sorted(files):
            path = Path(current, name)
            if has_source_suffix(path) and path.is_file():
                yield path


def has_source_suffix(path: Path) -> bool:
    """Return whether a file is Python or shell by its suffix."""
    return path.suffix in SHELL or path.suffix in (".py", ".pyw")


class RuleSuppressions:
    """Rules that comments suppress: `# dtctl: ignore[DT004]` on the line, `ignore-file` for the file."""

    def __init__(self, text: str, *, python: bool = False) -> None:
        self._lines: dict[int, frozenset[str]] = {}
        self._file: set[str] = set()
        self._all = False
        if "dtctl:" not in text:
            return
        for number, comment in _list_comments(text) if python else enumerate(text.split("\n"), 1):
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
        """Return whether a problem is suppressed on its first or last line, or for the file."""
        if self._all or rule in self._file:
            return True
        lines = [self._lines[number] for number in (line, end_line) if number in self._lines]
        return any(not rules or rule in rules for rules in lines)


def _list_comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments of a Python text with their lines; for other texts, those before the first mistake."""
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    except (tokenize.TokenError, SyntaxError):
        return
