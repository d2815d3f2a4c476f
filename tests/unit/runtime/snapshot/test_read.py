"""Damage of every kind is noticed, and the snapshot before is taken."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import load, read, write
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.saver import Saver
from tests.facts import raises


def parts(step: int) -> dict[str, object]:
    return {"model": {"weight": torch.full((40, 30), float(step))}, "random": {"torch": torch.arange(100)}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (10, 20):
        write.save_snapshot_parts(tmp_path, step, parts(step), facts={"position": step * 8}, keep=5)
    return tmp_path


def test_the_newest_is_taken(folder: Path) -> None:
    good, rejected = read.find_newest_good(folder)
    assert good is not None
    assert good.manifest is not None
    assert (good.step, good.status, rejected) == (20, "ok", [])
    assert good.manifest.facts | {"state_sum": ""} == {"position": 160, "state_sum": ""}
    loaded = load.load(good)
    assert loaded.keys() == {"model", "random"}
    assert torch.equal(loaded["model"]["weight"], torch.full((40, 30), 20.0))


def test_no_folder_is_no_snapshot(tmp_path: Path) -> None:
    assert read.find_newest_good(tmp_path / "nowhere") == (None, [])


def test_every_flipped_byte_is_noticed(folder: Path) -> None:
    newest = layout.build_snapshot_path(folder, 20)
    source = random.Random(4)
    for name in sorted(path.name for path in newest.iterdir()):
        path = newest / name
        whole = path.read_bytes()
        for _ in range(25):
            place, bit = source.randrange(len(whole)), 1 << source.randrange(8)
            path.write_bytes(whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :])
            good, (bad,) = read.find_newest_good(folder)
            assert good is not None
            assert (good.step, bad.status) == (10, "corrupt")
        path.write_bytes(whole)
    assert read.verify_snapshot(newest).status == "ok"


def test_cut_and_missing_files_are_noticed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in ("model.safetensors", "random.safetensors", layout.MANIFEST, layout.COMMIT):
        copy = tmp_path_factory.mktemp("copy")
        shutil.copytree(folder, copy, dirs_exist_ok=True)
        path = layout.build_snapshot_path(copy, 20) / name
        path.write_bytes(path.read_bytes()[:-1])
        verdict = read.verify_snapshot(path.parent)
        assert verdict.status == "corrupt"
        assert verdict.bad
        path.unlink()
        verdict = read.verify_snapshot(path.parent)
        assert verdict.status == "incomplete"
        assert verdict.bad == (f"{name} is missing",)


def test_a_renamed_snapshot_is_not_what_it_says(folder: Path) -> None:
    layout.build_snapshot_path(folder, 20).rename(layout.build_snapshot_path(folder, 30))
    verdict = read.verify_snapshot(layout.build_snapshot_path(folder, 30))
    assert verdict.status == "corrupt"
    assert verdict.bad == ("the folder is named after step 30 and holds step 20",)


def test_a_later_format_is_not_taken_for_damage(folder: Path) -> None:
    path = layout.build_snapshot_path(folder, 20)
    document = json.loads((path / layout.MANIFEST).read_text())
    text = json.dumps({**document, "format": 99}).encode()
    (path / layout.MANIFEST).write_bytes(text)
    (path / layout.COMMIT).write_bytes(layout.commit_record(text, document["hash"]))
    with raises(SnapshotError, "format 99"):
        read.find_newest_good(folder)


def test_nothing_unverified_is_loaded(folder: Path) -> None:
    path = layout.build_snapshot_path(folder, 20)
    (path / layout.COMMIT).unlink()
    with raises(SnapshotError, "incomplete COMMIT"):
        load.load(read.verify_snapshot(path))
    with raises(SnapshotError, "snapshot"):
        read.verify_snapshot(folder / "elsewhere")


def test_what_is_neither_tensor_nor_json_is_refused(folder: Path) -> None:
    """Nothing is pickled, so nothing can run code when it is read."""
    for value in (object(), {1: torch.zeros(1)}, torch.zeros(2, 2).to_sparse(), {1, 2}):
        with raises(SnapshotError, "snapshots"):
            write.save_snapshot_parts(folder, 30, {"model": {"weight": value}}, facts={}, keep=5)
    assert [path.name for path in sorted(folder.iterdir())] == ["step-00000010", "step-00000020"]


def test_bytes_that_were_verified_are_the_bytes_that_are_used(folder: Path) -> None:
    good, _ = read.find_newest_good(folder)
    assert good is not None
    path = good.path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with raises(SnapshotError, "corrupt"):
        load.load(good)


def test_sha256_where_blake3_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    write.save_snapshot_parts(folder, 30, parts(30), facts={}, keep=5)
    good, _ = read.find_newest_good(folder)
    assert good is not None
    assert good.manifest is not None
    assert good.manifest.hash == "sha256"
    with raises(SnapshotError, "blake3"):
        read.verify_snapshot(layout.build_snapshot_path(folder, 20))


def test_a_flipped_byte_in_memory_is_noticed(tmp_path: Path) -> None:
    saver = Saver(tmp_path, in_memory=True)
    saver.save(10, parts(10), facts={})
    saver.wait()
    path = layout.build_snapshot_path(tmp_path, 10)
    assert json.loads((path / layout.MANIFEST).read_text())["hash"] == "xxh3_128"
    assert read.verify_snapshot(path).status == "ok"
    whole = (path / "model.safetensors").read_bytes()
    for place in (0, 9, len(whole) // 2, len(whole) - 1):
        damaged = bytes([whole[place] ^ 4])
        (path / "model.safetensors").write_bytes(whole[:place] + damaged + whole[place + 1 :])
        assert read.verify_snapshot(path).status == "corrupt"


def test_tensors_that_are_there_are_filled_and_others_made(folder: Path) -> None:
    weight, other = torch.zeros(40, 30), torch.zeros(99)
    found = load.newest(folder, into={"model": {"weight": weight}, "random": {"torch": other}})
    assert found is not None
    assert (found.step, found.facts["position"], found.rejected) == (20, 160, ())
    assert found.parts["model"]["weight"].data_ptr() == weight.data_ptr()
    assert torch.equal(weight, torch.full((40, 30), 20.0))
    assert torch.equal(found.parts["random"]["torch"], torch.arange(100))
    assert not other.any(), "another shape is left alone"
    assert load.newest(folder / "nowhere", into={}) is None


def test_filling_notices_every_flip_cut_and_loss(folder: Path) -> None:
    weight = torch.zeros(40, 30)
    source = random.Random(6)
    path = layout.build_snapshot_path(folder, 20) / "model.safetensors"
    whole = path.read_bytes()
    for _ in range(150):
        hurt = bytearray(whole)
        # Half of them in the header, which is read before it can be believed.
        place = source.randrange(200 if source.random() < 0.5 else len(whole))
        if source.random() < 0.3:
            del hurt[place:]
        else:
            hurt[place] ^= 1 << source.randrange(8)
        path.write_bytes(hurt)
        found = load.newest(folder, into={"model": {"weight": weight}})
        assert found is not None
        assert (found.step, len(found.rejected)) == (10, 1)
        assert torch.equal(weight, torch.full((40, 30), 10.0))
    path.unlink()
    shutil.rmtree(layout.build_snapshot_path(folder, 10))
    with raises(SnapshotError, "step-00000020 incomplete"):
        load.newest(folder, into={"model": {"weight": weight}})
