"""Rendering of a project's own templates in a separate process with limits of memory and time.

A template can use any amount of memory and time (`center`, `replace`, doubling a text in a loop), and no list of
forbidden filters would be complete, so the limits are those of the system. The process stays for the scripts of other
nodes, since starting Python for each would take longer than rendering.
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
"""Seconds of processor time for one template."""
WALL_LIMIT_S: Final = 60.0
"""Seconds for one template on a busy machine."""
_SIZE: Final = struct.Struct("!Q")


class _RenderProcess:
    """The process; used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, request: tuple[Any, ...], name: str) -> dict[str, Any]:
        with self._lock:
            process = self._process = self._process or self._start_renderer_process()
            clock = threading.Timer(WALL_LIMIT_S, process.kill)
            clock.daemon = True
            clock.start()
            try:
                _write_sized_block(cast(BinaryIO, process.stdin), pickle.dumps(request))
                return dict(json.loads(_read_sized_block(cast(BinaryIO, process.stdout))))
            except (OSError, EOFError):
                self.close()
                raise RenderError(
                    f"the template takes longer than {LIMIT_S} s, or more memory than {MEMORY_BYTES >> 20} MiB",
                    where=name,
                ) from None
            finally:
                clock.cancel()

    def close(self) -> None:
        """End the process; the next request starts another one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError):  # unread output is discarded
                process.communicate()

    @staticmethod
    def _start_renderer_process() -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        argv = children.build_module_argv(sys.executable, __name__, str(MEMORY_BYTES), str(LIMIT_S))
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)


@functools.cache
def _open_renderer() -> _RenderProcess:
    renderer = _RenderProcess()
    atexit.register(renderer.close)
    return renderer


def render_with_limits(name: str, values: Mapping[str, object], *, folders: Sequence[Path]) -> str:
    """Render as `dtctl.render.render_template` does, in a process with limits."""
    answer = _open_renderer().call((name, dict(values), [*folders]), name)
    if "text" in answer:
        return str(answer["text"])
    raise RenderError(answer["message"], where=answer["where"], hint=answer["hint"])


def _write_sized_block(stream: BinaryIO, data: bytes) -> None:
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def _read_sized_block(stream: BinaryIO) -> bytes:
    (size,) = _SIZE.unpack(stream.read(_SIZE.size) or _raise_end_of_file())
    return stream.read(size)


def _raise_end_of_file() -> bytes:
    raise EOFError


def _serve_render_requests(memory_bytes: int, limit_s: int) -> None:
    """Render requests until the parent closes standard input; runs in the limited process."""
    import resource

    from dtctl.render import templates

    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    while True:
        try:
            name, values, folders = pickle.loads(_read_sized_block(sys.stdin.buffer))  # noqa: S301 - from the parent
        except EOFError:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + limit_s, -1))
        try:
            answer: dict[str, str | None] = {"text": templates.render_in_process(name, values, folders=folders)}
        except RenderError as exc:
            answer = {"message": exc.message, "where": exc.where, "hint": exc.hint}
        except MemoryError:
            answer = {"message": f"the template takes more than {memory_bytes >> 20} MiB", "where": name, "hint": None}
        _write_sized_block(sys.stdout.buffer, json.dumps(answer).encode())


if __name__ == "__main__":
    _serve_render_requests(int(sys.argv[1]), int(sys.argv[2]))
