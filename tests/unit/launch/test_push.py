"""A push from end to end: what is there is what was scanned, and what goes wrong is said."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtctl.errors import ConnectError, NodeError, TransferError
from dtctl.launch.control.link import NodeLink
from dtctl.launch.files import push as pushing
from dtctl.launch.files.push import PayloadCache, push_tree_to_node
from dtctl.launch.files.push_selection import ALWAYS_LEFT_OUT
from dtctl.launch.files.tree import FileTree, scan_push_tree
from dtctl.supervisor import frames
from tests.facts import raises
from tests.unit.pushing import SocketStream, bring, bring_tree, left_in, listing, node, release


@pytest.fixture(autouse=True)
def _no_tree_stays_held() -> Iterator[None]:
    yield
    release()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small working tree."""
    root = tmp_path / "project"
    (root / "pkg" / "deep").mkdir(parents=True)
    (root / "train.py").write_text("print('hello')\n" * 100)
    (root / "pkg" / "__init__.py").touch()
    (root / "pkg" / "deep" / "__init__.py").touch()
    (root / "pkg" / "deep" / "weights.bin").write_bytes(os.urandom(700_000))
    (root / "run.sh").write_text("#!/bin/sh\n")
    (root / "run.sh").chmod(0o755)
    (root / "latest").symlink_to("pkg/deep")
    return root


def test_what_arrives_is_what_was_there(project: Path, tmp_path: Path) -> None:
    done = bring(project, tmp_path / "node")
    assert done.state == "done"
    assert done.path == str(tmp_path / "node" / "code" / scan_push_tree(project).digest)
    assert listing(Path(done.path)) == {path: (mode & 0o700, data) for path, (mode, data) in listing(project).items()}
    assert done.files_sent == 4  # the empty ones are sent as one, the link not at all
    assert 700_000 < done.bytes_sent < 702_000


def test_an_unchanged_tree_is_not_sent(project: Path, tmp_path: Path) -> None:
    first = bring(project, tmp_path / "node")
    again = bring(project, tmp_path / "node")
    assert (again.state, again.path, again.files_sent, again.bytes_sent) == ("have", first.path, 0, 0)


def test_only_what_changed_is_sent(project: Path, tmp_path: Path) -> None:
    bring(project, tmp_path / "node")
    (project / "train.py").write_text("print('changed')\n")
    (project / "pkg" / "copy.bin").write_bytes((project / "pkg" / "deep" / "weights.bin").read_bytes())
    (project / "run.sh").unlink()
    done = bring(project, tmp_path / "node")
    assert done.files_sent == 1
    assert done.bytes_sent < 2_000
    assert (Path(done.path) / "train.py").read_text() == "print('changed')\n"
    assert (Path(done.path) / "pkg" / "copy.bin").stat().st_size == 700_000
    assert not (Path(done.path) / "run.sh").exists()


def test_a_link_can_be_used_for_more_after_a_push(project: Path, tmp_path: Path) -> None:
    with node(tmp_path / "node") as link:
        states = [push_tree_to_node(link, scan_push_tree(project), shared=PayloadCache()).state for _ in range(3)]
        assert states == ["done", "have", "have"]


names = st.binary(min_size=1, max_size=12).filter(lambda n: not {b"/", b"\0"} & {n[i : i + 1] for i in range(len(n))})
names = names.filter(lambda name: name not in (b".", b"..", b".gitignore", b".dtctlignore", *ALWAYS_LEFT_OUT))


def test_odd_names_and_contents_arrive_byte_for_byte(tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=40, deadline=None)
    @given(st.dictionaries(names, st.binary(max_size=2000), min_size=1, max_size=6), st.booleans())
    def check(files: dict[bytes, bytes], executable: bool) -> None:
        root = tmp_path_factory.mktemp("odd")
        for name, data in files.items():
            path = root / os.fsdecode(name)
            path.write_bytes(data)
            path.chmod(0o700 if executable else 0o600)
        tree = scan_push_tree(root, include=["*"])
        done = bring_tree(tree, tmp_path_factory.mktemp("node"))
        assert listing(Path(done.path)) == {e.path: (e.mode, files[e.path]) for e in tree.files}
        assert len(tree.files) + len(tree.withheld) == len(files)
        release()

    check()


