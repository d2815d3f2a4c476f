"""This machine as a node: what the protocol promises, held by real child processes."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtctl import shell
from dtctl.errors import ConnectError
from dtctl.transport.base import Target
from dtctl.transport.local import LocalConnection, LocalStream, LocalTransport


@pytest.fixture
def connection() -> Iterator[LocalConnection]:
    made = LocalTransport().connect(Target(name="here", address="ignored"))
    yield made
    made.close()
    for stream in made.streams:
        stream.exit_status(60)  # all of them end at the end of their input


def read_all(stream: LocalStream) -> bytes:
    found = b""
    while data := stream.read(1 << 16):
        found += data
    return found


def test_a_command_is_shell_text_in_the_home_folder(connection: LocalConnection) -> None:
    stream = connection.open("pwd; echo $((1 + 1)); " + shell.join_command(["printf", "%s", "a b'c"]))
    assert read_all(stream).decode() == f"{Path.home()}\n2\na b'c"
    assert stream.exit_status(60) == 0


def test_the_three_streams_are_apart(connection: LocalConnection) -> None:
    stream = connection.open("cat; echo trouble >&2; exit 3")
    assert stream.read_stderr() == b"", "it does not wait for more"
    stream.write(b"in")
    stream.close_stdin()
    assert read_all(stream) == b"in"
    assert stream.exit_status(60) == 3
    assert stream.read_stderr() == b"trouble\n"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_is_told_as_a_shell_tells_it(connection: LocalConnection, number: int) -> None:
    stream = connection.open(f"kill -{number} $$")
    assert stream.exit_status(60) == 128 + number


def test_a_command_that_goes_on_has_no_status_yet(connection: LocalConnection) -> None:
    stream = connection.open("exec cat")
    assert stream.exit_status(0) is None
    stream.close()
    stream.close()
    assert stream.exit_status(60) == 0, "closing lets it see the end of its input"


def test_writing_to_a_command_that_has_ended_is_an_error_of_the_node(connection: LocalConnection) -> None:
    stream = connection.open("exec true")
    assert stream.exit_status(60) == 0
    with pytest.raises(ConnectError) as caught:
        stream.write(b"x" * (1 << 20))
    assert caught.value.node == "here"
    stream.close()
    with pytest.raises(ConnectError):
        stream.write(b"x")


def test_all_of_a_large_write_arrives_though_signals_interrupt_it(connection: LocalConnection) -> None:
    data = os.urandom(1 << 20) * 4
    stream = connection.open("sleep 0.05; sha256sum")  # the pipe is full for a while
    handler = signal.signal(signal.SIGALRM, lambda *_: None)
    limit = signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)  # of this test, which holds afterwards, too
    try:
        stream.write(data)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *limit)
    stream.close_stdin()
    assert read_all(stream).decode().split()[0] == hashlib.sha256(data).hexdigest()


def test_a_command_is_out_of_reach_of_ctrl_c(connection: LocalConnection) -> None:
    stream = connection.open("ps -o sid= -p $$; echo $$")
    session, own = read_all(stream).split()
    assert int(session) == int(own) != os.getsid(0)


def test_two_commands_do_not_share_their_input(connection: LocalConnection) -> None:
    """A second child must not hold the first one's input open, or closing it would tell nobody."""
    first = connection.open("exec cat")
    second = connection.open("exec cat")
    first.close_stdin()
    assert first.exit_status(60) == 0
    assert second.exit_status(0) is None


def test_nothing_is_left_when_a_connection_is_closed() -> None:
    connection = LocalTransport().connect(Target(name="here", address=""))
    stream = connection.open("exec cat")
    pid = stream._process.pid
    reader = threading.Thread(target=read_all, args=(stream,), daemon=True)
    reader.start()
    connection.close()
    connection.close()
    reader.join(60)
    assert not reader.is_alive()
    assert stream.exit_status(60) == 0
    assert not Path(f"/proc/{pid}").exists(), "not even a zombie"
    del stream, connection
    gc.collect()  # an open pipe would be told of here, and warnings are errors


def test_it_is_this_machine(connection: LocalConnection) -> None:
    assert (connection.peer_address(), connection.alive(), connection.target.name) == ("127.0.0.1", True, "here")
