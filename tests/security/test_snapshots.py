"""Snapshots from elsewhere: right digests and wrong contents, links, mounts, pipes, and modules beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from dtctl.runtime.snapshot import commands, load, read, write
from dtctl.runtime.snapshot.format import headers, layout
from tests.command_line import dtctl

PROGRAM = Path(sys.executable).with_name("dtctl")
Change = Callable[[dict[str, Any]], Any]


def made(folder: Path, *steps: int, **facts: Any) -> None:
    for step in steps:
        parts = {"model": {"w": torch.full((4,), float(step))}, "optimizer": {"state": {}, "groups": []}}
        write.save_snapshot_parts(folder, step, parts, facts=facts, keep=9)


def sealed(snapshot: Path, manifest: bytes) -> None:
    """Put a manifest in place with the commit record that it would have."""
    (snapshot / layout.MANIFEST).write_bytes(manifest)
    (snapshot / layout.COMMIT).write_bytes(layout.commit_record(manifest, "sha256"))


def with_header(snapshot: Path, change: Change) -> None:
    """Change the header of a part, and the digests so that they are right."""
    path = snapshot / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + length])
    changed = change(document)
    text = changed if isinstance(changed, bytes) else json.dumps(document).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    manifest = json.loads((snapshot / layout.MANIFEST).read_bytes())
    manifest["hash"] = "sha256"
    for name, entry in manifest["files"].items():
        entry["size_bytes"] = (snapshot / name).stat().st_size
        entry["digest"] = layout.compute_file_digest(snapshot / name, "sha256")
    sealed(snapshot, json.dumps(manifest).encode())


DEEP = b"[" * 100_000 + b"]" * 100_000
MANIFESTS: dict[str, Change | bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "too deep": DEEP,
    "too deep within": b'{"format": 2, "facts": ' + DEEP + b"}",
    "no files": lambda d: d.pop("files"),
    "files are a list": lambda d: d.update(files=[1]),
    "a file without a digest": lambda d: d["files"]["model.safetensors"].pop("digest"),
    "a file with more": lambda d: d["files"]["model.safetensors"].update(more=1),
    "a size that is text": lambda d: d["files"]["model.safetensors"].update(size_bytes="1"),
    "a size below nothing": lambda d: d["files"]["model.safetensors"].update(size_bytes=-1),
    "a path for a name": lambda d: d["files"].update({"../../x": d["files"]["model.safetensors"]}),
    "an absolute path": lambda d: d["files"].update({"/etc/passwd": d["files"]["model.safetensors"]}),
    "no name": lambda d: d["files"].update({"": d["files"]["model.safetensors"]}),
    "facts that are text": lambda d: d.update(facts="x"),
    "another hash": lambda d: d.update(hash="md5"),
    "a step that is text": lambda d: d.update(step="10"),
    "a step that is true": lambda d: d.update(step=True),
    "a format that is a list": lambda d: d.update(format=[]),
    "infinity": lambda d: d.update(step=float("inf")),
}
HEADERS: dict[str, Change] = {
    "no JSON": lambda _: b"\xff",
    "nothing": lambda _: b"",
    "too deep": lambda _: DEEP,
    "no metadata": lambda d: d.pop("__metadata__"),
    "no tree": lambda d: d["__metadata__"].pop("tree"),
    "a tree that is no JSON": lambda d: d["__metadata__"].update(tree="{"),
    "a tree of a tensor that is not there": lambda d: d["__metadata__"].update(tree='{"w": {"$tensor": "v"}}'),
    "a tensor with a list for a name": lambda d: d["__metadata__"].update(tree='{"w": {"$tensor": []}}'),
    "another type": lambda d: d["w"].update(dtype="F99"),
    "a shape that is text": lambda d: d["w"].update(shape="x"),
    "a shape below nothing": lambda d: d["w"].update(shape=[-4]),
    "a shape that is too large": lambda d: d["w"].update(shape=[1 << 80]),
    "a shape that is not its size": lambda d: d["w"].update(shape=[3]),
    "behind the end": lambda d: d["w"].update(data_offsets=[1 << 40, (1 << 40) + 16]),
    "no offsets": lambda d: d["w"].pop("data_offsets"),
    "two that share bytes": lambda d: d.update(v=dict(d["w"])),
    "a piece of more than there can be": lambda d: d["__metadata__"].update(
        tree=json.dumps({"w": {"$tensor": "w", "$of": {"shape": [1 << 60], "offset": [0]}}})
    ),
    "a piece that is outside": lambda d: d["__metadata__"].update(
        tree=json.dumps({"w": {"$tensor": "w", "$of": {"shape": [4], "offset": [2]}}})
    ),
    "a piece with other dims": lambda d: d["__metadata__"].update(
        tree=json.dumps({"w": {"$tensor": "w", "$of": {"shape": [4, 1], "offset": [0]}}})
    ),
    "a piece of nothing": lambda d: d["__metadata__"].update(tree=json.dumps({"w": {"$tensor": "w", "$of": []}})),
}


def falls_back(folder: Path) -> None:
    """Every way to read a snapshot passes over the newest one, and says that it is corrupt."""
    newest = folder / "step-00000010"
    assert read.verify_snapshot(newest).status == "corrupt"
    assert commands.verify_snapshots(folder)["newest_good"] == str(folder / "step-00000005")
    for verb in (commands.describe_newest_snapshot, commands.compute_snapshot_digest):
        answer = verb(folder)
        assert (answer["step"], len(answer["rejected"])) == (5, 1)
    loaded = load.newest(folder)
    assert loaded is not None
    assert loaded.step == 5
    into = {"model": {"w": torch.zeros(4)}}
    filled = load.newest(folder, into=into)
    assert filled is not None
    assert filled.step == 5
    assert into["model"]["w"].tolist() == [5.0] * 4


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_manifest_that_makes_no_sense_is_corrupt_though_its_record_is_right(tmp_path: Path, kind: str) -> None:
    made(tmp_path, 5, 10)
    newest, change = tmp_path / "step-00000010", MANIFESTS[kind]
    if isinstance(change, bytes):
        sealed(newest, change)
    else:
        document = json.loads((newest / layout.MANIFEST).read_bytes())
        change(document)
        sealed(newest, json.dumps(document).encode())
    falls_back(tmp_path)


@pytest.mark.parametrize("kind", HEADERS)
def test_a_part_that_makes_no_sense_is_corrupt_though_its_digest_is_right(tmp_path: Path, kind: str) -> None:
    made(tmp_path, 5, 10)
    with_header(tmp_path / "step-00000010", HEADERS[kind])
    falls_back(tmp_path)


def test_a_file_larger_than_records_are_is_not_read(tmp_path: Path) -> None:
    made(tmp_path, 5, 10)
    os.truncate(tmp_path / "step-00000010" / layout.COMMIT, 1 << 40)
    falls_back(tmp_path)


@pytest.mark.parametrize("name", [layout.COMMIT, layout.MANIFEST, "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "link in a circle"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    made(tmp_path, 5, 10)
    path = tmp_path / "step-00000010" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    assert commands.verify_snapshots(tmp_path)["newest_good"] == str(tmp_path / "step-00000005")
    assert commands.describe_newest_snapshot(tmp_path)["step"] == 5


@pytest.mark.parametrize("keep", [-100, 0, None, "x", True])
def test_a_rule_in_a_manifest_never_takes_the_last_good_one(tmp_path: Path, keep: Any) -> None:
    made(tmp_path, 5, 10, retention={"keep": keep, "every_s": "x", "best": 3})
    commands.prune_snapshot_folder(tmp_path)
    assert commands.verify_snapshots(tmp_path)["newest_good"] == str(tmp_path / "step-00000010")


def tree_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_archive_that_a_step_is_a_link_to_stays_whole(tmp_path: Path) -> None:
    made(tmp_path / "archive", 5)
    made(tmp_path / "run", 10)
    (tmp_path / "run" / "step-00000005").symlink_to(tmp_path / "archive" / "step-00000005")
    before = tree_of(tmp_path / "archive")
    answer = commands.prune_snapshot_folder(tmp_path / "run", keep=1)
    assert tree_of(tmp_path / "archive") == before
    assert (answer["removed"], answer["left"]) == ([], [str(tmp_path / "run" / "step-00000005")])
    done = dtctl("snapshot", "prune", "run", "--keep", "1", cwd=tmp_path)
    assert done.returncode == 10
    assert "not removed" in done.stderr
    assert "removed" not in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="needs to mount")
def test_what_is_mounted_in_a_snapshot_stays(tmp_path: Path) -> None:
    made(tmp_path / "run", 5, 10)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("mine")
    inside = tmp_path / "run" / "step-00000005" / "mounted"
    inside.mkdir()
    subprocess.run(["mount", "--bind", tmp_path / "data", inside], check=True)  # the same file system
    try:
        answer = commands.prune_snapshot_folder(tmp_path / "run", keep=1)
        assert answer["left"] == [str(tmp_path / "run" / "step-00000005")]
        assert (tmp_path / "data" / "mine").read_text() == "mine"
    finally:
        subprocess.run(["umount", inside], check=True)
    assert commands.prune_snapshot_folder(tmp_path / "run", keep=1)["removed"] == [
        str(tmp_path / "run" / "step-00000005")
    ]


SHADOWS = ("argparse", "json", "runpy", "typer", "blake3", "subprocess", "dtctl", "encodings", "hashlib", "tarfile")


def planted(folder: Path) -> Path:
    """Modules that leave a file behind when they are run, under names that dtctl imports."""
    trace = folder / "it-ran"
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    for name in ("sitecustomize", "usercustomize"):
        (folder / f"{name}.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    return trace


@pytest.mark.parametrize("verb", ["ls", "verify", "show", "digest", "prune"])
def test_modules_beside_a_snapshot_are_not_run(tmp_path: Path, verb: str) -> None:
    made(tmp_path, 5)
    trace = planted(tmp_path)
    done = subprocess.run([PROGRAM, "snapshot", verb, "."], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not trace.exists()


def test_modules_beside_a_snapshot_are_not_run_by_an_export(tmp_path: Path) -> None:
    made(tmp_path, 5)
    trace = planted(tmp_path)
    argv = [PROGRAM, "snapshot", "export", ".", "-o", "w.safetensors"]
    assert subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False).returncode == 0
    assert (tmp_path / "w.safetensors").is_file()
    assert not trace.exists()


def test_a_header_longer_than_its_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    with (tmp_path / "x").open("rb") as file, pytest.raises(headers.MalformedFile):
        headers.read_header(file, 10)
