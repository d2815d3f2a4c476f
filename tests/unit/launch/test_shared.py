"""Copies of shared folders between nodes: the nodes' halves are real, in folders of this machine."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtctl.errors import NodeError
from dtctl.launch.files.shared import CopyNode, CopyResult, CopyRounds, _require_path, _SharedFolderNode
from dtctl.supervisor import receive, relay, shared
from dtctl.supervisor.messages.shared import SharedCopy
from dtctl.transport.base import Target
from dtctl.transport.local import LocalConnection, LocalTransport

RUN = "run-1"
OLD_S = 60


class Waiting(LocalTransport):
    """Knows what it has started, so that no test leaves a process."""

    def __init__(self) -> None:
        self.connections: list[LocalConnection] = []

    def connect(self, target: Target) -> LocalConnection:
        self.connections.append(super().connect(target))
        return self.connections[-1]


@pytest.fixture(params=["from node to node", "through this machine"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    if request.param == "from node to node":
        monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 1 127.0.0.1 22")


def prepared(tmp_path: Path, *names: str) -> list[Path]:
    """Working folders of a run on nodes."""
    found = []
    for name in names:
        work = tmp_path / name / "runs" / RUN / "work"
        work.mkdir(parents=True)
        for folder in (tmp_path / name, work.parents[1], work.parent):
            folder.chmod(0o700)
        (work.parent / "work.json").write_text(json.dumps({"how": "copy", "code": "/", "files": []}))
        found.append(work)
    return found


def write(path: Path, data: bytes, age_s: float = OLD_S) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (time.time() - age_s, time.time() - age_s))


def listing(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def go(
    tmp_path: Path, *names: str, between: Callable[[], None] = lambda: None, stopped_s: float | None = None
) -> CopyResult:
    """One round, and no process that is left of it."""
    transport = Waiting()
    rounds = CopyRounds(RUN, [("out", "")], transport, share=1.0)
    nodes = [
        CopyNode(target=Target(name=name, address=name), python=sys.executable, workdir=str(tmp_path / name))
        for name in names
    ]
    try:
        result = rounds.run(nodes, stopped_s=stopped_s)
    finally:
        rounds.close()
    for connection in transport.connections:
        for stream in connection.streams:
            assert stream.exit_status(60) is not None
    return result


@pytest.mark.usefixtures("_way")
def test_all_nodes_get_what_each_has_written(tmp_path: Path) -> None:
    a, b, c = prepared(tmp_path, "a", "b", "c")
    large = os.urandom((9 << 20) + 7)
    write(a / "out" / "step-1" / "rank-0.bin", large)
    write(a / "out" / "step-1" / "empty", b"")
    write(b / "out" / "step-1" / "rank-1.bin", os.urandom(5000))
    write(b / "out" / "step-1" / "same.bin", large)
    write(c / "out" / "latest", b"step-1", age_s=1)
    result = go(tmp_path, "a", "b", "c")
    assert result.notes == []
    assert listing(a / "out") == listing(b / "out")
    assert {*listing(c / "out")} == {*listing(a / "out"), "latest"}, "one that is new yet is not copied"
    assert listing(a / "out")["step-1/same.bin"][0] == large
    assert result.files == 2 + 2 + 4
    assert not list(tmp_path.glob(f"*/runs/{RUN}/.incoming-*"))
    again = go(tmp_path, "a", "b", "c")
    assert (again.files, again.notes) == (0, [])
    (a / "out" / "step-1" / "rank-0.bin").unlink()
    assert go(tmp_path, "a", "b", "c").files == 0, "what its own node has removed stays away from there"


def test_copies_go_when_their_writer_has_removed_the_file(tmp_path: Path) -> None:
    a, b, c = prepared(tmp_path, "a", "b", "c")
    for step in ("step-1", "step-2"):
        write(a / "out" / step / "deep" / "rank-0.bin", b"first")
        write(b / "out" / step / "rank-1.bin", b"first")
    write(a / "out" / "gone-at-once.bin", b"first")
    go(tmp_path, "a", "b", "c")
    assert listing(a / "out") == listing(b / "out") == listing(c / "out")
    shutil.rmtree(a / "out" / "step-1")
    (a / "out" / "gone-at-once.bin").unlink()
    write(c / "out" / "gone-at-once.bin", b"its own")
    assert go(tmp_path, "a", "b", "c").notes == []
    assert {*listing(a / "out")} == {"gone-at-once.bin", "step-2/deep/rank-0.bin", "step-2/rank-1.bin"}
    assert {*listing(b / "out")} == {*listing(a / "out"), "step-1/rank-1.bin"} == {*listing(c / "out")}
    assert listing(b / "out")["gone-at-once.bin"][0] == b"its own"
    assert not (b / "out" / "step-1" / "deep").exists()
    shutil.rmtree(b / "out" / "step-1")
    go(tmp_path, "a", "b", "c")
    assert listing(a / "out") == listing(b / "out") == listing(c / "out")
    write(a / "out" / "step-1" / "deep" / "rank-0.bin", b"again")
    go(tmp_path, "a", "b", "c")
    assert listing(c / "out")["step-1/deep/rank-0.bin"][0] == b"again"


@pytest.mark.parametrize("how", ["boot", "folder", "unreadable", "set aside"])
def test_a_file_that_its_writer_has_lost_stays_on_other_nodes(tmp_path: Path, how: str) -> None:
    a, b = prepared(tmp_path, "a", "b")
    write(a / "out" / "step-1.bin", b"first")
    write(a / "out" / "step-1b.pt", b"PK\x03\x04" + bytes(100) + b"PK\x05\x06" + bytes(18))
    go(tmp_path, "a", "b")
    before = listing(b / "out")
    assert {*before} == {"step-1.bin", "step-1b.pt"}
    record = a.parent / "shared.json"
    if how == "boot":
        rows = json.loads(record.read_text())
        record.write_text(json.dumps({path: [*row[:3], "another"] for path, row in rows.items()}))
        shutil.rmtree(a / "out")
    elif how == "folder":
        shutil.rmtree(a)
    elif how == "unreadable":  # as by a disk that fails
        (a / "out").rename(a / "elsewhere")
        (a / "out").symlink_to("out")
    else:
        write(a / "out" / "step-1b.pt", b"PK\x03\x04", age_s=0)
        go(tmp_path, "a", "b", stopped_s=0.0)
        assert (a.parent / "aside-0" / "out" / "step-1b.pt").read_bytes() == b"PK\x03\x04"
    go(tmp_path, "a", "b")
    assert listing(b / "out") == before
    if how != "unreadable":
        assert listing(a / "out") == before


@pytest.mark.usefixtures("_way")
def test_a_newer_version_replaces_an_older_one(tmp_path: Path) -> None:
    a, b = prepared(tmp_path, "a", "b")
    write(a / "out" / "ckpt.bin", b"new", age_s=20)
    write(b / "out" / "ckpt.bin", b"old!", age_s=40)
    assert go(tmp_path, "a", "b").files == 1
    assert listing(a / "out") == listing(b / "out")


def test_a_spare_keeps_copies_until_it_has_a_working_folder(tmp_path: Path) -> None:
    (a,) = prepared(tmp_path, "a")
    write(a / "out" / "step-1.bin", b"new")
    assert go(tmp_path, "a", "s").notes == []
    run = tmp_path / "s" / "runs" / RUN
    assert listing(run / "ahead" / "out") == listing(a / "out")
    from dtctl.supervisor import run_workdir

    assert run_workdir.holds_copies_alone(str(run))
    (run / "work").mkdir()
    run_workdir._move_missing_files(str(run / "ahead"), str(run / "work"))
    assert listing(run / "work" / "out") == listing(a / "out")
    assert not (run / "ahead").exists()


def test_links_are_left_out_and_named(tmp_path: Path) -> None:
    a, b = prepared(tmp_path, "a", "b")
    (tmp_path / "secret").mkdir()
    write(tmp_path / "secret" / "key.bin", b"mine")
    write(a / "out" / "step-1.bin", b"new")
    (a / "out" / "last.bin").symlink_to("step-1.bin")
    (a / "out" / "more").symlink_to(tmp_path / "secret")
    os.mkfifo(a / "out" / "pipe")
    result = go(tmp_path, "a", "b")
    assert {*listing(b / "out")} == {"step-1.bin"}
    assert {text.partition(": ")[2] for _, text in result.notes} == {
        "out/last.bin: a link", "out/more: a link", "out/pipe: no regular file",
    }  # fmt: skip


def test_a_file_where_a_folder_is_named_is_reported(tmp_path: Path) -> None:
    """A program that writes `out` itself would share nothing, and its workers would resume at different steps."""
    a, _ = prepared(tmp_path, "a", "b")
    write(a / "out", b"weights")
    text = "ignored for job.shared: out: a file, and job.shared names folders: let the program write it into one"
    assert go(tmp_path, "a", "b").notes == [("a", text)]


def test_a_folder_that_is_a_link_is_neither_read_nor_written_through(tmp_path: Path) -> None:
    a, b = prepared(tmp_path, "a", "b")
    (tmp_path / "elsewhere").mkdir()
    write(a / "out" / "step-1.bin", b"new")
    write(a / "out" / "deep" / "x.bin", b"new")
    (b / "out").symlink_to(tmp_path / "elsewhere")
    result = go(tmp_path, "a", "b")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert any("link that leads out" in text for _, text in result.notes)
    (b / "out").unlink()
    (b / "out").mkdir()
    (b / "out" / "deep").symlink_to(tmp_path / "elsewhere")
    result = go(tmp_path, "a", "b")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert {*listing(b / "out")} == {"step-1.bin"}


def test_what_may_not_be_complete_is_moved_and_not_removed(tmp_path: Path) -> None:
    a, b = prepared(tmp_path, "a", "b")
    write(a / "out" / "step-1" / "rank-0.bin", b"first")
    write(b / "out" / "step-1" / "rank-1.bin", b"first")
    write(a / "out" / "step-2" / "rank-0.bin", b"second", age_s=1)
    result = go(tmp_path, "a", "b", stopped_s=0.5)
    assert listing(a / "out") == listing(b / "out")
    assert {*listing(a / "out")} == {"step-1/rank-0.bin", "step-1/rank-1.bin"}
    assert not (a / "out" / "step-2").exists()
    assert (a.parent / "aside-0" / "out" / "step-2" / "rank-0.bin").read_bytes() == b"second"
    assert any("out/step-2 may" in text and "aside-0" in text for _, text in result.notes)


@pytest.mark.usefixtures("_way")
def test_a_file_that_differs_from_its_digest_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = prepared(tmp_path, "a", "b")
    write(a / "out" / "step-1.bin", os.urandom(5000))
    write(b / "out" / "step-0.bin", b"before")
    offer = CopyRounds._compute_block_sizes

    def spoil(self: CopyRounds, rows: object) -> dict[bytes, int]:
        write(a / "out" / "step-1.bin", os.urandom(5000), age_s=59)
        return offer(self, rows)  # type: ignore[arg-type]

    monkeypatch.setattr(CopyRounds, "_compute_block_sizes", spoil)
    result = go(tmp_path, "a", "b")
    assert {*listing(b / "out")} == {"step-0.bin"}
    assert [node for node, text in result.notes if node is not None and "not copied" in text] == ["b"]
    assert not list(tmp_path.glob(f"b/runs/{RUN}/.incoming-*"))


def test_of_a_checkpoint_all_comes_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = prepared(tmp_path, "a", "b")
    for name in ("step-1/a.bin", "step-1/b.bin", "step-2/a.bin"):
        write(a / "out" / name, b"first")
    offer = _SharedFolderNode.offer

    def change_before(self: _SharedFolderNode, paths: list[str], pair: tuple[str, str]) -> list[str]:
        write(a / "out" / "step-1" / "b.bin", b"second", age_s=0)
        return offer(self, paths, pair)

    monkeypatch.setattr(_SharedFolderNode, "offer", change_before)
    assert go(tmp_path, "a", "b").files == 1
    assert {*listing(b / "out")} == {"step-2/a.bin"}


def test_a_node_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (a,) = prepared(tmp_path, "a")
    write(a / "out" / "step-1" / "a.bin", b"first")
    (tmp_path / "b").write_text("no folder")
    (note,) = go(tmp_path, "a", "b", stopped_s=1.0).notes
    assert note[0] == "b"


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "out/../../x", "other/x", "out", "out/./x", "out//x", "out/\n"]
)
def test_no_path_leads_out_of_the_shared_folders(path: str) -> None:
    row = {"path": path, "size": 1, "mtime_ns": 0, "origin": ""}
    with pytest.raises(receive.PushProblem):
        shared.parse_copies(json.dumps([row]).encode(), ["out"])
    with pytest.raises(NodeError):
        _require_path(path, ["out"], "a")
    assert shared.parse_copies(json.dumps([{**row, "path": "out/x"}]).encode(), ["out"]) == [
        SharedCopy(path="out/x", size=1, mtime_ns=0, origin="")
    ]


@pytest.mark.parametrize(
    ("name", "data", "end"),
    [
        ("a.pt", b"PK\x03\x04" + bytes(100) + b"PK\x05\x06" + bytes(18), "whole"),
        ("a.pt", b"PK\x03\x04" + bytes(70_000), "cut"),
        ("a.pt", b"", "cut"),
        ("a.safetensors", (2).to_bytes(8, "little") + b"{}", "whole"),
        ("a.safetensors", (90).to_bytes(8, "little") + b"{}", "cut"),
        ("a.safetensors", b"\x02", "cut"),
        ("a.safetensors", (4).to_bytes(8, "little") + b"[{}]", ""),
        ("__0_0.distcp", b"PK\x03\x04", ""),
        ("latest", b"step-1", ""),
    ],
)
def test_the_end_of_a_file_shows_whether_it_is_whole(tmp_path: Path, name: str, data: bytes, end: str) -> None:
    (tmp_path / name).write_bytes(data)
    assert shared.check_end(str(tmp_path / name), len(data)) == end


def test_a_pace_leaves_most_of_a_link_to_others() -> None:
    pace, began = relay.RateLimiter(0.25), time.monotonic()
    for _ in range(4):
        time.sleep(0.02)
        pace.wait(4 << 20)
    fast_s = time.monotonic() - began
    began = time.monotonic()
    for _ in range(4):
        pace.wait(4 << 20)
    assert time.monotonic() - began > 3 * fast_s
