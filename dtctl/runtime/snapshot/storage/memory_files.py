"""Files in memory (tmpfs) with huge pages, which a reader maps without a copy and with few page faults.

A page fault maps 64 KiB of small pages, or 2 MiB of a huge page. With small pages, the page faults of a new mapping
take about as long as summing its bytes. Since version 6.1 Linux gives huge pages to a file in tmpfs on request,
whatever the settings of the mount and of /sys/kernel/mm/transparent_hugepage (madvise(2), MADV_COLLAPSE). On other
systems pages stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, Final

HUGE_BYTES: Final = 2 << 20
"""Size of a huge page on x86-64, and on arm64 with pages of 4 KiB; elsewhere the request has no effect."""
_MADV_COLLAPSE: Final = 25  # linux/mman.h
_MAP_FIXED: Final = 0x10
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class MemoryFile:
    """A new file of a known size in tmpfs, written from its beginning to its end.

    Allocating, filling and freeing huge pages takes less time than the same with small pages.
    """

    def __init__(self, file: io.FileIO, size_bytes: int) -> None:
        """Give the file its size, and huge pages except for its end, where the kernel has them.

        Args:
            file: file that is open for reading and writing, empty and unbuffered.
            size_bytes: number of bytes that will be written.

        Raises:
            OSError: the file system is full.
        """
        self._file, self._place = file, 0
        self._huge = _allocate_huge_pages(file.fileno(), size_bytes)

    def write(self, chunk: bytes | memoryview, /) -> int:
        """Write some of the chunk, and return the number of bytes.

        Raises:
            OSError: the file system is full.
        """
        begin = self._place
        # these pages are allocated; a write to a missing page of a full tmpfs could kill the process
        if begin < len(self._huge):
            part = chunk[: len(self._huge) - begin]
            self._huge[begin : begin + len(part)] = part
            self._place += len(part)
        else:
            self._place += os.pwrite(self._file.fileno(), chunk, begin)
        return self._place - begin


def _allocate_huge_pages(descriptor: int, size_bytes: int) -> memoryview:
    """Return the part of a file that has huge pages: as many whole pages as fit, or none."""
    whole_bytes = size_bytes // HUGE_BYTES * HUGE_BYTES
    if whole_bytes and hasattr(mmap, "MADV_HUGEPAGE"):  # otherwise the system is not Linux
        os.ftruncate(descriptor, size_bytes)
        for place in range(0, whole_bytes, HUGE_BYTES):
            os.pwrite(descriptor, b"\0", place)  # the kernel refuses a range without any page
        with contextlib.suppress(OSError):
            mapped = _map_aligned(descriptor, whole_bytes, mmap.MAP_SHARED)
            if _load_libc().madvise(ctypes.addressof(mapped), whole_bytes, _MADV_COLLAPSE) == 0:
                return memoryview(mapped).cast("B")
    return memoryview(b"")


def map_file(path: Path) -> memoryview:
    """Return the bytes of a file in memory without a copy; changes to them are private to this process.

    The bytes stay valid while no process writes to the file. Files of snapshots never change: a file is renamed when it
    is complete, and a removed file stays until its last mapping is gone.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes == 0:
            return memoryview(bytearray())
        return memoryview(_map_aligned(file.fileno(), size_bytes, mmap.MAP_PRIVATE)).cast("B")


def _map_aligned(descriptor: int, size_bytes: int, flags: int) -> ctypes.Array[ctypes.c_uint8]:
    """Map a file at an address aligned to huge pages, so that the process can use them; Python's mmap aligns to pages.

    Raises:
        OSError: the kernel refuses.
    """
    libc, reserved_bytes = _load_libc(), size_bytes + HUGE_BYTES
    reserved = libc.mmap(None, reserved_bytes, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    _require_map(reserved)
    begin = -(-reserved // HUGE_BYTES) * HUGE_BYTES
    made = libc.mmap(begin, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags | _MAP_FIXED, descriptor, 0)
    if made != begin:
        libc.munmap(reserved, reserved_bytes)
    _require_map(made)
    mapped = (ctypes.c_uint8 * size_bytes).from_address(begin)
    weakref.finalize(mapped, libc.munmap, reserved, reserved_bytes).atexit = False
    return mapped


def _require_map(address: int | None) -> None:
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@functools.cache
def _load_libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = address
    libc.mmap.argtypes = address, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
    libc.munmap.argtypes = address, size
    libc.madvise.argtypes = address, size, ctypes.c_int
    return libc
