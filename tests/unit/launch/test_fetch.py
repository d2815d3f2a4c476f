"""Outputs come from a node whole, once, and nowhere else than into its folder; the node's half is the real one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from dtctl.errors import ConnectError, DtctlError, NodeError
from dtctl.launch.files import fetch as fetching
from dtctl.launch.files.fetch import FetchResult, FetchSource, fetch_run_outputs
from dtctl.supervisor import frames
from dtctl.transport.base import Target
from dtctl.transport.local import LocalConnection, LocalTransport

RUN = "run-1"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Working folder of a run on a node."""
    work = tmp_path / "node" / "runs" / RUN / "work"
    work.mkdir(parents=True)
    (work / "train.py").write_text("pass")
    info = (work / "train.py").stat()
    record = {"how": "copy", "code": "/", "files": [["train.py", info.st_size, info.st_mtime_ns, info.st_ino]]}
    (work.parent / "work.json").write_text(json.dumps(record))
    return work


class Waiting(LocalTransport):
    """Knows what it has started, so that no test leaves a process."""

    def __init__(self) -> None:
        self.connections: list[LocalConnection] = []

    def connect(self, target: Target) -> LocalConnection:
        self.connections.append(super().connect(target))
        return self.connections[-1]


def bring(tmp_path: Path, *paths: str, python: str = sys.executable) -> FetchResult | DtctlError:
    target = Target(name="a", address="a")
    source = FetchSource(target=target, python=python, run_dir=str(tmp_path / "node" / "runs" / RUN))
    into = tmp_path / "here"
    transport = Waiting()
    answer = fetch_run_outputs([source], transport, paths=paths, into=into)["a"]
    for connection in transport.connections:
        for stream in connection.streams:
            assert stream.exit_status(60) is not None
    return answer


def brought(tmp_path: Path, *paths: str) -> FetchResult:
    answer = bring(tmp_path, *paths)
    assert isinstance(answer, FetchResult), answer
    return answer


def here(tmp_path: Path) -> dict[str, bytes]:
    folder = tmp_path / "here" / "a"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_was_written_comes_and_what_was_pushed_does_not(tmp_path: Path, node: Path) -> None:
    (node / "out" / "deep").mkdir(parents=True)
    (node / "out" / "deep" / "big").write_bytes(os.urandom(3_000_000))
    (node / "out" / "empty").touch()
    (node / "out" / "link").symlink_to("/etc/passwd")
    (node / "__pycache__").mkdir()
    (node / "__pycache__" / "x.pyc").touch()
    (node / "\n bad").touch()
    done = brought(tmp_path)
    assert here(tmp_path) == {"out/deep/big": (node / "out" / "deep" / "big").read_bytes(), "out/empty": b""}
    assert (done.files, done.bytes, done.unchanged, len(done.problems)) == (2, 3_000_000, 0, 1)
    assert (tmp_path / "here" / "a" / "out").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "here" / "a" / "out" / "empty").stat().st_mode & 0o777 == 0o600
    again = brought(tmp_path)
    assert (again.files, again.bytes, again.unchanged) == (0, 0, 2)


def test_a_pushed_file_that_was_changed_comes(tmp_path: Path, node: Path) -> None:
    (node / "train.py").write_text("fail")
    assert brought(tmp_path).files == 1


@pytest.mark.parametrize(("path", "names"), [("out/a", {"out/a"}), ("out", {"out/a", "out/b"}), ("nothing", set())])
def test_a_path_that_is_named_comes(tmp_path: Path, node: Path, path: str, names: set[str]) -> None:
    (node / "out").mkdir()
    for name in ("out/a", "out/b", "c"):
        (node / name).write_text(name)
    brought(tmp_path, path)
    assert (here(tmp_path).keys() if names else set()) == names


def test_a_file_that_changed_there_comes_anew(tmp_path: Path, node: Path) -> None:
    (node / "a").write_text("first")
    brought(tmp_path)
    (node / "a").write_text("other")  # as long as before
    assert brought(tmp_path).files == 1
    assert here(tmp_path) == {"a": b"other"}
    (tmp_path / "here" / "a" / "a").write_text("spoil")
    assert brought(tmp_path).files == 1
    assert here(tmp_path) == {"a": b"other"}


@pytest.mark.parametrize("spoilt", [False, True])
def test_an_interrupted_file_is_continued_if_its_beginning_is_right(tmp_path: Path, node: Path, spoilt: bool) -> None:
    data = os.urandom(1_000_000)
    (node / "a").write_bytes(data)
    partial = tmp_path / "here" / "a" / fetching._build_partial_name("a")
    partial.parent.mkdir(parents=True)
    partial.write_bytes((b"x" if spoilt else data[:1]) + data[1:700_000])
    done = brought(tmp_path)
    assert done.bytes == (1_000_000 if spoilt else 300_000)
    assert here(tmp_path) == {"a": data}


