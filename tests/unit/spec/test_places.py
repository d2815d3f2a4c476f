import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import SpecError
from dtctl.spec.places import KeyLocations, format_dotted_key, parse_key

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)


@given(st.tuples(NAMES), st.lists(NAMES | st.integers(0, 999), max_size=5))
def test_a_key_survives_being_written_and_read(first: tuple[str], rest: list[str | int]) -> None:
    assert parse_key(format_dotted_key((*first, *rest))) == (*first, *rest)


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a..b", "a[x]", "a[-1]", "a[1", "a]1[", "[0]", "a[0]b", "a[²]"])
def test_what_is_no_key(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_key(text)
    assert caught.value.message == f"{text!r} is not a key"
    assert caught.value.where == "--set"
    assert caught.value.hint == "write it like train.lr or cluster.nodes[0].slots"


def test_a_place_is_that_of_the_nearest_key_that_was_written() -> None:
    places = KeyLocations("dtctl.yaml", {(): 1, ("train",): 3, ("train", "lr"): 4})
    assert places.locate_key(("train", "lr")) == "dtctl.yaml:4"
    assert places.locate_key(("train", "snapshot", "keep")) == "dtctl.yaml:3"
    assert places.locate_key(("slurm",)) == "dtctl.yaml:1"
    assert KeyLocations("the command line").locate_key(("cluster",)) == "the command line"


def test_the_last_override_of_a_key_is_its_place() -> None:
    overrides = [(("train",), "train={}"), (("train", "lr"), "train.lr=1"), (("train", "lr"), "train.lr=2")]
    places = KeyLocations("dtctl.yaml", {(): 1, ("train",): 3}, overrides)
    assert places.locate_key(("train", "lr")) == "--set train.lr=2"
    assert places.locate_key(("train", "seed")) == "--set train={}"
    assert places.locate_key(("job",)) == "dtctl.yaml:1"
