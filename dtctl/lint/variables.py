"""What is wrong with a variable of NCCL, torch or gloo; for Python and for shell."""

from __future__ import annotations

import re

from dtctl.lint.model import Severity
from dtctl.nccl.catalogue import catalogue, near

NAME = re.compile(r"(?:NCCL|TORCH_NCCL|TORCH_FR|GLOO)_[A-Z0-9_]+\Z")


def judge(name: str, value: str | None) -> tuple[Severity, str, str] | None:
    """Severity, message and fix for setting a variable; None if nothing is wrong with it.

    Args:
        name: of the variable.
        value: None when it is not known.
    """
    known = catalogue().get(name)
    if known is None:
        meant = near(name) if NAME.match(name) else ""
        return ("warning", f"there is no variable {name}", f"{meant} is probably meant") if meant else None
    if known.kind == "dead":
        instead = "remove it" if known.instead == "nothing" else f"use {known.instead}"
        return "warning", f"{name} has no effect: {known.meaning}", instead
    if known.kind == "alias":
        return "info", f"{name} is an older name", f"use {known.instead}"
    if value is None:
        return None
    return _value(name, value)


def _value(name: str, value: str) -> tuple[Severity, str, str] | None:
    known = catalogue()[name]
    if known.values and value.upper() not in known.values and not value.startswith("$"):
        return "warning", f"{name} knows no value {value}", f"one of {', '.join(known.values)}"
    if name == "NCCL_PROTO" and "LL128" not in value.upper().replace("^LL128", ""):  # that one alone corrupts
        return (
            "info",
            f"NCCL_PROTO={value} ends NCCL's own choice by size",
            "remove it unless it was measured",
        )
    if value in known.risky or ("any" in known.risky and value):
        return "warning", f"{name}={value}: {known.meaning}", known.danger or "only to find a mistake; remove it"
    if name == "NCCL_DEBUG_FILE" and re.search(r"%[^hp%]", value):
        found = re.findall(r"%[^hp%]", value)[0]
        return "warning", f"NCCL_DEBUG_FILE: {found} is taken literally, and all ranks write one file", "use %h and %p"
    if name == "NCCL_IB_DISABLE" and value == "0":
        return "info", "NCCL_IB_DISABLE=0 is the default", "remove it"
    if name == "NCCL_SOCKET_IFNAME" and re.fullmatch(r"[A-Za-z]+\d+", value):
        return "info", f"NCCL_SOCKET_IFNAME={value} also matches {value}0 and others", f"={value} is exact"
    if name == "NCCL_IB_HCA" and re.fullmatch(r"\w+_\d+", value):
        return "warning", f"NCCL_IB_HCA={value} is a prefix, and one device of possibly many", "leave it unset"
    return None
