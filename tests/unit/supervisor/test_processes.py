"""A run's processes are found and ended by their mark and their descent, and nobody else's ever."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dtctl import node_facts, shell
from dtctl.supervisor import processes

SLEEP = "exec sleep 60"


# Asked by a process of its own: to one that asks, all its own children belong to the run.
FIND = (
    "import sys; from dtctl.supervisor.processes import find_run_processes\n"
    "print(*find_run_processes(sys.argv[1], frozenset(map(int, sys.argv[2:]))))"
)
KILL = "import sys; from dtctl.supervisor.processes import kill_run_processes; print(kill_run_processes(sys.argv[1]))"


def ask(program: str, *arguments: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


def found(token: str, *keepers: int) -> list[int]:
    return ask(FIND, token, *map(str, keepers))


def kill(token: str) -> int:
    (left,) = ask(KILL, token)
    return left


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextmanager
def started(command: str, token: str | None) -> Iterator[subprocess.Popen[bytes]]:
    """A shell command, marked if a token is given; what it leaves behind is ended by its mark or its session."""
    env = {key: value for key, value in os.environ.items() if key != processes.TOKEN}
    if token is not None:
        env[processes.TOKEN] = token
    process = subprocess.Popen(["sh", "-c", command], env=env, start_new_session=True, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        for pid in {*marked_or_below(process.pid), process.pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def marked_or_below(root: int) -> list[int]:
    table = processes._read_process_table()
    inside = {root}
    for pid in sorted(table):
        if table[pid][0] in inside:
            inside.add(pid)
    return sorted(inside)


def test_a_process_whose_first_thread_alone_has_ended_is_found_and_ended() -> None:
    """The kernel calls it a zombie, and shows the environment to those who look at another thread."""
    program = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    token = secrets.token_hex(16)
    with started(f"exec {shell.quote_word(sys.executable)} -c {shell.quote_word(program)}", token) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
        assert process.poll() is None
        assert found(token) == [process.pid]
        assert node_facts.start_ticks(process.pid) > 0
        assert kill(token) == 0
        assert process.poll() == -signal.SIGKILL, "it could be collected as soon as it counted as ended"


def line_of(process: subprocess.Popen[bytes]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@pytest.fixture
def token() -> Iterator[str]:
    made = secrets.token_hex(16)
    yield made
    kill(made)


def test_marked_processes_are_found_oldest_first(token: str) -> None:
    with started(SLEEP, token) as one, started(SLEEP, token) as two:
        wait_until(lambda: len(found(token)) == 2)
        assert found(token) == [one.pid, two.pid]
    assert found(token) == []


def test_no_other_process_is_ever_found(token: str) -> None:
    other = secrets.token_hex(16)
    with started(SLEEP, None) as plain, started(SLEEP, other) as others, started(SLEEP, token[:-1]) as shorter:
        with (
            started(f"{processes.TOKEN}X={token} {SLEEP}", None),
            started(f"exec sleep 60 {processes.TOKEN}={token}", None),
        ):
            wait_until(lambda: found(other))
            assert found(token) == []
        assert found(other) == [others.pid]
        assert {plain.pid, shorter.pid}.isdisjoint(found(other))
    assert os.getpid() not in found(token)


def test_a_daemonized_process_is_found(token: str) -> None:
    with started("setsid sh -c 'echo $$; exec sleep 60' & sleep 0.01", token) as parent:
        daemon = line_of(parent)
        parent.wait()
        assert found(token) == [daemon]
        assert processes._read_process_table()[daemon][0] != parent.pid, "it belongs to somebody else by now"
        assert kill(token) == 0
        assert found(token) == []
        wait_until(lambda: processes._read_process_table().get(daemon, (0, "Z", 0))[1] == "Z")


def test_a_child_that_has_wiped_its_environment_is_found_by_descent(token: str) -> None:
    with started("env -i sh -c 'echo $$; sleep 60; :' & wait", token) as parent:
        child = line_of(parent)
        wait_until(lambda: len(found(token)) == 3)
        assert {parent.pid, child} < set(found(token))


def test_descendants_of_the_supervisor_belong_to_the_run_and_it_does_not(token: str) -> None:
    with started("env -i sh -c 'echo $$; exec sleep 60' & wait", None) as supervisor:
        child = line_of(supervisor)
        assert found(token) == []
        assert found(token, supervisor.pid) == [child]


def test_zombies_do_not_count(token: str) -> None:
    with started("sh -c 'echo $$' & exec sleep 60", token) as parent:
        child = line_of(parent)
        wait_until(lambda: processes._read_process_table()[child][1] == "Z")
        assert found(token) == [parent.pid]


def test_a_command_name_with_spaces_and_parentheses_is_read(token: str) -> None:
    program = "open('/proc/self/comm', 'w').write('a) R 1 (b'); import time; print(1, flush=True); time.sleep(60)"
    with started("exec " + shell.join_command([sys.executable, "-c", program]), token) as odd:
        line_of(odd)
        assert processes._read_process_table()[odd.pid][0] == os.getpid()
        assert found(token) == [odd.pid]


def test_kill_ends_all_of_them_even_those_that_fork_and_ignore(token: str) -> None:
    stubborn = "trap '' TERM INT HUP; while :; do sh -c 'sleep 0.2' & sleep 0.01; done"
    with started(stubborn, token), started(stubborn, token), started(SLEEP, None) as other:
        wait_until(lambda: len(found(token)) > 6)
        assert kill(token) == 0
        assert found(token) == []
        assert other.poll() is None


def test_a_stopped_process_is_ended_too(token: str) -> None:
    with started("kill -STOP $$; sleep 60", token) as stopped:
        wait_until(lambda: processes._read_process_table()[stopped.pid][1] == "T")
        assert kill(token) == 0
        assert stopped.wait(60) == -signal.SIGKILL


def test_signals_to_those_that_are_gone_are_no_error() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    processes.send_process_signal([process.pid], signal.SIGTERM)


def test_children_are_reaped_and_orphans_adopted() -> None:
    program = (
        "import os, subprocess, time\nfrom dtctl.supervisor import processes as p\n"
        "assert p.become_subreaper()\nassert not p.has_children()\n"
        "shell = subprocess.Popen(['sh', '-c', 'setsid sleep 0.05 & exit 4'])\n"
        "ended = []\n"
        "while p.has_children():\n    ended += p.reap_children()\n"
        "print(len(ended), sorted(status for _, status in ended), p.reap_children())\nshell.returncode = 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=600)
    assert done.stdout == "2 [0, 1024] []\n", done.stderr


def test_a_process_ends_with_its_parent() -> None:
    program = (
        "import os, time\nfrom dtctl.supervisor import processes as p\nparent = os.getpid()\nif os.fork() == 0:\n"
        "    p.set_parent_death_signal(parent)\n    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    child = line_of(parent)
    parent.kill()
    parent.wait()
    assert parent.stdout is not None
    parent.stdout.close()
    wait_until(lambda: processes._read_process_table().get(child, (0, "Z", 0))[1] == "Z")


WITHOUT_GUARD = """
import os, signal, subprocess, sys, time
from dtctl.supervisor import processes
from dtctl.supervisor.messages.attempt import StartAttempt
from dtctl.supervisor.supervisor import Supervisor

