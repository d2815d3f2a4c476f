"""Settings from JSON and `--train.key=value`: checked, typed, frozen; strict, with the near match in every error.

Knows dataclasses and type hints, and nothing of what the keys mean.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import types
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dtctl.errors import SpecError

PREFIX: Final = "--train."
"""Prefix of arguments that belong to the configuration."""

MOST: Final = (1 << 63) - 1
"""No number is larger than what the workers' programs can hold."""

T = TypeVar("T")


def parse_settings_json(text: str, *, where: str) -> dict[str, Any]:
    """Return the JSON object in a text; an empty text is an empty object.

    Raises:
        SpecError: the text is not a JSON object.
    """
    try:
        value = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as exc:
        raise SpecError(f"the training configuration is not JSON: {exc}", where=where) from exc
    if not isinstance(value, dict):
        raise SpecError(
            f"the training configuration is {_describe_value_kind(value)}, and an object is expected", where=where
        )
    return value


def parse_argv_settings(argv: Sequence[str]) -> dict[str, Any]:
    """Return the settings among arguments: `--train.key=value` or `--train.key value`.

    Keys nest by dots (`--train.model.layers=2`); values are JSON, or else text.

    Raises:
        SpecError: a value is missing, or a key stands below one that is not a mapping.
    """
    values: dict[str, Any] = {}
    words = iter(argv)
    for word in words:
        if not word.startswith(PREFIX):
            continue
        path, equals, text = word.removeprefix(PREFIX).partition("=")
        value = text if equals else next(words, None)
        if value is None:
            raise SpecError(
                f"{word} has no value", where="command line", key=f"train.{path}", hint=f"write {word}=VALUE"
            )
        *parents, last = path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise SpecError(f"{word} is nested in {parent}, which has a value", where="command line")
        place[last] = _parse_setting_value(value)
    return values


def _parse_setting_value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def merge_settings(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """`upper` over `lower`; mappings are merged key by key, everything else is replaced."""
    merged = dict(lower)
    for key, value in upper.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            merged[key] = merge_settings(below, value)
        else:
            merged[key] = value
    return merged


def build(cls: type[T], values: Mapping[str, Any], *, at: str, where: str) -> T:
    """Return an instance of a dataclass from plain values.

    Fields may carry `metadata`: `at_least`, `above` and `below` for numbers and lists of them; `not_empty` for text;
    `check`, a function that raises ValueError; `section`, a dataclass whose fields are the keys of a mapping. Meant
    for scripts too: `build(ModelConfig, config.model, at="train.model", where="the spec")`.

    Args:
        cls: the dataclass.
        values: field name -> value, as JSON gives it.
        at: path of the mapping, for messages: `train.model`.
        where: source of the values, for messages.

    Raises:
        SpecError: a key is unknown, a value has the wrong type or is out of range, or the class refuses the whole
            with a ValueError.
    """
    if not dataclasses.is_dataclass(cls):
        raise TypeError(f"{cls!r} is not a dataclass")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    hints = get_type_hints(cls)
    ready: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{at}.{name}"
        if name not in fields:
            import difflib  # imported here, since only errors need it

            matches = difflib.get_close_matches(name, fields, n=1)
            hint = f"did you mean `{matches[0]}`?" if matches else f"the keys here are {', '.join(fields)}"
            raise SpecError(f"unknown key `{key}`", where=where, key=key, hint=hint)
        ready[name] = _convert_setting(value, hints[name], key=key, where=where)
        _check_setting_rules(ready[name], fields[name].metadata, key=key, where=where)
    missing = [
        name
        for name, field in fields.items()
        if name not in ready and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise SpecError(f"`{at}.{missing[0]}` is not set and has no default", where=where, key=f"{at}.{missing[0]}")
    try:
        return cls(**ready)
    except ValueError as exc:
        raise SpecError(str(exc), where=where, key=at) from None


class _TypeMismatch(Exception):
    """The value does not fit the hint."""


def _convert_setting(value: Any, hint: Any, *, key: str, where: str) -> Any:
    for option in _list_hint_options(hint):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            if isinstance(value, option):
                return value
            if isinstance(value, Mapping):
                return build(option, value, at=key, where=where)
            continue
        try:
            return _convert_scalar(value, option)
        except _TypeMismatch:
            continue
    message = f"`{key}` is {_describe_value_kind(value)}, and {_describe_expected_type(hint)} is expected"
    raise SpecError(message, where=where, key=key, hint=_suggest_near_choice(value, hint))


def _list_hint_options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _convert_scalar(value: Any, option: Any) -> Any:
    if option is Any:
        return value
    if option is type(None):
        valid = value is None
    elif get_origin(option) is Literal:
        valid = isinstance(value, str) and value in get_args(option)
    elif get_origin(option) is Mapping:
        valid = isinstance(value, Mapping)
        if valid:
            _, inner = get_args(option)
            return {str(name): _convert_scalar(item, inner) for name, item in value.items()}
    elif get_origin(option) is tuple:
        valid = isinstance(value, list | tuple)
        if valid:
            return tuple(_convert_scalar(item, get_args(option)[0]) for item in value)
    elif option is float:
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if valid else value
    elif option is int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # 1e3 is a float to JSON
        valid = isinstance(value, int) and not isinstance(value, bool)
    else:
        valid = isinstance(value, option)
    if not valid:
        raise _TypeMismatch
    return value


def _check_setting_rules(value: Any, rules: Mapping[str, Any], *, key: str, where: str) -> None:
    if value is None:
        return
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int | float):
            _check_range(number, rules, key=key, where=where)
    if rules.get("not_empty") and value == "":
        raise SpecError(f"`{key}` is empty", where=where, key=key)
    if "section" in rules and isinstance(value, Mapping):
        build(rules["section"], value, at=key, where=where)
    if "check" in rules:
        try:
            rules["check"](value)
        except ValueError as exc:
            raise SpecError(f"`{key}`: {exc}", where=where, key=key) from None


def _check_range(value: float, limits: Mapping[str, Any], *, key: str, where: str) -> None:
    if isinstance(value, int) and abs(value) > MOST:
        raise SpecError(f"`{key}` is {value}, and no number beyond {MOST} can be used", where=where, key=key)
    if not math.isfinite(value):
        raise SpecError(f"`{key}` is {value}, and a finite number is expected", where=where, key=key)
    for limit, words, keeps in (
        ("at_least", "at least", operator.ge),
        ("above", "more than", operator.gt),
        ("below", "less than", operator.lt),
    ):
        if limit in limits and not keeps(value, limits[limit]):
            raise SpecError(f"`{key}` is {value}, and must be {words} {limits[limit]}", where=where, key=key)


def _describe_expected_type(hint: Any) -> str:
    spelt = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
    parts = []
    for option in _list_hint_options(hint):
        if get_origin(option) is Literal:
            parts.append("one of " + ", ".join(get_args(option)))
        else:
            parts.append("a list" if get_origin(option) is tuple else spelt.get(option, "a mapping"))
    return " or ".join(parts)


def _suggest_near_choice(value: Any, hint: Any) -> str | None:
    choices = [
        choice for option in _list_hint_options(hint) if get_origin(option) is Literal for choice in get_args(option)
    ]
    import difflib  # imported here, since only errors need it

    matches = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    return f"did you mean `{matches[0]}`?" if matches else None


def _describe_value_kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return json.dumps(value, default=str)
