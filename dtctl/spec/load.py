"""Reading a spec: every problem at once, each with file, line, key and the near match.

pydantic decides what is right; this module says what is wrong in words that do not need pydantic's.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dtctl.errors import SpecError
from dtctl.spec import overrides as setting
from dtctl.spec.model import Spec
from dtctl.spec.positions import Document, parse

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "keys with values",
    "model_type": "keys with values",
    "model_attributes_type": "keys with values",
    "path_type": "a path",
}


def load_spec(path: Path, overrides: Sequence[str] = ()) -> Spec:
    """The spec in the file at `path`, with `--set` values applied.

    Raises:
        SpecError: the file cannot be read, or says something that is not allowed; all problems in one error.
    """
    if path.is_dir():
        path = path / "dtctl.yaml"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(
            f"there is no spec {path}", where=str(path), hint="`dtctl init DIR` makes a project with one"
        ) from None
    except UnicodeDecodeError as exc:
        raise SpecError("the spec is not UTF-8 text", where=f"{path}, byte {exc.start}") from exc
    except OSError as exc:
        raise SpecError(f"the spec cannot be read: {exc.strerror}", where=str(path)) from exc
    return parse_spec(text, source=str(path), base_dir=path.resolve().parent, overrides=overrides)


def parse_spec(text: str, *, source: str, base_dir: Path, overrides: Sequence[str] = ()) -> Spec:
    """The spec that `text` says.

    Args:
        text: YAML.
        source: name of the text in messages.
        base_dir: folder that relative paths are relative to.
        overrides: `KEY=VALUE`, applied in order.

    Raises:
        SpecError: as `load_spec`.
    """
    document = parse(text, source=source)
    if document.data is None:
        raise SpecError("the spec is empty", where=source, hint="`dtctl init DIR` makes a project with one")
    if not isinstance(document.data, dict):
        raise SpecError("a spec has sections (cluster, job, ...), and this is something else", where=f"{source}:1")
    if "base_dir" in document.data:
        raise SpecError(
            f"base_dir: {_unknown_words(('base_dir',))}", where=document.where(("base_dir",)), key="base_dir"
        )
    data = document.data
    set_by: dict[tuple[str | int, ...], str] = {}
    for override in overrides:
        set_by[tuple(setting.apply(data, override))] = override
    data = {key: value if value is not None else {} for key, value in data.items()}  # `train:` with nothing under it
    try:
        spec = Spec.model_validate(data)
    except ValidationError as exc:
        raise _explain(exc.errors(include_url=False), document, set_by) from None
    return spec.model_copy(update={"base_dir": base_dir})


def explain(error: ValidationError, *, source: str) -> SpecError:
    """What is wrong with data that did not come from a file."""
    return _explain(error.errors(include_url=False), Document(None, {}, source), {})


def dump_spec(spec: Spec) -> str:
    """The spec as YAML that `parse_spec` reads as the same spec."""
    import yaml

    return str(yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True, exclude_unset=True), sort_keys=False))


def _explain(problems: list[ErrorDetails], document: Document, set_by: dict[tuple[str | int, ...], str]) -> SpecError:
    """One error for all problems, in the order of the file."""
    found = []
    for problem in _without_union_noise(problems):
        path = _path(problem["loc"])
        place = next((f"--set {text}" for key, text in set_by.items() if path[: len(key)] == key), document.where(path))
        found.append((place, _dotted(path), _words(problem, path)))
    found = list(dict.fromkeys(found))
    first = found[0]
    if len(found) == 1:
        return SpecError(f"{first[1]}: {first[2]}" if first[1] else first[2], where=first[0], key=first[1])
    lines = [f"{len(found)} problems in the spec"]
    lines.extend(f"  {place}: {key}: {words}" for place, key, words in found)
    return SpecError("\n".join(lines), where=first[0], key=first[1])


def _path(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Location in the file: pydantic's without the names of union members, which are no keys of the file."""
    members = {"NodeEntry", "Mesh", "str", "int", "float", "bool", "list[union[str,NodeEntry]]", "dict[str,str]"}
    return tuple(part for part in loc if not (isinstance(part, str) and (part in members or "[" in part)))


def _without_union_noise(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Of a value that fits no member of a union, the problems of the member that it was most likely meant to be."""
    by_path: dict[tuple[int | str, ...], list[ErrorDetails]] = {}
    for problem in problems:
        by_path.setdefault(_path(problem["loc"]), []).append(problem)
    paths = list(by_path)
    kept = []
    for path, group in by_path.items():
        if any(len(other) > len(path) and other[: len(path)] == path for other in paths):
            continue  # the value has the right shape and something inside it is wrong
        kept.append(group[0] if len(group) == 1 else _joined(group))
    return kept


def _joined(group: list[ErrorDetails]) -> ErrorDetails:
    expected = []
    for problem in group:
        words = _EXPECTED.get(problem["type"]) or problem.get("ctx", {}).get("expected")
        if words and words not in expected:
            expected.append(words)
    merged = dict(group[0])
    merged["type"], merged["msg"] = "union", "expected " + " or ".join(expected)
    return merged  # type: ignore[return-value]  # the keys are those of ErrorDetails


def _words(problem: ErrorDetails, path: tuple[int | str, ...]) -> str:
    kind, value = problem["type"], problem.get("input")
    if kind == "extra_forbidden":
        return _unknown_words(path)
    if kind == "missing":
        return "is missing"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}, got {value!r}"
    if kind == "literal_error":
        allowed = str(problem["ctx"]["expected"])
        near = difflib.get_close_matches(
            str(value), [word.strip("' ") for word in allowed.replace(" or ", ",").split(",")], 1
        )
        return f"{value!r} is not one of {allowed}" + (f"; did you mean {near[0]}?" if near else "")
    message = problem["msg"].removeprefix("Value error, ")
    if kind in ("value_error", "assertion_error"):
        return message if isinstance(value, dict) else f"{message} (got {value!r})"
    return f"{message[:1].lower()}{message[1:]}, got {value!r}"


def _unknown_words(path: tuple[int | str, ...]) -> str:
    legal = sorted(_legal_keys(path[:-1]))
    near = difflib.get_close_matches(str(path[-1]), legal, n=1)
    if near:
        return f"unknown key; did you mean `{near[0]}`?"
    return f"unknown key; here may stand: {', '.join(legal)}"


def _legal_keys(path: tuple[int | str, ...]) -> set[str]:
    """Keys that may stand in the section at `path`."""
    models: list[type[BaseModel]] = [Spec]
    for step in path:
        if isinstance(step, int):
            continue
        models = [
            inner
            for model in models
            if step in model.model_fields
            for inner in _models_in(model.model_fields[step].annotation)
        ]
    return {name for model in models for name in model.model_fields if name != "base_dir"}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The section classes that an annotation mentions."""
    if get_origin(annotation) is None:
        return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _dotted(path: tuple[int | str, ...]) -> str:
    """`cluster.nodes[1].slots`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
