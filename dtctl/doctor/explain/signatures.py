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
    yields: tuple[str, ...] = ()

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
        Signature(
            patterns=tuple(re.compile(pattern) for pattern in entry.pop("match")),
            yields=tuple(entry.pop("yields", ())),
            **entry,
        )
        for entry in entries
    )


@functools.cache
def _any() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What begins, and what is found in, every line that has a signature: most lines of a log need no second look.

    Two patterns, since one that begins with `^` among others takes re's quick way to the next possible start away.
    """
    texts = [re.sub(r"\?P<\w+>", "?:", pattern.pattern) for signature in signatures() for pattern in signature.patterns]
    return (
        re.compile("|".join(text for text in texts if text.startswith("^"))),
        re.compile(_by_letter([text for text in texts if not text.startswith("^")])),
    )


def _by_letter(texts: list[str]) -> str:
    """Alternatives gathered by the letter that they begin with: re tries alternatives one by one at every place."""
    gathered: dict[str, list[str]] = {}
    for text in texts:
        plain = text[0].isalpha() and text[1] not in "?*+{" and "|" not in _outside_groups(text)
        gathered.setdefault(text[0] if plain else "", []).append(text[1:] if plain else text)
    return "|".join(f"{letter}(?:{'|'.join(rest)})" if letter else "|".join(rest) for letter, rest in gathered.items())


def _outside_groups(text: str) -> str:
    """A pattern without its groups and without what is escaped."""
    text = re.sub(r"\\.", "", text)
    while (shorter := re.sub(r"\([^()]*\)", "", text)) != text:
        text = shorter
    return text


def find(text: str) -> tuple[Signature, dict[str, str]] | None:
    """The signature of a line and its named groups."""
    beginning, anywhere = _any()
    if beginning.match(text) is None and anywhere.search(text) is None:
        return None
    for signature in signatures():
        groups = signature.search(text)
        if groups is not None:
            return signature, groups
    return None
