"""What may be forked: a process whose threads, if it has any, know of forks."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dtctl.supervisor import fork_server_main
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


def test_a_fork_server_that_was_killed_is_noticed_though_nothing_is_asked_of_it(tmp_path: Path) -> None:
    server = ForkServer(str(tmp_path))
    script = tmp_path / "node.sh"
    script.write_text(f'exec sh "$DTCTL_VIA" {sys.executable} train.py\n')
    server.start(str(script), str(tmp_path), dict(os.environ), ["decimal"], 2)
    while not server.poll():
        select.select(server.descriptors(), [], [], 60)
    os.kill(server.pid, signal.SIGKILL)
    os.waitpid(server.pid, 0)
    with pytest.raises(ForkServerUnavailable) as caught:
        server.poll()
    assert not caught.value.is_final, "another one would do as well as this one did"
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
