"""Exchange of a push's blocks between nodes: each node serves its blocks to nodes of the same run. Stdlib, Python 3.8.

The control machine assigns fetching to serving nodes (dtctl/launch/files/relay.py). Both ends of a connection prove
that they belong to the run by its certificate, or, if Python has no ssl, by an HMAC (hmac_socket.py). A request is the
SHA-256 of a block; the answer is the block's length and bytes, preceded by a heartbeat every second until the serving
node has the block. Only blocks with the right digest are written.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import threading
import time
import weakref

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Iterator, Sequence
    from typing import Tuple, Union

    from dtctl.supervisor.hmac_socket import HmacContext, HmacSocket

    Context = Union[ssl.SSLContext, HmacContext]
    FetchKeys = Tuple[Context, bytes]
    ProvenSocket = Union[ssl.SSLSocket, HmacSocket]

BLOCK_BYTES = 4 << 20
LENGTH = struct.Struct("!I")
WAITING = LENGTH.pack(0xFFFFFFFF)
"""Heartbeat in place of a length from a node that does not have the block yet."""
WAITING_S = 1.0
CONNECT_S = 5.0
"""Seconds for a connection: the kernel tries again after one and three seconds, if the other end's queue was full."""
CONNECT_ATTEMPTS = 3
SILENCE_S = 6.0
"""Seconds without a byte from a serving node after which it counts as lost."""
STALL_S = 120.0
"""Seconds without a block from a living node after which another source is requested."""
SLOW_READER_S = 20.0
"""Seconds without an accepted byte after which a node is no longer served; it may connect again."""
AHEAD = 2
"""Number of blocks that are requested at a time, so that the connection between two nodes is never idle."""
HANDSHAKE_S = 5.0
STRANGERS = 256
"""Most connections that have not sent a ticket yet; one more closes the oldest."""
TICKET_S = 5.0
"""Seconds in which a new connection has to send its ticket."""
PLACES = 64
"""Most connections of nodes of the run."""
BACKLOG = 1024
"""Most connections that the kernel queues until they are accepted, up to its own limit (net.core.somaxconn)."""
NONCE_BYTES, TICKET_BYTES = 16, 48
PACE_BYTES = 4 * BLOCK_BYTES
"""Bytes by which the speed of a link is measured before a limit that is a share of this speed applies."""
PACE_LEAST = 4 << 20
"""Bytes per second that a limit always allows."""


class SourceFailed(Exception):
    """A node did not serve a block; `code` is unreachable, digest or lost."""

    def __init__(self, code: str, text: str) -> None:
        """Store the code and the text of the failure."""
        super().__init__(text)
        self.code = code


def split_file_blocks(sizes: Iterable[int]) -> list[list[tuple[int, int, int]]]:
    """Cut files into blocks, which are the same on both ends.

    Args:
        sizes: sizes of the files in bytes.

    Returns:
        Segments of each block as (number of the file, offset, length). Small files share a block.
    """
    blocks: list[list[tuple[int, int, int]]] = []
    pack: list[tuple[int, int, int]] = []
    room = BLOCK_BYTES
    for number, size in enumerate(sizes):
        if size >= BLOCK_BYTES:
            blocks += [[(number, offset, min(BLOCK_BYTES, size - offset))] for offset in range(0, size, BLOCK_BYTES)]
        elif size:
            if size > room:
                blocks.append(pack)
                pack, room = [], BLOCK_BYTES
            pack.append((number, 0, size))
            room -= size
    return [*blocks, pack] if pack else blocks


