"""Blocks of a push that go from node to node: real servers and TLS, in threads of the test."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtctl.launch.files.push import Payloads, PushResult, push
from dtctl.launch.files.relay import Relay, make_key_pair
from dtctl.launch.files.tree import Tree, scan
from dtctl.supervisor import receive, relay
from dtctl.supervisor.messages.setup import PushState
from tests.hosts import wait_until
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
            link.node = folder.name
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


def files_of(folder: Path, contents: bytes) -> tuple[relay.BlockFiles, list[bytes]]:
    """One file of these contents that is not written yet, and the names of its blocks."""
    folder.mkdir()
    path = folder / "file"
    path.touch()
    os.truncate(path, len(contents))
    blocks = relay.cut([len(contents)])
    digests = [hashlib.sha256(contents[start : start + length]).digest() for [(_, start, length)] in blocks]
    fd = os.open(folder, os.O_RDONLY)
    try:
        return relay.BlockFiles(fd, [b"file"], blocks, digests), digests
    finally:
        os.close(fd)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server that has all blocks of a file."""
    contents = os.urandom(SIZE)
    serving, fetching = relay.make_contexts(*make_key_pair(), str(tmp_path))
    files, digests = files_of(tmp_path / "serving", contents)
    for number, digest in enumerate(digests):
        start = number * relay.BLOCK_BYTES
        assert files.write(digest, memoryview(contents)[start : start + relay.BLOCK_BYTES])
    server = relay.BlockServer(files, serving)
    yield Served(server, files, digests, fetching, contents, tmp_path / "fetched")
    server.close()


@dataclass
class Served:
    """A server, and what fetches from it."""

    server: relay.BlockServer
    files: relay.BlockFiles
    digests: list[bytes]
    fetching: ssl.SSLContext
    contents: bytes
    folder: Path

    def fetch(self, context: ssl.SSLContext | None = None) -> list[bytes]:
        """Fetch all blocks into a folder; the names of those that came."""
        files, _ = files_of(self.folder, self.contents)
        done = list(relay.fetch(files, self.digests, "127.0.0.1", self.server.port, context or self.fetching))
        assert (self.folder / "file").read_bytes() == self.contents
        return done

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=20)


def test_a_node_of_another_run_gets_nothing(served: Served, tmp_path: Path) -> None:
    _, foreign = relay.make_contexts(*make_key_pair(), str(tmp_path))
    with pytest.raises(relay.SourceFailed) as caught:
        served.fetch(foreign)
    assert caught.value.code == "lost"
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # accepts every server, and has no certificate
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    received = b""
    with contextlib.suppress(OSError), served.connect() as sock, without.wrap_socket(sock) as secure:
        secure.sendall(served.digests[0])
        received = secure.recv(1)
    assert received == b""
    served.folder.joinpath("file").unlink()
    served.folder.rmdir()
    assert served.fetch() == served.digests


def test_strangers_do_not_keep_nodes_of_the_run_out(served: Served) -> None:
    strangers = [served.connect() for _ in range(3 * relay.UNPROVEN)]
    for sock in strangers[::2]:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n" + os.urandom(100))
    assert served.fetch() == served.digests
    assert len(served.server._unproven) <= relay.UNPROVEN_OF_ADDRESS
    for sock in strangers:
        sock.close()


def test_a_stranger_that_says_nothing_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HANDSHAKE_S", 0.3)
    with served.connect() as sock:
        assert sock.recv(1) == b""
    wait_until(lambda: not served.server._unproven, what="its place is free")


def test_a_stranger_that_dribbles_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HANDSHAKE_S", 0.5)
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        served.fetching.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    data, sent = hello.read(), 0
    with served.connect() as sock, contextlib.suppress(OSError):
        while sent < len(data) and not select.select([sock], [], [], 0.1)[0]:
            sock.sendall(data[sent : sent + 1])  # well before each wait is over
            sent += 1
    assert sent < min(100, len(data)), "it was waited for"
    wait_until(lambda: not served.server._unproven, what="its place is free")


def test_garbage_of_a_proven_node_ends_its_connection_alone(served: Served) -> None:
    with served.connect() as sock, served.fetching.wrap_socket(sock) as secure:
        secure.sendall(os.urandom(32))
        assert secure.recv(1) == b""
    assert served.fetch() == served.digests


