"""Types for JSON from an untrusted source: a class per object, and a check per key.

    class Point(Record):
        x: int = value(integer(0, 100))
        label: str = value(prose, default="")

    Point.parse({"x": 3})

A value of the wrong form is refused, unknown keys are dropped, and every size is limited. The module is used on the
control machine and, as part of the supervisor's program, on nodes; it needs only the standard library of Python 3.8.
The classes are not dataclasses: this import and thirty classes would delay the start of every node
(benchmarks/launch.py).
"""

from __future__ import annotations

import math

TYPE_CHECKING = False  # importing typing is slow on a node
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any, Callable, ClassVar, Self, TypeAlias, TypeVar, dataclass_transform

    T = TypeVar("T")
    U = TypeVar("U")
    Check: TypeAlias = Callable[[Any], T]
    """Function that returns the value, which may be shortened, or raises InvalidMessage."""
else:
    Check = None

    def dataclass_transform(**_):  # noqa: D103 - shows type checkers that `Record` makes an `__init__`
        return lambda cls: cls


PROSE = 4000
"""Largest number of characters of a human-readable text; the rest is dropped."""
DEPTH = 32
"""Largest nesting of JSON without a fixed schema, as in a snapshot's manifest."""
MANY = 200_000
"""Largest number of rows of a list, for lists that the limit of bytes hardly restricts."""


class InvalidMessage(ValueError):
    """JSON that does not match its schema; the text names the place."""


# -- kinds of values ----------------------------------------------------------------------------------------------


def check_prose(value: object) -> str:
    """Return a human-readable text, cut to `PROSE` characters."""
    if not isinstance(value, str):
        raise InvalidMessage("not a string")
    return value if len(value) <= PROSE else f"{value[:PROSE]} ..."


def make_text_check(limit: int) -> Check[str]:
    """Return the check of a text of at most `limit` characters; a longer text is refused, not cut."""

    def check(value: object) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise InvalidMessage(f"not a string of at most {limit} characters")
        return value

    return check


def make_integer_check(low: int, high: int = 1 << 63) -> Check[int]:
    """Return the check of an integer in a range that includes both ends."""

    def check(value: object) -> int:
        if type(value) is not int or not low <= value <= high:
            raise InvalidMessage(f"not an integer from {low} to {high}")
        return value

    return check


def check_number(value: object) -> float:
    """Return a finite number."""
    if type(value) is int and abs(value) < 1 << 63:
        return value
    if type(value) is not float or not math.isfinite(value):
        raise InvalidMessage("not a finite number")
    return value


def check_moment(value: object) -> float:
    """Return a time in seconds since the epoch."""
    if not 0 <= check_number(value) < 1 << 36:
        raise InvalidMessage("not a time")
    return check_number(value)


def check_flag(value: object) -> bool:
    """Return true or false; any other value is refused."""
    if not isinstance(value, bool):
        raise InvalidMessage("not a boolean")
    return value


def any_json(value: object) -> Any:
    """Return any JSON value with a nesting of at most `DEPTH` levels."""
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


def check_file_name(value: object) -> str:
    """Return the name of one file, without folders."""
    from dtctl import folders

    if not folders.is_name(value):
        raise InvalidMessage("not the name of a file")
    return str(value)


def check_path(value: object) -> str:
    """Return a path that is only displayed or sent back to its own node, and never opened on this machine."""
    if not isinstance(value, str) or not 0 < len(value) <= 4096 or not value.isprintable():
        raise InvalidMessage("not a path")
    return value


def check_address(value: object) -> str:
    """Return a numeric address, or an empty text."""
    import ipaddress  # the import is slow, and unused on a node

    try:
        return str(ipaddress.ip_address(value)) if value else ""  # type: ignore[arg-type]
    except ValueError:
        raise InvalidMessage("not a numeric address") from None