def test_a_link_here_is_not_written_through(tmp_path: Path, node: Path) -> None:
    (node / "out").mkdir()
    (node / "out" / "a").write_text("new")
    (tmp_path / "here" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here" / "a" / "out").symlink_to(tmp_path / "elsewhere")
    answer = bring(tmp_path)
    assert isinstance(answer, DtctlError)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "here" / "a" / "out").unlink()
    (tmp_path / "here" / "a" / "out").mkdir()
    (tmp_path / "precious").write_text("old")
    (tmp_path / "here" / "a" / "out" / "a").symlink_to(tmp_path / "precious")
    assert brought(tmp_path).files == 1
    assert (tmp_path / "precious").read_text() == "old"


def row(path: object, size: object = 1) -> dict[str, object]:
    return {"op": "rows", "rows": [[path, size]]}


LISTED = {"op": "listed", "is_there": True, "unnameable": 0}
SENT = {"op": "sent", "index": 0, "digest": "0" * 64, "problem": ""}
LIES: dict[str, list[object]] = {
    "an absolute path": [row("/etc/cron.d/x"), LISTED],
    "a path upwards": [row("../../x"), LISTED],
    "a path upwards in the middle": [row("a/../../x"), LISTED],
    "no path": [row(""), LISTED],
    "a name of ours": [row(".fetch-x"), LISTED],
    "a path with an escape sequence": [row("\x1b[2J"), LISTED],
    "a path of 5000 characters": [row("a/" * 2500 + "a"), LISTED],
    "a path of a number": [row(5), LISTED],
    "a row of one": [{"op": "rows", "rows": [["a"]]}, LISTED],
    "a size below nothing": [row("a", -1), LISTED],
    "a file twice": [row("a"), row("a"), LISTED],
    "a file that is a folder": [row("a"), row("a/b"), LISTED],
    "more than there is room for": [row("a", 1 << 60), LISTED],
    "more than was announced": [row("a"), LISTED, b"xx", SENT],
    "another digest": [row("a"), LISTED, b"x", SENT],
    "another file": [row("a"), LISTED, {**SENT, "index": 1}],
    "contents unasked": [b"x"],
    "an operation of its own": [{"op": "rm"}],
    "a digest unasked": [row("a"), LISTED, {"op": "digest", "index": 5, "digest": ""}],
    "nothing at all": [],
}
LIAR = """#!{python}
import os
os.write(1, {answer!r})
while {answer!r} and os.read(0, 65536):
    pass
"""


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_node_writes_nothing_outside(tmp_path: Path, lie: str) -> None:
    said = [frames.pack_frame(frames.BYTES, x, 0) if isinstance(x, bytes) else frames.pack_json(x) for x in LIES[lie]]
    program = tmp_path / "liar"
    program.write_text(LIAR.format(python=sys.executable, answer=b"".join(said)))
    program.chmod(0o700)
    before = sorted(tmp_path.rglob("*"))
    result = bring(tmp_path, python=str(program))
    assert isinstance(result, DtctlError)
    assert isinstance(result, NodeError | ConnectError) or "free here" in str(result) or "did not arrive" in str(result)
    ours = {tmp_path / "here", tmp_path / "here" / "a"}
    made = [path for path in sorted(tmp_path.rglob("*")) if path not in before and path not in ours]
    assert all(path.name.startswith(fetching.PARTIAL) and path.stat().st_size <= 1 for path in made)


def test_links_that_stay_inside_come_as_links(tmp_path: Path, node: Path) -> None:
    (node / "out" / "checkpoint-40").mkdir(parents=True)
    (node / "out" / "checkpoint-40" / "w").write_text("40")
    (node / "out" / "latest").symlink_to("checkpoint-40")
    (node / "best").symlink_to(node / "out" / "latest" / "w")  # the whole path of a place in the working folder
    (node / "top").symlink_to("out/checkpoint-40/../checkpoint-40/w")
    for name, target in {"etc": "/etc/passwd", "up": "../..", "out/up": "../../x", "through": "out/latest/w"}.items():
        (node / name).symlink_to(target)
    done = brought(tmp_path)
    folder = tmp_path / "here" / "a"
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_symlink()} == {"out/latest", "top"}
    assert ((folder / "out" / "latest" / "w").read_text(), (folder / "top").read_text()) == ("40", "40")
    refused = {text.partition(":")[0] for text in done.left_out}
    assert refused == {"etc", "up", "out/up", "through", "best"}, "and not through another link, which may change"
    assert (done.files, done.problems) == (3, [])
    (node / "out" / "latest").unlink()
    (node / "out" / "latest").symlink_to("checkpoint-50")
    again = brought(tmp_path)
    assert (again.files, again.unchanged) == (1, 2)
    assert str((folder / "out" / "latest").readlink()) == "checkpoint-50"


def test_an_absolute_path_comes_from_where_it_is(tmp_path: Path, node: Path) -> None:
    (tmp_path / "scratch" / "deep").mkdir(parents=True)
    (tmp_path / "scratch" / "deep" / "a").write_text("far")
    (tmp_path / "scratch" / "link").symlink_to("/etc/passwd")
    (node / "out").write_text("near")
    brought(tmp_path, str(tmp_path / "scratch"), "out")
    assert here(tmp_path) == {f"{tmp_path}/scratch/deep/a"[1:]: b"far", "out": b"near"}
    assert brought(tmp_path, str(tmp_path / "scratch"), "out").unchanged == 2
