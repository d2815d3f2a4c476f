"""A worker that gloo would let wait until the group times out gives way; one whose wait is ended does not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl import names
from dtctl.supervisor.messages.attempt import Heal
from dtctl.supervisor.replacement_pipes import ReplacementPipes

pytestmark = pytest.mark.torch

PAIR = """
import datetime, os, signal, sys, threading, time
import torch
import torch.distributed as dist
from dtctl.runtime.live import stuck
from dtctl.runtime.live.control import SupervisorLink

kind, peer_ends, port = sys.argv[1:]
other = os.fork()
rank = 1 if other else 0
control = SupervisorLink.build_from_environ(os.environ, rank, 2) if rank else None
if control:
    control.joining()
limit = datetime.timedelta(seconds=600)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=limit)
data = torch.ones(16 << 20)  # more than the buffers of sockets take

def until(condition):
    while not condition():
        time.sleep(0.02)

def exchange(**options):
    if kind == "send":
        dist.send(data, 0) if rank else dist.irecv(data, 1)
    elif kind == "broadcast":
        dist.broadcast(data, 1, **options)
    else:
        dist.all_reduce(data, **options)

if not rank:  # has said that it takes the data, and takes none
    if kind != "all_reduce":
        exchange(async_op=True)
        until(lambda: kind == "send" or stuck.find_gloo_waits())
    os.kill(os.getpid(), signal.SIGSTOP)
control.trains = True
control.is_joined()

def tell():
    until(stuck.find_gloo_waits)
    print("waits", flush=True)
    if peer_ends == "killed":
        os.kill(other, signal.SIGKILL)

with open(f"/proc/{other}/stat") as stat:
    until(lambda: (stat.seek(0), stat.read().rpartition(")")[2].split()[0] == "T")[1])
threading.Thread(target=tell, daemon=True).start()
try:
    exchange()
except RuntimeError as exc:
    print("woken:", exc, flush=True)
finally:
    os.kill(other, signal.SIGKILL)
os._exit(0)
"""


@pytest.mark.parametrize("peer_ends", ["frozen", "killed"])
@pytest.mark.parametrize(("kind", "is_stuck"), [("send", True), ("broadcast", True), ("all_reduce", False)])
def test_a_send_that_gloo_forgets(tmp_path: Path, kind: str, is_stuck: bool, peer_ends: str) -> None:
    pipes = ReplacementPipes(str(tmp_path / "live"), [1])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    worker = subprocess.Popen(
        [sys.executable, "-c", PAIR, kind, peer_ends, str(port)],
        env={**os.environ, names.LIVE: str(tmp_path / "live")},
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "waits\n"
        pipes.heal(Heal(epoch=1, lost=[0], host=1))
        told = worker.stdout.readline()
        assert told.startswith("gloo does not end" if is_stuck else "woken:")
        assert worker.wait(60) == (-signal.SIGKILL if is_stuck else 0)
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
