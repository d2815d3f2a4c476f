"""Connections between nodes of a run whose Python has no ssl: unencrypted, with an HMAC of every piece.

Both ends prove by the key of the push that they belong to the run, and a piece that was changed, repeated or inserted
on the way ends the connection. The classes have the methods of `ssl.SSLContext` and `ssl.SSLSocket` that relay.py uses.
Stdlib only, Python 3.8.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time

NONCE_BYTES = 32
TAG_BYTES = 32
HEAD = struct.Struct("!I")
PIECE_BYTES = 1 << 18
"""Most bytes that one HMAC covers; a longer announced piece ends the connection."""
PIECE_S = 30.0
"""Seconds that a whole piece may take, since a sender of single bytes at long intervals counts as lost."""


class HmacContext:
    """Key of a push that replaces a TLS context, the same for both ends."""

    def __init__(self, key: bytes) -> None:
        """Use the key that only the nodes of the push have."""
        self._key = key

    def wrap_socket(
        self,
        sock: socket.socket,
        *,
        server_side: bool = False,
        do_handshake_on_connect: bool = False,  # noqa: ARG002 - the signature of ssl
    ) -> HmacSocket:
        """Return the connection in place of its socket, which is closed; `do_handshake` has to follow."""
        return HmacSocket(sock, self._key, is_server=server_side)


class HmacSocket(socket.socket):
    """A connection on which each piece has an HMAC over its number, its length and its bytes."""

    def __init__(self, sock: socket.socket, key: bytes, *, is_server: bool) -> None:
        """Take over a connected socket."""
        timeout_s = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.settimeout(timeout_s)
        self._key = key
        self._is_server = is_server
        self._sending_key = self._receiving_key = b""
        self._sent = self._received = 0
        """Numbers of pieces sent and received."""
        self._ready = memoryview(b"")

    def do_handshake(self) -> None:
        """Let both ends prove that they have the key; the serving end answers only after the other end's proof.

        Raises:
            OSError: the other end has another key, or does not follow the protocol.
        """
        own, deadline = os.urandom(NONCE_BYTES), time.monotonic() + PIECE_S
        if self._is_server:  # The server sends no byte before the other end has sent its own.
            nonces = self._receive_exactly(NONCE_BYTES, deadline) + own
            super().sendall(own)
        else:
            super().sendall(own)
            nonces = own + self._receive_exactly(NONCE_BYTES, deadline)
        of_server, of_client = (hmac.digest(self._key, end + nonces, "sha256") for end in (b"server", b"client"))
        self._sending_key, self._receiving_key = (of_server, of_client) if self._is_server else (of_client, of_server)
        if not self._is_server:
            self.sendall(b"")
        if self._receive_piece() != b"":
            raise OSError("it did not prove that it is of this run")
        if self._is_server:
            self.sendall(b"")

    def sendall(self, data: bytes | memoryview) -> None:  # type: ignore[override]  # no flags
        """Send bytes, in as many pieces as needed.

        Raises:
            OSError: the other end has closed or does not read.
        """
        for start in range(0, max(1, len(data)), PIECE_BYTES):
            piece = bytes(data[start : start + PIECE_BYTES])
            message = HEAD.pack(len(piece)) + piece
            super().sendall(message + _compute_tag(self._sending_key, self._sent, message))
            self._sent += 1

    def recv_into(self, buffer: memoryview) -> int:  # type: ignore[override]  # no size, no flags
        """Fill the beginning of a buffer with received bytes; return their number, 0 at the end.

        Raises:
            OSError: nothing arrives, or the bytes were changed on the way.
        """
        while not self._ready:
            piece = self._receive_piece()
            if piece is None:
                return 0
            self._ready = memoryview(piece)
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def recv(self, size: int, flags: int = 0) -> bytes:  # noqa: ARG002 - the signature of socket.socket
        """Return received bytes, at most `size`; empty at the end.

        Raises:
            OSError: as `recv_into`.
        """
        buffer = bytearray(size)
        return bytes(buffer[: self.recv_into(memoryview(buffer))])

    def _receive_piece(self) -> bytes | None:
        """Return the next piece; None if the other end has closed the connection before it."""
        first = super().recv(1)
        if not first:
            return None
        deadline = time.monotonic() + PIECE_S
        head = first + self._receive_exactly(HEAD.size - 1, deadline)
        size = HEAD.unpack(head)[0]
        if size > PIECE_BYTES:
            raise OSError("a piece is longer than pieces are")
        message = head + self._receive_exactly(size, deadline)
        tag = self._receive_exactly(TAG_BYTES, deadline)
        if not hmac.compare_digest(tag, _compute_tag(self._receiving_key, self._received, message)):
            raise OSError("a piece has a wrong HMAC: it was changed on the way, or the sender is not of this run")
        self._received += 1
        return message[HEAD.size :]

    def _receive_exactly(self, size: int, deadline: float) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = super().recv_into(view[done:])
            if not count:
                raise OSError("it closed the connection within a piece")
            done += count
            if time.monotonic() > deadline:
                raise socket.timeout("timed out")
        return bytes(data)


def _compute_tag(key: bytes, number: int, message: bytes) -> bytes:
    code = hmac.new(key, b"%d " % number, "sha256")
    code.update(message)
    return code.digest()