@pytest.mark.parametrize("piece_bytes", [1, 100, 1 << 18])
def test_contents_do_not_depend_on_how_they_are_cut(
    project: Path, tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pushing, "PIECE_BYTES", piece_bytes)
    (project / "pkg" / "deep" / "weights.bin").write_bytes(os.urandom(5000))
    done = bring(project, tmp_path / "node")
    assert listing(Path(done.path)).keys() == listing(project).keys()


def test_what_cannot_be_compressed_is_not(project: Path, tmp_path: Path) -> None:
    tree = scan_push_tree(project)
    assert (
        pushing._choose_compression_level(
            tree, pushing._build_whole_segments(tree, [i for i, e in enumerate(tree.files) if e.path.endswith(b".bin")])
        )
        == 0
    )
    assert (
        pushing._choose_compression_level(
            tree,
            pushing._build_whole_segments(tree, [i for i, e in enumerate(tree.files) if e.path.endswith(b"train.py")]),
        )
        == 1
    )


def test_many_nodes_at_once_share_one_compression(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Sequence[int]] = []
    compressed = pushing._compress_segments

    def count(tree: FileTree, indexes: Sequence[int]) -> Iterator[tuple[bytes, int]]:
        made.append(indexes)
        return compressed(tree, indexes)

    monkeypatch.setattr(pushing, "_compress_segments", count)
    barrier = threading.Barrier(4)

    class Together(PayloadCache):
        def pieces(self, tree: FileTree, indexes: tuple[int, ...]) -> Iterator[tuple[bytes, int]]:
            source = super().pieces(tree, indexes)
            first = next(source)
            barrier.wait(60)  # nobody has finished when the last one begins
            yield first
            yield from source

    shared, tree = Together(), scan_push_tree(project)
    paths = []

    def one(number: int) -> None:
        with node(tmp_path / f"node{number}") as link:
            paths.append(push_tree_to_node(link, tree, shared=shared).path)

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(paths) == 4
    assert len(made) == 1
    assert len({frozenset(listing(Path(path)).items()) for path in paths}) == 1
    assert not shared._payloads  # nothing is kept for the days that a run may last


def test_a_large_payload_is_not_kept_in_memory(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "SHARED_LIMIT_BYTES", 1000)
    monkeypatch.setattr(pushing, "_Payload", None)
    assert bring(project, tmp_path / "node").state == "done"


def test_progress_counts_up_to_what_the_node_lacked(project: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, ...]] = []
    tree = scan_push_tree(project)
    with node(tmp_path / "node") as link:
        done = push_tree_to_node(link, tree, shared=PayloadCache(), progress=lambda *report: seen.append(report[:2]))
    size = sum(file.size for file in tree.files if file.mode != 0o120000)
    assert seen == sorted(seen)
    assert {of for _, of in seen} == {size} == {done.content_bytes}
    assert (seen[0][0], seen[-1][0]) == (0, size)


@pytest.mark.parametrize("change", ["longer", "shorter", "gone"])
def test_a_file_that_changes_meanwhile_is_named(project: Path, tmp_path: Path, change: str) -> None:
    tree = scan_push_tree(project)
    if change == "gone":
        (project / "train.py").unlink()
    else:
        (project / "train.py").write_text("x" * (5000 if change == "longer" else 5))
    with node(tmp_path / "node") as link, pytest.raises(TransferError) as caught:
        push_tree_to_node(link, tree, shared=PayloadCache())
    assert caught.value.where == str(project / "train.py")
    assert caught.value.node == "node1"
    assert left_in(tmp_path / "node") == []


