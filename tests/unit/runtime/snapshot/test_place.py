"""Snapshots at URLs, in fsspec's memory: the same as in a folder, without a rename."""

from __future__ import annotations

import secrets
from pathlib import Path

import fsspec
import pytest
import torch

from dtctl.errors import DtctlError, SnapshotError, SpecError
from dtctl.runtime.snapshot import Saver, commands, newest, read, write
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.storage.place import RemotePath, is_remote_url, parse_place
from tests.facts import raises


@pytest.fixture
def url() -> str:
    return f"memory://{secrets.token_hex(4)}/run"


def save(url: str, step: int, value: float = 0.0, keep: int = 1) -> RemotePath:
    parts = {"model": {"w": torch.full((9,), value)}, "optimizer": {"state": {}, "groups": []}}
    found = write.save_snapshot_parts(parse_place(url), step, parts, facts={"a": 1}, keep=keep)
    assert isinstance(found, RemotePath)
    return found


def steps(url: str) -> list[int]:
    return [step for step, _ in layout.list_step_folders(parse_place(url))]


def test_what_is_a_url() -> None:
    assert is_remote_url("s3://bucket/run")
    assert is_remote_url("memory://run")
    assert not is_remote_url("/mnt/run")
    assert not is_remote_url("file:///mnt/run")
    assert parse_place("file:///mnt/run") == Path("/mnt/run")
    assert parse_place("~/run") == Path.home() / "run"
    assert str(parse_place("memory://run/")) == "memory://run"
    assert parse_place(Path("run")) == Path("run")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("s3://key:hidden@bucket/run", SpecError, "secret"),
        ("abfs://box/run?sig=hidden", SpecError, "secret"),
        ("simplecache::memory://run", SpecError, "top"),
        ("nothing://run", SpecError, "Protocol known"),
        ("sftp://node/run", SpecError, "any machine"),
        ("gs://bucket/run", SnapshotError, "package"),
    ],
)
def test_what_is_refused(text: str, error: type[DtctlError], message: str) -> None:
    with raises(error, message) as caught:
        parse_place(text)
    assert "hidden" not in f"{caught.value} {caught.value.where} {caught.value.hint}"
    if text.startswith("gs"):
        assert caught.value.hint == "pip install gcsfs"


def test_it_comes_back_and_old_ones_go(url: str) -> None:
    assert newest(url) is None
    with Saver(url, keep=2) as saver:
        for step in (1, 2, 3):
            saver.save(step, {"model": {"w": torch.full((9,), float(step))}}, facts={"position": step})
    assert steps(url) == [3, 2]
    found = newest(url)
    assert found is not None
    assert (found.step, found.facts["position"], found.rejected) == (3, 3, ())
    into = {"w": torch.zeros(9)}
    filled = newest(url, into={"model": into})
    assert filled is not None
    assert filled.parts["model"]["w"].data_ptr() == into["w"].data_ptr()
    assert torch.equal(into["w"], torch.full((9,), 3.0))


def test_a_step_that_is_made_again_is_there_all_the_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(url, 5, value=1.0)

    def fails(draft: object, manifest: object) -> None:
        raise SnapshotError("no")

    with monkeypatch.context() as patch:
        patch.setattr(write, "write_commit_record", fails)
        with raises(SnapshotError, "step 5"):
            save(url, 5, value=2.0)
    assert [path.name for path in parse_place(url).iterdir()] == [first.name]
    second = save(url, 5, value=2.0)
    assert [path.name for path in parse_place(url).iterdir()] == [second.name] != [first.name]
    found = newest(url)
    assert found is not None
    assert found.parts["model"]["w"][0] == 2.0


def test_a_damaged_one_gives_way_and_one_without_commit_does_not_count(url: str) -> None:
    first, second, third = (save(url, step, keep=9) for step in (1, 2, 3))
    (third / layout.COMMIT).unlink()
    store = fsspec.filesystem("memory").store
    name = next(name for name in store if second.name in name and "model" in name)
    store[name].getbuffer()[-1] ^= 1
    found, rejected = read.find_newest_good(parse_place(url))
    assert found is not None
    assert found.path == first
    assert [bad.bad for bad in rejected] == [
        ("COMMIT is missing",),
        ("model.safetensors does not have the digest that was recorded",),
    ]
    save(url, 4, keep=2)
    assert steps(url) == [4, 2], "retention does not read; what has a commit record counts"


