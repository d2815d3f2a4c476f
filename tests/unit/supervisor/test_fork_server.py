"""What may be forked: a process whose threads, if it has any, know of forks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from dtctl.supervisor import fork_server_main


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
