"""How long linters take for 1,000 files: dtctl lint, ruff and torchfix on the same ones.

    python benchmarks/lint.py [FOLDER]      default: the packages of this Python; a minute

Peers are taken from benchmarks/.venv-peers (`pip install ruff torchfix`) or from PATH; one that is
not installed is left out. ruff and torchfix have no rule for distributed training, so their findings are others.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from machine import HERE, keep, wait_for_quiet

FILES = 1000
PEERS = HERE / ".venv-peers" / "bin"


def corpus(folder: Path, into: Path) -> int:
    """Copy 1,000 Python files, chosen by the digest of their names; how many lines they have."""
    found = sorted(
        (path for path in folder.rglob("*.py") if path.stat().st_size < 200_000),
        key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest(),
    )
    lines = 0
    for path in found[:FILES]:
        target = into / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        lines += target.read_bytes().count(b"\n")
    if len(found) < FILES:
        raise SystemExit(f"{folder} has only {len(found)} Python files; {FILES} are needed")
    return lines


def programs() -> dict[str, list[str]]:
    """Name -> command, without the folder."""
    found = {"dtctl lint": [sys.executable, "-m", "dtctl", "lint", "--format", "json"]}
    for name, arguments in (
        ("ruff", ["check", "--no-cache", "--isolated", "--select", "ALL", "--quiet"]),
        ("torchfix", []),
    ):
        path = next((str(one) for one in (PEERS / name,) if one.exists()), None) or shutil.which(name)
        if path:
            found[name] = [path, *arguments]
    return found


def version_of(package: str) -> str | None:
    """The version that `programs` takes; None if there is none."""
    python = PEERS / "python"
    ask = f"import importlib.metadata as m; print(m.version({package!r}))"
    for one in (str(python), sys.executable):
        if Path(one).exists():
            done = subprocess.run([one, "-c", ask], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
    return None


def measured(command: list[str], folder: Path, rounds: int) -> dict[str, float]:
    """Wall and processor time of a command."""
    walls, cpus = [], []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begun = time.monotonic()
        done = subprocess.run([*command, str(folder)], cwd=HERE, capture_output=True, text=True, check=False)
        if done.returncode not in ((0, 9) if "dtctl" in command else (0, 1)):
            raise SystemExit(f"{command}: {done.stderr[-500:]}")
        walls.append(time.monotonic() - begun)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {
        "median_s": round(statistics.median(walls), 3),
        "min_s": round(min(walls), 3),
        "max_s": round(max(walls), 3),
        "client_cpu_s": round(statistics.median(cpus), 3),
    }


def main() -> None:
    """Measure and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(sysconfig.get_paths()["purelib"]))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="measure although the machine is busy")
    given = parser.parse_args()
    os.environ["PYTHONPATH"] = str(HERE.parent)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = corpus(given.folder, folder)
        if not given.busy:
            wait_for_quiet()
        rows = {}
        for program, command in programs().items():
            rounds = 1 if program == "torchfix" else given.rounds
            rows[program] = measured(command, folder, rounds)
            print(program, json.dumps(rows[program]))
    versions = {"python": sys.version.split()[0], "processors": os.cpu_count(), "files": FILES, "lines": lines}
    for package in ("ruff", "torchfix"):
        if found := version_of(package):
            versions[package] = found
    keep("lint", {"date": time.strftime("%Y-%m-%d %H:%M"), "versions": versions, f"{FILES} files": rows})


if __name__ == "__main__":
    main()
