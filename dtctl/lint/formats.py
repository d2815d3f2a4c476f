"""Problems as readable text, JSON, SARIF 2.1.0, and workflow commands of GitHub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from dtctl.lint.model import Problem
from dtctl.lint.rules import Rule, load_lint_rules

_SARIF_LEVELS = {"error": "error", "warning": "warning", "info": "note"}
_GITHUB_LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def text_lines(problem: Problem) -> tuple[str, str]:
    """Return place and fact, and the fix."""
    place = f"{problem.path}:{problem.line}:{problem.column}"
    return f"{place}: {problem.severity} {problem.rule} {problem.message}", f"    {problem.fix}"


def build_json_problems(problems: Sequence[Problem]) -> list[dict[str, object]]:
    """Return the list for `--format json`."""
    return [problem.as_json() for problem in problems]


def format_github_command(problem: Problem) -> str:
    """Return a workflow command, which GitHub shows at the line of a pull request.

    https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions
    """
    message = f"{problem.message}. {problem.fix}".replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    path = problem.path.replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    return (
        f"::{_GITHUB_LEVELS[problem.severity]} file={path},line={problem.line},col={problem.column},"
        f"title={problem.rule}::{message}"
    )


def build_sarif_log(problems: Sequence[Problem], version: str) -> dict[str, Any]:
    """Return a SARIF log, see https://docs.oasis-open.org/sarif/sarif/v2.1.0/sarif-v2.1.0.html."""
    rule_ids = sorted({problem.rule for problem in problems})
    index = {rule: number for number, rule in enumerate(rule_ids)}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "dtctl lint",
                        "version": version,
                        "rules": [_sarif_rule(rule_id) for rule_id in rule_ids],
                    }
                },
                "results": [
                    {
                        "ruleId": problem.rule,
                        "ruleIndex": index[problem.rule],
                        "level": _SARIF_LEVELS[problem.severity],
                        "message": {"text": f"{problem.message}. {problem.fix}"},
                        "locations": [
                            {
                                "physicalLocation": {
                                    "artifactLocation": {"uri": quote(PurePath(problem.path).as_posix())},
                                    "region": {"startLine": problem.line, "startColumn": problem.column},
                                }
                            }
                        ],
                    }
                    for problem in problems
                ],
            }
        ],
    }


def _sarif_rule(id_: str) -> dict[str, Any]:
    rule = load_lint_rules().get(id_)
    if rule is None:
        return {"id": id_, "shortDescription": {"text": "the file cannot be read"}}
    return {
        "id": id_,
        "name": rule.name,
        "shortDescription": {"text": rule.name},
        "fullDescription": {"text": " ".join(rule.why.split())},
        "helpUri": rule.source,
    }


def explained(rule: Rule) -> str:
    """Return the complete text about a rule, for `--explain`."""
    parts = [
        f"{rule.id} {rule.name} ({rule.severity})",
        "",
        " ".join(rule.why.split()),
        "",
        "Wrong:",
        "",
        _indent_code(rule.wrong),
    ]
    parts += ["", "Right:", "", _indent_code(rule.right), ""]
    if rule.exempt:
        parts += [f"Does not apply: {' '.join(rule.exempt.split())}", ""]
    parts += [f"Fix: {rule.fix}{' (--fix handles the plain cases)' if rule.fixable else ''}", f"Source: {rule.source}"]
    return "\n".join(parts)


def _indent_code(code: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in code.rstrip().split("\n"))


def format_json_value(value: object) -> str:
    """Return one JSON value in readable form."""
    return json.dumps(value, indent=2)
