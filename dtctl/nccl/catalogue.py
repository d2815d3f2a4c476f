"""Catalogue of the variables of NCCL, torch and gloo, read from catalogue.yaml."""

from __future__ import annotations

import difflib
import functools
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclVariable:
    """A variable that NCCL, or torch for NCCL, reads."""

    name: str
    meaning: str
    kind: Literal["live", "alias", "dead"] = "live"
    default: str = ""
    since: str = ""
    """Version of NCCL; empty when it was always there or is not NCCL's."""
    danger: str = ""
    instead: str = ""
    """Replacement for a variable that has no effect any more."""
    values: tuple[str, ...] = ()
    """All valid values; empty if any value is valid."""
    risky: tuple[str, ...] = ()
    """Values to warn of; `any` for all."""
    differ: bool = False
    """True if nodes may have different values."""
    rccl: str = ""
    """Use of the variable in AMD's RCCL where NCCL does not read it any more; empty if neither does."""


@functools.cache
def load_variable_catalogue() -> dict[str, NcclVariable]:
    """Return all variables by name, in the order of the file."""
    import yaml

    text = resources.files("dtctl.nccl").joinpath("catalogue.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: dict[str, dict[str, Any]] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, either of them
    return {name: _build_catalogue_variable(name, entry) for name, entry in entries.items()}


def _build_catalogue_variable(name: str, entry: dict[str, Any]) -> NcclVariable:
    risky = entry.pop("risky", ())
    for key in ("default", "since"):
        entry[key] = str(entry.get(key, ""))
    risky = (risky,) if isinstance(risky, str) else tuple(str(value) for value in risky)
    return NcclVariable(name=name, values=tuple(str(value) for value in entry.pop("values", ())), risky=risky, **entry)


@functools.cache
def find_closest_name(name: str) -> str:
    """Return the known variable that `name` is probably a misspelling of; empty when none is near."""
    matches = difflib.get_close_matches(name, load_variable_catalogue(), n=1, cutoff=0.9)
    return matches[0] if matches else ""
