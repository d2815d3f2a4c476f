"""An attempt of the zoo through `dtctl launch` on this machine: pushed, supervised, killed by SIGKILL to a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

from dtctl import names
from tests import forked
from tests.fault.zoo.draws import Run
from tests.fault.zoo.models import DEFAULTS

STUCK_S = 120.0


def start(run: Run, folder: Path, kill: forked.Kill | None) -> forked.Ended:
    """Launch once, without restarts; what it ended with, in the words of the forked workers."""
    code = folder / "code"
    code.mkdir(parents=True, exist_ok=True)
    (code / "train.py").write_text(run.script)
    (code / "options.json").write_text(json.dumps(run.options))
    (folder / "progress").unlink(missing_ok=True)
    snapshot = {**DEFAULTS["snapshot"], **run.settings.get("snapshot", {}), "dir": str(folder / "snapshots")}
    spec = {
        "cluster": {"transport": "local", "slots": run.workers, "workdir": str(folder / "work")},
        "job": {
            "name": "zoo",
            "script": "train.py",
            "kind": "direct",
            "grace_s": 2,
            "max_restarts": 0,
            "env": {"OMP_NUM_THREADS": "1", "ZOO_FOLDER": str(folder)},
        },
        "train": {**run.settings, "snapshot": snapshot},
    }
    (code / "dtctl.yaml").write_text(yaml.safe_dump(spec))
    argv = [sys.executable, "-m", "dtctl", "launch"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("DTCTL_")}
    killed = False
    with (folder / "output").open("w+") as output:
        process = subprocess.Popen(argv, cwd=code, stdout=output, stderr=subprocess.STDOUT, env=environ)
        deadline = time.monotonic() + STUCK_S
        while process.poll() is None and time.monotonic() < deadline:
            if kill is not None and not killed and forked.is_due(kill):
                killed = _kill(folder, kill.rank)
            time.sleep(0.002)
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        code_of = process.wait(30)
        output.seek(0)
        text = output.read()
    runs = code / names.STATE_DIR / names.RUNS_DIR
    newest = max((path for path in runs.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    text += "".join(path.read_text(errors="replace") for path in sorted(newest.rglob("rank-0*.log")))
    return forked.Ended(code=code_of, output=("killed\n" if killed else "") + text)


def _kill(folder: Path, rank: int) -> bool:
    """SIGKILL to the worker of a rank, if it is there."""
    wanted = {f"ZOO_FOLDER={folder}".encode(), f"RANK={rank}".encode()}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                if wanted <= set((path / "environ").read_bytes().split(b"\0")):
                    os.kill(int(path.name), signal.SIGKILL)
                    return True
            except OSError:
                continue
    return False
