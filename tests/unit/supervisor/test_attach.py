"""A launcher that takes a kept run up again in the moment in which the run's supervisor ends."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtctl.supervisor import frames
from dtctl.supervisor.messages.attempt import Attach, AttemptStopped
from dtctl.supervisor.setup import attach_to_supervisor, listen_for_links


def end_at_once(server: socket.socket) -> None:
    """Leave the connection unaccepted."""


def end_before_it_reads(server: socket.socket) -> None:
    """Accept the connection, and leave the request unread."""
    connection, _ = server.accept()
    time.sleep(0.2)
    connection.close()


def end_after_it_has_read(server: socket.socket) -> None:
    """Take the request, and say nothing."""
    connection, _ = server.accept()
    connection.recv(1 << 16)
    connection.close()


@pytest.mark.parametrize("end", [end_at_once, end_before_it_reads, end_after_it_has_read])
def test_the_end_of_a_run_is_told_when_its_supervisor_ends_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Callable[[socket.socket], None]
) -> None:
    monkeypatch.chdir(tmp_path)  # attach changes it
    (tmp_path / "attempt-0").mkdir()
    (tmp_path / "attempt-0" / "rank-0.log").write_text("the whole output\n")
    (tmp_path / "attempt-0" / "exit.json").write_bytes(json.dumps(AttemptStopped(left=0, exits=[]).to_json()).encode())
    server = socket.socket(fileno=listen_for_links(str(tmp_path)))
    server.setblocking(True)

    def supervise() -> None:
        time.sleep(0.2)  # the connection waits to be accepted
        end(server)
        server.close()

    supervisor = threading.Thread(target=supervise)
    supervisor.start()
    (request_fd, request_end), (answer_fd, answer_end) = os.pipe(), os.pipe()
    try:
        assert (
            attach_to_supervisor(frames.FdLink(request_fd, answer_end), str(tmp_path), Attach(run="r", offsets={})) == 0
        )
    finally:
        supervisor.join()
        os.close(answer_end)
    answers = frames.FdLink(answer_fd, -1)
    assert answers.receive() == (frames.LOG, 0, b"the whole output\n")
    document = answers.receive_json()
    assert document is not None
    assert AttemptStopped.parse(document).gone
    assert answers.receive() is None
    for fd in (request_fd, request_end, answer_fd):
        os.close(fd)
