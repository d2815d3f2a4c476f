"""Rules, read from rules.yaml: subject, reason, source, and a wrong and a right example."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dtctl.lint.model import Severity

SYNTAX = "DT000"
"""Id of the problem that no rule could be applied to a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Rule of `dtctl lint`, as in rules.yaml."""

    id: str
    name: str
    severity: Severity
    why: str
    fix: str
    source: str
    wrong: str
    right: str
    exempt: str = ""
    """Cases to which the rule does not apply although they look similar."""
    fixable: bool = False
    """True if `--fix` fixes simple cases."""


@functools.cache
def load_lint_rules() -> dict[str, Rule]:
    """Return all rules by id, in the order of the file."""
    import yaml

    text = resources.files("dtctl.lint").joinpath("rules.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: dict[str, dict[str, Any]] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, either of them
    return {id_: Rule(id=id_, **entry) for id_, entry in entries.items()}


def explained_syntax() -> str:
    """Return the text about DT000, which is not a rule about training and has no example."""
    return (
        f"{SYNTAX} unreadable (error)\n\n"
        "The file could not be read: it is not Python, or not text in the encoding that it names, or it may not be\n"
        "opened. No rule was applied to it; the other files were still read. Also reported for a file on which a\n"
        "rule crashed; that is a bug in dtctl, and the message names the rule."
    )
