"""What may be forked: a process whose threads, if it has any, know of forks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.supervisor import fork_server, fork_server_main, processes
from dtctl.supervisor.fork_server import ForkServer, ForkServerUnavailable


def why(folder: Path, module: str) -> str:
    """What importing a module says against forking; with as many threads as the libraries like."""
    environ = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    program = f"import runpy; print(runpy.run_path({fork_server_main.__file__!r})['load']([{module!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_threads_of_numpy_are_no_obstacle_and_others_are(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    assert why(tmp_path, "numpy") == ""
    (tmp_path / "busy.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    assert why(tmp_path, "busy") == "importing has started 1 threads"


ASKED = """
import os
import select
import signal
from types import SimpleNamespace

STARTED_BY = os.getpid()
# As torch does: whoever asks for GPUs by CUDA's runtime spoils every fork, and `is_initialized` stays False.
cuda = SimpleNamespace(is_initialized=lambda: False, _is_in_bad_fork=lambda: {spoilt} and os.getpid() != STARTED_BY)
LOOKS_BY_NVML = os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")
"""


def test_a_question_for_gpus_that_spoils_forks_is_noticed(tmp_path: Path) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    for spoilt in (True, False):
        (package / "__init__.py").write_text(ASKED.format(spoilt=spoilt))
        expected = "importing has started CUDA: a module has asked for GPUs" if spoilt else ""
        assert why(tmp_path, "torch") == expected


def test_modules_that_ask_for_gpus_do_not_start_cuda(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(
        "import os\nif os.environ.get('PYTORCH_NVML_BASED_CUDA_CHECK') != '1':\n    raise RuntimeError('by CUDA')\n"
    )
    assert why(tmp_path, "asks") == ""


def started(folder: Path, modules: str = "decimal", program: str = "print('here')") -> ForkServer:
    """A fork server that is ready."""
    (folder / "train.py").write_text(program)
    server = ForkServer(str(folder))
    script = folder / "node.sh"
    script.write_text(f'exec sh "$DTCTL_VIA" {sys.executable} train.py\n')
    server.start(str(script), str(folder), dict(os.environ), [modules], 2)
    while not server.poll():
        select.select(server.descriptors(), [], [], 60)
    return server


def test_a_fork_server_that_was_killed_is_noticed_though_nothing_is_asked_of_it(tmp_path: Path) -> None:
    server = started(tmp_path)
    os.kill(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    with pytest.raises(ForkServerUnavailable) as caught:
        server.poll()
    assert not caught.value.is_final, "another one would do as well as this one did"
    server.close()


ONCE = """
import os
with open("imported.txt", "a") as file:
    file.write(f"{os.getpid()}\\n")
"""


def output_of(server: ForkServer) -> str:
    """What a worker prints that this server forks."""
    read_end, write_end = os.pipe()
    pid = server.fork({}, write_end)
    os.close(write_end)
    with open(read_end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed"), pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.slow)],
)
def test_a_standby_takes_the_place_of_a_fork_server_and_imports_nothing_again(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert processes.become_subreaper()
    monkeypatch.setattr(fork_server, "FORK_LIMIT_S", 2.0)
    (tmp_path / "once.py").write_text(ONCE)
    server = started(tmp_path, "once")
    imported_by = {server.pid}
    for _ in range(3):
        server.keep_standby()
        first, standby = server.pid, server.standby_pid
        server.keep_standby()
        assert server.standby_pid == standby, "one is enough"
        os.kill(first, number)
        assert output_of(server) == "here\n"
        os.waitpid(first, 0)
        assert (server.pid, server.standby_pid) == (standby, 0)
    assert {int(line) for line in (tmp_path / "imported.txt").read_text().split()} == imported_by
    server.keep_standby()
    assert output_of(server) == "here\n"  # served one after the other: the standby is a child of this process by now
    last = [server.pid, server.standby_pid]
    server.close()
    for pid in last:
        os.waitpid(pid, 0)


def test_a_standby_that_was_killed_is_replaced(tmp_path: Path) -> None:
    assert processes.become_subreaper()
    server = started(tmp_path)
    server.keep_standby()
    assert output_of(server) == "here\n"  # served one after the other: the standby is a child of this process by now
    first = server.standby_pid
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    server.keep_standby()
    assert server.standby_pid not in (0, first)
    assert output_of(server) == "here\n"
    os.kill(server.standby_pid, signal.SIGKILL)
    os.waitpid(server.standby_pid, 0)
    os.kill(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    with pytest.raises(ForkServerUnavailable):
        server.poll()
    server.close()


def test_garbage_is_not_searched_for_while_importing_and_is_afterwards(tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(
        "import gc\nbefore = gc.get_stats()[0]['collections']\nkept = [[] for _ in range(100_000)]\n"
        "searches = gc.get_stats()[0]['collections'] - before\n"
    )
    program = (
        f"import gc, runpy; load = runpy.run_path({fork_server_main.__file__!r})['load']\n"
        "assert load(['many']) == ''\nimport many\n"
        "print(many.searches, gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "True"]
