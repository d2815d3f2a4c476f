"""A node's end of the link during a run: non-blocking frames, and a limit on silence. Stdlib only, Python 3.8."""

from __future__ import annotations

import os
import select
import socket
import time

from dtctl.schema import InvalidMessage
from dtctl.supervisor import frames
from dtctl.supervisor.messages.attempt import RUN_REQUESTS
from dtctl.supervisor.messages.base import Message, parse_message_document

CHUNK = 1 << 16


class ControlLink:
    """Connection to the control machine: non-blocking frames, and the time of the last received bytes.

    A lost link can be replaced. Messages without a link are dropped: a new link requests the missing output.
    """

    def __init__(self, setup_link: frames.FdLink | None, listener_fd: int | None, timeout_s: float) -> None:
        """Continue the link of the set-up, if there is one.

        Args:
            setup_link: link of the set-up, with frames that were read but not used.
            listener_fd: socket at which new links arrive; None: no new links are accepted.
            timeout_s: seconds of silence after which a link counts as lost.
        """
        self.listener_fd = listener_fd
        self.timeout_s = timeout_s
        self.is_up = self.is_synced = False
        self.out = bytearray()
        if setup_link is not None:
            self._begin_link(setup_link.read_fd, setup_link.write_fd)
            self._parser, self._ready = setup_link.parser, setup_link.ready
            self.is_synced = True

    def _begin_link(self, read_fd: int, write_fd: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self._parser, self._ready = frames.FrameParser(), []
        self.out = bytearray()
        self._last_heard = time.monotonic()
        self.is_up = True
        self.is_synced = False  # The new link first has to report its offsets.
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def accept(self) -> None:
        """Use the newest connection to the listening socket as the link."""
        listener = socket.socket(fileno=self.listener_fd)
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return  # The other process has closed the connection again.
        finally:
            listener.detach()
        fd = connection.detach()
        self._begin_link(fd, fd)

    def drop(self) -> None:
        """Drop the link."""
        self.is_up = self.is_synced = False
        self.out = bytearray()

    def send(self, message: Message) -> None:
        """Queue a message for the control machine, if there is a link."""
        if self.is_up:
            self.out += frames.pack_json(message)

    def read(self) -> list[Message] | None:
        """Return received messages; None if the other end has closed, sends invalid data, or is silent for too long."""
        if not self.is_up:
            return []
        received, self._ready = self._ready, []
        try:
            data = os.read(self.read_fd, CHUNK)
            if not data:
                return None
            self._last_heard = time.monotonic()
            received += self._parser.feed(data)
        except BlockingIOError:
            pass
        except (OSError, frames.BrokenFrame):
            return None
        if time.monotonic() - self._last_heard > self.timeout_s:
            return None
        try:
            documents = [frames.decode_message(payload) for kind, _, payload in received if kind == frames.JSON]
            # A launcher of a newer version may send requests that this older supervisor does not support.
            requests = [document for document in documents if document.get("op") in RUN_REQUESTS]
            return [parse_message_document(document, RUN_REQUESTS) for document in requests]
        except (frames.BrokenFrame, InvalidMessage):
            return None

    def flush(self) -> bool:
        """Write the bytes that the descriptor accepts; return False if the other end has closed."""
        try:
            while self.out:
                del self.out[: os.write(self.write_fd, self.out[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def register(self, poll: select.poll) -> None:
        """Register the descriptors for input, and for output if messages are queued."""
        if self.is_up:
            poll.register(self.read_fd, select.POLLIN)
            if self.out:
                poll.register(self.write_fd, select.POLLIN | select.POLLOUT)
        if self.listener_fd is not None:
            poll.register(self.listener_fd, select.POLLIN)
