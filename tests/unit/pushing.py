"""A push between two threads of the test: the control machine's end and the node's, joined by a socket."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dtctl.errors import ConnectError
from dtctl.launch.control.link import NodeLink
from dtctl.launch.files.push import PayloadCache, PushResult, push_tree_to_node
from dtctl.launch.files.tree import FileTree, scan_push_tree
from dtctl.supervisor import frames, receive
from dtctl.supervisor.messages.setup import PushTree


class SocketStream:
    """The part of `dtctl.transport.base.Stream` that a link needs, over a socket."""

    def __init__(self, sock: socket.socket, *, spoil: Callable[[bytes], bytes] | None = None) -> None:
        self._sock = sock
        self._spoil = spoil

    def read(self, size: int) -> bytes:
        try:
            return self._sock.recv(size)
        except OSError:
            return b""

    def write(self, data: bytes) -> None:
        try:
            self._sock.sendall(self._spoil(data) if self._spoil else data)
        except OSError as exc:
            raise ConnectError("the command no longer reads", node="node1") from exc

    def read_stderr(self) -> bytes:
        return b""

    def close_stdin(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def exit_status(self, timeout_s: float) -> int | None:
        return None

    def close(self) -> None:
        self._sock.close()


def serve(sock: socket.socket, workdir: Path) -> None:
    """What the node does: one push after the other, until one is refused or the other end closes."""
    link = frames.FdLink(sock.fileno(), sock.fileno(), 20)
    try:
        while (request := link.receive_json()) is not None:
            receive.receive_tree(link, str(workdir), PushTree.parse(request).tree)
    except (receive.PushRefused, BrokenPipeError, frames.BrokenFrame):
        pass
    finally:
        sock.close()


@contextmanager
def node(workdir: Path, *, spoil: Callable[[bytes], bytes] | None = None) -> Iterator[NodeLink]:
    """A link to a node that keeps its files in `workdir`.

    Args:
        workdir: the node's folder.
        spoil: changes what is sent, as a bad cable would.
    """
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=serve, args=(theirs, workdir), daemon=True)
    thread.start()
    try:
        yield NodeLink(SocketStream(ours, spoil=spoil), node="node1")
    finally:
        ours.close()
        thread.join(120)
        assert not thread.is_alive(), "the node's end hangs"


def bring(root: Path, workdir: Path) -> PushResult:
    """Scan and push."""
    return bring_tree(scan_push_tree(root), workdir)


def bring_tree(tree: FileTree, workdir: Path) -> PushResult:
    with node(workdir) as link:
        return push_tree_to_node(link, tree, shared=PayloadCache())


def release() -> None:
    """Let go of the trees that this process holds as the node."""
    while receive._locks_in_use:
        os.close(receive._locks_in_use.pop())


def listing(folder: Path) -> dict[bytes, tuple[int, bytes]]:
    """Path -> (permissions, contents) of all files below a folder; of a link, (0, target)."""
    found = {}
    for path in folder.rglob("*"):
        name = os.fsencode(path.relative_to(folder))
        if path.is_symlink():
            found[name] = (0, os.fsencode(path.readlink()))
        elif path.is_file():
            found[name] = (path.stat().st_mode & 0o777, path.read_bytes())
    return found


def left_in(workdir: Path) -> list[str]:
    """Names in the node's store, seals, the store's lock and its marker aside."""
    store = workdir / "code"
    return sorted(
        path.name for path in store.iterdir() if path.suffix != ".json" and path.name not in (".lock", ".dtctl")
    )
