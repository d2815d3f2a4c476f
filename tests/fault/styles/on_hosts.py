"""Two virtual hosts with two workers each, on which a program runs through `dtctl launch`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from dtctl.sandbox import control

if TYPE_CHECKING:
    from typing_extensions import Self

ROOT = Path(__file__).parents[3]
LIMIT_S = 300.0


class HostPair:
    """A sandbox of two hosts, which is removed at the end."""

    def __enter__(self) -> Self:
        # Not below /tmp, nor below the home folder: the hosts have their own ones.
        self._base = Path(tempfile.mkdtemp(prefix="dtctl-styles-", dir="/var/tmp"))
        os.environ["DTCTL_SANDBOX_DIR"], os.environ["DTCTL_SANDBOX"] = str(self._base / "sandbox"), "styles"
        control.start_sandbox("styles", nodes=2)
        code = self._base / "code"
        for part in ("dtctl", "templates", "tests/fault/styles"):
            shutil.copytree(ROOT / part, code / part, ignore=shutil.ignore_patterns("__pycache__"))
        return self

    def __exit__(self, *_: object) -> None:
        control.remove_sandbox("styles")
        shutil.rmtree(self._base)
        del os.environ["DTCTL_SANDBOX_DIR"], os.environ["DTCTL_SANDBOX"]

    def train(self, name: str, folder: Path, options: list[str]) -> None:
        """Launch a program on both hosts; its weights are then in final.pt of the folder.

        Raises:
            RuntimeError: the launch has failed.
        """
        folder.mkdir(exist_ok=True)
        project = self._base / "projects" / name
        project.mkdir(parents=True)
        shutil.copy(ROOT / "tests" / "fault" / "styles" / f"{name}.py", project / "train.py")
        final = project / "final.pt"
        spec = {
            "cluster": {"transport": "sandbox", "nodes": 2, "slots": 2},
            "job": {
                "name": name.replace("_", "-"),
                "script": "train.py",
                "args": options,
                "env": {"PYTHONPATH": str(self._base / "code"), "OMP_NUM_THREADS": "1", "STYLES_FINAL": str(final)},
            },
        }
        (project / "dtctl.yaml").write_text(yaml.safe_dump(spec))
        done = subprocess.run(
            [sys.executable, "-m", "dtctl", "launch"],
            cwd=project, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode or not final.exists():
            raise RuntimeError(f"{name}: exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        shutil.copy(final, folder / "final.pt")
