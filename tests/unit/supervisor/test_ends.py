"""How the workers of an attempt have ended, as a supervisor records it; with real children of a process of its own."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.supervisor.messages.attempt import AttemptStopped, WorkerExit

SUPERVISE = """\
import os, signal, sys, threading, time
from dtctl.supervisor import run_workdir
from dtctl.supervisor.messages.attempt import StartAttempt, WorkerSpec
from dtctl.supervisor.supervisor import Supervisor

run_dir, token, script = sys.argv[1:]
run_workdir.share_code_folder(run_dir, run_dir)
workers = [WorkerSpec(rank=rank, env={"RANK": str(rank)}) for rank in range(3)]
start = StartAttempt(
    run="r", token=token, attempt=0, script=script, workers=workers, split_ranks=False, env={}, peer="", grace_s=0.5,
    keep=False, link_timeout_s=1,
)
server = Supervisor(start, run_dir, None, None, 0)  # no guard: the parent has other children
server.start(start)

def stop():
    while any(not os.path.exists(os.path.join(run_dir, "up-%d" % rank)) for rank in range(3)):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

if "up-" in script:
    threading.Thread(target=stop, daemon=True).start()
server.leaving = True
server.serve()
"""


def exits(tmp_path: Path, script: str) -> dict[int, WorkerExit]:
    """Rank -> what the exit record of an attempt with this script says of it."""
    argv = [sys.executable, "-c", SUPERVISE, str(tmp_path), secrets.token_hex(16), script]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    record = AttemptStopped.parse(json.loads((tmp_path / "attempt-0" / "exit.json").read_text()))
    return {worker.rank: worker for worker in record.exits}


def test_workers_that_the_supervisor_kills_are_recorded_as_killed(tmp_path: Path) -> None:
    """They do not end when they are asked to; one does."""
    obedient = "[ $RANK = 1 ] || trap '' TERM\n"
    found = exits(tmp_path, obedient + f"touch {tmp_path}/up-$RANK\nwhile :; do sleep 0.05; done\n")
    assert sorted(found) == [0, 1, 2]
    assert [(found[rank].signal, found[rank].killed, found[rank].told) for rank in range(3)] == [
        (signal.SIGKILL, True, True), (signal.SIGTERM, False, True), (signal.SIGKILL, True, True),
    ]  # fmt: skip
    assert "dtctl killed it" in found[0].why


def test_a_worker_that_others_have_killed_is_not_recorded_as_killed_by_dtctl(tmp_path: Path) -> None:
    """It is killed when the others have said that they ignore the request to end, which follows at once."""
    others = " && ".join(f"[ -e {tmp_path}/ready-{rank} ]" for rank in (0, 2))
    killed = f"if [ $RANK = 1 ]; then until {others}; do sleep 0.05; done; kill -KILL $$; fi\n"
    found = exits(tmp_path, killed + f"trap '' TERM\ntouch {tmp_path}/ready-$RANK\nwhile :; do sleep 0.05; done\n")
    assert [(found[rank].signal, found[rank].killed, found[rank].told) for rank in range(3)] == [
        (signal.SIGKILL, True, True), (signal.SIGKILL, False, False), (signal.SIGKILL, True, True),
    ]  # fmt: skip


BETWEEN = """\
import os, signal, sys
from dtctl.supervisor import processes

signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"the handler of the parent has run\\n"))
begin = os.setsid
def begin_and_be_told():
    begin()
    os.kill(os.getpid(), int(sys.argv[1]))
os.setsid = begin_and_be_told
child = processes.spawn_program(["sleep", "2"], "/", dict(os.environ), {})
print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_between_fork_and_exec_is_not_lost(number: int) -> None:
    """It comes right after the fork, while the child still has the handlers of its parent."""
    argv = [sys.executable, "-c", BETWEEN, str(int(number))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == (f"{int(number)}\n", "")


def test_no_signal_is_blocked_in_a_program_nor_in_who_has_started_it() -> None:
    program = (
        "import os, signal\nfrom dtctl.supervisor import processes\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])\n"
        "child = processes.spawn_program(['grep', 'SigBlk', '/proc/self/status'], '/', dict(os.environ), {})\n"
        "os.waitpid(child, 0)\nprint(*signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    blocked, own = done.stdout.splitlines()
    assert int(blocked.split()[1], 16) == 1 << (signal.SIGUSR2 - 1)
    assert own in ("Signals.SIGUSR2", str(int(signal.SIGUSR2)))
