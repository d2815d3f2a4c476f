"""Output of the linter: problems, and the edits that fix some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
LEVELS: tuple[Severity, ...] = ("info", "warning", "error")
"""Severities in rising order. A run of the linter fails on warnings and errors."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Replacement of a range of text. Lines count from 1, columns in UTF-8 bytes from 0, as in ast."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Problem at one place of a file."""

    rule: str
    severity: Severity
    path: str
    line: int
    column: int
    """Column from 1, in characters."""
    message: str
    fix: str
    """Way to fix the problem, as a sentence."""
    end_line: int
    edits: tuple[Edit, ...] = ()
    """Edits for `--fix`; empty if a person must decide."""

    def as_json(self) -> dict[str, object]:
        """Return the object for `--format json`."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "path": self.path,
            "line": self.line,
            "column": self.column,
            "message": self.message,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """Facts about the cluster on which the linted code will run."""

    nodes: int | None = None
    """Number of nodes; None if no spec contains it."""

    @property
    def multi_node(self) -> bool:
        """Return whether the code certainly runs on several nodes."""
        return self.nodes is not None and self.nodes > 1

    @property
    def single_node(self) -> bool:
        """Return whether the code certainly runs on one node."""
        return self.nodes == 1