def test_a_slow_reader_is_dropped_and_keeps_nobody_waiting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SLOW_READER_S", 0.5)
    with served.connect() as sock, served.fetching.wrap_socket(sock) as secure:
        for digest in served.digests * 20:  # far more than fits into the kernel's buffers
            secure.sendall(digest)
        assert served.fetch() == served.digests
        wait_until(lambda: not served.server._proven, what="it is dropped")


def test_a_block_is_served_as_soon_as_it_is_there(served: Served, tmp_path: Path) -> None:
    files, digests = files_of(tmp_path / "later", served.contents)
    server = relay.BlockServer(files, served.server._context)
    last, _ = files_of(tmp_path / "last", served.contents)
    waiting = relay.fetch(last, digests, "127.0.0.1", server.port, served.fetching)
    try:
        for number, digest in enumerate(digests):
            files.write(digest, memoryview(served.contents)[number * relay.BLOCK_BYTES :][: relay.BLOCK_BYTES])
            assert next(waiting) == digest  # while the next one is not there
    finally:
        server.close()
    assert not server._threads


def test_a_node_that_lies_about_a_block_is_named(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, shared = scan(project), Payloads(Relay(6))
    bring_to_all(tree, [tmp_path / "liar"], shared)
    [server] = receive._servers
    honest = server._files.read
    lies = b""

    def lie(digest: bytes) -> bytes:
        nonlocal lies
        lies = lies or digest
        data = honest(digest)
        return data[:-1] + bytes([data[-1] ^ 1]) if digest == lies else data

    monkeypatch.setattr(server._files, "read", lie)
    results, notes = bring_to_all(tree, [tmp_path / f"node{number}" for number in range(4)], shared)
    for result in results:
        assert Path(result.path, "weights.bin").read_bytes() == (project / "weights.bin").read_bytes()
    assert any("liar sent node" in note and lies.hex()[:12] in note for note in notes), notes
    assert sum(result.bytes_sent for result in results) < 1.2 * SIZE  # once from here instead


def test_relays_that_go_away_are_replaced(project: Path, tmp_path: Path) -> None:
    tree, shared = scan(project), Payloads(Relay(6))
    bring_to_all(tree, [tmp_path / "first", tmp_path / "second"], shared)
    for server in receive._servers:
        server._listener.close()
    receive._servers[0].close()
    results, notes = bring_to_all(tree, [tmp_path / f"node{number}" for number in range(4)], shared)
    for result in results:
        assert Path(result.path, "weights.bin").read_bytes() == (project / "weights.bin").read_bytes()
    assert sum(result.bytes_sent for result in results) <= 4 * 1.1 * SIZE
    sources = [note.partition(" from ")[2].partition(":")[0] for note in notes]
    # Connections that the kernel had accepted for them may be lost later than refused ones: then one note for each
    # relay, however many nodes lost theirs.
    assert len(set(sources)) == len(sources), notes
    assert set(sources) <= {"first", "second"}, notes


def test_a_relay_that_goes_away_is_reported_once() -> None:
    nodes, notes = Relay(6), list[str]()
    members = [
        nodes.join(f"gpu{number}", PushState(state="blocks", address="10.0.0.1", port=9), notes.append)
        for number in range(3)
    ]
    for member in members[1:]:
        assert nodes.choose_source(member) is members[0]
    for member in members[1:]:
        nodes.fail(
            member, PushState(state="source-failed", code="lost", message="it closed the connection"), notes.append
        )
    assert notes == ["gpu1 no longer gets blocks from gpu0: 'it closed the connection'"]


def test_nodes_that_cannot_reach_each_other_are_told_in_one_line(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", "127.0.0.1 1 127.255.255.254 22")
    monkeypatch.setattr(relay, "CONNECT_S", 0.2)
    create = socket.create_connection

    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        return create((address[0], 1), timeout)  # where nobody listens, as behind a firewall that rejects

    monkeypatch.setattr(relay.socket, "create_connection", refuse)
    results, notes = bring_to_all(
        scan(project), [tmp_path / f"node{number}" for number in range(5)], Payloads(Relay(5))
    )
    assert all(result.bytes_sent > SIZE for result in results)
    assert notes == ["the nodes cannot reach each other: each gets the files from here"]


def test_a_node_without_ssl_is_told_of(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise ImportError

    monkeypatch.setattr(relay, "make_contexts", none)
    results, notes = bring_to_all(scan(project), [tmp_path / "bare"], Payloads(Relay(5)))
    assert results[0].bytes_sent > SIZE
    assert notes == ["bare gets the files from here and not from other nodes: its Python has no ssl"]
