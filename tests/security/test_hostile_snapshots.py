"""`dtctl snapshot` on a run of two nodes, each with a part of every snapshot, of which one lies."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from dtctl.cli import snapshot as cli
from dtctl.errors import DtctlError, SnapshotError, TransportError
from dtctl.launch import snapshots
from dtctl.launch.cluster import ResolvedCluster, resolve_cluster
from dtctl.launch.records.record import RunInfo
from dtctl.launch.records.run_writer import RunWriter
from dtctl.runtime.snapshot import write
from dtctl.runtime.snapshot.format import layout
from dtctl.spec.load import parse_spec
from tests.security import snapshot_liar
from tests.security.test_hostile_node import SPEC, HostileTransport

PARTS = {"model": {"w": torch.arange(4.0)}, "optimizer": {"state": {}, "groups": []}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home of two nodes, and a run whose folder is the working folder."""
    project, homes = tmp_path / "project", tmp_path / "homes"
    for folder in (project, homes):
        folder.mkdir(mode=0o700)
    for node, lacks in (("a", "optimizer.safetensors"), ("b", "model.safetensors")):
        kept = homes / node / "work" / "runs" / "one" / "snapshots"
        for step in (1, 2):
            write.save_snapshot_parts(kept, step, PARTS, facts={"retention": {"keep": 1}}, keep=9)
            (kept / f"step-{step:08d}" / lacks).unlink()
    spec = parse_spec(SPEC.replace("PYTHON", sys.executable), source="dtctl.yaml", base_dir=project)
    found = resolve_cluster(spec, start=False)
    transport = HostileTransport(homes, "no lie")
    cluster = ResolvedCluster(nodes=found.nodes, targets=found.targets, make_transport=lambda: transport)
    monkeypatch.setattr(snapshots, "build_run_cluster", lambda _: cluster)
    monkeypatch.setattr(snapshots, "load_run_spec", lambda _: spec)
    monkeypatch.setattr(snapshots, "SILENCE_S", 5.0)
    monkeypatch.setattr(snapshots, "READING_S", 8.0)
    monkeypatch.chdir(project)
    yield tmp_path
    transport.bury()


def recorded(folder: Path, lie: str | None) -> None:
    """Write down a run whose second node has a Python that lies."""
    info = RunInfo(run="one", token="x", pid=1, started=1.0, spec="", command=[], detached=False)
    record = RunWriter.create(folder / "project", info)
    nodes = []
    for name in ("a", "b"):
        python = folder / f"python-{name}"
        words = [sys.executable, *([snapshot_liar.__file__, lie] if lie is not None and name == "b" else [])]
        python.write_text(f'#!/bin/sh\nexec {" ".join(repr(word) for word in words)} "$@"\n')
        python.chmod(0o700)
        path = [{"name": "PYTHONPATH", "value": str(Path(__file__).parents[2]), "origin": "test"}]
        workdir = str(folder / "homes" / name / "work")
        nodes.append({"name": name, "workdir": workdir, "python": str(python), "env": path, "setup": [], "slots": 1})
    (record.folder / "plan.json").write_text(
        json.dumps({"nodes": nodes, "attempt": 0, "rendezvous": {"address": "127.0.0.1", "port": 1}})
    )


def act(command: str) -> int:
    out = Path("w.safetensors")
    given = {"out": out, "part": "model"} if command == "export" else {}
    given |= {"keep": None, "every_h": None, "no_best": False, "dry_run": False} if command == "prune" else {}
    return int(getattr(cli, command)("one", json_=True, **given))


def left_of(folder: Path) -> set[str]:
    """All files, without those that a run or an export may write."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}
    return {name for name in found if not name.startswith("project/.dtctl/") and name != "project/w.safetensors"}


@pytest.mark.parametrize("lie", snapshot_liar.LIES)
def test_a_lie_about_snapshots_is_an_error_of_its_node(
    place: Path, lie: str, capfd: pytest.CaptureFixture[str]
) -> None:
    recorded(place, lie)
    _, command, _ = snapshot_liar.LIES[lie]
    before, had = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, left_of(place)
    told, kind = "", SnapshotError
    try:
        act(command)
    except DtctlError as exc:
        told = f"{exc} {exc.hint} {exc.where} {getattr(exc, 'node', '')}"
        kind = type(exc)
    assert issubclass(kind, SnapshotError | TransportError)
    assert "bug" not in told
    said = capfd.readouterr()
    named = re.search(r"\bb\b", f"{told}\n{said.err}")
    assert not told or named or lie in snapshot_liar.AS_WITHOUT_SNAPSHOTS, told
    assert not set(said.out + said.err) & set("\x1b\x07\u202e")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
    lost = had - left_of(place)
    assert left_of(place) <= had, "something was written"
    assert not [name for name in lost if "homes/a" in name], "the honest node lost something"
    assert not [name for name in lost if "step-00000002" in name], "the newest one lost something"
    out = place / "project" / "w.safetensors"
    if out.exists():
        assert layout.read_file_size(out) < 1000
        assert torch.frombuffer(bytearray(out.read_bytes()[-16:]), dtype=torch.float32).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("command", ["ls", "verify", "show", "digest", "export", "prune"])
def test_without_a_lie_all_is_well(place: Path, command: str) -> None:
    recorded(place, None)
    assert act(command) == 0
    left = {path.name for path in place.rglob("step-*")}
    assert left == ({"step-00000002"} if command == "prune" else {"step-00000001", "step-00000002"})


def test_a_link_where_the_export_is_to_lie_is_replaced_and_not_written_through(place: Path) -> None:
    recorded(place, None)
    (place / "mine").write_text("mine")
    (place / "project" / "w.safetensors").symlink_to(place / "mine")
    assert act("export") == 0
    assert (place / "mine").read_text() == "mine"
    shutil.rmtree(place / "project")
