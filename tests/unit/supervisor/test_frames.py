"""Frames: what goes in comes out, however the bytes are cut, and damage is noticed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dtctl.supervisor import frames
from dtctl.supervisor.frames import BYTES, HEADER, JSON, LOG, MAX_FRAME, BrokenFrame, FdLink, FrameParser
from tests.facts import raises

KINDS = st.sampled_from([JSON, LOG, BYTES])
RANKS = st.integers(-(2**31), 2**31 - 1)
FRAMES = st.lists(st.tuples(KINDS, RANKS, st.binary(max_size=200)), max_size=6)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


def packed(wanted: list[tuple[bytes, int, bytes]]) -> bytes:
    return b"".join(frames.pack_frame(kind, payload, rank) for kind, rank, payload in wanted)


@given(FRAMES, st.lists(st.integers(1, 50), max_size=60))
def test_frames_arrive_whole_and_in_order_however_they_are_cut(
    wanted: list[tuple[bytes, int, bytes]], cuts: list[int]
) -> None:
    data = packed(wanted)
    parser, found = FrameParser(), []
    for size in cuts:
        found += parser.feed(data[:size])
        data = data[size:]
    found += parser.feed(data)
    assert found == wanted
    assert parser.pending == 0


@given(FRAMES, st.data())
def test_a_cut_stream_gives_the_whole_frames_before_the_cut(
    wanted: list[tuple[bytes, int, bytes]], data: st.DataObject
) -> None:
    whole = packed(wanted)
    at = data.draw(st.integers(0, len(whole)))
    parser = FrameParser()
    found = parser.feed(whole[:at])
    assert found == wanted[: len(found)]
    assert len(packed(found)) + parser.pending == at


@given(st.dictionaries(TEXT, VALUES))
@example({"text": "\x00\x7fé\u2028😀", "big": 2**80, "deep": [[[[]]]]})
def test_messages_arrive_as_they_were(message: dict[str, object]) -> None:
    ((kind, rank, payload),) = FrameParser().feed(frames.pack_json(message))
    assert (kind, rank) == (JSON, -1)
    assert frames.decode_message(payload) == json.loads(payload) == message


@given(st.binary(min_size=HEADER.size, max_size=300))
@example(b"Last login: Mon Nov 2 10:00:00\r\n")
def test_bytes_that_are_no_frames_are_never_waited_for_in_vain(noise: bytes) -> None:
    """Either they are refused at once, or they announce no more than a frame may hold."""
    parser = FrameParser()
    try:
        found = parser.feed(noise)
    except BrokenFrame:
        return
    assert len(packed(found)) + parser.pending == len(noise)
    if parser.pending >= HEADER.size:
        kind, _, length = HEADER.unpack_from(noise, len(noise) - parser.pending)
        assert kind in (JSON, LOG, BYTES)
        assert 0 <= length <= MAX_FRAME


@pytest.mark.parametrize("length", [-1, MAX_FRAME + 1, 2**31 - 1])
def test_an_impossible_length_is_refused_before_it_is_waited_for(length: int) -> None:
    with raises(BrokenFrame, "frame"):
        FrameParser().feed(HEADER.pack(JSON, -1, length))


def test_the_longest_frame_passes() -> None:
    payload = bytes(MAX_FRAME)
    assert FrameParser().feed(frames.pack_frame(BYTES, payload, 7)) == [(BYTES, 7, payload)]


@pytest.mark.parametrize(
    "payload", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"null", b'{"a":1} {"b":2}', b"[" * 90_000]
)
def test_what_is_not_a_message_is_refused(payload: bytes) -> None:
    with raises(BrokenFrame, "message"):
        frames.decode_message(payload)


@pytest.fixture
def pipe() -> Iterator[tuple[FdLink, int]]:
    """A link that reads what the test writes to the descriptor."""
    there, here = os.pipe()
    link = FdLink(there, here, idle_limit_s=0.05)
    ends = [here]

    def close() -> None:
        for fd in ends:
            os.close(fd)
        ends.clear()

    link.close_far_end = close  # type: ignore[attr-defined]
    yield link, here
    close()
    os.close(there)


def test_a_link_reads_frame_by_frame_and_hides_pings(pipe: tuple[FdLink, int]) -> None:
    link, here = pipe
    sent = [{"op": "hello", "n": 1}, {"op": "ping", "time": 1.0}, {"op": "hello", "n": 2}]
    os.write(here, b"".join(map(frames.pack_json, sent)) + frames.pack_frame(BYTES, b"data", 3))
    assert [link.receive_json(), link.receive_json()] == [sent[0], sent[2]]
    with raises(BrokenFrame, "4 bytes"):
        link.receive_json()


def test_a_link_that_is_closed_between_frames_has_ended(pipe: tuple[FdLink, int]) -> None:
    link, here = pipe
    os.write(here, frames.pack_json({"op": "quit"}))
    link.close_far_end()  # type: ignore[attr-defined]
    assert link.receive_json() == {"op": "quit"}
    assert link.receive_json() is None


def test_a_link_that_is_closed_inside_a_frame_is_broken(pipe: tuple[FdLink, int]) -> None:
    link, here = pipe
    os.write(here, frames.pack_json({"op": "quit"})[:-1])
    link.close_far_end()  # type: ignore[attr-defined]
    with raises(BrokenFrame, "inside frame"):
        link.receive()


def test_silence_is_the_loss_of_a_link(pipe: tuple[FdLink, int]) -> None:
    with raises(BrokenFrame, "0.05 seconds"):
        pipe[0].receive()


def test_sending_and_receiving_fit_together() -> None:
    there, here = os.pipe()
    try:
        link = FdLink(there, here)
        link.send_json({"op": "x"})
        link.send_frame(LOG, b"line\n", 5)
        assert link.receive_json() == {"op": "x"}
        assert link.receive() == (LOG, 5, b"line\n")
    finally:
        os.close(there)
        os.close(here)
