"""A node's end of the link while a run is on: frames that never block, and a clock. Stdlib only, Python 3.8."""

from __future__ import annotations

import os
import time

from dtctl.supervisor import frames
from dtctl.supervisor.messages.attempt import RUN_REQUESTS
from dtctl.supervisor.messages.base import Message, parse

CHUNK = 1 << 16


class ControlLink:
    """The way to the control machine: non-blocking frames, with a clock for its last sign of life."""

    def __init__(self, read_fd: int, write_fd: int, setup_link: frames.FdLink | None = None) -> None:
        """Talk over these descriptors from now on, taking over what `before` has read but not used."""
        self.read_fd = read_fd
        self.write_fd = write_fd
        self.parser = setup_link.parser if setup_link else frames.Parser()
        self.ready = setup_link.ready if setup_link else []
        self.out = bytearray()
        self.last_heard = time.monotonic()
        self.is_synced = True
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)

    def read(self) -> list[Message] | None:
        """Messages that have arrived; None when the other end is gone.

        Raises:
            BrokenFrame: the stream is not ours.
            InvalidMessage: a message has not the form of its kind.
        """
        received, self.ready = self.ready, []
        try:
            data = os.read(self.read_fd, CHUNK)
            if not data:
                return None
            self.last_heard = time.monotonic()
            received += self.parser.feed(data)
        except BlockingIOError:
            pass
        except OSError:
            return None
        documents = [frames.decode(payload) for kind, _, payload in received if kind == frames.JSON]
        # A launcher of a newer version may ask for more than this supervisor, which the older one has sent, knows.
        requests = [document for document in documents if document.get("op") in RUN_REQUESTS]
        return [parse(document, RUN_REQUESTS) for document in requests]

    def flush(self) -> bool:
        """Write what fits; False when the other end is gone."""
        try:
            while self.out:
                del self.out[: os.write(self.write_fd, self.out[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True
