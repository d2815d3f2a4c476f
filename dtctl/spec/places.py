"""Keys such as `cluster.nodes[1].slots`, and their places in the user's files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dtctl.errors import SpecError

Path = tuple[str | int, ...]
"""A key as steps: names, and positions in lists from 0."""

_STEP = re.compile(r"(?P<name>[^.\[\]]+)(?P<indexes>(?:\[[0-9]{1,9}\])*)\Z")


def parse_key(text: str) -> Path:
    """Return the steps of a key: `cluster.nodes[0].slots` -> cluster, nodes, 0, slots.

    Raises:
        SpecError: the text is not a key.
    """
    steps: list[str | int] = []
    for part in text.split("."):
        match = _STEP.match(part)
        if match is None:
            raise SpecError(
                f"{text!r} is not a key", where="--set", hint="write it like train.lr or cluster.nodes[0].slots"
            )
        steps.append(match["name"])
        steps.extend(int(number) for number in re.findall(r"[0-9]+", match["indexes"]))
    return tuple(steps)


def has_path_step(data: object, step: str | int) -> bool:
    """Return whether `data[step]` exists: a key of a mapping, or a position in a list."""
    if isinstance(step, int):
        return isinstance(data, list) and step < len(data)
    return isinstance(data, dict) and step in data


def format_dotted_key(path: Path) -> str:
    """Return the text of a key; `parse_key` reverses this."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        else:
            text += f".{step}" if text else step
    return text


@dataclass(frozen=True, slots=True)
class KeyLocations:
    """Lines of a spec at which its keys were written.

    Any two objects are equal, since specs are compared by their contents and not by their lines.
    """

    source: str = field(default="", compare=False)
    """Name of the file, or a substitute for it in messages."""
    lines: Mapping[Path, int] = field(default_factory=dict, compare=False)
    """Line of each key in the file, from 1; entries of lists by position."""
    overrides: Sequence[tuple[Path, str]] = field(default=(), compare=False)
    """Changes by `--set`: key and `KEY=VALUE`, in the order in which they were applied."""

    def locate_key(self, path: Path) -> str:
        """Return `file:line` of the key at `path`, or of the nearest one above it; `--set KEY=VALUE` if that set it.

        If the file lacks a section, its place is the `--set` that has set a part of the section.
        """
        for key, text in reversed(self.overrides):
            if path[: len(key)] == key or (key[: len(path)] == path and path not in self.lines):
                return f"--set {text}"
        line = self.line(path)
        return self.source if line is None else f"{self.source}:{line}"

    def line(self, path: Path) -> int | None:
        """Return the line of the key at `path`, or of the nearest key above it; None if the file has neither."""
        return next((self.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.lines), None)
