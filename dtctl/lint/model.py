"""Output of the linter: problems, and the edits that fix some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]
LEVELS: tuple[Severity, ...] = ("info", "warning", "error")
"""Levels from harmless to wrong. A run of the linter fails on warnings and errors."""


@dataclass(frozen=True, slots=True)
class Edit:
    """Text to put in place of some other. Lines from 1; columns in UTF-8 bytes from 0, as ast counts them."""

    start: tuple[int, int]
    end: tuple[int, int]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem at one place."""

    rule: str
    severity: Severity
    path: str
    line: int
    column: int
    """Column from 1, in characters."""
    message: str
    fix: str
    """Fix, one sentence."""
    end_line: int
    edits: tuple[Edit, ...] = ()
    """Edits of `--fix`; empty when a person has to decide."""

    def as_json(self) -> dict[str, object]:
        """Return the object of `--format json`."""
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
    """Number of nodes; None if no spec gives it."""

    @property
    def multi_node(self) -> bool:
        """Return whether it surely runs on several nodes."""
        return self.nodes is not None and self.nodes > 1

    @property
    def single_node(self) -> bool:
        """Return whether it surely runs on one node."""
        return self.nodes == 1
