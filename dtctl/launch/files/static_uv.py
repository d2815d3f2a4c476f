"""Static program of uv, from a wheel of the same version, for nodes on which this machine's uv does not run."""

from __future__ import annotations

import re
import secrets
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from dtctl.errors import PlanError
from dtctl.launch.files import wheels

FOLDER: Final = "uv"
HINT: Final = "install uv on the nodes, or add a source with its musllinux wheel to `job.environment.index`"
_WHEEL: Final = re.compile(r'\b(?:url|path) = "([^"]+\.whl)"[^}]*?\bsha256 = "([0-9a-f]{64})"')
_PROGRAM: Final = ".data/scripts/uv"
"""End of the program's name in the wheel."""


def find_static_uv(
    version: str,
    machine: str,
    cache: Path,
    resolve: Callable[[Sequence[str], str], object],
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Return the path of uv's static program, and download it if the cache lacks it.

    Args:
        version: version of uv.
        machine: processor of the nodes, such as aarch64.
        cache: folder of downloads.
        resolve: runs uv with words of a command and a standard input; raises PlanError if uv fails.
        report: called with the progress of the download.

    Raises:
        PlanError: no source of packages has this program.
    """
    path = cache / FOLDER / f"{version}-{machine}" / "uv"
    if path.is_file():
        return path
    words = ["pip", "compile", "-", "--no-deps", "--no-header", "--only-binary", ":all:", "--no-python-downloads"]
    words += ["--quiet", "--generate-hashes", "--python-platform", f"{machine}-unknown-linux-musl"]
    with tempfile.TemporaryDirectory(prefix="dtctl-uv-") as scratch:
        made = Path(scratch) / "pylock.toml"
        try:
            resolve([*words, "--format", "pylock.toml", "--output-file", str(made)], f"uv=={version}\n")
        except PlanError as exc:
            exc.message, exc.hint = f"there is no uv for {machine} to be sent to the nodes: {exc.message}", HINT
            raise
        found = _WHEEL.search(made.read_text(encoding="utf-8"))
    if found is None:
        raise PlanError(f"there is no uv for {machine} to be sent to the nodes", hint=HINT)
    wheel = wheels.RelayedWheel(package="uv", url=found[1], sha256=found[2], where="job.environment")
    wheels.download_wheels([wheel], cache, report)
    _extract_program(wheels.locate_wheel(wheel, cache), path)
    return path


def _extract_program(wheel: Path, path: Path) -> None:
    """Write the program in a wheel to a path in one step.

    Raises:
        PlanError: the wheel does not contain the program.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next((name for name in archive.namelist() if name.endswith(_PROGRAM)), None)
        if name is None:
            raise PlanError("the wheel has no program", where=str(wheel), hint=HINT)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f"..{secrets.token_hex(4)}")
        draft.write_bytes(archive.read(name))
        draft.chmod(0o700)
        draft.replace(path)
