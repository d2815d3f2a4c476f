"""Templates that came with a project, rendered in a process of their own with limits of memory and time.

What a template may compute (`center`, `replace`, doubling a text in a loop) is worth that much memory and time wherever
it happens, and no list of filters is complete; so the limits are those of the system. The process stays for the
scripts of other nodes, since starting Python for each would cost more than rendering.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from dtctl import children
from dtctl.errors import RenderError

MEMORY_BYTES: Final = 1 << 30
LIMIT_S: Final = 10
"""Seconds of processor time, and"""
WALL_LIMIT_S: Final = 60.0
"""of a busy machine's."""
_SIZE: Final = struct.Struct("!Q")


class _Renderer:
    """The process; used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, request: tuple[Any, ...], name: str) -> dict[str, Any]:
        with self._lock:
            process = self._process = self._process or self._start()
            clock = threading.Timer(WALL_LIMIT_S, process.kill)
            clock.daemon = True
            clock.start()
            try:
                _send(cast(BinaryIO, process.stdin), pickle.dumps(request))
                return dict(json.loads(_receive(cast(BinaryIO, process.stdout))))
            except (OSError, EOFError):
                self.close()
                raise RenderError(
                    f"the template takes longer than {LIMIT_S} s, or more memory than {MEMORY_BYTES >> 20} MiB",
                    where=name,
                ) from None
            finally:
                clock.cancel()

    def close(self) -> None:
        """End the process; the next question starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # what it has not read is lost
                process.communicate()

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        argv = children.module(sys.executable, __name__, str(MEMORY_BYTES), str(LIMIT_S))
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


@functools.cache
def _renderer() -> _Renderer:
    renderer = _Renderer()
    atexit.register(renderer.close)
    return renderer


def render(name: str, values: Mapping[str, object], *, folders: Sequence[Path]) -> str:
    """See `dtctl.render.render`."""
    answer = _renderer().call((name, dict(values), [*folders]), name)
    if "text" in answer:
        return str(answer["text"])
    raise RenderError(answer["message"], where=answer["where"], hint=answer["hint"])


def _send(stream: BinaryIO, data: bytes) -> None:
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def _receive(stream: BinaryIO) -> bytes:
    (size,) = _SIZE.unpack(stream.read(_SIZE.size) or _end())
    return stream.read(size)


def _end() -> bytes:
    raise EOFError


def _serve(memory_bytes: int, limit_s: int) -> None:
    """The process itself: renders what it is asked for, until nobody is there to ask."""
    import resource

    from dtctl.render import templates

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    while True:
        try:
            name, values, folders = pickle.loads(_receive(sys.stdin.buffer))  # noqa: S301 - from the parent
        except EOFError:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + limit_s, -1))
        try:
            answer: dict[str, str | None] = {"text": templates.render(name, values, folders=folders)}
        except RenderError as exc:
            answer = {"message": exc.message, "where": exc.where, "hint": exc.hint}
        except MemoryError:
            answer = {"message": f"the template takes more than {memory_bytes >> 20} MiB", "where": name, "hint": None}
        _send(sys.stdout.buffer, json.dumps(answer).encode())


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
