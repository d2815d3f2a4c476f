"""Human-readable numbers: `7B`, `80GiB`."""

from __future__ import annotations

import re

from dtctl.errors import UsageError

_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SIZE = {"": 2**30, "gib": 2**30, "gb": 1e9, "mib": 2**20, "mb": 1e6, "tib": 2**40, "g": 2**30}

LARGEST = 1e20


def parse_count(text: str) -> float:
    """Return a number of things: `7B`, `125M`, `7e9`.

    Raises:
        UsageError: it is none, or not above 0.
    """
    return _parse_number_with_unit(text, _COUNT, "a number such as 7B, 125M or 7e9")


def parse_gibibytes(text: str) -> float:
    """Return a size in GiB: `80`, `80GiB`, `80GB`.

    Raises:
        UsageError: it is none, or not above 0.
    """
    return _parse_number_with_unit(text, _SIZE, "a size such as 80GiB") / 2**30


def format_short_count(number: float) -> str:
    """Return a number of things in three digits: `7.24M`, `8.03B`."""
    for letter, unit in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= unit * 0.9995:
            return f"{number / unit:.3g}{letter}"
    return f"{number:.0f}"


def _parse_number_with_unit(text: str, units: dict[str, float], expected: str) -> float:
    match = re.fullmatch(r"\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = units.get(match[2].lower()) if match else None
    try:
        value = float(match[1]) if match else 0.0
    except ValueError:
        unit = None
    if unit is None:
        raise UsageError(f"{text} is not {expected}")
    if not value > 0:
        raise UsageError(f"{text} must be above 0")
    if value * unit > LARGEST:
        raise UsageError(f"{text} is more than any machine has")
    return value * unit
