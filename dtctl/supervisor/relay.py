"""Blocks of a push between nodes: each node serves those that it has to nodes of the same run. Stdlib only, Python 3.8.

The control machine assigns fetching to serving nodes (dtctl/launch/files/relay.py). Both ends of a connection prove
that they belong to the run by its certificate. A request is the SHA-256 of a block; the answer is its length and its
bytes, as soon as the serving node has it, and until then a sign of life every second. The digest decides what is
written.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import threading
import time

TYPE_CHECKING = False  # typing is slow to import on a node
if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterable, Iterator, Sequence

BLOCK_BYTES = 4 << 20
LENGTH = struct.Struct("!I")
WAITING = LENGTH.pack(0xFFFFFFFF)
"""Sent in place of a length: the node lives, and has not got the block yet."""
WAITING_S = 1.0
CONNECT_S = 3.0
SILENCE_S = 6.0
"""Seconds without a byte from a serving node after which it counts as lost."""
STALL_S = 120.0
"""Seconds without a block from a living node after which another source is requested."""
SLOW_READER_S = 20.0
"""A node that takes no byte for so long is no longer served; it may come again."""
AHEAD = 2
"""Blocks that are requested at a time, so that the way between two nodes is never idle."""
HANDSHAKE_S = 5.0
UNPROVEN, UNPROVEN_OF_ADDRESS = 32, 4
"""Connections that have not proven yet that they are of the run: in all, and from one address."""
PROVEN = 64
PACE_BYTES = 4 * BLOCK_BYTES
"""Bytes by which the speed of a link is measured, before a limit holds that is a share of it."""
PACE_LEAST = 4 << 20
"""Bytes a second that a limit always allows."""


class SourceFailed(Exception):
    """A node did not serve a block; `code` is unreachable, digest or lost."""

    def __init__(self, code: str, text: str) -> None:
        """Take the reason."""
        super().__init__(text)
        self.code = code


def cut(sizes: Iterable[int]) -> list[list[tuple[int, int, int]]]:
    """Cut files into blocks; both ends do it in the same way.

    Args:
        sizes: of the files.

    Returns:
        Of each block its segments, as (number of the file, offset, length). Small files share a block.
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
    """Files that are written block by block, in any order, and read by others meanwhile."""

    def __init__(
        self,
        folder: int,
        paths: Sequence[bytes],
        blocks: Sequence[list],  # type: ignore[type-arg]
        digests: Sequence[bytes],
        *,
        are_whole: bool = False,
    ) -> None:
        """Take the layout.

        Args:
            folder: descriptor of the folder; a duplicate of it is kept.
            paths: of the files in it, which exist.
            blocks: as `cut` returns them.
            digests: SHA-256 of each block.
            are_whole: whether the files are here already, and only read.
        """
        self._folder = os.dup(folder)
        self._paths = paths
        self._segments: dict[bytes, list] = {}  # type: ignore[type-arg]
        for digest, segments in zip(digests, blocks):  # noqa: B905 - Python 3.8 has no strict
            self._segments.setdefault(digest, []).append(segments)  # contents may repeat
        self._have: set[bytes] = set(digests) if are_whole else set()
        self._news = threading.Condition()
        self._closed = False

    def knows(self, digest: bytes) -> bool:
        """Return whether the block is one of these files'."""
        return digest in self._segments

    def has(self, digest: bytes) -> bool:
        """Return whether the block is here."""
        return digest in self._have

    def size(self, digest: bytes) -> int:
        """Return the number of bytes of a block."""
        return sum(length for _, _, length in self._segments[digest][0])

    def write(self, digest: bytes, data: memoryview) -> bool:
        """Write a block wherever it belongs; return False, and write nothing, if its digest does not match."""
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
        """Return a block that is here.

        Raises:
            OSError: it cannot be read.
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
        """Wait until a block is here; return whether it is."""
        with self._news:
            self._news.wait_for(lambda: digest in self._have or self._closed, timeout_s)
        return digest in self._have

    def is_closed(self) -> bool:
        """Return whether nothing is served any longer."""
        return self._closed

    def close(self) -> None:
        """Release all waiting threads."""
        with self._news:
            self._closed = True
            self._news.notify_all()


class Pace:
    """Limit of the speed of a transfer: a share of what the link was seen to carry at its beginning."""

    def __init__(self, share: float) -> None:
        """Take the share of the link that may be used, up to 1, which is no limit."""
        self._share = share
        self._begun = time.monotonic()
        self._seen_bytes = 0
        self._paced_bytes = 0
        self._paced_from = 0.0
        self._rate = 0.0

    def wait(self, size_bytes: int) -> None:
        """Wait, after so many more bytes, for as long as the limit needs."""
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
        certificate: of the run, PEM.
        key: its private key, PEM.
        folder: private folder for a file that is removed at once, where the kernel has no files without a name.

    Raises:
        ImportError: this Python has no ssl.
    """
    import ssl

    if hasattr(os, "memfd_create"):
        fd, name = os.memfd_create("dtctl"), ""
        path = f"/proc/self/fd/{fd}"
    else:
        import tempfile

        fd, name = tempfile.mkstemp(dir=folder)  # of mode 0600
        path = name
    try:
        os.write(fd, (key + certificate).encode())
        contexts = []
        for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
            context = ssl.SSLContext(protocol)
            context.check_hostname = False  # the certificate is the run's, wherever its nodes are
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


