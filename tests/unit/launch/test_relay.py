"""Blocks of a push that go from node to node: real servers and TLS, in threads of the test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dtctl.launch.files.push import Payloads, PushResult, push
from dtctl.launch.files.relay import Relay
from dtctl.launch.files.tree import Tree, scan
from dtctl.supervisor import receive, relay
from tests.unit.pushing import listing, node, release

SIZE = 12 << 20


@pytest.fixture(autouse=True)
def _servers_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 1 127.0.0.1 22")
    yield
    receive.stop_serving()
    release()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A tree with one large file, and small ones."""
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "train.py").write_text("print('hello')\n" * 100)
    (root / "pkg" / "empty.py").touch()
    (root / "pkg" / "small.bin").write_bytes(os.urandom(300_000))
    (root / "weights.bin").write_bytes(os.urandom(SIZE + 5))
    return root


def bring_to_all(tree: Tree, folders: list[Path], shared: Payloads) -> tuple[list[PushResult], list[str]]:
    """Push to several nodes at once; what each push did, and all notes."""
    notes: list[str] = []

    def bring(folder: Path) -> PushResult:
        with node(folder) as link:
            return push(link, tree, shared=shared, progress=lambda _, note="": notes.append(note) if note else None)

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(bring, folders)), notes


def test_every_block_leaves_the_control_machine_once(project: Path, tmp_path: Path) -> None:
    folders = [tmp_path / f"node{number}" for number in range(6)]
    results, notes = bring_to_all(scan(project), folders, Payloads(Relay(6)))
    expected = {path: data for path, (_, data) in listing(project).items()}
    for result in results:
        assert {path: data for path, (_, data) in listing(Path(result.path)).items()} == expected
    assert SIZE < sum(result.bytes_sent for result in results) < 1.1 * SIZE
    assert notes == []


def test_few_nodes_and_small_trees_are_sent_as_ever(project: Path, tmp_path: Path) -> None:
    results, _ = bring_to_all(scan(project), [tmp_path / "a", tmp_path / "b"], Payloads(Relay(2)))
    assert all(result.bytes_sent > SIZE for result in results)
    assert not receive._servers


def test_a_changed_block_is_all_that_moves(project: Path, tmp_path: Path) -> None:
    folders = [tmp_path / f"node{number}" for number in range(5)]
    bring_to_all(scan(project), folders, Payloads(Relay(5)))
    with (project / "weights.bin").open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"changed")
    results, _ = bring_to_all(scan(project), folders, Payloads(Relay(5)))
    assert sum(result.bytes_sent for result in results) < 1.1 * relay.BLOCK_BYTES
    for result in results:
        assert Path(result.path, "weights.bin").read_bytes() == (project / "weights.bin").read_bytes()
    again, _ = bring_to_all(scan(project), folders, Payloads(Relay(5)))
    assert {result.bytes_sent for result in again} == {0}


def test_blocks_do_not_depend_on_where_they_are_cut() -> None:
    sizes = [0, 10, relay.BLOCK_BYTES, relay.BLOCK_BYTES - 5, 7, 2 * relay.BLOCK_BYTES + 1]
    blocks = relay.cut(sizes)
    assert all(0 < sum(length for _, _, length in block) <= relay.BLOCK_BYTES for block in blocks)
    covered = [0] * len(sizes)
    for number, offset, length in sorted(segment for block in blocks for segment in block):
        assert offset == covered[number]
        covered[number] += length
    assert covered == sizes
