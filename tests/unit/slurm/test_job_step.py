"""A job step whose tasks connect back; test_slurm_launch.py has the same with real Slurm.

Here a program takes srun's place that starts the tasks on this machine, since no srun fails at a chosen moment.
"""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest

from dtctl.errors import ConnectError
from dtctl.slurm import job_step
from dtctl.slurm.job_step import JobStep
from tests.hosts import wait_until

SRUN = f"""\
#!{sys.executable}
import os, subprocess, sys, threading
options = [each for each in sys.argv[1:] if each.startswith("--")]
nodes = next(each for each in options if each.startswith("--nodelist=")).partition("=")[2].split(",")
argv = sys.argv[sys.argv.index({sys.executable!r}):]
told = sys.stdin.buffer.read()
def run(task, node):
    broken = node in os.environ.get("BROKEN", "").split()
    env = {{**os.environ, "SLURM_PROCID": str(task), "SLURMD_NODENAME": node, "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}}
    child = subprocess.Popen(["false"] if broken else argv, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        child.stdin.write(told)
        child.stdin.close()
    except OSError:
        pass
    for line in child.stderr:
        lost = line.startswith(b"lost ")
        sys.stderr.write(f"srun: error: Node failure on {{node}}\\n" if lost else f"{{task}}: {{line.decode()}}")
        sys.stderr.flush()
    code = child.wait()
    if code:
        sys.stderr.write(f"srun: error: {{node}}: task {{task}}: Exited with exit code {{code}}\\n")
        sys.stderr.flush()
threads = [threading.Thread(target=run, args=each) for each in enumerate(nodes)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return []


def started(notes: list[str], *nodes: str) -> JobStep:
    step = JobStep("7", nodes, note=notes.append)
    step.start()
    return step


def read_all(stream: job_step.StepStream) -> bytes:
    found = b""
    while data := stream.read(1 << 16):
        found += data
    return found


def test_each_node_gets_its_own_command_and_stream(notes: list[str]) -> None:
    step = started(notes, "n1", "n2", "n3")
    streams = {}
    for number, node in enumerate(("n2", "n1", "n3")):
        stream = step.open(node, f"read line; echo {node} $line; echo error of {node} >&2; exit {number}")
        assert stream is not None, notes
        streams[node] = stream
    assert step.open("n1", "true") is None, "each task is handed out once"
    for node, stream in streams.items():
        stream.write(f"hello {node}\n".encode())
    for code, (node, stream) in enumerate(streams.items()):
        assert read_all(stream) == f"{node} hello {node}\n".encode()
        assert stream.exit_status(60) == code
        assert stream.read_stderr() == f"error of {node}\n".encode()
        assert stream.read_stderr() == b""
        stream.close()
        stream.close()
    assert notes == []


def test_a_command_sees_the_end_of_its_input_when_its_stream_is_closed(notes: list[str], tmp_path: Path) -> None:
    step = started(notes, "n1", "n2")
    first, second = (step.open(node, f"cat > /dev/null; touch {tmp_path}/{node}") for node in ("n1", "n2"))
    assert first is not None
    assert second is not None
    first.close()
    second.close_stdin()
    wait_until(lambda: {each.name for each in tmp_path.glob("n?")} == {"n1", "n2"}, 10, "both have ended")
    second.close()
    with pytest.raises(ConnectError, match="no longer reads"):
        first.write(b"x")


def test_a_node_whose_task_fails_is_given_up_at_once_and_the_others_stay(
    notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROKEN", "n2")
    step = started(notes, "n1", "n2")
    begun = time.monotonic()
    assert step.open("n2", "echo no") is None
    assert time.monotonic() - begun < job_step.CALL_BACK_S / 2
    assert notes == ["n2 gets a job step of its own: srun: error: n2: task 1: Exited with exit code 1"]
    stream = step.open("n1", "echo yes")
    assert stream is not None
    assert read_all(stream) == b"yes\n"


def test_a_step_that_cannot_be_started_reaches_no_node(
    notes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\necho 'srun: error: Unable to create step for job 7' >&2; exit 1\n")
    assert started(notes, "n1", "n2").open("n1", "true") is None
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    assert started(notes, "n1", "n2").open("n1", "true") is None
    assert notes == [
        "n1 gets a job step of its own: srun: error: Unable to create step for job 7",
        "n1 gets a job step of its own: srun cannot be started: No such file or directory",
    ]


def test_strangers_get_nothing_and_keep_nobody_out(notes: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection that does not prove itself is closed, whatever it sends, and silent ones keep no place."""
    monkeypatch.setattr(job_step, "HANDSHAKE_S", 0.5)
    step = JobStep("7", ("n1",), note=notes.append)
    strangers: list[socket.socket] = []
    step.start()
    for number in range(100):
        stranger = socket.create_connection(("127.0.0.1", step.port), timeout=60)
        if number % 2:
            stranger.sendall(bytes(4096))
        strangers.append(stranger)
    stream = step.open("n1", "echo yes")
    assert stream is not None, notes
    assert read_all(stream) == b"yes\n"
    for stranger in strangers:
        try:
            received = b"".join(iter(lambda stranger=stranger: stranger.recv(4096), b""))  # type: ignore[misc]
        except ConnectionResetError:
            received = b""
        assert len(received) <= 16, "a number to sign, and nothing else"
        stranger.close()


def test_a_node_that_slurm_gives_up_ends_its_stream_though_its_task_lives(notes: list[str]) -> None:
    """As with a slurmd that hangs: the controller declares the node failed, and the task stays connected."""
    step = started(notes, "n1", "n2")
    stream = step.open("n1", "echo lost node >&2; sleep 8")
    other = step.open("n2", "read line; echo $line")
    assert other is not None
    assert stream is not None
    begun = time.monotonic()
    assert read_all(stream) == b""
    assert time.monotonic() - begun < 7
    assert b"Node failure on n1" in stream.read_stderr()
    other.write(b"still here\n")
    assert read_all(other) == b"still here\n"
    stream.close()
