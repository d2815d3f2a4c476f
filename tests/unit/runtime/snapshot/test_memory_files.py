"""Files in memory have huge pages where the kernel gives them, and the same bytes everywhere."""

from __future__ import annotations

import gc
import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dtctl.runtime.snapshot import read
from dtctl.runtime.snapshot.saver import Saver
from dtctl.runtime.snapshot.storage.memory_files import HUGE_BYTES, MemoryFile, map_file
from dtctl.runtime.snapshot.write import write_whole_chunk

pytestmark = pytest.mark.torch

IN_MEMORY = Path("/dev/shm")
SETTING = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in tmpfs."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        yield Path(folder)


def has_huge_pages() -> bool:
    """Whether this kernel gives them to files on request."""
    version = tuple(int(number) for number in os.uname().release.split(".")[:2])
    return version >= (6, 1) and SETTING.exists() and "[deny]" not in SETTING.read_text()


@pytest.mark.skipif(not has_huge_pages(), reason="this kernel has no huge pages for files in memory")
def test_reading_a_snapshot_in_memory_takes_few_page_faults(memory: Path) -> None:
    saver, mib = Saver(memory, in_memory=True), 64
    saver.save(1, {"model": {"weight": torch.randn(mib << 18)}}, facts={})
    saver.finish()
    assert read.find_newest_good(memory, {})[0] is not None  # modules are imported
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    verdict, _ = read.find_newest_good(memory, {})
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    saver.close()
    assert verdict is not None
    assert faults < mib * 16 / 4, "there are 16 for each MiB of small pages"


@pytest.mark.parametrize("size_bytes", [0, 1, HUGE_BYTES - 1, HUGE_BYTES, 3 * HUGE_BYTES + 4711])
def test_a_mapped_file_has_its_bytes_and_keeps_them(memory: Path, tmp_path: Path, size_bytes: int) -> None:
    content = os.urandom(size_bytes)
    for folder in (memory, tmp_path):  # one on a disk has no huge pages
        path = folder / "file"
        with path.open("w+b", buffering=0) as file:
            write_whole_chunk(MemoryFile(file, size_bytes), memoryview(content))
        mapped = map_file(path)
        assert mapped == content
        if size_bytes:
            mapped[-1] ^= 1
            assert mapped != content
        assert path.read_bytes() == content


def test_a_map_is_given_back_with_its_last_user(memory: Path) -> None:
    path = memory / "file"
    path.write_bytes(bytes(HUGE_BYTES))
    tensor = torch.frombuffer(map_file(path), dtype=torch.uint8)[1:]
    gc.collect()
    assert int(tensor.sum()) == 0
    assert str(path) in Path("/proc/self/maps").read_text()
    del tensor
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    reserved = Path("/proc/self/maps").read_text().count("r--p 00000000 00:00 0")
    for _ in range(5):
        map_file(path)
    assert Path("/proc/self/maps").read_text().count("r--p 00000000 00:00 0") == reserved


def test_a_size_that_the_system_refuses_is_an_error(memory: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HUGE_BYTES, limits[1]))
    try:
        with (memory / "file").open("w+b", buffering=0) as file, pytest.raises(OSError, match="too large"):
            MemoryFile(file, 4 * HUGE_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