class BlockServer:
    """Serves blocks to nodes that prove that they are of the run."""

    def __init__(self, files: BlockFiles, context: ssl.SSLContext) -> None:
        """Listen on a port that the kernel chooses."""
        self._files = files
        self._context = context
        self._lock = threading.Lock()
        self._unproven: list[tuple[str, socket.socket]] = []
        """The oldest first."""
        self._proven: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(("", 0))
        self._listener.listen(128)
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept, ())

    def close(self) -> None:
        """Stop serving; no thread is left."""
        self._files.close()
        with self._lock:
            sockets = [self._listener, *(sock for _, sock in self._unproven), *self._proven]
        for sock in sockets:
            _shut(sock)
        for thread in list(self._threads):
            thread.join(2 * WAITING_S)
        self._listener.close()

    def _start(self, function, arguments: tuple) -> None:  # type: ignore[no-untyped-def, type-arg]
        thread = threading.Thread(target=self._run, args=(function, arguments), name="relay", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _run(self, function, arguments: tuple) -> None:  # type: ignore[no-untyped-def, type-arg]
        try:
            function(*arguments)
        finally:
            self._threads.discard(threading.current_thread())

    def _accept(self) -> None:
        while not self._files.is_closed():
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._files.is_closed():
                    return
                time.sleep(0.1)  # no more descriptors for the moment
                continue
            try:
                # Not a byte is read here. What shuts a connection has to have this socket: `sock` has lost its own.
                secure = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            except OSError:  # it has gone already
                sock.close()
                continue
            self._admit(str(peer[0]), secure)
            try:
                self._start(self._serve, (secure,))
            except RuntimeError:  # no more threads are allowed here
                self._dismiss(secure)
                secure.close()

    def _admit(self, address: str, sock: socket.socket) -> None:
        """Give a connection one of the places for unproven connections; if all are taken, close another one.

        The address with the most places loses one: an address that opens many connections displaces its own.
        """
        with self._lock:
            counts: dict[str, int] = {}
            for other, _ in self._unproven:
                counts[other] = counts.get(other, 0) + 1
            crowded = ""
            if counts.get(address, 0) >= UNPROVEN_OF_ADDRESS:
                crowded = address
            elif len(self._unproven) >= UNPROVEN:
                crowded = max(counts, key=lambda each: counts[each])
            for entry in self._unproven:
                if entry[0] == crowded:
                    _shut(entry[1])
                    self._unproven.remove(entry)
                    break
            self._unproven.append((address, sock))

    def _dismiss(self, sock: socket.socket) -> bool:
        """Take back a place; return whether the connection still had it."""
        with self._lock:
            left = [entry for entry in self._unproven if entry[1] is not sock]
            had, self._unproven = len(left) < len(self._unproven), left
        return had

    def _serve(self, secure: ssl.SSLSocket) -> None:
        with secure:
            try:
                shake_hands(secure, HANDSHAKE_S)
                is_proven = True
            except OSError:  # ssl's errors are some of these
                is_proven = False
            still_there = self._dismiss(secure)
            with self._lock:
                if not is_proven or not still_there or len(self._proven) >= PROVEN or self._files.is_closed():
                    return
                self._proven.add(secure)
            try:
                self._answer(secure)
            except OSError:
                pass  # it has gone, or takes nothing
            finally:
                with self._lock:
                    self._proven.discard(secure)

    def _answer(self, sock: ssl.SSLSocket) -> None:
        while True:
            sock.settimeout(STALL_S)  # between requests a node may wait for its disk
            digest = receive_exactly(sock, 32)
            sock.settimeout(SLOW_READER_S)
            if digest is None or not self._files.knows(digest):
                return
            while not self._files.wait(digest, WAITING_S):
                if self._files.is_closed():
                    return
                sock.sendall(WAITING)
            data = memoryview(self._files.read(digest))
            sock.sendall(LENGTH.pack(len(data)))
            for start in range(0, len(data), 1 << 18):  # the limit is one of each piece
                sock.sendall(data[start : start + (1 << 18)])


def fetch(
    files: BlockFiles, digests: Sequence[bytes], address: str, port: int, context: ssl.SSLContext
) -> Iterator[bytes]:
    """Fetch blocks from a node, in order, and write them; yield each one's digest once it is written.

    Raises:
        SourceFailed: it does not serve them.
    """
    try:
        sock = socket.create_connection((address, port), timeout=CONNECT_S)
    except OSError as exc:
        raise SourceFailed("unreachable", f"{address}:{port}: {exc}") from exc
    with sock:
        try:
            secure = context.wrap_socket(sock, do_handshake_on_connect=False)
        except OSError as exc:
            raise SourceFailed("lost", f"{address}:{port}: {exc}") from exc
    with secure:
        try:
            shake_hands(secure, HANDSHAKE_S)
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


def shake_hands(secure: ssl.SSLSocket, limit_s: float) -> None:
    """Let both ends prove that they are of the run, however slowly the other one sends.

    Raises:
        OSError: it is not of the run, or the time is over.
    """
    limit = threading.Timer(limit_s, _shut, (secure,))
    limit.daemon = True
    limit.start()
    try:
        secure.settimeout(limit_s)
        secure.do_handshake()
        secure.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    finally:
        limit.cancel()


def _receive_block(sock: ssl.SSLSocket, size: int) -> memoryview | None:
    """Return the bytes of the next block; None if it has another size.

    Raises:
        OSError: it does not come.
    """
    deadline = time.monotonic() + STALL_S
    while True:
        head = receive_exactly(sock, LENGTH.size)
        if head is None:
            raise OSError("it closed the connection")
        if head != WAITING:
            break
        if time.monotonic() > deadline:
            raise OSError(f"no block came for {STALL_S:g} s")
    if LENGTH.unpack(head)[0] != size:
        return None
    data = receive_exactly(sock, size, deadline)
    if data is None:
        raise OSError("it closed the connection within a block")
    return memoryview(data)


def receive_exactly(sock: socket.socket, size: int, deadline: float = 0.0) -> bytes | None:
    """Return so many bytes; None when the other end closes before.

    Raises:
        OSError: nothing comes for as long as the socket waits, or the time is over.
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


def _shut(sock: socket.socket) -> None:
    """Wake the threads that wait for a socket."""
    try:
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError:
        pass
