"""`--set KEY=VALUE`: changes to a spec's data before the checks, which then treat a wrong key like one in the file."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from dtctl.errors import SpecError
from dtctl.printable import format_count
from dtctl.spec import positions
from dtctl.spec.places import KeyLocations, Path, format_dotted_key, has_path_step, parse_key


def apply_override(data: dict[str, Any], texts: dict[Path, str], override: str) -> Path:
    """Change `data` in place, and return the path of the key that was set.

    The value is YAML: numbers, true, null (back to the default), `[a, b]`, `{a: 1}`. Without a value the key becomes an
    empty text. Missing sections are added, and a node that is only a name becomes a mapping.

    Args:
        data: data of the spec; no object may occur in it twice.
        texts: numbers of the spec in the user's notation; this function updates them.
        override: `KEY=VALUE`.

    Raises:
        SpecError: the text has no `=`, the key or the value is not well formed, or a part of the path does not exist.
    """
    key, equals, text = override.partition("=")
    if not equals:
        raise SpecError(f"{override!r} has no `=`", where="--set", hint="write --set train.lr=1e-3")
    path = parse_key(key.strip())
    document = _parse_override_value(text, override)
    place: Any = data
    for depth, (step, following) in enumerate(pairwise(path)):
        place = _prepare_override_place(place, step, following, path[:depth], override)
    last = path[-1]
    if not (has_path_step(place, last) or (isinstance(place, dict) and isinstance(last, str))):
        raise _build_missing_key_error(path[:-1], last, place, override)
    place[last] = document.data
    for known in [known for known in texts if known[: len(path)] == path]:
        del texts[known]
    texts.update({path + inner: typed for inner, typed in document.texts.items()})
    return path


def _parse_override_value(text: str, override: str) -> positions.YamlDocument:
    if text == "":
        return positions.YamlDocument("", KeyLocations(), {})
    try:
        return positions.parse_yaml_document(text, source="--set")
    except SpecError as exc:
        raise SpecError(
            f"{text!r} is not a value: {exc.message.removeprefix('not valid YAML: ')}",
            where=f"--set {override}",
            hint="put text with special characters in quotes, for the shell and for YAML: --set 'job.name=\"a: b\"'",
        ) from exc


def _prepare_override_place(place: Any, step: str | int, following: str | int, above: Path, override: str) -> Any:
    """Return the item at `step` of `place`, which becomes a mapping if `following` is a key."""
    if isinstance(place, dict) and isinstance(step, str):
        inner = place.get(step)
        if inner is None and isinstance(following, int):
            raise _build_missing_key_error((*above, step), following, [], override)
        if isinstance(following, str) and (inner is None or (above == ("train",) and step == "strategy")):
            # A strategy is a name or a mapping of degrees.
            inner = place[step] = inner if isinstance(inner, dict) else {}
        return inner
    if has_path_step(place, step):
        if isinstance(place[step], str) and isinstance(following, str):
            place[step] = {"name": place[step]}
        return place[step]
    raise _build_missing_key_error(above, step, place, override)


def _build_missing_key_error(above: Path, step: str | int, place: Any, override: str) -> SpecError:
    name = f"`{format_dotted_key(above)}`"
    if isinstance(place, list):
        entries = format_count(len(place), "entry", "entries")
        message = f"{name} has {entries}, counted from 0, and no [{step}]"
    elif isinstance(step, int):
        message = f"{name} is not a list, and has no [{step}]"
    else:
        message = f"{name} has no keys, and so no `{step}`"
    return SpecError(message, where=f"--set {override}", key=format_dotted_key((*above, step)))
