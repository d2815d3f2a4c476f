"""The catalogue of texts that failing jobs print, read from signatures.yaml."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

Role = Literal["cause", "effect", "note"]
Blames = Literal["self", "group", "all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One cause and the texts that it is known by; the head of signatures.yaml says what the fields mean."""

    id: str
    patterns: tuple[re.Pattern[str], ...]
    cause: str
    fix: str
    source: str
    example: str
    role: Role = "cause"
    blames: Blames = "self"
    ambiguous: str = ""
    versions: str = ""

    def search(self, text: str) -> dict[str, str] | None:
        """The named groups of the first pattern found in `text`, None without one."""
        for pattern in self.patterns:
            found = pattern.search(text)
            if found is not None:
                return {name: value for name, value in found.groupdict().items() if value is not None}
        return None


@functools.cache
def signatures() -> tuple[Signature, ...]:
    """All of them, in the order of the file: of two that fit one line, the first wins."""
    import yaml

    text = resources.files("dtctl.doctor.explain").joinpath("signatures.yaml").read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: list[dict[str, Any]] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, either of them
    return tuple(
        Signature(patterns=tuple(re.compile(pattern) for pattern in entry.pop("match")), **entry) for entry in entries
    )


@functools.cache
def any_signature() -> re.Pattern[str]:
    """One pattern that is found in every line in which any signature is: most lines of a log need no second look."""
    patterns = (pattern.pattern for signature in signatures() for pattern in signature.patterns)
    return re.compile("|".join(re.sub(r"\?P<\w+>", "?:", pattern) for pattern in patterns))


def find(text: str) -> tuple[Signature, dict[str, str]] | None:
    """The signature of a line and its named groups."""
    if any_signature().search(text) is None:
        return None
    for signature in signatures():
        groups = signature.search(text)
        if groups is not None:
            return signature, groups
    return None
