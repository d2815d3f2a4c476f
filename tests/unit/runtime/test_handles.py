"""A data set that keeps files open, read by several processes: the samples of one, or a refusal before training."""

from __future__ import annotations

import fcntl
import gzip
import io
import mmap
import os
import socket
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dtctl.errors import PlanError
from dtctl.runtime.data_loading import handles
from dtctl.runtime.data_loading.feed import BatchLoader
from dtctl.runtime.data_loading.order import SampleOrder, WorkerSampler
from dtctl.runtime.data_loading.reading import BatchReader
from dtctl.train.batch import BatchSizes
from dtctl.train.config import TrainConfig
from tests.facts import raises

COUNT, PIECES, PIECE = 96, 32, 16
SIZE = PIECES * PIECE


def content() -> bytes:
    return b"".join(index.to_bytes(2, "little") * (SIZE // 2) for index in range(COUNT))


class Records:
    """Fixed-size records that are read in pieces through something that is open."""

    def __init__(self, read: Callable[[int, int], bytes], handle: Any) -> None:
        self.read, self.handle = read, handle

    def close(self) -> None:
        for handle in self.handle if isinstance(self.handle, list) else [self.handle]:
            os.close(handle) if isinstance(handle, int) else handle.close()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        pieces = []
        for piece in range(PIECES):
            pieces.append(self.read(index * SIZE + piece * PIECE, PIECE))
            os.sched_yield()  # the other process may move a position that both have
        return torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.int16).clone()


def by_seeking(file: Any) -> Callable[[int, int], bytes]:
    def read(offset: int, size: int) -> bytes:
        file.seek(offset)
        os.sched_yield()
        found: bytes = file.read(size)
        return found

    return read


def unbuffered(path: Path) -> Records:
    file = path.open("rb", buffering=0)
    return Records(by_seeking(file), file)


def buffered(path: Path) -> Records:
    file = path.open("rb")
    return Records(by_seeking(file), file)


def descriptor(path: Path) -> Records:
    number = os.open(path, os.O_RDONLY)

    def read(offset: int, size: int) -> bytes:
        os.lseek(number, offset, os.SEEK_SET)
        os.sched_yield()
        return os.read(number, size)

    return Records(read, number)


def zipped(path: Path) -> Records:
    with zipfile.ZipFile(path.with_suffix(".zip"), "w") as file:
        file.write(path, "records")
    archive = zipfile.ZipFile(path.with_suffix(".zip"))
    member = archive.open("records")
    return Records(by_seeking(member), [member, archive])


def tarred(path: Path) -> Records:
    with tarfile.open(path.with_suffix(".tar"), "w") as file:
        file.add(path, "records")
    archive = tarfile.open(path.with_suffix(".tar"))  # noqa: SIM115
    member = archive.extractfile("records")
    return Records(by_seeking(member), [member, archive])


def compressed(path: Path) -> Records:
    path.with_suffix(".gz").write_bytes(gzip.compress(path.read_bytes()))
    file = gzip.open(path.with_suffix(".gz"))  # noqa: SIM115
    return Records(by_seeking(file), file)


def deleted(path: Path) -> Records:
    """As a temporary file is, which has no name any more."""
    file = path.open("rb+", buffering=0)
    path.unlink()
    return Records(by_seeking(file), file)


def mapped(path: Path) -> Records:
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return Records(lambda offset, size: memory[offset : offset + size], memory)


def all_of(data: object, workers: int) -> list[list[int]]:
    sizes = BatchSizes(micro=4, accumulate=1, world_size=1)
    schedule = WorkerSampler(SampleOrder(COUNT, 0), sizes, rank=0, end=COUNT)
    feed = BatchLoader(BatchReader(data, 0), TrainConfig(data_workers=workers), torch.device("cpu"))  # type: ignore[arg-type]
    with feed.running():
        return [
            feed.batch(schedule(start)[0], schedule, start, 0)[:, ::8].tolist()
            for start in range(0, COUNT, sizes.total)
        ]


@pytest.mark.parametrize("opened", [unbuffered, buffered, descriptor, zipped, tarred, compressed, deleted, mapped])
def test_processes_read_what_one_reads(tmp_path: Path, opened: Callable[[Path], Records]) -> None:
    path = tmp_path / "records"
    path.write_bytes(content())
    with closing(opened(path)) as data:
        assert all_of(data, 2) == all_of(data, 0)


def test_a_file_that_is_written_stays_shared_and_a_lock_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(content())
    data = unbuffered(path)
    with (tmp_path / "log").open("wb", buffering=0) as log, (tmp_path / "lock").open("w+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        inner = data.read

        def read(offset: int, size: int) -> bytes:
            if offset % SIZE == 0:
                log.write(b"0123456789\n")
            return inner(offset, size)

        data.read = read
        all_of(data, 2)
        assert set((tmp_path / "log").read_bytes().split()) == {b"0123456789"}
        with (tmp_path / "lock").open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    data.close()


class Holder:
    """Rows of a database or of a server."""

    def __init__(self, handle: object = None, opens: Callable[[], Any] | None = None) -> None:
        self.nested: dict[str, Any] = {"handle": handle}
        self.connection: Any = None
        self.opens, self.opened_by = opens, 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> int:
        if self.opens is not None and self.connection is None:
            self.connection, self.opened_by = self.opens(), os.getpid()
        assert self.opens is None or self.opened_by == os.getpid()
        return index


def refuse(handle: object, facts: str) -> None:
    with raises(PlanError, facts):
        BatchLoader(BatchReader(Holder(handle), 0), TrainConfig(data_workers=2), torch.device("cpu"))
    BatchLoader(BatchReader(Holder(handle), 0), TrainConfig(data_workers=0), torch.device("cpu"))


def test_a_socket_is_refused_by_name() -> None:
    one, other = socket.socketpair()
    with one, other:
        refuse(one, "socket nested handle")


def test_an_open_database_is_refused_by_name(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "rows.db")
    connection.execute("create table rows (value)")
    connection.commit()
    refuse(connection, "SQLite rows.db nested handle")
    # One that something else has opened is no business of the data set.
    BatchLoader(BatchReader(Holder(io.BytesIO()), 0), TrainConfig(data_workers=2), torch.device("cpu"))
    connection.close()
    with closing(sqlite3.connect(":memory:")) as memory:
        BatchLoader(BatchReader(Holder(memory), 0), TrainConfig(data_workers=2), torch.device("cpu"))


def test_a_map_of_lmdb_is_refused_by_name(tmp_path: Path) -> None:
    """Its library is no part of the tests: a file with its mark, and an object that no other process can have."""
    (tmp_path / "data.mdb").write_bytes(bytes(16) + b"\xde\xc0\xef\xbe" + bytes(4072))
    with (tmp_path / "data.mdb").open("rb"), closing(sqlite3.connect(":memory:")) as handle:
        refuse(handle, "LMDB data.mdb")


def test_what_a_data_set_opens_when_it_is_read_each_process_opens_itself(tmp_path: Path) -> None:
    """The first samples are read before training, in the process that the others are forked from."""
    database = tmp_path / "rows.db"
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("create table rows (value)")

    def connect() -> Any:
        made = sqlite3.connect(database)
        made.execute("select * from rows").fetchall()
        return made

    for opens in (connect, socket.socket):
        data = Holder(opens=opens)
        feed = BatchLoader(BatchReader(data, 0), TrainConfig(data_workers=2), torch.device("cpu"))
        feed.single(np.array([1, 2]))
        assert data.connection is not None
        schedule = WorkerSampler(
            SampleOrder(COUNT, 0), BatchSizes(micro=4, accumulate=1, world_size=1), rank=0, end=COUNT
        )
        with feed.running():
            for start in range(0, 32, 4):
                assert feed.batch(schedule(start)[0], schedule, start, 0).tolist() == schedule(start)[0].tolist()
        data.connection.close()


def test_positions_are_those_before_the_fork(tmp_path: Path) -> None:
    path = tmp_path / "records"
    path.write_bytes(content())
    with path.open("rb", buffering=0) as file:
        file.seek(SIZE)
        files = handles.open_files()
        assert files[file.fileno()].position == SIZE
        file.seek(0)
        handles.reopen_inherited_files({file.fileno(): files[file.fileno()]})
        assert file.read(2) == b"\1\0"


def test_a_file_that_was_closed_since_is_left_alone(tmp_path: Path) -> None:
    """Libraries close theirs in forked processes, and another file may have the descriptor by then."""
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    number = os.open(tmp_path / "a", os.O_RDONLY)
    files = handles.open_files()
    os.close(number)
    handles.reopen_inherited_files({number: files[number]})
    other = os.open(tmp_path / "b", os.O_RDONLY)
    try:
        os.lseek(other, 1, os.SEEK_SET)
        handles.reopen_inherited_files({other: files[number]})
        assert os.lseek(other, 0, os.SEEK_CUR) == 1
    finally:
        os.close(other)
