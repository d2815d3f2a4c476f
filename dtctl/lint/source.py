"""Reading files to lint: which ones, and which problems their comments wave aside."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from dtctl.errors import UsageError

SHELL = frozenset([".sh", ".bash", ".sbatch", ".slurm", ".job"])
_SKIPPED = frozenset(
    ["__pycache__", "node_modules", "site-packages", "build", "dist", ".git", ".venv", "venv", ".tox", ".dtctl"]
)
_IGNORE = re.compile(r"#\s*dtctl:\s*ignore(?P<file>-file)?(?:\[(?P<rules>[A-Z0-9,\s]*)\])?")


def is_python(path: Path) -> bool:
    """Whether a file is read as Python."""
    return path.suffix in (".py", ".pyw")


def collect(paths: Iterable[Path]) -> list[Path]:
    """The files that are meant: files as named, folders with all Python and shell files in them, each once.

    Raises:
        UsageError: a path does not exist.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found.update(dict.fromkeys(_walk(path)))
        elif path.exists():
            found[path] = None
        else:
            raise UsageError(f"there is no file or folder {path}")
    return list(found)


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith(".venv"))
        for name in sorted(files):
            path = Path(here, name)
            if path.suffix in SHELL or is_python(path):
                yield path


class Ignored:
    """What comments of a file wave aside: `# dtctl: ignore[DT004]` on the line, `ignore-file` for all of it."""

    def __init__(self, text: str) -> None:
        self._lines: dict[int, frozenset[str]] = {}
        self._file: set[str] = set()
        self._all = False
        if "dtctl:" not in text:
            return
        for number, line in enumerate(text.split("\n"), 1):
            found = _IGNORE.search(line)
            if found is None:
                continue
            rules = frozenset(one.strip() for one in (found["rules"] or "").split(",") if one.strip())
            if found["file"]:
                self._file |= rules
                self._all |= not rules
            else:
                self._lines[number] = rules

    def covers(self, rule: str, line: int, end_line: int) -> bool:
        """Whether a problem is waved aside: on its first or last line, or for the file."""
        if self._all or rule in self._file:
            return True
        found = [self._lines[number] for number in (line, end_line) if number in self._lines]
        return any(not rules or rule in rules for rules in found)