def test_commands_say_the_same(url: str, tmp_path: Path) -> None:
    old, new = save(url, 5, 1.0, keep=9), save(url, 10, 2.0, keep=9)
    local = tmp_path / "local"
    write.save_snapshot_parts(
        local, 10, {"model": {"w": torch.full((9,), 2.0)}, "optimizer": {"state": {}, "groups": []}}, facts={"a": 1}
    )
    there = parse_place(url)
    rows = commands.list_snapshots(there)["snapshots"]
    assert [(row["path"], row["step"], row["committed"]) for row in rows] == [(str(new), 10, True), (str(old), 5, True)]
    assert rows[0]["size_bytes"] == commands.list_snapshots(local)["snapshots"][0]["size_bytes"]
    assert commands.verify_snapshots(there)["newest_good"] == str(new)
    assert commands.compute_snapshot_digest(there)["digest"] == commands.compute_snapshot_digest(local)["digest"]
    assert commands.compute_snapshot_digest(old)["step"] == 5
    assert commands.describe_newest_snapshot(there)["tensors"] == commands.describe_newest_snapshot(local)["tensors"]
    commands.export_snapshot_part(there, part="model", out=tmp_path / "a")
    commands.export_snapshot_part(local, part="model", out=tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert commands.prune_snapshot_folder(there, keep=1, dry_run=True)["removed"] == [str(old)]
    assert commands.prune_snapshot_folder(there, keep=1)["removed"] == [str(old)]
    assert steps(url) == [10]
    with raises(SnapshotError, "folder snapshots"):
        commands.list_snapshots(parse_place(f"{url}/nothing"))


def test_a_copy_of_one_in_a_folder_is_a_snapshot(url: str, tmp_path: Path) -> None:
    there = save(url, 5, 1.0)
    (tmp_path / there.name).mkdir()
    for path in there.iterdir():
        (tmp_path / there.name / path.name).write_bytes(path.read_bytes())
    assert commands.verify_snapshots(tmp_path)["newest_good"] == str(tmp_path / there.name)
    write.save_snapshot_parts(tmp_path, 6, {"model": {}}, facts={}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def test_what_does_not_answer_is_not_missing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = save(url, 5)

    def silent(*_: object, **__: object) -> None:
        raise ConnectionError("who:hidden@ does not answer")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", silent)
    for ask in (
        where.is_dir,
        where.is_file,
        where.exists,
        lambda: newest(url),
        lambda: commands.verify_snapshots(parse_place(url)),
    ):
        with raises(SnapshotError, "ConnectionError"):
            ask()


def test_a_file_is_read_in_blocks_that_come_side_by_side(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtctl.runtime.snapshot.storage.place.FIRST_BYTES", 3)
    monkeypatch.setattr("dtctl.runtime.snapshot.storage.place.FETCH_BYTES", 10)
    content, file = bytes(range(100)), parse_place(url) / "file"
    assert isinstance(file, RemotePath)
    with file.upload() as out:
        out.write(content)
    with file.open() as stream:
        assert [stream.read(2), stream.read(40), stream.read(100), stream.read(1)] == [
            *(content[:2], content[2:42], content[42:], b"")
        ]
    chunk, found = memoryview(bytearray(64)), b""
    with file.open() as stream:
        while count := stream.readinto(chunk):
            found += bytes(chunk[:count])
    assert found == content
    monkeypatch.setattr(RemotePath, "size_bytes", lambda _: 101)
    with file.open() as stream, raises(SnapshotError, "7 8 bytes"):
        stream.read(101)


def test_an_upload_that_the_store_cuts_short_is_an_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = parse_place(url) / "file"
    assert isinstance(file, RemotePath)
    monkeypatch.setattr(RemotePath, "size_bytes", lambda _: 2)
    with raises(SnapshotError, "0 2 bytes"):
        file.touch()
