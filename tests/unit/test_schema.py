"""Types of JSON that somebody else has written: what is refused, what is dropped, and what is missing."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from dtctl.schema import (
    InvalidMessage,
    Record,
    check_number,
    check_prose,
    define_record_key,
    list_of,
    make_integer_check,
    make_nullable_check,
    make_text_check,
    mapping_of,
    valid_items,
)


class Inner(Record):
    rank: int = define_record_key(make_integer_check(0, 9))


class Outer(Record):
    name: str = define_record_key(make_text_check(5))
    inner: list[Inner] = define_record_key(list_of(Inner.parse, 2))
    seconds: float | None = define_record_key(make_nullable_check(check_number), default=None)


class More(Outer):
    lenient: list[Inner] = define_record_key(valid_items(Inner.parse, 9), default=[])
    counts: dict[str, int] = define_record_key(mapping_of(make_text_check(3), make_integer_check(0)), default={})


GOOD: dict[str, Any] = {"name": "a", "inner": [{"rank": 3}]}


def test_what_is_in_order_becomes_an_object() -> None:
    assert Outer.parse({**GOOD, "other": 7}) == Outer(name="a", inner=[Inner(rank=3)])
    more = More.parse({**GOOD, "seconds": 1, "lenient": [{"rank": 1}, {}, 3], "counts": {"a": 1}})
    assert (more.name, more.seconds, more.lenient, more.counts) == ("a", 1, [Inner(rank=1)], {"a": 1})


def test_what_is_sent_is_what_arrives() -> None:
    more = More(name="a", inner=[Inner(rank=3)], seconds=0.5)
    document = json.loads(json.dumps(more, default=Record.to_json))
    assert document == {"name": "a", "inner": [{"rank": 3}], "seconds": 0.5}
    assert More.parse(document) == more


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ([], "not an object"),
        ({"name": "a"}, "inner is missing"),
        ({**GOOD, "name": "longer than five"}, "name: "),
        ({**GOOD, "name": None}, "name: "),
        ({**GOOD, "inner": [{"rank": 10}]}, "inner: rank: "),
        ({**GOOD, "inner": [{"rank": True}]}, "inner: rank: "),
        ({**GOOD, "inner": [{"rank": 1}] * 3}, "inner: "),
        ({**GOOD, "inner": {"0": {"rank": 1}}}, "inner: "),
        ({**GOOD, "seconds": math.nan}, "seconds: "),
        ({**GOOD, "seconds": 10**400}, "seconds: "),
        ({**GOOD, "counts": {"long name": 1}}, "counts: "),
        ({**GOOD, "counts": {"a": -1}}, "counts: "),
        ({**GOOD, "lenient": [{}] * 10}, "lenient: "),
    ],
)
def test_what_is_not_in_order_is_refused_with_its_place(document: object, place: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        More.parse(document)
    assert str(caught.value).startswith(place)


def test_a_text_for_people_is_cut() -> None:
    assert len(check_prose("x" * 100_000)) < 5000


def test_a_mistake_of_our_own_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        Inner()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Inner(rank=1, place=2)  # type: ignore[call-arg]
