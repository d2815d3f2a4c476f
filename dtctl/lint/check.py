"""Interface of a checker: its input and its result."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dtctl.lint.model import ClusterFacts, Edit, Problem, Severity
from dtctl.lint.project import Project
from dtctl.lint.rules import load_lint_rules
from dtctl.lint.source_file import SourceFile


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Input of a checker."""

    module: SourceFile
    project: Project
    cluster: ClusterFacts

    def problem(
        self,
        rule: str,
        node: ast.AST,
        message: str,
        *,
        severity: Severity | None = None,
        fix: str | None = None,
        edits: tuple[Edit, ...] = (),
    ) -> Problem:
        """Return a problem at a node; severity and fix are the rule's unless they are given."""
        meta = load_lint_rules()[rule]
        severity = severity or meta.severity
        if severity == "warning" and self.module.is_test_file:
            severity = "info"  # a test is not a training run, and often does such things on purpose
        line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]  # all nodes that are reported have them
        text = self.module.text.split("\n", line)[line - 1] if line else ""
        return Problem(
            rule=rule,
            severity=severity,
            path=str(self.module.path),
            line=line,
            column=len(text.encode()[:column].decode("utf-8", "replace")) + 1,
            message=message,
            fix=fix or meta.fix,
            end_line=getattr(node, "end_lineno", None) or line,
            edits=edits,
        )


Checker = Callable[[CheckContext], Iterator[Problem]]
