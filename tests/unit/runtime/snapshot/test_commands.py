"""What is said of snapshots from outside of a training; without torch, and exactly what a training would say."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import __main__ as program
from dtctl.runtime.snapshot import commands, state, write
from dtctl.runtime.snapshot.format import headers, layout, packing
from tests.facts import raises


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    model[2](model[1](model[0](torch.randn(5, 3))).bfloat16()).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, step: int) -> str:
    """Write a snapshot; its digest, as training computes it."""
    model, optimizer = trained()
    with torch.no_grad():
        model[0].weight += step
    tree = state.optimizer_tree(model, optimizer)
    write.save_snapshot_parts(
        folder, step, {"model": dict(model.state_dict()), "optimizer": tree}, facts={"position": step}, keep=9
    )
    return state.compute_state_digest(model.state_dict(), tree)


def damage(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)


def test_the_digest_is_that_of_the_training(tmp_path: Path) -> None:
    expected = {step: save(tmp_path, step) for step in (5, 10)}
    assert commands.compute_snapshot_digest(tmp_path)["digest"] == expected[10]
    assert commands.compute_snapshot_digest(layout.build_snapshot_path(tmp_path, 5))["digest"] == expected[5]
    damage(layout.build_snapshot_path(tmp_path, 10) / "optimizer.safetensors")
    found = commands.compute_snapshot_digest(tmp_path)
    assert (found["step"], found["digest"]) == (5, expected[5])
    assert found["rejected"] == [
        "step-00000010 is corrupt: optimizer.safetensors does not have the digest that was recorded"
    ]


def test_one_object_and_ten_on_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (5, 10):
        save(tmp_path, step)
    assert program.main(["verify", str(tmp_path)]) == 0
    damage(layout.build_snapshot_path(tmp_path, 10) / "model.safetensors")
    capsys.readouterr()
    assert program.main(["verify", str(tmp_path)]) == 10
    found = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["status"]) for row in found["snapshots"]] == [(10, "corrupt"), (5, "ok")]
    assert found["newest_good"] == str(layout.build_snapshot_path(tmp_path, 5))
    assert program.main(["digest", str(tmp_path / "nowhere")]) == 10
    assert json.loads(capsys.readouterr().out)["error"] == "there is no folder of snapshots here"


def test_nothing_of_torch_is_needed(tmp_path: Path) -> None:
    save(tmp_path, 5)
    blocked = "import sys; sys.modules['torch'] = None; sys.modules['numpy'] = None; sys.argv[1:] = ARGV; "
    blocked += "import runpy; runpy.run_module('dtctl.runtime.snapshot', run_name='__main__')"
    for verb, *options in (["ls"], ["verify"], ["show"], ["digest"], ["export", "--out", str(tmp_path / "w")]):
        text = blocked.replace("ARGV", repr([verb, str(tmp_path), *options]))
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)


def test_show_names_every_tensor(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = commands.describe_newest_snapshot(tmp_path)
    assert found["facts"]["position"] == 5
    assert int(found["facts"]["state_sum"], 16)
    assert found["tensors"]["model.0.weight"] == {"dtype": "float32", "shape": [4, 3]}
    assert found["tensors"]["optimizer.state.2.bias.exp_avg"] == {"dtype": "bfloat16", "shape": [1]}


def test_an_export_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    save(tmp_path, 5)
    out = tmp_path / "weights.safetensors"
    told = commands.export_snapshot_part(tmp_path, part="model", out=out)
    text = out.read_bytes()
    assert (told["step"], told["size_bytes"]) == (5, len(text))
    (length,) = struct.unpack("<Q", text[:8])
    document = json.loads(text[8 : 8 + length])
    assert document.pop("__metadata__") == {"format": "pt", "step": "5"}
    model, _ = trained()
    assert document.keys() == model.state_dict().keys()
    begin, end = document["0.weight"]["data_offsets"]
    values = torch.frombuffer(bytearray(text[8 + length + begin : 8 + length + end]), dtype=torch.float32)
    assert torch.equal(values.view(4, 3), model.state_dict()["0.weight"] + 5)
    stream = io.BytesIO()
    commands.export_snapshot_part(tmp_path, part="model", out=stream)
    assert stream.getvalue() == text
    with raises(SnapshotError, "part ema"):
        commands.export_snapshot_part(tmp_path, part="ema", out=out)
    with raises(SnapshotError, "written"):
        commands.export_snapshot_part(tmp_path, part="model", out=tmp_path / "no" / "folder")
    assert out.read_bytes() == text


def splits(letters: str) -> dict[str, Any]:
    """All ways to nest what is called `a.b.c` in the end: 2 ** (len(letters) - 1) tensors."""
    tree: dict[str, Any] = {".".join(letters): torch.zeros(1)}
    for length in range(1, len(letters)):
        tree[".".join(letters[:length])] = splits(letters[length:])
    return tree


def test_thousands_of_names_that_are_alike_take_no_minutes(tmp_path: Path) -> None:
    write.save_snapshot_parts(tmp_path, 1, {"model": splits("abcdefghijklmno")}, facts={})
    began = time.process_time()
    commands.export_snapshot_part(tmp_path, part="model", out=tmp_path / "out")
    assert time.process_time() - began < 20
    text = (tmp_path / "out").read_bytes()
    names = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    assert len(names) == 2**14 + 1


def test_a_tree_that_names_a_tensor_often_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digests are right, since whoever made it has computed them. Written out it would be many times as large."""
    text = packing._format_tree_json
    monkeypatch.setattr(packing, "_format_tree_json", lambda tree: text(tree).replace(':"small"', ':"large"'))
    parts = {"model": {"large": torch.zeros(1 << 16), "small": torch.zeros(1)}}
    write.save_snapshot_parts(tmp_path, 1, parts, facts={})
    with raises(SnapshotError, "snapshot"):
        commands.export_snapshot_part(tmp_path, part="model", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_for_which_a_header_has_no_room_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write.save_snapshot_parts(tmp_path, 1, {"model": {"a" * 3000: torch.zeros(1)}}, facts={})
    monkeypatch.setattr(headers, "MAX_BYTES", 2000)
    with raises(SnapshotError, "model safetensors room"):
        commands.export_snapshot_part(tmp_path, part="model", out=tmp_path / "out")


def test_prune_keeps_the_newest_good_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    damage(layout.build_snapshot_path(tmp_path, 4) / "model.safetensors")
    assert len(commands.prune_snapshot_folder(tmp_path, keep=2, dry_run=True)["removed"]) == 2
    assert len(layout.list_step_folders(tmp_path)) == 4
    commands.prune_snapshot_folder(tmp_path, keep=2)
    assert [step for step, _ in layout.list_step_folders(tmp_path)] == [3, 2]
    for step in (2, 3):
        damage(layout.build_snapshot_path(tmp_path, step) / "model.safetensors")
    assert commands.prune_snapshot_folder(tmp_path, keep=1)["removed"] == []
    assert len(layout.list_step_folders(tmp_path)) == 2


def test_prune_keeps_one_every_so_many_hours(tmp_path: Path) -> None:
    for hour in range(7):
        save(tmp_path, hour)
        os.utime(layout.build_snapshot_path(tmp_path, hour), (hour * 3600, hour * 3600))
    commands.prune_snapshot_folder(tmp_path, keep=2, every_s=7200)
    assert [step for step, _ in layout.list_step_folders(tmp_path)] == [6, 5, 4, 2, 0]


def test_headers_are_read_from_their_beginning_alone(tmp_path: Path) -> None:
    text = headers.encode_header({}, {headers.TREE: "[1]"})
    assert headers.parse_header(memoryview(text)).tree == [1]
