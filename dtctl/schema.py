"""Types for JSON from an untrusted source: a class per object, and a check per key.

    class Point(Record):
        x: int = value(integer(0, 100))
        label: str = value(prose, default="")

    Point.parse({"x": 3})

A value of the wrong form is refused, unknown keys are dropped, and every size is limited. Used on the control machine
and, sent along with the supervisor, on nodes: stdlib only, Python 3.8. The classes are no dataclasses, because their
import and thirty classes would delay the start of every node (benchmarks/launch.py).
"""

from __future__ import annotations

import math

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Callable, ClassVar, Self, TypeAlias, TypeVar, dataclass_transform

    T = TypeVar("T")
    U = TypeVar("U")
    Check: TypeAlias = Callable[[Any], T]
    """Returns the value, perhaps shortened, or raises InvalidMessage."""
else:
    Check = None

    def dataclass_transform(**_):  # noqa: D103 - shows type checkers that `Record` makes an `__init__`
        return lambda cls: cls


PROSE = 4000
"""Characters of a human-readable text; the rest is left out."""
DEPTH = 32
"""Nesting that the free part of a snapshot's manifest may have."""
MANY = 200_000
"""Rows of a list, where the limit of bytes is not the closer one."""


class InvalidMessage(ValueError):
    """JSON that does not match its schema; the text names the place."""


# -- kinds of values ----------------------------------------------------------------------------------------------


def prose(value: object) -> str:
    """Return a human-readable text, cut to `PROSE` characters."""
    if not isinstance(value, str):
        raise InvalidMessage("not a string")
    return value if len(value) <= PROSE else f"{value[:PROSE]} ..."


def text(limit: int) -> Check[str]:
    """Return a text that is used whole, or not at all."""

    def check(value: object) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise InvalidMessage(f"not a string of at most {limit} characters")
        return value

    return check


def integer(low: int, high: int = 1 << 63) -> Check[int]:
    """Return an integer of a range, both ends included."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise InvalidMessage(f"not an integer from {low} to {high}")
        return value

    return check


def number(value: object) -> float:
    """Return a number that a clock or a plot can have."""
    if type(value) is int and abs(value) < 1 << 63:
        return value
    if type(value) is not float or not math.isfinite(value):
        raise InvalidMessage("not a finite number")
    return value


def moment(value: object) -> float:
    """Return seconds since the epoch that a clock can show."""
    if not 0 <= number(value) < 1 << 36:
        raise InvalidMessage("not a time")
    return number(value)


def flag(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise InvalidMessage("not a boolean")
    return value


def any_json(value: object) -> Any:
    """Any JSON that is not too deep to be looked through."""
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > DEPTH:
            raise InvalidMessage(f"nested deeper than {DEPTH} levels")
        if isinstance(item, dict):
            todo += [(inner, depth + 1) for inner in item.values()]
        elif isinstance(item, list):
            todo += [(inner, depth + 1) for inner in item]
    return value


def file_name(value: object) -> str:
    """Return the name of one file, which is no path."""
    from dtctl import folders

    if not folders.is_name(value):
        raise InvalidMessage("not the name of a file")
    return str(value)


def path(value: object) -> str:
    """Return a path to show and to send back to its own node; nothing is opened by it here."""
    if not isinstance(value, str) or not 0 < len(value) <= 4096 or not value.isprintable():
        raise InvalidMessage("not a path")
    return value


def address(value: object) -> str:
    """Return a numeric address, or nothing."""
    import ipaddress  # slow, and not needed on a node

    try:
        return str(ipaddress.ip_address(value)) if value else ""  # type: ignore[arg-type]
    except ValueError:
        raise InvalidMessage("not a numeric address") from None


def nullable(check: Check[T]) -> Check[T | None]:
    """Return the value, or null."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check[T], limit: int = MANY) -> Check[list[T]]:
    """Return a list of such values."""

    def check_all(value: object) -> list[T]:
        if not isinstance(value, list) or len(value) > limit:
            raise InvalidMessage(f"not a list of at most {limit} items")
        return [check(item) for item in value]

    return check_all


