from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.errors import SpecError
from dtctl.spec.hostfile import HostfileLine, parse_hostfile, read_hostfile


def test_all_dialects() -> None:
    text = "# cluster\na slots=4\nb slots=8 max_slots=16  # big\nc:2\n\n  d\t\ne max-slots=4\nfe80::1 slots=1\r\n"
    assert [(line.name, line.slots, line.where) for line in parse_hostfile(text, source="hosts")] == [
        ("a", 4, "hosts:2"),
        ("b", 8, "hosts:3"),
        ("c", 2, "hosts:4"),
        ("d", None, "hosts:6"),
        ("e", None, "hosts:7"),
        ("fe80::1", 1, "hosts:8"),
    ]


@pytest.mark.parametrize(
    ("text", "message", "where", "hint"),
    [
        ("a slots=x", "slots=x is not a number of workers", "hosts:1", "write `slots=4`"),
        ("a slots=0", "slots=0 is not a number of workers", "hosts:1", "write `slots=4`"),
        ("a slots=", "slots= is not a number of workers", "hosts:1", "write `slots=4`"),
        ("a slots=²", "slots=² is not a number of workers", "hosts:1", "write `slots=4`"),
        ("a slots=9999999999", "slots=9999999999 is not a number of workers", "hosts:1", "write `slots=4`"),
        ("a max_slots=-1", "max_slots=-1 is not a number of workers", "hosts:1", "write `max_slots=4`"),
        ("a:0", "slots=0 is not a number of workers", "hosts:1", "write `slots=4`"),
        ("a:b", "slots=b is not a number of workers", "hosts:1", "write `slots=4`"),
        ("a\n# x\na slots=2", "node a is listed twice in the hostfile: hosts:1 and hosts:3", "hosts:3",
         "add up its slots in one line"),
        ("a gpus=4", "'gpus=4' is not understood in a hostfile", "hosts:1", "write `name slots=4`"),
        ("a xslots=4", "'xslots=4' is not understood in a hostfile", "hosts:1", "write `name slots=4`"),
        ("a 4", "'4' is not understood in a hostfile", "hosts:1", "write `name slots=4`"),
        ("a = slots", "'=' is not understood in a hostfile", "hosts:1", "write `name slots=4`"),
        ("slots=4", "'slots=4' is not the name of a node", "hosts:1", "write `name slots=4`"),
        ("a slots=1 slots=2", "slots of node a are given twice", "hosts:1", "write `name slots=4`"),
        ("a:1 slots=2", "slots of node a are given twice", "hosts:1", "write `name slots=4`"),
        ("a slots=4 max_slots=2", "node a has 4 slots and at most 2", "hosts:1", None),
        ("# nobody\n", "the hostfile names no node", "hosts", "write one `name slots=4` a line"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(text: str, message: str, where: str, hint: str | None) -> None:
    with pytest.raises(SpecError) as caught:
        parse_hostfile(text, source="hosts")
    assert (caught.value.message, caught.value.where, caught.value.hint) == (message, where, hint)


@given(st.text(max_size=40) | st.text("ab slots=:14#\n", max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_hostfile(text, source="hosts")
    except SpecError:
        return
    assert all(line.name and (line.slots is None or line.slots > 0) for line in found)


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfa slots=2\n")
    assert read_hostfile(path) == [HostfileLine(name="a", slots=2, where=f"{path}:1")]


def test_a_file_that_cannot_be_read_is_an_error_and_not_an_empty_cluster(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as missing:
        read_hostfile(tmp_path / "hosts")
    assert missing.value.message == "the hostfile cannot be read: No such file or directory"
    assert missing.value.where == str(tmp_path / "hosts")
    with pytest.raises(SpecError) as folder:
        read_hostfile(tmp_path)
    assert folder.value.message == "the hostfile cannot be read: it is a folder, not a regular file"
    (tmp_path / "latin").write_bytes(b"caf\xe9\n")
    with pytest.raises(SpecError) as latin:
        read_hostfile(tmp_path / "latin")
    assert latin.value.message == "the hostfile is not UTF-8 text"
