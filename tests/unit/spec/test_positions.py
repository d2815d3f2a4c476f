import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import SpecError
from dtctl.spec.positions import MAX_VALUES, format_yaml_document, parse_yaml_document

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
WORDS = st.sampled_from(["NO", "on", "1e3", "010", "1:30:00", "2024-01-01", "~", "null", "<<", "0x1", "1_0", ".5", "="])
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | TEXT | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT | WORDS, inner, max_size=4),
    max_leaves=12,
)


def data(text: str) -> Any:
    return parse_yaml_document(text, source="f").data


def error(text: str) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_yaml_document(text, source="f")
    return caught.value


@given(DATA)
def test_data_survives_being_written_and_read(value: Any) -> None:
    assert data(format_yaml_document(value)) == value


@given(st.text(max_size=60) | st.text("[]{}&*a<:,-?!|>'\"#%@ \n\t0.", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml_document(text, source="f")
    except SpecError as exc:
        where = exc.where or ""
    else:
        where = "f"
    assert re.fullmatch(r"f(:[1-9]\d*){0,2}", where)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1), ("-3", -3), ("+4", 4), ("0", 0), ("0x10", 16), ("0o17", 15), ("1_000", 1000),
        ("1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("1e-3", 0.001), ("1.0e+3", 1000.0), ("-.inf", float("-inf")),
        ("1e5", 100_000), ("true", True), ("False", False), ("~", None), ("null", None), ("", None),
        # Text, whatever YAML 1.1 thinks of it:
        ("NO", "NO"), ("on", "on"), ("yes", "yes"), ("010", "010"), ("1:30:00", "1:30:00"), ("0b1", "0b1"),
        ("2024-01-01", "2024-01-01"), ("=", "="), ("1e", "1e"), ("'1'", "1"), ("1.2.3", "1.2.3"), ("!!str 1", "1"),
    ],
)  # fmt: skip
def test_what_scalars_mean(text: str, value: object) -> None:
    found = data(f"a: {text}")["a"]
    assert found == value
    assert type(found) is type(value)


def test_whole_numbers_without_a_point_stay_whole() -> None:
    assert isinstance(data("1e5"), int)
    assert isinstance(data("1.0e5"), float)
    assert isinstance(data("1e300"), float)


def test_keys_are_text_as_they_are_typed() -> None:
    assert data("{1: a, on: b, ~: c, 1.10: d, true: e}") == {"1": "a", "on": "b", "~": "c", "1.10": "d", "true": "e"}


def test_numbers_are_remembered_as_they_were_typed() -> None:
    assert parse_yaml_document("a: {b: 1.10, c: [0x10, text, true]}", source="f").texts == {
        ("a", "b"): "1.10",
        ("a", "c", 0): "0x10",
        ("a", "c", 2): "true",
    }


def test_every_key_has_its_line() -> None:
    places = parse_yaml_document("a:\n  b: 1\n  c:\n    - x\n    - {d: 1,\n       e: 2}\n", source="f").places
    assert {path: line for path, line in places.lines.items() if path} == {
        ("a",): 1, ("a", "b"): 2, ("a", "c"): 3, ("a", "c", 0): 4, ("a", "c", 1): 5,
        ("a", "c", 1, "d"): 5, ("a", "c", 1, "e"): 6,
    }  # fmt: skip


def test_merged_keys_yield_and_keep_their_lines() -> None:
    text = "a: &a\n  x: 1\n  y: 1\nb: &b\n  y: 2\n  z: 2\nc:\n  z: 3\n  <<: [*a, *b]\n"
    document = parse_yaml_document(text, source="f")
    assert document.data["c"] == {"x": 1, "y": 1, "z": 3}
    assert [document.places.line(("c", key)) for key in "xyz"] == [2, 3, 8]
    assert document.texts[("c", "z")] == "3"
    assert data("a: {<<: {}}") == {"a": {}}
    assert data("a: {'<<': b}") == {"a": {"<<": "b"}}