def valid_items(check: Check[T], limit: int) -> Check[list[T]]:
    """Check a list as `list_of` does, without its wrong items: user programs write parts of a node's report."""

    def check_some(value: object) -> list[T]:
        valid = []
        for item in list_of(lambda item: item, limit)(value):
            try:
                valid.append(check(item))
            except InvalidMessage:
                continue
        return valid

    return check_some


def pair(first: Check[T], second: Check[U]) -> Check[tuple[T, U]]:
    """Return a list of two."""

    def check_both(value: object) -> tuple[T, U]:
        if not isinstance(value, list) or len(value) != 2:
            raise InvalidMessage("not a list of two")
        return first(value[0]), second(value[1])

    return check_both


def mapping_of(check_name: Check[str], check: Check[T], limit: int = MANY) -> Check[dict[str, T]]:
    """Return an object with names that are not known before."""

    def check_all(value: object) -> dict[str, T]:
        if not isinstance(value, dict) or len(value) > limit:
            raise InvalidMessage(f"not an object with at most {limit} keys")
        return {check_name(name): check(item) for name, item in value.items()}

    return check_all


def form(optional: Mapping[str, Check[Any]] | None = None, **needed: Check[Any]) -> Check[dict[str, Any]]:
    """Return an object with these keys, as a dictionary; others are dropped."""

    def check(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidMessage("not an object")
        fields = {}
        for key, inner in (*needed.items(), *(optional or {}).items()):
            if key in value:
                try:
                    fields[key] = inner(value[key])
                except InvalidMessage as exc:
                    raise InvalidMessage(f"{key}: {exc}") from None
            elif key in needed:
                raise InvalidMessage(f"{key} is missing")
        return fields

    return check


# -- objects ------------------------------------------------------------------------------------------------------


class _Value:
    def __init__(self, check: Check[Any], default: object) -> None:
        self.check = check
        self.default = default


_NEEDED = object()


def value(check: Check[T], *, default: T = _NEEDED) -> T:  # type: ignore[assignment]
    """Return a key of a Record: what it may hold, and what it is when it is missing."""
    return _Value(check, default)  # type: ignore[return-value]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(value,))
class Record:
    """A JSON object with known keys: an attribute each, declared with `value`. Constructed with keywords."""

    _values: ClassVar[Mapping[str, _Value]] = {}
    _form: ClassVar[Check[dict[str, Any]]]

    def __init_subclass__(cls) -> None:
        """Collect the keys, those of the parents first."""
        own = {name: item for name, item in vars(cls).items() if isinstance(item, _Value)}
        cls._values = {**cls._values, **own}
        needed = {name: item.check for name, item in cls._values.items() if item.default is _NEEDED}
        optional = {name: item.check for name, item in cls._values.items() if name not in needed}
        cls._form = staticmethod(form(optional, **needed))
        for name in own:
            delattr(cls, name)

    def __init__(self, **values: object) -> None:
        """Take the values as they are: this process has made them."""
        for name, each in self._values.items():
            item = values.pop(name, each.default)
            if item is _NEEDED:
                raise TypeError(f"{type(self).__name__} lacks {name}")
            self.__dict__[name] = item
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    @classmethod
    def parse(cls, document: object) -> Self:
        """Return the object that this JSON is.

        Raises:
            InvalidMessage: it is none: a key is missing, or a value has another form.
        """
        return cls(**cls._form(document))

    def to_json(self) -> dict[str, Any]:
        """Return the object for json.dumps, without what is as it is when it is missing."""
        defaults = {name: each.default for name, each in self._values.items()}
        return {name: item for name, item in vars(self).items() if name not in defaults or item != defaults[name]}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # some values are lists

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={item!r}' for name, item in self.__dict__.items())})"
