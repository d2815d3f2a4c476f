"""Submitting a job to Slurm: its folder, a copy of the code, the batch file, the submission."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtctl import names
from dtctl.errors import LaunchError, PlanError, UsageError
from dtctl.launch.assemble import CodePush, check_program_files, read_secrets
from dtctl.launch.cluster import cluster_of
from dtctl.launch.files.tree import Tree
from dtctl.launch.first_plan import first_plan
from dtctl.launch.records.record import state_folder
from dtctl.slurm import batch, login_client
from dtctl.slurm.follow import JobRef
from dtctl.slurm.job_output import JOB_LOG
from dtctl.slurm.partition_checks import lacks
from dtctl.slurm.site import LoginSite, Site
from dtctl.spec.load import dump_spec
from dtctl.spec.model import Slurm, Spec

BATCH_FILE = "job.sbatch"


def python_at(spec: Spec, site: Site) -> str:
    """The interpreter for dtctl's own small programs there."""
    return (spec.cluster.python or "python3") if isinstance(site, LoginSite) else sys.executable


def submit(
    spec: Spec, site: Site, run: str, code: CodePush | None, *, followed: bool, out: Path | None = None
) -> JobRef:
    """Submit the job of a spec.

    Args:
        spec: the checked spec.
        site: where Slurm's commands are.
        run: run id.
        code: the scanned code; None when the job needs none.
        followed: whether somebody follows the run: then each worker's output has a file of its own.
        out: a further place for the batch file.

    Raises:
        DtctlError: of the class that says what is wrong; nothing was submitted.
    """
    if followed and spec.slurm is not None and spec.slurm.array is not None:
        raise PlanError(
            "a launch follows one job, and a job array is many",
            where=spec.written_at("slurm.array"),
            hint="`dtctl sbatch --submit` submits it",
        )
    plan = first_plan(spec, cluster_of(spec, start=False), run=run)
    secrets = read_secrets(spec)
    if code is not None:
        check_program_files(spec, code.tree)
    python = python_at(spec, site)
    check_offer(spec, len(plan.nodes), login_client.ask(site, python, {"op": "offer"}))
    workdir = spec.cluster.workdir if isinstance(site, LoginSite) else str(state_folder(spec.base_dir, "slurm").parent)
    folder = Path(login_client.ask(site, python, {"op": "place", "workdir": workdir, "run": run})["folder"])
    pushed = _bring(site, code, folder, python=python, workdir=workdir)
    text = batch.text(
        spec,
        plan,
        chdir=folder / "code" if code is not None else folder,
        output=Path(batch.literal(folder)) / (JOB_LOG if followed else "%j.log"),
        folder=folder if followed else None,
    )
    files = {BATCH_FILE: text, names.RUN_SPEC_FILE: dump_spec(spec)}
    login_client.ask(site, python, {"op": "fill", "folder": str(folder), "code": pushed, "files": files})
    if out is not None:
        write(out, text)
    answer = login_client.ask(site, python, {"op": "submit", "folder": str(folder), "env": secrets})
    if answer["code"]:
        raise LaunchError(f"Slurm refuses the job: {words(answer['said'])}", where=str(out or folder / BATCH_FILE))
    return JobRef(
        job=answer["job"],
        folder=str(folder),
        python=python,
        workers_apart=plan.per_worker,
        slots=plan.head.slots,
        max_attempts=plan.max_restarts,
    )


def check_offer(spec: Spec, nodes: int, offer: Mapping[str, Any]) -> None:
    """Refuse a job that can never start on this cluster.

    Raises:
        PlanError: it asks for what is not there; names the key.
    """
    for lack in lacks(spec.slurm or Slurm(), nodes, offer):
        if lack.never:
            raise PlanError(lack.summary, where=spec.written_at(lack.key), hint=lack.fix)


def write(path: Path, text: str) -> None:
    """Write a batch file.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        # It holds the job's variables, which are nobody else's business.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.fchmod(fd, 0o600)
            file.write(text)
    except OSError as exc:
        raise UsageError(f"the file cannot be written: {exc.strerror}", where=str(path)) from exc


def _bring(site: Site, code: CodePush | None, folder: Path, *, python: str, workdir: str) -> str:
    """Bring the code; the folder there that is to be copied into the run's, empty if it is in that already."""
    if code is None:
        return ""
    if isinstance(site, LoginSite):
        return login_client.push(site, code, python=python, workdir=workdir)
    try:
        _copy(code.tree, folder / "code")
    except OSError as exc:
        raise UsageError(f"the code cannot be copied: {exc.strerror}", where=str(exc.filename or folder)) from exc
    return ""


def _copy(tree: Tree, folder: Path) -> None:
    """Put a copy of a tree into a new folder, readable for its owner alone."""
    folder.mkdir(mode=0o700, parents=True)
    for entry in tree.files:
        target = folder / os.fsdecode(entry.path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if entry.mode == stat.S_IFLNK:
            target.symlink_to(os.fsdecode(entry.link))
        else:
            shutil.copyfile(tree.root / os.fsdecode(entry.path), target)
            target.chmod(entry.mode)


def words(output: str) -> str:
    """What sbatch has said, without its name on every line."""
    lines = [re.sub(r"^(sbatch: |error: |allocation failure: )+", "", line) for line in output.splitlines()]
    return "; ".join(line for line in lines if line) or "no message"
