"""Mistakes in variables of NCCL, RCCL, torch or gloo, for Python and for shell."""

from __future__ import annotations

import re

from dtctl.lint.model import Severity
from dtctl.nccl.catalogue import find_closest_name, load_variable_catalogue

NAME = re.compile(r"(?:NCCL|RCCL|TORCH_NCCL|TORCH_FR|GLOO)_[A-Z0-9_]+\Z")

MAX_PORT = 65535


def check_variable_setting(name: str, value: str | None) -> tuple[Severity, str, str] | None:
    """Return severity, message and fix for setting a variable; None if the setting is correct.

    Args:
        name: name of the variable.
        value: value of the variable; None if it is not known.
    """
    variable = load_variable_catalogue().get(name)
    if variable is None:
        suggestion = find_closest_name(name) if NAME.match(name) else ""
        return ("warning", f"there is no variable {name}", f"{suggestion} is probably meant") if suggestion else None
    if variable.kind == "dead":
        instead = "remove it" if variable.instead == "nothing" else f"use {variable.instead}"
        return "warning", f"{name} has no effect: {variable.meaning}", instead
    if variable.kind == "alias":
        return "info", f"{name} is an older name", f"use {variable.instead}"
    if value is None:
        return None
    return _check_assigned_value(name, value)


def _check_assigned_value(name: str, value: str) -> tuple[Severity, str, str] | None:
    variable = load_variable_catalogue()[name]
    if variable.values and value.upper() not in variable.values and not value.startswith("$"):
        return "warning", f"{name} has no value {value}", f"one of {', '.join(variable.values)}"
    if name == "NCCL_PROTO" and "LL128" not in value.upper().replace("^LL128", ""):  # only LL128 corrupts data
        return (
            "info",
            f"NCCL_PROTO={value} ends NCCL's own choice by size",
            "remove it unless it was measured",
        )
    if value in variable.risky or ("any" in variable.risky and value):
        return "warning", f"{name}={value}: {variable.meaning}", variable.danger or "only to find a mistake; remove it"
    if name == "NCCL_DEBUG_FILE" and re.search(r"%[^hp%]", value):
        placeholder = re.findall(r"%[^hp%]", value)[0]
        return (
            "warning",
            f"NCCL_DEBUG_FILE: {placeholder} is taken literally, and all ranks write one file",
            "use %h and %p",
        )
    if name == "NCCL_IB_DISABLE" and value == "0":
        return "info", "NCCL_IB_DISABLE=0 is the default", "remove it"
    if name == "NCCL_SOCKET_IFNAME" and re.fullmatch(r"[A-Za-z]+\d+", value):
        return "info", f"NCCL_SOCKET_IFNAME={value} also matches {value}0 and others", f"={value} is exact"
    if name == "NCCL_IB_HCA" and re.fullmatch(r"\w+_\d+", value):
        return "warning", f"NCCL_IB_HCA={value} is a prefix, and one device of possibly many", "leave it unset"
    return None