def test_an_alias_is_a_copy() -> None:
    found = data("a: &a {x: [1]}\nb: *a\n")
    found["a"]["x"].append(2)
    assert found["b"] == {"x": [1]}


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("a: 1\nb: 2\na: 3\n", "`a` is set twice, on lines 1 and 3", "f:3"),
        ("a: {b: 1, 'b': 2}", "`b` is set twice, on line 1", "f:1"),
        ("<<: {}\n<<: {}", "`<<` is set twice, on lines 1 and 2", "f:2"),
        ("a:\n  <<: 5", "`<<` takes keys with values, or a list of such", "f:2"),
        ("? [a]\n: b", "a key has to be text", "f:1"),
        ("a: &a\n  b: *a", "an alias is inside the value it refers to", "f:1"),
        ("a: &a [*a]", "an alias is inside the value it refers to", "f:1"),
        ("a: &a {<<: *a}", "an alias is inside the value it refers to", "f:1"),
        ("a: *b", "not valid YAML: found undefined alias", "f:1:4"),
        ("a: 1\n---\nb: 2", "not valid YAML: expected a single document in the stream but found another document",
         "f:2:1"),
        ("a: !!python/object/apply:os.system [x]", "a spec has no values of the type !!python/object/apply:os.system",
         "f:1"),
        ("a:\n  !own {}", "a spec has no values of the type !own", "f:2"),
        ("a: !!set {x}", "a spec has no values of the type !!set", "f:1"),
        ("a: !!binary aGk=", "a spec has no values of the type !!binary", "f:1"),
        ("a: !!timestamp 2024-01-01", "a spec has no values of the type !!timestamp", "f:1"),
        ("a: !!int two", "'two' is not what its tag !!int says", "f:1"),
        ("a: !!bool yes", "'yes' is not what its tag !!bool says", "f:1"),
        ('a: "x\\0y"', "a NUL character cannot be passed to a program", "f:1"),
        ('"a\\0": 1', "a key has to be text", "f:1"),
        ("a: 1\nb: \x01", "YAML does not allow the character U+0001", "f:2"),
        ("a: \udc80", "this is not UTF-8 text", "f"),
        ("[" * 200_000, "values are nested more than 64 deep", "f:1"),
        ("a: [\n" * 100, "values are nested more than 64 deep", "f:33"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, message: str, where: str) -> None:
    found = error(text)
    assert found.message == message
    assert found.where == where


COLUMNS = "keys of one section begin in the same column, and those of the section above it further left"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("job:\n\tscript: a\n", "indent with spaces; YAML does not allow tabs"),
        ("job:\n  script: a\n\tname: b\n", "indent with spaces; YAML does not allow tabs"),
        ("nodes: [gpu[01-04]]", 'quote ranges of nodes: ["gpu[01-04]"]'),
        ("nodes:\n  - gpu[1\n  -b: [", None),
        ("cluster:\n  nodes: 1\n   slots: 2\n", COLUMNS),
        ("cluster:\n  nodes: 1\n job:\n  name: x\n", COLUMNS),
        ("job:\n  name: a: b\n", None),
        ("job:\n  name: a\n  kind\n", None),  # told of the end of the text
    ],
)
def test_a_hint_for_what_is_most_often_wrong(text: str, hint: str | None) -> None:
    found = error(text)
    assert found.message.startswith("not valid YAML: ")
    assert found.hint == hint


def test_chains_of_aliases_are_not_deeper_than_other_nesting() -> None:
    links = "".join(f"  a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200))
    assert error(f"x:\n  a0: &a0 [1]\n{links}").message == "values are nested more than 64 deep"


@pytest.mark.parametrize("form", ["[{}]", "{{<<: [{}]}}"])
def test_nested_aliases_do_not_fill_the_memory(form: str) -> None:
    text = "a0: &a0 {x: 1}\n"
    for level in range(1, 12):
        text += f"a{level}: &a{level} {form.format(', '.join([f'*a{level - 1}'] * 10))}\n"
    found = error(text)
    assert found.message == f"the file has more than {MAX_VALUES:,} values"
    assert found.hint == "are there nested aliases?"