def test_a_file_that_changes_and_keeps_its_size_is_found_out_by_its_digest(project: Path, tmp_path: Path) -> None:
    tree = scan_push_tree(project)
    (project / "train.py").write_text("print('HELLO')\n" * 100)
    with (
        node(tmp_path / "node") as link,
        raises(TransferError, "train.py differ") as caught,
    ):
        push_tree_to_node(link, tree, shared=PayloadCache())
    assert caught.value.hint
    assert left_in(tmp_path / "node") == []


def test_a_flipped_bit_on_the_way_is_noticed(project: Path, tmp_path: Path) -> None:
    def flip(data: bytes) -> bytes:
        if data[:1] == frames.BYTES and len(data) > 100_000:
            return data[:50_000] + bytes([data[50_000] ^ 4]) + data[50_001:]
        return data

    with (
        node(tmp_path / "node", spoil=flip) as link,
        pytest.raises(TransferError),  # the compressed stream is damaged, or contents differ
    ):
        push_tree_to_node(link, scan_push_tree(project), shared=PayloadCache())
    assert left_in(tmp_path / "node") == []


def test_a_workdir_that_cannot_be_made_is_the_nodes_error(project: Path, tmp_path: Path) -> None:
    (tmp_path / "node").write_text("a file")
    with node(tmp_path / "node") as link, raises(NodeError, "directory"):
        push_tree_to_node(link, scan_push_tree(project), shared=PayloadCache())


class Scripted(SocketStream):
    """A node that says what it was told to, and does not read."""

    def __init__(self, *messages: dict[str, object], reads: bool = True) -> None:
        self._said = [frames.pack_json(message) for message in messages]
        self._reads = reads

    def read(self, size: int) -> bytes:
        return self._said.pop(0) if self._said else b""

    def write(self, data: bytes) -> None:
        if not self._reads and data[:1] == frames.BYTES:
            raise ConnectError("the command no longer reads", node="node1")


WANT: dict[str, object] = {"op": "push", "state": "want-manifest"}
FULL: dict[str, object] = {"op": "push", "state": "error", "code": "disk-full", "message": "No space left"}


@pytest.mark.parametrize(
    ("messages", "kind", "text"),
    [
        ([FULL], NodeError, "space left"),
        ([{"op": "error", "code": "permission", "message": "no"}], NodeError, "written"),
        ([{"op": "push", "state": "error", "code": "digest", "message": "no"}], TransferError, "push failed"),
        ([{"op": "ready"}], NodeError, "valid"),
        ([WANT, {"op": "push", "state": "need", "indexes": [99]}], TransferError, "tree"),
        ([WANT, {"op": "push", "state": "need", "indexes": ["0"]}], NodeError, "malformed"),
        ([WANT, {"op": "push", "state": "need", "indexes": [0, 0]}], TransferError, "file twice"),
        ([{"op": "push", "state": "have", "path": "/etc"}], TransferError, "code lies"),
        ([WANT], ConnectError, "link lost"),
        ([], ConnectError, "link lost"),
    ],
)
def test_what_a_node_says_becomes_an_error_with_a_class(
    project: Path, messages: list[dict[str, object]], kind: type[Exception], text: str
) -> None:
    with raises(kind, text):
        push_tree_to_node(NodeLink(Scripted(*messages), node="node1"), scan_push_tree(project), shared=PayloadCache())


def test_a_node_that_stops_reading_is_asked_why(project: Path) -> None:
    with raises(NodeError, "disk full") as caught:
        push_tree_to_node(
            NodeLink(Scripted(WANT, FULL, reads=False), node="node1"), scan_push_tree(project), shared=PayloadCache()
        )
    assert caught.value.hint
    with pytest.raises(ConnectError):
        push_tree_to_node(
            NodeLink(Scripted(WANT, reads=False), node="node1"), scan_push_tree(project), shared=PayloadCache()
        )