def make_nullable_check(check: Check[T]) -> Check[T | None]:
    """Return a check that accepts null in addition to the values of `check`."""
    return lambda value: None if value is None else check(value)


def list_of(check: Check[T], limit: int = MANY) -> Check[list[T]]:
    """Return the check of a list with at most `limit` items that pass `check`."""

    def check_all(value: object) -> list[T]:
        if not isinstance(value, list) or len(value) > limit:
            raise InvalidMessage(f"not a list of at most {limit} items")
        return [check(item) for item in value]

    return check_all


def valid_items(check: Check[T], limit: int) -> Check[list[T]]:
    """Return the check of a list without its wrong items: user programs write parts of a node's report."""

    def check_some(value: object) -> list[T]:
        valid = []
        for item in list_of(lambda item: item, limit)(value):
            try:
                valid.append(check(item))
            except InvalidMessage:
                continue
        return valid

    return check_some


def make_two_item_check(first: Check[T], second: Check[U]) -> Check[tuple[T, U]]:
    """Return the check of a list with two items."""

    def check_both(value: object) -> tuple[T, U]:
        if not isinstance(value, list) or len(value) != 2:
            raise InvalidMessage("not a list of two")
        return first(value[0]), second(value[1])

    return check_both


def mapping_of(check_name: Check[str], check: Check[T], limit: int = MANY) -> Check[dict[str, T]]:
    """Return the check of an object whose names are not known in advance."""

    def check_all(value: object) -> dict[str, T]:
        if not isinstance(value, dict) or len(value) > limit:
            raise InvalidMessage(f"not an object with at most {limit} keys")
        return {check_name(name): check(item) for name, item in value.items()}

    return check_all


def make_object_check(optional: Mapping[str, Check[Any]] | None = None, **needed: Check[Any]) -> Check[dict[str, Any]]:
    """Return the check of an object with these keys, as a dictionary; other keys are dropped."""

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


class _RecordKey:
    def __init__(self, check: Check[Any], default: object) -> None:
        self.check = check
        self.default = default


_NEEDED = object()


def define_record_key(check: Check[T], *, default: T = _NEEDED) -> T:  # type: ignore[assignment]
    """Return a key of a Record, with the check of its value and its default."""
    return _RecordKey(check, default)  # type: ignore[return-value]


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(define_record_key,))
class Record:
    """A JSON object with known keys; each key is an attribute that is declared with `define_record_key`.

    The constructor takes keywords.
    """

    _values: ClassVar[Mapping[str, _RecordKey]] = {}
    _form: ClassVar[Check[dict[str, Any]]]

    def __init_subclass__(cls) -> None:
        """Collect the keys of the class, those of its parents first."""
        own = {name: item for name, item in vars(cls).items() if isinstance(item, _RecordKey)}
        cls._values = {**cls._values, **own}
        needed = {name: item.check for name, item in cls._values.items() if item.default is _NEEDED}
        optional = {name: item.check for name, item in cls._values.items() if name not in needed}
        cls._form = staticmethod(make_object_check(optional, **needed))
        for name in own:
            delattr(cls, name)

    def __init__(self, **values: object) -> None:
        """Store the values without checks, since this process has made them."""
        for name, each in self._values.items():
            item = values.pop(name, each.default)
            if item is _NEEDED:
                raise TypeError(f"{type(self).__name__} lacks {name}")
            self.__dict__[name] = item
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    @classmethod
    def parse(cls, document: object) -> Self:
        """Return the object for a JSON value.

        Raises:
            InvalidMessage: a key is missing, or a value has another form.
        """
        return cls(**cls._form(document))

    def to_json(self) -> dict[str, Any]:
        """Return the object for json.dumps, without keys that have their default."""
        defaults = {name: each.default for name, each in self._values.items()}
        return {name: item for name, item in vars(self).items() if name not in defaults or item != defaults[name]}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # some values are lists

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={item!r}' for name, item in self.__dict__.items())})"
