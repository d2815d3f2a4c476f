"""Blocks of a push that go from node to node: real servers and TLS, in threads of the test."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from dtctl.launch.files.push import PayloadCache, PushResult, push_tree_to_node
from dtctl.launch.files.relay import BlockRelay, make_key_pair
from dtctl.launch.files.tree import FileTree, scan_push_tree
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


def bring_to_all(tree: FileTree, folders: list[Path], shared: PayloadCache) -> tuple[list[PushResult], list[str]]:
    """Push to several nodes at once; what each push did, and all notes."""
    notes: list[str] = []

    def bring(folder: Path) -> PushResult:
        with node(folder) as link:
            link.node = folder.name
            return push_tree_to_node(
                link, tree, shared=shared, progress=lambda _got, _of, note="": notes.append(note) if note else None
            )

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(bring, folders)), notes


def test_every_block_leaves_the_control_machine_once(project: Path, tmp_path: Path) -> None:
    folders = [tmp_path / f"node{number}" for number in range(6)]
    results, notes = bring_to_all(scan_push_tree(project), folders, PayloadCache(BlockRelay(6)))
    expected = {path: data for path, (_, data) in listing(project).items()}
    for result in results:
        assert {path: data for path, (_, data) in listing(Path(result.path)).items()} == expected
    assert SIZE < sum(result.bytes_sent for result in results) < 1.1 * SIZE
    assert notes == []


def test_few_nodes_and_small_trees_are_sent_as_ever(project: Path, tmp_path: Path) -> None:
    results, _ = bring_to_all(scan_push_tree(project), [tmp_path / "a", tmp_path / "b"], PayloadCache(BlockRelay(2)))
    assert all(result.bytes_sent > SIZE for result in results)
    assert not receive._servers


def test_a_changed_block_is_all_that_moves(project: Path, tmp_path: Path) -> None:
    folders = [tmp_path / f"node{number}" for number in range(5)]
    bring_to_all(scan_push_tree(project), folders, PayloadCache(BlockRelay(5)))
    with (project / "weights.bin").open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"changed")
    results, _ = bring_to_all(scan_push_tree(project), folders, PayloadCache(BlockRelay(5)))
    assert sum(result.bytes_sent for result in results) < 1.1 * relay.BLOCK_BYTES
    for result in results:
        assert Path(result.path, "weights.bin").read_bytes() == (project / "weights.bin").read_bytes()
    again, _ = bring_to_all(scan_push_tree(project), folders, PayloadCache(BlockRelay(5)))
    assert {result.bytes_sent for result in again} == {0}


def test_blocks_do_not_depend_on_where_they_are_cut() -> None:
    sizes = [0, 10, relay.BLOCK_BYTES, relay.BLOCK_BYTES - 5, 7, 2 * relay.BLOCK_BYTES + 1]
    blocks = relay.split_file_blocks(sizes)
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
    blocks = relay.split_file_blocks([len(contents)])
    digests = [hashlib.sha256(contents[start : start + length]).digest() for [(_, start, length)] in blocks]
    fd = os.open(folder, os.O_RDONLY)
    try:
        return relay.BlockFiles(fd, [b"file"], blocks, digests), digests
    finally:
        os.close(fd)


def make_both_keys(kind: str, folder: Path) -> tuple[relay.Context, relay.FetchKeys]:
    """What the serving and the fetching end of a new push have."""
    certificate, key = make_key_pair()
    if kind == "tls":
        serving, fetching = relay.make_contexts(certificate, key, str(folder))
    else:
        serving = fetching = relay.make_hmac_context(key)
    return serving, (fetching, relay.make_ticket_key(key))


@pytest.fixture(params=["tls", "hmac"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """A server that has all blocks of a file."""
    contents = os.urandom(SIZE)
    serving, keys = make_both_keys(request.param, tmp_path)
    files, digests = files_of(tmp_path / "serving", contents)
    for number, digest in enumerate(digests):
        start = number * relay.BLOCK_BYTES
        assert files.write(digest, memoryview(contents)[start : start + relay.BLOCK_BYTES])
    server = relay.BlockServer(files, serving, keys[1])
    yield Served(request.param, server, files, digests, keys, contents, tmp_path / "fetched")
    server.close()


@dataclass
class Served:
    """A server, and what fetches from it."""

    kind: str
    server: relay.BlockServer
    files: relay.BlockFiles
    digests: list[bytes]
    keys: relay.FetchKeys
    contents: bytes
    folder: Path

    def fetch(self, keys: relay.FetchKeys | None = None, port: int = 0) -> list[bytes]:
        """Fetch all blocks into a folder; the names of those that came."""
        files, _ = files_of(self.folder, self.contents)
        port = port or self.server.port
        done = list(relay.fetch_node_blocks(files, self.digests, "127.0.0.1", port, keys or self.keys))
        assert (self.folder / "file").read_bytes() == self.contents
        return done

    def forget(self) -> None:
        """Remove what was fetched."""
        (self.folder / "file").unlink()
        self.folder.rmdir()

    def prove(self, sock: socket.socket) -> relay.ProvenSocket:
        """The same connection, on which both ends have proven that they are of the run."""
        sock.sendall(relay.make_ticket(self.keys[1]))
        secure = self.keys[0].wrap_socket(sock, do_handshake_on_connect=False)
        secure.do_handshake()
        return secure

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=20)


def test_a_node_of_another_run_gets_nothing(served: Served, tmp_path: Path) -> None:
    _, foreign = make_both_keys(served.kind, tmp_path)
    for keys in (foreign, (foreign[0], served.keys[1])):  # also with a ticket that it has stolen
        with pytest.raises(relay.SourceFailed) as caught:
            served.fetch(keys)
        assert caught.value.code == "lost"
        served.forget()
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # accepts every server, and has no certificate
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    received = b""
    with contextlib.suppress(OSError), served.connect() as sock:
        sock.sendall(relay.make_ticket(served.keys[1]))
        with without.wrap_socket(sock) as secure:
            secure.sendall(served.digests[0])
            received = secure.recv(1)
    assert received == b""
    assert served.fetch() == served.digests


def test_strangers_do_not_keep_nodes_of_the_run_out(served: Served) -> None:
    strangers = [served.connect() for _ in range(300)]
    for sock in strangers[::2]:
        with contextlib.suppress(OSError):
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n" + os.urandom(100))
    assert served.fetch() == served.digests
    assert len(served.server._strangers) <= relay.STRANGERS
    assert len(served.server._threads) <= 2, "strangers have none"
    for sock in strangers:
        sock.close()


def test_a_stranger_that_says_nothing_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(relay, "TICKET_S", 0.3)
    with served.connect() as sock:
        assert sock.recv(1) == b""
    with served.connect() as sock:  # that has a ticket
        sock.sendall(relay.make_ticket(served.keys[1]))
        assert sock.recv(1) == b""
    wait_until(lambda: not served.server._strangers and not served.server._places, what="its place is free")


def test_a_ticket_that_was_overheard_opens_nothing(served: Served) -> None:
    ticket = relay.make_ticket(served.keys[1])
    with served.connect() as first, served.connect() as second:
        first.sendall(ticket)
        wait_until(lambda: served.server._places, what="it has a place")
        second.sendall(ticket)
        assert second.recv(1) == b""
        assert len(served.server._places) == 1


def test_a_stranger_that_dribbles_is_dropped(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HANDSHAKE_S", 0.5)
    hello = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="x").do_handshake()
    data, sent = hello.read() if served.kind == "tls" else bytes(32 + 4 + 31), 0
    with served.connect() as sock, contextlib.suppress(OSError):
        sock.sendall(relay.make_ticket(served.keys[1]))
        while sent < len(data) and not select.select([sock], [], [], 0.1)[0]:
            sock.sendall(data[sent : sent + 1])  # well before each wait is over
            sent += 1
    assert sent < min(60, len(data)), "it was waited for"
    wait_until(lambda: not served.server._places, what="its place is free")


def test_garbage_of_a_proven_node_ends_its_connection_alone(served: Served) -> None:
    with served.connect() as sock, served.prove(sock) as secure:
        secure.sendall(os.urandom(32))
        assert secure.recv(1) == b""
    assert served.fetch() == served.digests


def test_a_slow_reader_is_dropped_and_keeps_nobody_waiting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "SLOW_READER_S", 0.5)
    with served.connect() as sock, served.prove(sock) as secure:
        for digest in served.digests * 20:  # far more than fits into the kernel's buffers
            secure.sendall(digest)
        assert served.fetch() == served.digests
        wait_until(lambda: not served.server._places, what="it is dropped")


def test_a_block_is_served_as_soon_as_it_is_there(served: Served, tmp_path: Path) -> None:
    files, digests = files_of(tmp_path / "later", served.contents)
    server = relay.BlockServer(files, served.server._context, served.keys[1])
    last, _ = files_of(tmp_path / "last", served.contents)
    waiting = relay.fetch_node_blocks(last, digests, "127.0.0.1", server.port, served.keys)
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
    tree, shared = scan_push_tree(project), PayloadCache(BlockRelay(6))
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
    tree, shared = scan_push_tree(project), PayloadCache(BlockRelay(6))
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
    nodes, notes = BlockRelay(6), list[str]()
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
        scan_push_tree(project), [tmp_path / f"node{number}" for number in range(5)], PayloadCache(BlockRelay(5))
    )
    assert all(result.bytes_sent > SIZE for result in results)
    assert notes == ["the nodes cannot reach each other: each gets the files from here"]


def test_nodes_without_ssl_pass_blocks_on_with_an_hmac(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ssl", None)  # as in a Python that was built without OpenSSL
    folders = [tmp_path / f"bare{number}" for number in range(5)]
    results, notes = bring_to_all(scan_push_tree(project), folders, PayloadCache(BlockRelay(5)))
    for result in results:
        assert Path(result.path, "weights.bin").read_bytes() == (project / "weights.bin").read_bytes()
    assert SIZE < sum(result.bytes_sent for result in results) < 1.1 * SIZE
    assert len(notes) == 1, "one line, however many nodes"
    assert "has a Python without ssl: such nodes pass files on to each other unencrypted, with an HMAC" in notes[0]


def test_nodes_with_and_without_ssl_do_not_fetch_from_each_other() -> None:
    nodes, notes = BlockRelay(6), list[str]()
    members = [
        nodes.join(f"gpu{number}", PushState(state="blocks", address="10.0.0.1", port=9, code=code), notes.append)
        for number, code in enumerate(["", "no-ssl", "", "no-ssl"])
    ]
    assert [nodes.choose_source(member) for member in members] == [None, None, members[0], members[1]]


class Wire:
    """A stranger on the way between a server and a node: hands everything on, and may change what the server sends."""

    def __init__(self, port: int, change: Callable[[int, bytes], bytes]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target, self._change = port, change
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        ours, _ = self._listener.accept()
        with ours, socket.create_connection(("127.0.0.1", self._target)) as theirs:
            other = threading.Thread(target=self._copy, args=(ours, theirs, lambda _, data: data), daemon=True)
            other.start()
            self._copy(theirs, ours, self._change)
            other.join(20)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, change: Callable[[int, bytes], bytes]) -> None:
        done = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(change(done, data))
                done += len(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self._threads[0].join(20)


@pytest.mark.parametrize("flip_at", [0, 40, 5_000_000])
def test_what_is_changed_on_the_way_is_no_lie_of_the_node(served: Served, flip_at: int) -> None:
    """In the handshake, at its end, and within a block: the connection is lost, and no node is blamed."""

    def flip(done: int, data: bytes) -> bytes:
        at = flip_at - done
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if 0 <= at < len(data) else data

    wire = Wire(served.server.port, flip)
    try:
        with pytest.raises(relay.SourceFailed) as caught:
            served.fetch(port=wire.port)
    finally:
        wire.close()
    assert caught.value.code == "lost"
    served.forget()
    assert served.fetch() == served.digests


@pytest.mark.parametrize("served", ["hmac"], indirect=True)
def test_what_was_recorded_without_tls_proves_nothing(served: Served) -> None:
    """A stranger repeats all that a node has sent; the server's nonce is another one."""
    said: list[bytes] = []
    wire = Wire(served.server.port, lambda _, data: data)
    copy = wire._copy

    def record(source: socket.socket, target: socket.socket, change: Callable[[int, bytes], bytes]) -> None:
        is_of_node = target.getpeername()[1] == served.server.port
        copy(source, target, lambda _, data: said.append(data) or data if is_of_node else data)

    wire._copy = record  # type: ignore[method-assign]
    try:
        served.fetch(port=wire.port)
    finally:
        wire.close()
    received = b""
    with contextlib.suppress(OSError), served.connect() as sock:
        sock.sendall(b"".join(said))
        while data := sock.recv(1 << 16):
            received += data
    assert len(b"".join(said)) > 48 + 32 + 4 + 32, "ticket, proof and requests"
    assert received == b"", "the ticket was used"
    received = b""
    with contextlib.suppress(OSError), served.connect() as sock:  # which has a ticket of its own
        sock.sendall(relay.make_ticket(served.keys[1]) + b"".join(said)[48:])
        while data := sock.recv(1 << 16):
            received += data
    assert len(received) == 32, "the nonce and nothing else"
