"""Virtual environments of the frameworks, made once and kept beside other caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
FOLDER = Path(os.environ.get("DTCTL_FRAMEWORKS", Path.home() / ".cache" / "dtctl-frameworks"))
"""Not below /tmp: the sandbox's hosts have a /tmp of their own."""


def python_of(name: str) -> Path:
    """The interpreter of a framework's environment, which is made anew when its requirements have changed."""
    folder, files = FOLDER / name, [REQUIREMENTS / f"{name}.txt", REQUIREMENTS / f"{name}-source.txt"]
    wanted = "".join(file.read_text() for file in files if file.exists())
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return python
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    for file in files:
        if file.exists():
            source = ["--no-build-isolation"] if file.stem.endswith("-source") else []
            subprocess.run(
                [python, "-m", "pip", "install", "--quiet", *source, "--requirement", file],
                check=True,
                env={**os.environ, "DS_BUILD_OPS": "0"},
            )
    ready.write_text(wanted)
    return python


def versions(python: Path, *packages: str) -> dict[str, str]:
    """What is installed there."""
    program = "import sys, json, importlib.metadata as m; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    shown = subprocess.run([python, "-c", program, *packages], capture_output=True, text=True, check=True)
    return dict(json.loads(shown.stdout))
