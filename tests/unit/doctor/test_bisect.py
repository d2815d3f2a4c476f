"""The bad member of a group is found by trying parts of it, and few of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.doctor.checks.bisect import find_bad_members


def search(names: Sequence[str], bad: set[str], pairs: Sequence[set[str]] = ()) -> tuple[list[str], int]:
    tried = []

    def works(group: Sequence[str]) -> bool:
        assert len(set(group)) == len(group) > 1
        tried.append(group)
        return not (bad & {*group}) and not any(pair <= {*group} for pair in pairs)

    return find_bad_members(names, works), len(tried)


@given(st.integers(min_value=3, max_value=70), st.data())
def test_one_bad_member_is_named(count: int, data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(count)]
    bad = data.draw(st.sampled_from(names))
    found, tried = search(names, {bad})
    assert found == [bad]
    assert tried <= 4 * count.bit_length() + 4


@given(st.integers(min_value=3, max_value=40), st.data())
def test_of_a_pair_that_fails_both_are_named(count: int, data: st.DataObject) -> None:
    names = [f"n{i}" for i in range(count)]
    pair = data.draw(st.sampled_from(list(combinations(names, 2))))
    assert sorted(search(names, set(), [set(pair)])[0]) == sorted(pair)


@pytest.mark.parametrize("bad", list(combinations("abcdefgh", 2)))
def test_one_of_two_bad_members_is_named_at_least(bad: tuple[str, str]) -> None:
    found, _ = search("abcdefgh", set(bad))
    assert set(found) & set(bad)
    assert set(found) <= set(bad)


def test_of_two_members_nobody_can_tell_which() -> None:
    assert search("ab", {"b"})[0] == ["a", "b"]


def test_a_group_in_which_everybody_fails_with_everybody_is_not_a_members_fault() -> None:
    found, tried = search("abcdefgh", set("abcdefgh"))
    assert len(found) == 2
    assert tried < 12
