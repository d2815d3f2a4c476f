import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import SpecError
from dtctl.spec.nodeset import LIMIT, expand_nodeset, fold_node_names

WORDS = st.text("abxyz-.", min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        (" a , b ", ["a", "b"]),
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[1,3,5-6]", ["gpu1", "gpu3", "gpu5", "gpu6"]),
        ("gpu[ 1 , 3 ]", ["gpu1", "gpu3"]),
        ("n[1-7/3]", ["n1", "n4", "n7"]),
        ("n[0-1/5]", ["n0"]),
        ("r[0-1]n[0-1]", ["r0n0", "r0n1", "r1n0", "r1n1"]),
        ("[0-1][0-1]", ["00", "01", "10", "11"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[01-08,12]-ib[0-1]", [f"gpu{n:02d}-ib{m}" for n in [*range(1, 9), 12] for m in (0, 1)]),
        ("a[1-2],b[3,4],c", ["a1", "a2", "b3", "b4", "c"]),
        ("host-[1].example.org", ["host-1.example.org"]),
        ("n[99999999999999999999-100000000000000000000]", ["n99999999999999999999", "n100000000000000000000"]),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    assert expand_nodeset(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu[1-", "brackets do not match in 'gpu[1-'"),
        ("a,gpu]1[", "brackets do not match in 'gpu]'"),
        ("gpu[1[2]]", "brackets do not match in 'gpu[1['"),
        ("gpu[1]]", "brackets do not match in 'gpu[1]]'"),
        ("a,,b", "a name is empty in 'a,,b'"),
        ("a,", "a name is empty in 'a,'"),
        ("", "a name is empty in ''"),
        ("gpu[]", "'' is not a number or a range in '[]'"),
        ("gpu[1,]", "'' is not a number or a range in '[1,]'"),
        ("gpu[x]", "'x' is not a number or a range in '[x]'"),
        ("gpu[-1]", "'-1' is not a number or a range in '[-1]'"),
        ("gpu[1-2-3]", "'1-2-3' is not a number or a range in '[1-2-3]'"),
        ("gpu[1/2]", "'1/2' is not a number or a range in '[1/2]'"),
        ("gpu[²]", "'²' is not a number or a range in '[²]'"),
        ("gpu[3-1]", "the range '3-1' runs backwards in '[3-1]'"),
        ("gpu[1-5/0]", "a step has to be at least 1 in '[1-5/0]'"),
        ("gpu[1-08]", "the range '1-08' mixes numbers of 1 and 2 digits in '[1-08]'"),
        ("a[0-99999]", "more than 65,536 names in '[0-99999]'"),
        ("a[0-999][0-999]", "more than 65,536 names in '[0-999]'"),
        ("a[0-65535],b", "more than 65,536 names in 'b'"),
    ],
)
def test_what_is_wrong_is_named(text: str, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        expand_nodeset(text)
    assert caught.value.message == f"{text!r} is not a list of nodes: {why}"
    assert caught.value.hint == "write it like gpu[01-04,7]"


@pytest.mark.parametrize(
    "text", ["a[0-65535,0-65535,0-65535]", "a" + "[0-65535]" * 1000, "a[0-" + "9" * 190 + "]", "[1]" * 20_000 + "[1-2"]
)
def test_too_many_names_are_refused_before_they_are_made(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        expand_nodeset(text)
    assert len(caught.value.message) < 300


def test_as_many_names_as_are_allowed() -> None:
    assert len(expand_nodeset("a[0-65535]")) == LIMIT
    assert len(expand_nodeset("a[0-255]b[0-255]")) == LIMIT


@given(st.text(max_size=30) | st.text("a1[]-,/0 ", max_size=30))
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        names = expand_nodeset(text)
    except SpecError:
        return
    assert all(names)
    assert not any(mark in name for name in names for mark in "[],")


@given(st.lists(st.tuples(WORDS, st.integers(0, 99), st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=2))
def test_several_brackets_are_a_product(parts: list[tuple[str, int, int, int]]) -> None:
    text = "".join(f"{word}[{first:03d}-{first + more:03d}/{step}]" for word, first, more, step in parts)
    choices = [
        [f"{word}{number:03d}" for number in range(first, first + more + 1, step)] for word, first, more, step in parts
    ]
    assert expand_nodeset(text) == ["".join(pick) for pick in itertools.product(*choices)]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 4), st.sampled_from(["", "-ib", ".a-b"]))
def test_fold_is_undone_by_expand(numbers: list[int], width: int, tail: str) -> None:
    names = [f"gpu{number:0{width}d}{tail}" for number in numbers]
    assert expand_nodeset(fold_node_names(names)) == names


@given(st.lists(st.from_regex(r"[a-z]{0,2}[0-9]{0,3}[a-z-]{0,2}[0-9]{1,3}[a-z]?", fullmatch=True), min_size=1))
def test_fold_keeps_names_of_all_shapes(names: list[str]) -> None:
    assert expand_nodeset(fold_node_names(names)) == names


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([f"gpu{n:02d}" for n in range(1, 65)], "gpu[01-64]"),
        (["a", "b", "c1", "c2"], "a,b,c[1-2]"),
        (["n1", "n2", "n4", "n7", "n8"], "n[1-2,4,7-8]"),
        (["n9", "n10", "n011"], "n[9-10,011]"),
        (["r1n1", "r1n2", "r2n1", "r2n2"], "r1n[1-2],r2n[1-2]"),
        ([], ""),
    ],
)
def test_fold_is_short(names: list[str], text: str) -> None:
    assert fold_node_names(names) == text
