"""`--set KEY=VALUE`: changes to a spec's data before it is checked, so that a wrong key is refused as in the file."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from dtctl.errors import SpecError
from dtctl.spec import positions
from dtctl.spec.places import Path, Places, dotted, holds, parse_key


def apply(data: dict[str, Any], texts: dict[Path, str], override: str) -> Path:
    """Change `data` in place; the path that was set.

    The value is YAML: numbers, true, null (back to the default), `[a, b]`, `{a: 1}`. Nothing after the `=` is an empty
    text. Sections that are not there are made, and a node that is only a name becomes a mapping.

    Args:
        data: of the spec; no part of it may stand in it twice.
        texts: its numbers as they were typed, kept up to date.
        override: `KEY=VALUE`.

    Raises:
        SpecError: there is no `=`, the key or the value is not well formed, or the key leads to no place.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise SpecError(f"{override!r} has no `=`", where="--set", hint="write --set train.lr=1e-3")
    path = parse_key(key.strip())
    document = _read(text, override)
    place: Any = data
    for depth, (step, following) in enumerate(pairwise(path)):
        place = _descend(place, step, following, path[:depth], override)
    last = path[-1]
    if not (holds(place, last) or (isinstance(place, dict) and isinstance(last, str))):
        raise _nowhere(path[:-1], last, place, override)
    place[last] = document.data
    for known in [known for known in texts if known[: len(path)] == path]:
        del texts[known]
    texts.update({path + inner: typed for inner, typed in document.texts.items()})
    return path


def _read(text: str, override: str) -> positions.Document:
    if text == "":
        return positions.Document("", Places(), {})
    try:
        return positions.parse(text, source="--set")
    except SpecError as exc:
        raise SpecError(
            f"{text!r} is not a value: {exc.message.removeprefix('not valid YAML: ')}",
            where=f"--set {override}",
            hint="put text with special characters in quotes, for the shell and for YAML: --set 'job.name=\"a: b\"'",
        ) from exc


def _descend(place: Any, step: str | int, following: str | int, above: Path, override: str) -> Any:
    """Return the part of `place` that `step` names, made ready for `following` to be set in it."""
    if isinstance(place, dict) and isinstance(step, str):
        inner = place.get(step)
        if inner is None and isinstance(following, int):
            raise _nowhere((*above, step), following, [], override)
        if isinstance(following, str) and (inner is None or (above == ("train",) and step == "strategy")):
            inner = place[step] = inner if isinstance(inner, dict) else {}  # a strategy may be a name or degrees
        return inner
    if holds(place, step):
        if isinstance(place[step], str) and isinstance(following, str):
            place[step] = {"name": place[step]}
        return place[step]
    raise _nowhere(above, step, place, override)


def _nowhere(above: Path, step: str | int, place: Any, override: str) -> SpecError:
    name = f"`{dotted(above)}`"
    if isinstance(place, list):
        entries = "1 entry" if len(place) == 1 else f"{len(place)} entries"
        message = f"{name} has {entries}, counted from 0, and no [{step}]"
    elif isinstance(step, int):
        message = f"{name} is not a list, and has no [{step}]"
    else:
        message = f"{name} has no keys, and so no `{step}`"
    return SpecError(message, where=f"--set {override}", key=dotted((*above, step)))
