"""What files of a run may hold, before anybody believes it: a job, a full disk or a person may have written it."""

from __future__ import annotations

import math
from typing import Any, Final

_LISTS: Final = ("plan", "allocated")
"""Events whose `nodes` are names; elsewhere they are a number."""

_NUMBERS: Final = ("attempt", "of", "rank", "wait_s", "step", "exit_code", "signal")


def event(value: Any) -> bool:
    """Whether this is an event: with a kind and a time, and nodes that have names."""
    if not isinstance(value, dict) or not isinstance(value.get("event"), str):
        return False
    if not number(value.get("time", 0.0)) or not isinstance(value.get("node") or "", str):
        return False
    if not all(value.get(key) is None or number(value[key]) for key in _NUMBERS):
        return False
    if value["event"] == "node" and not (value.get("node") and isinstance(value.get("state"), str)):
        return False
    return value["event"] not in _LISTS or _names(value.get("nodes", []))


def plan(value: Any) -> bool:
    """Whether this is a plan: nodes with names, numbers of workers and variables."""
    nodes = value.get("nodes", []) if isinstance(value, dict) else None
    return isinstance(nodes, list) and all(isinstance(node, dict) and _node(node) for node in nodes)


def _node(node: dict[str, Any]) -> bool:
    variables = node.get("env", [])
    return (
        isinstance(node.get("name"), str)
        and all(isinstance(node.get(key, 0), int) for key in ("slots", "first_rank"))
        and isinstance(variables, list)
        and all(isinstance(one, dict) and _texts(one, "name", "value", "origin") for one in variables)
    )


def ledger(value: Any) -> bool:
    """Whether this is a ledger: seconds of phases, and their sum."""
    phases = value.get("phases_s", {}) if isinstance(value, dict) else None
    return isinstance(phases, dict) and all(number(spent) for spent in (*phases.values(), value.get("wall_s", 0)))


def number(value: Any) -> bool:
    """Whether this is a number that a clock or a plot can have."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _texts(value: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(value.get(key), str) for key in keys)