class BlockFiles:
    """Files that are written block by block in any order, and read by other threads meanwhile."""

    def __init__(
        self,
        folder: int,
        paths: Sequence[bytes],
        blocks: Sequence[list],  # type: ignore[type-arg]
        digests: Sequence[bytes],
        *,
        are_whole: bool = False,
    ) -> None:
        """Set the layout of the files.

        Args:
            folder: descriptor of the folder, of which a duplicate is kept.
            paths: paths of the files in the folder, which exist.
            blocks: blocks as `split_file_blocks` returns them.
            digests: SHA-256 of each block.
            are_whole: whether the files are complete and only read.
        """
        self._folder = os.dup(folder)
        weakref.finalize(self, os.close, self._folder)  # A thread may still read during `close`.
        self._paths = paths
        self._segments: dict[bytes, list] = {}  # type: ignore[type-arg]
        for digest, segments in zip(digests, blocks):  # noqa: B905 - Python 3.8 has no strict
            self._segments.setdefault(digest, []).append(segments)  # Blocks may have equal contents.
        self._have: set[bytes] = set(digests) if are_whole else set()
        self._news = threading.Condition()
        self._closed = False

    def has_digest(self, digest: bytes) -> bool:
        """Return whether a block belongs to these files."""
        return digest in self._segments

    def has(self, digest: bytes) -> bool:
        """Return whether a block has been written."""
        return digest in self._have

    def size(self, digest: bytes) -> int:
        """Return the number of bytes of a block."""
        return sum(length for _, _, length in self._segments[digest][0])

    def write(self, digest: bytes, data: memoryview) -> bool:
        """Write a block to all its places; return False without writing if the digest does not match."""
        if len(data) != self.size(digest) or hashlib.sha256(data).digest() != digest:
            return False
        for segments in self._segments[digest]:
            start = 0
            for number, offset, length in segments:
                fd = os.open(self._paths[number], os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
                try:
                    done = 0
                    while done < length:
                        done += os.pwrite(fd, data[start + done : start + length], offset + done)
                finally:
                    os.close(fd)
                start += length
        with self._news:
            self._have.add(digest)
            self._news.notify_all()
        return True

    def read(self, digest: bytes) -> bytes:
        """Return the contents of a written block.

        Raises:
            OSError: the block cannot be read.
        """
        parts = []
        for number, offset, length in self._segments[digest][0]:
            fd = os.open(self._paths[number], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
            try:
                parts.append(os.pread(fd, length, offset))
            finally:
                os.close(fd)
        return b"".join(parts)

    def wait(self, digest: bytes, timeout_s: float) -> bool:
        """Wait until a block has been written; return whether it has."""
        with self._news:
            self._news.wait_for(lambda: digest in self._have or self._closed, timeout_s)
        return digest in self._have

    def is_closed(self) -> bool:
        """Return whether no more blocks are served."""
        return self._closed

    def close(self) -> None:
        """Release all waiting threads."""
        with self._news:
            self._closed = True
            self._news.notify_all()


class RateLimiter:
    """Limit of a transfer's speed to a share of the speed that was measured at its beginning."""

    def __init__(self, share: float) -> None:
        """Set the share of the link's speed that may be used, up to 1, which means no limit."""
        self._share = share
        self._begun = time.monotonic()
        self._seen_bytes = 0
        self._paced_bytes = 0
        self._paced_from = 0.0
        self._rate = 0.0

    def wait(self, size_bytes: int) -> None:
        """Add a number of bytes, and wait as long as the limit requires."""
        if self._share >= 1:
            return
        now = time.monotonic()
        if not self._rate:
            self._seen_bytes += size_bytes
            if self._seen_bytes >= PACE_BYTES:
                speed = self._seen_bytes / max(1e-6, now - self._begun)
                self._rate, self._paced_from = max(PACE_LEAST, self._share * speed), now
            return
        self._paced_bytes += size_bytes
        time.sleep(max(0.0, self._paced_from + self._paced_bytes / self._rate - now))


def make_contexts(certificate: str, key: str, folder: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of the serving and of the fetching end; both present and require the run's certificate.

    Args:
        certificate: certificate of the run as PEM.
        key: private key of the certificate as PEM.
        folder: private folder for a file that is removed at once, if the kernel does not support files without a name.

    Raises:
        ImportError: this Python has no ssl.
    """
    import ssl

    if hasattr(os, "memfd_create"):
        fd, name = os.memfd_create("dtctl"), ""
        path = f"/proc/self/fd/{fd}"
    else:
        import tempfile

        fd, name = tempfile.mkstemp(dir=folder)  # The file has mode 0600.
        path = name
    try:
        os.write(fd, (key + certificate).encode())
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.check_hostname = False  # The certificate is that of the run and names no hosts.
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(path)
            context.load_verify_locations(cadata=certificate)
            contexts.append(context)
    finally:
        os.close(fd)
        if name:
            os.unlink(name)
    return contexts[0], contexts[1]


def make_hmac_context(key: str) -> HmacContext:
    """Return the context that replaces both TLS contexts if Python has no ssl.

    Args:
        key: private key of the run as PEM, which only its nodes have.
    """
    from dtctl.supervisor.hmac_socket import HmacContext

    return HmacContext(hashlib.sha256(key.encode()).digest())


def make_ticket_key(key: str) -> bytes:
    """Return the key of the tickets with which connections begin.

    A ticket proves with the first bytes, by one HMAC, that a connection comes from a node of the run. Without a ticket,
    a connection gets neither to TLS nor one of the `PLACES`; TLS then decides whether it gets blocks.

    Args:
        key: private key of the run as PEM.
    """
    return hmac.new(key.encode(), b"ticket", "sha256").digest()


def make_ticket(ticket_key: bytes) -> bytes:
    """Return a ticket, which can be used once."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + _compute_ticket_tag(ticket_key, nonce)


def _compute_ticket_tag(ticket_key: bytes, nonce: bytes) -> bytes:
    return hmac.new(ticket_key, nonce, "sha256").digest()


class BlockServer:
    """Server of blocks for nodes that prove that they belong to the run."""

    def __init__(self, files: BlockFiles, context: Context, ticket_key: bytes) -> None:
        """Listen on a port that the kernel chooses.

        Args:
            files: files whose blocks are served.
            context: context of the serving end.
            ticket_key: key from `make_ticket_key`.
        """
        self._files = files
        self._context = context
        self._ticket_key = ticket_key
        self._used_tickets: set[bytes] = set()
        self._lock = threading.Lock()
        self._strangers: dict[int, tuple[socket.socket, float, bytearray]] = {}
        """Connections without a ticket, their deadlines, and the bytes that they have sent, by descriptor, oldest
        first. They have no thread and no TLS, so they cost little."""
        self._places: set[socket.socket] = set()
        """Connections that have sent a ticket."""
        self._threads: set[threading.Thread] = set()
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(("", 0))
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._start_relay_thread(self._receive_tickets, ())

    def close(self) -> None:
        """Stop serving, and wait until all threads have ended."""
        self._files.close()
        with self._lock:
            sockets = [self._listener, *self._places]
        for sock in sockets:
            _shut_down_socket(sock)
        for thread in list(self._threads):
            if thread.is_alive():
                thread.join(2 * WAITING_S)
        self._listener.close()

    def _start_relay_thread(self, function, arguments: tuple) -> None:  # type: ignore[no-untyped-def, type-arg]
        thread = threading.Thread(target=self._run_relay_thread, args=(function, arguments), name="relay", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # The limit of threads is reached.
            self._threads.discard(thread)
            raise

    def _run_relay_thread(self, function, arguments: tuple) -> None:  # type: ignore[no-untyped-def, type-arg]
        try:
            function(*arguments)
        finally:
            self._threads.discard(threading.current_thread())

    def _receive_tickets(self) -> None:
        """Accept connections, start a thread for those with a ticket, and close the others."""
        with select.epoll() as poll:
            poll.register(self._listener, select.EPOLLIN)
            while not self._files.is_closed():
                for fd, _ in poll.poll(WAITING_S):
                    if fd == self._listener.fileno():
                        self._accept_strangers(poll)
                    elif fd in self._strangers:
                        self._read_ticket(fd, poll)
                now = time.monotonic()
                for fd in [fd for fd, (_, deadline, _) in self._strangers.items() if deadline < now]:
                    self._strangers.pop(fd)[0].close()
        for sock, _, _ in self._strangers.values():
            sock.close()
        self._strangers.clear()

    def _accept_strangers(self, poll: select.epoll) -> None:
        for _ in range(STRANGERS // 4):  # limited, so that known connections are read soon
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                time.sleep(0 if self._files.is_closed() else 0.1)  # The limit of descriptors is reached.
                return
            sock.setblocking(False)
            if len(self._strangers) >= STRANGERS:  # Nodes send tickets at once, so the oldest is no node.
                oldest = next(iter(self._strangers))
                self._read_ticket(oldest, poll)
                if oldest in self._strangers:
                    self._strangers.pop(oldest)[0].close()
            self._strangers[sock.fileno()] = (sock, time.monotonic() + TICKET_S, bytearray())
            poll.register(sock, select.EPOLLIN)

    def _read_ticket(self, fd: int, poll: select.epoll) -> None:
        sock, _, ticket = self._strangers[fd]
        try:
            more = sock.recv(TICKET_BYTES - len(ticket))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        ticket += more
        if more and len(ticket) < TICKET_BYTES:
            return
        del self._strangers[fd]
        poll.unregister(fd)  # From now on, the connection's own thread reads.
        nonce, tag = bytes(ticket[:NONCE_BYTES]), bytes(ticket[NONCE_BYTES:])
        is_known = hmac.compare_digest(tag, _compute_ticket_tag(self._ticket_key, nonce))
        if not is_known or nonce in self._used_tickets or len(self._places) >= PLACES:
            sock.close()
            return
        self._used_tickets.add(nonce)  # A recorded ticket cannot be used again.
        sock.setblocking(True)
        try:
            # This call reads no byte. Later calls have to close this socket: `sock` has lost its descriptor.
            secure = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:  # The other end has closed already.
            sock.close()
            return
        with self._lock:
            self._places.add(secure)
        try:
            self._start_relay_thread(self._serve_connection, (secure,))
        except RuntimeError:
            with self._lock:
                self._places.discard(secure)
            secure.close()

    def _serve_connection(self, secure: ProvenSocket) -> None:
        try:
            with secure:
                shake_hands(secure, HANDSHAKE_S)
                self._send_requested_blocks(secure)
        except OSError:  # This includes the errors of ssl.
            pass  # The other end does not belong to the run, has closed, or does not read.
        finally:
            with self._lock:
                self._places.discard(secure)

    def _send_requested_blocks(self, sock: ProvenSocket) -> None:
        while True:
            sock.settimeout(STALL_S)  # Between requests, a node may wait for its disk.
            digest = receive_exactly(sock, 32)
            sock.settimeout(SLOW_READER_S)
            if digest is None or not self._files.has_digest(digest):
                return
            while not self._files.wait(digest, WAITING_S):
                if self._files.is_closed():
                    return
                sock.sendall(WAITING)
            data = memoryview(self._files.read(digest))
            sock.sendall(LENGTH.pack(len(data)))
            for start in range(0, len(data), 1 << 18):  # The time limit applies to each piece.
                sock.sendall(data[start : start + (1 << 18)])


def fetch_node_blocks(
    files: BlockFiles, digests: Sequence[bytes], address: str, port: int, keys: FetchKeys
) -> Iterator[bytes]:
    """Fetch blocks from a node in order and write them; yield the digest of each block once it is written.

    Args:
        files: files to which the blocks are written.
        digests: digests of the blocks.
        address: address of the node.
        port: port of the node's server.
        keys: context of the fetching end, and the key of tickets.

    Raises:
        SourceFailed: the node does not serve the blocks.
    """
    with _connect_to_node(address, port, keys) as secure:
        try:
            secure.settimeout(SILENCE_S)
            secure.sendall(b"".join(digests[:AHEAD]))
        except OSError as exc:
            raise SourceFailed("lost", f"{address}:{port}: {exc}") from exc
        for number, digest in enumerate(digests):
            try:
                data = _receive_block(secure, files.size(digest))
                secure.sendall(b"".join(digests[number + AHEAD : number + AHEAD + 1]))
            except OSError as exc:
                raise SourceFailed("lost", f"{address}:{port}: {exc}") from exc
            if data is None or not files.write(digest, data):
                raise SourceFailed("digest", f"block {digest.hex()[:12]} is not what its name says")
            yield digest


def _connect_to_node(address: str, port: int, keys: FetchKeys) -> ProvenSocket:
    """Return a connection on which both ends have proven that they belong to the run.

    Raises:
        SourceFailed: the connection cannot be made.
    """
    context, ticket_key = keys
    for attempt in range(CONNECT_ATTEMPTS):
        try:
            sock = socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError as exc:
            raise SourceFailed("unreachable", f"{address}:{port}: {exc}") from exc
        try:
            sock.sendall(make_ticket(ticket_key))
            sock = context.wrap_socket(sock, do_handshake_on_connect=False)
            shake_hands(sock, HANDSHAKE_S)
            return sock
        except OSError as exc:
            sock.close()
            if attempt + 1 == CONNECT_ATTEMPTS:  # Before that, other connections may have displaced it.
                raise SourceFailed("lost", f"{address}:{port}: {exc}") from exc
    raise AssertionError("unreachable")


def shake_hands(secure: ProvenSocket, limit_s: float) -> None:
    """Let both ends prove that they belong to the run, within a limit for the whole handshake.

    Raises:
        OSError: the other end does not belong to the run, or the time limit has passed.
    """
    limit = threading.Timer(limit_s, _shut_down_socket, (secure,))
    limit.daemon = True
    limit.start()
    try:
        secure.settimeout(limit_s)
        secure.do_handshake()
        secure.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    finally:
        limit.cancel()


def _receive_block(sock: ProvenSocket, size: int) -> memoryview | None:
    """Return the bytes of the next block; None if its size is wrong.

    Raises:
        OSError: the block does not arrive.
    """
    deadline = time.monotonic() + STALL_S
    while True:
        head = receive_exactly(sock, LENGTH.size)
        if head is None:
            raise OSError("it closed the connection")
        if head != WAITING:
            break
        if time.monotonic() > deadline:
            raise OSError(f"no block arrived for {STALL_S:g} s")
    if LENGTH.unpack(head)[0] != size:
        return None
    data = receive_exactly(sock, size, deadline)
    if data is None:
        raise OSError("it closed the connection within a block")
    return memoryview(data)


def receive_exactly(sock: socket.socket, size: int, deadline: float = 0.0) -> bytes | None:
    """Receive exactly `size` bytes; return None if the other end closes before.

    Raises:
        OSError: nothing arrives within the socket's time limit, or the deadline has passed.
    """
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = sock.recv_into(view[done:])
        if not count:
            return None
        done += count
        if deadline and time.monotonic() > deadline:
            raise socket.timeout("timed out")
    return bytes(data)


def _shut_down_socket(sock: socket.socket) -> None:
    """Shut a socket down, which wakes the threads that wait for it."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass
