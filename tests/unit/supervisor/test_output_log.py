"""What a rank prints is sent in its order, whatever the disk takes; what is missing is counted to the byte."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.supervisor import output_log
from dtctl.supervisor.output_log import OutputLog, read_from


class Disk(OutputLog):
    """A log on a disk that has so much room; -1: as much as is wanted."""

    room = -1

    def _write_output(self, data: bytes) -> int:
        if self.room >= 0:
            data = data[: self.room]
            self.room -= len(data)
        return super()._write_output(data)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("print"), st.integers(1, 400)),
        st.tuples(st.just("take"), st.integers(1, 500)),
        st.tuples(st.just("room"), st.integers(-1, 300)),
        st.tuples(st.just("link"), st.integers(0, 1)),
    ),
    max_size=60,
)


@given(ACTIONS, st.sampled_from([0, 1000]))
def test_every_byte_is_sent_or_counted(actions: list[tuple[str, int]], limit: int) -> None:
    held, output_log.HELD_BYTES = output_log.HELD_BYTES, 300
    try:
        _try(actions, limit)
    finally:
        output_log.HELD_BYTES = held


def _try(actions: list[tuple[str, int]], limit: int) -> None:
    printed, received, is_linked = b"", b"", True
    with tempfile.TemporaryDirectory() as folder:
        log = Disk(str(Path(folder, "x")), limit)

        def take(size: int) -> bytes:
            missing, data = log.take_unsent(size)
            return b"?" * missing + data

        for action, number in actions:
            if action == "print":
                data = bytes(65 + (len(printed) + n) % 26 for n in range(number))
                printed += data
                log.write(data, is_linked)
                assert len(log.held) <= 300 + 400 * len(actions) if is_linked else 300
            elif action == "take" and is_linked:
                received += take(number)
            elif action == "room":
                log.room = number
            elif action == "link":
                is_linked = bool(number)
        from_disk = b""
        for missing, data in read_from(log.fd, log.segments, 0):
            from_disk += b"?" * missing + data
        assert all(a in (b, 63) for a, b in zip(from_disk, printed, strict=False))
        told = log.lost(is_linked=True)
        while log.sent < log.size:
            received += take(70)
        assert len(received) == len(printed) == log.size
        assert all(a in (b, 63) for a, b in zip(received, printed, strict=True))
        assert told == log.lost(is_linked=True)
        # What was cut is missing, too, but for what had been sent before.
        assert told <= received.count(b"?") <= told + log.cut
        if not limit and not log.unstored:
            assert told == 0
        assert (log.stored() <= limit + 400) if limit else log.cut == 0
        os.close(log.fd)


def test_what_is_cut_out_of_the_middle_is_said_there(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path / "x"), 100_000)
    lines = [b"%06d\n" % n for n in range(100_000)]
    for number in range(0, len(lines), 100):
        log.write(b"".join(lines[number : number + 100]))
        while log.sent < log.size:
            log.take_unsent(1 << 16)
    kept = (tmp_path / "x").read_bytes().splitlines()
    marks = [line for line in kept if b"cut" in line]
    assert len(marks) == 1
    assert b"%d bytes" % log.cut in marks[0]
    assert log.cut == 700_000 - log.stored() > 0
    assert (kept[0], kept[-1]) == (b"000000", b"099999")
    assert len((tmp_path / "x").read_bytes()) < 101_000


def test_a_link_that_is_as_slow_as_allowed_misses_nothing(tmp_path: Path) -> None:
    log = OutputLog(str(tmp_path / "x"), 8 << 20)
    for _ in range(40):
        while log.is_full():
            assert log.take_unsent(1 << 16)[0] == 0
        log.write(bytes(output_log.READ_BYTES))
    assert log.cut > 0


@pytest.mark.parametrize("backlog", [0, 60_000])
def test_a_worker_waits_only_where_something_would_be_missed(tmp_path: Path, backlog: int) -> None:
    log = OutputLog(str(tmp_path / "x"), 16 << 20)
    log.write(bytes(2 << 20))
    assert not log.is_full(), "it is on the disk"
    log.write(bytes(13_800_000))
    assert log.is_full(), "the link is far behind, and the middle is about to be cut"
    while log.sent < log.size - backlog:
        log.take_unsent(1 << 16)
    assert not log.is_full()
