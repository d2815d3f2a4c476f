"""Digests are remembered, and never believed when the file may have changed."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from dtctl.launch.files import tree
from dtctl.launch.files.tree import DigestCache


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "digests.json"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that is older than a tick of the file system's clock."""
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return aged(path)


def aged(path: Path) -> Path:
    """Returns when the clock of the file system has gone on from the file's last change."""
    probe = path.with_name("probe")
    while True:
        probe.write_text("")
        if probe.stat().st_ctime_ns > path.stat().st_ctime_ns + tree.TICK_NS:
            probe.unlink()
            return path
        probe.unlink()


def look(memory: Path | None, path: Path) -> tuple[str, bool]:
    with DigestCache(memory) as known:
        return known.compute_file_digest(os.fsencode(path.name), os.fsencode(path), path.lstat())


def is_read(memory: Path | None, path: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the file has to be opened to know its digest; checks the digest."""
    opened = []
    real = tree._read_file_digest
    with monkeypatch.context() as patch:
        patch.setattr(tree, "_read_file_digest", lambda name: opened.append(name) or real(name))  # type: ignore[func-returns-value]
        assert look(memory, path)[0] == hashlib.sha256(path.read_bytes()).hexdigest()
    return bool(opened)


def test_an_unchanged_file_is_read_once(memory: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_read(memory, file, monkeypatch)
    assert not is_read(memory, file, monkeypatch)
    assert is_read(None, file, monkeypatch)


def test_an_edit_that_keeps_size_and_time_is_noticed(memory: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    look(memory, file)
    before = file.stat()
    file.write_text("print('HELLO')\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert is_read(memory, file, monkeypatch)


def test_a_file_that_took_the_place_of_another_is_noticed(
    memory: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look(memory, file)
    other = file.with_name("other")
    other.write_text("print('HELLO')\n")
    other.replace(file)
    assert is_read(memory, file, monkeypatch)


def test_a_file_changed_in_the_same_tick_is_not_believed(
    memory: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("print('young')\n")
    with monkeypatch.context() as patch:
        patch.setattr(tree, "TICK_NS", 3600 * 10**9)  # however slow this machine is, it is the same tick
        look(memory, file)  # the file could be written again now, and `stat` would say the same
        assert is_read(memory, file, monkeypatch)
    aged(file)
    assert is_read(memory, file, monkeypatch)
    assert not is_read(memory, file, monkeypatch)


def test_whole_seconds_are_a_coarse_clock(memory: Path, file: Path) -> None:
    info = file.lstat()
    whole = os.stat_result(info, {"st_ctime_ns": info.st_ctime_ns // 10**9 * 10**9, "st_mtime_ns": info.st_mtime_ns})
    with DigestCache(memory) as known:
        known.compute_file_digest(b"train.py", os.fsencode(file), whole)
    assert not memory.exists() or json.loads(memory.read_text())["files"] == {}


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"files": []}', b'{"files": {"train.py": 3}}', b'{"files": {"train.py": [1]}}'],
)
def test_a_damaged_memory_is_ignored(memory: Path, file: Path, damage: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    look(memory, file)
    memory.write_bytes(damage)
    assert is_read(memory, file, monkeypatch)
    assert not is_read(memory, file, monkeypatch)


def test_a_memory_that_cannot_be_written_does_no_harm(file: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert look(tmp_path / "cache" / "digests.json", file)[1] is False


def test_the_memory_is_private_and_leaves_no_partial_file(memory: Path, file: Path) -> None:
    look(memory, file)
    look(memory, file)
    assert [path.name for path in memory.parent.iterdir()] == ["digests.json"]
    assert oct(memory.stat().st_mode & 0o777) == "0o600"
    with pytest.raises(ZeroDivisionError), DigestCache(memory):
        raise ZeroDivisionError
    assert [path.name for path in memory.parent.iterdir()] == ["digests.json"]


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n", True),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n", True),
        ("PuTTY-User-Key-File-3: ssh-ed25519\n", True),
        ("-----BEGIN CERTIFICATE-----\nabc\n", False),
        ("# how to make a -----BEGIN PRIVATE KEY-----\n", False),
        ("", False),
    ],
)
def test_a_private_key_is_known_by_its_contents_and_remembered(
    memory: Path, file: Path, text: str, private: bool
) -> None:
    file.write_text(text)
    aged(file)
    assert [look(memory, file)[1] for _ in range(2)] == [private, private]


def test_a_large_file_is_read_whole(memory: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_bytes(os.urandom(2 * tree._CHUNK_BYTES + 7))
    assert is_read(memory, file, monkeypatch)