processes.become_subreaper()  # as a node's init is
service = subprocess.Popen(["sleep", "60"])
reading, writing = os.pipe()
if os.fork() == 0:
    guard = os.getpid()
    if os.fork() == 0:
        start = StartAttempt(
            run="r", token=sys.argv[2], attempt=0, script="", workers=[], split_ranks=False, env={}, peer="",
            grace_s=1, keep=False, link_timeout_s=1,
        )
        server = Supervisor(start, sys.argv[1], None, None, guard)
        os.kill(guard, signal.SIGKILL)
        while os.getppid() == guard:
            time.sleep(0.001)
        os.write(writing, str(processes.kill_run_processes(sys.argv[2], server.run.helpers)).encode())
        os._exit(0)
    signal.pause()
os.close(writing)
os.read(reading, 9)
time.sleep(0.05)
print(int(service.poll() is None))
service.kill()
"""


def test_a_supervisor_whose_guard_was_killed_leaves_the_services_of_the_node_alone(tmp_path: Path) -> None:
    """Whoever adopts it has other children: init has them all."""
    assert ask(WITHOUT_GUARD, str(tmp_path), secrets.token_hex(16)) == [1]


def test_no_process_at_all_is_none_of_the_run() -> None:
    """0, which a warm process has for its id when it has ended, is also the parent of init."""
    assert found(secrets.token_hex(16), 0) == []
