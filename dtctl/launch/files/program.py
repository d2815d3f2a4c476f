"""Whether the job's program is among the files that are pushed."""

from __future__ import annotations

import os
from pathlib import Path

from dtctl.errors import PlanError
from dtctl.launch.files.tree import Tree
from dtctl.spec.model import Spec


def check_program_files(spec: Spec, tree: Tree) -> None:
    """Refuse a job whose script is not among the files that are pushed.

    Raises:
        PlanError: the script does not exist, or is left out of the push.
    """
    script = spec.job.script
    if script is None or Path(script).is_absolute():
        return
    script_path = os.path.normpath(script)
    if any(os.fsdecode(entry.path) == script_path for entry in tree.files):
        return
    path = Path(spec.base_dir) / spec.job.files.root / script
    if script_path.startswith(".."):
        raise PlanError(
            f"{script} lies outside of the folder that is pushed",
            where=str(path),
            hint="move it there, or name a folder above both as `job.files.root`",
        )
    if path.is_dir():
        raise PlanError(f"{script} is a folder", where=str(path), hint="name the script in it, or use `job.module`")
    if path.exists():
        from dtctl.launch.files import left_out

        files = spec.job.files
        root = os.fsencode(os.path.realpath(spec.base_dir / files.root))
        rule = left_out.reason(root, os.fsencode(script_path), include=files.include, exclude=files.exclude)
        raise PlanError(
            f"{script} is not among the files that are pushed{f': {rule}' if rule else ''}",
            where=str(path),
            hint=f"`job.files.include: [{script_path}]` takes it all the same",
        )
    raise PlanError(f"there is no {script}", where=str(path), hint="`job.script` is relative to the folder of the spec")
