"""Keys such as `cluster.nodes[1].slots`, and where in the user's files each of them was written."""

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
        SpecError: it is not a key.
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


def holds(data: object, step: str | int) -> bool:
    """Return whether `data[step]` exists: a key of a mapping, or a position in a list."""
    if isinstance(step, int):
        return isinstance(data, list) and step < len(data)
    return isinstance(data, dict) and step in data


def dotted(path: Path) -> str:
    """Return the key that `parse_key` turns into `path`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


@dataclass(frozen=True, slots=True)
class Places:
    """Lines of a spec at which its keys were written.

    Any two are equal, since specs are compared by their contents, and not by their lines.
    """

    source: str = field(default="", compare=False)
    """Name of the file, or of what stands for one in messages."""
    lines: Mapping[Path, int] = field(default_factory=dict, compare=False)
    """Line of each key in the file, from 1; entries of lists by position."""
    overrides: Sequence[tuple[Path, str]] = field(default=(), compare=False)
    """Changes by `--set`: key and `KEY=VALUE`, in the order in which they were applied."""

    def of(self, path: Path) -> str:
        """Return `file:line` of the key at `path`, or of the nearest one above it; `--set KEY=VALUE` if that set it.

        The place of a section that the file does not have is the `--set` that set a part of it.
        """
        for key, text in reversed(self.overrides):
            if path[: len(key)] == key or (key[: len(path)] == path and path not in self.lines):
                return f"--set {text}"
        line = self.line(path)
        return self.source if line is None else f"{self.source}:{line}"

    def line(self, path: Path) -> int | None:
        """Return the line of the key at `path`, or of the nearest one above it; None when no file has either."""
        return next((self.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.lines), None)
