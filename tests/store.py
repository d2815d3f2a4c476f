"""A store for objects that speaks S3, on this machine, and a way to it that can be cut.

    with store.serving() as s3:
        s3.url        # s3://bucket
        s3.environ    # with which s3fs finds it
        s3.link.cut_after(1 << 20)

The server is moto's, in a process of its own; objects are looked at and changed over plain HTTP.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

BUCKET = "bucket"
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class Link:
    """A TCP port that leads to another one, as long as it is not cut; then it takes nothing and says nothing."""

    def __init__(self, port: int) -> None:
        self._to, self._left = port, None
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, size_bytes: int | None) -> None:
        """Let through so many more bytes on the way there; None: mend it, for new connections."""
        self._left: int | None = size_bytes

    def close(self) -> None:
        self._listening.close()

    @property
    def is_cut(self) -> bool:
        return self._left is not None and self._left <= 0

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._carry, args=(near,), daemon=True).start()

    def _carry(self, near: socket.socket) -> None:
        with near, socket.create_connection(("127.0.0.1", self._to)) as far, contextlib.suppress(OSError):
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    if self._left is not None and ready is near:
                        self._left -= len(data)
                    if self.is_cut:
                        threading.Event().wait(30)  # the peer gives up long before
                        return
                    (far if ready is near else near).sendall(data)


@dataclass(frozen=True, slots=True)
class Store:
    """The server."""

    port: int
    link: Link
    url: str = f"s3://{BUCKET}"

    @property
    def environ(self) -> dict[str, str]:
        """Over the link."""
        return self._environ(self.link.port)

    def _environ(self, port: int) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "who",
            "AWS_SECRET_ACCESS_KEY": "ever",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def ask(self, method: str, path: str = "", data: bytes | None = None) -> bytes:
        """One request, about `bucket/path`."""
        where = f"http://127.0.0.1:{self.port}/{BUCKET}{path}"
        told = {"Authorization": "AWS who:ever", "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(where, data=data, headers=told, method=method)
        with urllib.request.urlopen(request) as answer:
            found: bytes = answer.read()
        return found

    def names(self, prefix: str = "") -> list[str]:
        """Of all objects that begin so."""
        text = self.ask("GET", f"?list-type=2&prefix={prefix}").decode()
        return re.findall(r"<Key>(.*?)</Key>", text)

    def flip(self, name: str, place: int = -1) -> None:
        """Change one bit of an object."""
        content = bytearray(self.ask("GET", f"/{name}"))
        content[place] ^= 1
        self.ask("PUT", f"/{name}", bytes(content))


@contextlib.contextmanager
def serving() -> Iterator[Store]:
    """A store with an empty bucket, as long as the context lasts."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        port = int(server.stdout.readline())
        found = Store(port, Link(port))
        try:
            found.ask("PUT")
            yield found
        finally:
            found.link.close()
            server.stdin.close()
