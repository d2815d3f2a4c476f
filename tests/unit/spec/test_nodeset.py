import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import SpecError
from dtctl.spec.nodeset import expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[1,3,5-6]", ["gpu1", "gpu3", "gpu5", "gpu6"]),
        ("n[1-7/3]", ["n1", "n4", "n7"]),
        ("r[0-1]n[0-1]", ["r0n0", "r0n1", "r1n0", "r1n1"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("a[1-2],b", ["a1", "a2", "b"]),
        ("host-[1].example.org", ["host-1.example.org"]),
    ],
)
def test_expand(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gpu[1-", "brackets do not match"),
        ("gpu]1[", "brackets do not match"),
        ("a,,b", "a name is empty"),
        ("", "a name is empty"),
        ("gpu[x]", "'x' is not a number or a range"),
        ("gpu[3-1]", "runs backwards"),
        ("gpu[1-5/0]", "at least 1"),
        ("a[0-99999]", "more than 65536 names"),
        ("a[0-999][0-999]", "more than 65536 names"),
    ],
)
def test_what_is_wrong_is_named(text: str, why: str) -> None:
    with pytest.raises(SpecError) as caught:
        expand(text)
    assert why in caught.value.message
    assert caught.value.hint == "write it like gpu[01-04,7]"


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 4), st.sampled_from(["", "-ib"]))
def test_fold_is_undone_by_expand(numbers: list[int], width: int, tail: str) -> None:
    names = [f"gpu{number:0{width}d}{tail}" for number in numbers]
    assert expand(fold(names)) == names


def test_fold_is_short() -> None:
    assert fold([f"gpu{n:02d}" for n in range(1, 65)]) == "gpu[01-64]"
    assert fold(["a", "b", "c1", "c2"]) == "a,b,c[1-2]"
