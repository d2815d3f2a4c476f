"""`--set KEY=VALUE`: changes to a spec's data before it is checked, so that a wrong key is refused as in the file."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import yaml

from dtctl.errors import SpecError

_STEP = re.compile(r"(?P<name>[^.\[\]]+)(?P<indexes>(?:\[\d+\])*)\Z")


def parse_key(text: str) -> list[str | int]:
    """The steps of a key: `cluster.nodes[0].slots` -> cluster, nodes, 0, slots.

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
        steps.extend(int(number) for number in re.findall(r"\d+", match["indexes"]))
    return steps


def parse_value(text: str) -> Any:
    """The value as YAML would read it: numbers, true, lists in brackets; nothing is an empty text.

    `1e-3` is a number here, which YAML 1.1 would take for text.

    Raises:
        SpecError: it is not valid YAML.
    """
    if text == "":
        return ""
    if re.fullmatch(r"[+-]?\d+(?:\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise SpecError(
            f"{text!r} is not a value: {exc}", where="--set", hint="put text with : or [ in quotes"
        ) from exc


def apply(data: dict[str, Any], override: str) -> list[str | int]:
    """Change `data` in place; the path that was set.

    Raises:
        SpecError: there is no `=`, the key is not well formed, or leads through a value that has no parts.
    """
    key, equals, value = override.partition("=")
    if not equals:
        raise SpecError(f"{override!r} has no `=`", where="--set", hint="write --set train.lr=1e-3")
    path = parse_key(key.strip())
    place: Any = data
    for step, following in pairwise(path):
        place = _descend(place, step, following, override)
    last = path[-1]
    settable = (
        isinstance(last, str) if isinstance(place, dict) else isinstance(place, list) and last in range(len(place))
    )
    if not settable:
        raise SpecError(f"`{key}` does not exist in the spec", where=f"--set {override}")
    place[last] = parse_value(value)
    return path


def _descend(place: Any, step: str | int, following: str | int, override: str) -> Any:
    if isinstance(place, dict) and isinstance(step, str):
        if place.get(step) is None:
            if isinstance(following, int):
                raise SpecError(f"`{step}` has no entry {following}", where=f"--set {override}")
            place[step] = {}
        elif isinstance(place[step], str) and isinstance(following, str) and step == "strategy":
            place[step] = {}
        return place[step]
    if isinstance(place, list) and isinstance(step, int) and step < len(place):
        if isinstance(place[step], str) and isinstance(following, str):
            place[step] = {"name": place[step]}  # a node that was only a name gets keys
        return place[step]
    raise SpecError(f"`{step}` does not exist in the spec", where=f"--set {override}")
