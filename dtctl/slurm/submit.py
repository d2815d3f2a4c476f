"""Submitting a job to Slurm: its folder, a copy of the code, the batch file, the submission."""

from __future__ import annotations

import base64
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dtctl import names
from dtctl.errors import LaunchError, PlanError, UsageError
from dtctl.launch.assemble import CodePush
from dtctl.launch.cluster import cluster_of, first_plan
from dtctl.launch.files.tree import Tree, check_program_files
from dtctl.launch.records.run_writer import state_folder
from dtctl.plan.environment import read_secrets
from dtctl.plan.model import Plan
from dtctl.slurm import arrays, batch, login_client
from dtctl.slurm.answers import Filled, Offer, RunPlace, Submitted
from dtctl.slurm.job_file import LAUNCHER_FILE
from dtctl.slurm.job_output import JOB_LOG
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.launcher_files import digest_of, make_launcher
from dtctl.slurm.partition_checks import lacks
from dtctl.slurm.site import LocalSite, LoginSite, Site
from dtctl.spec.load import dump_spec
from dtctl.spec.model import Spec
from dtctl.spec.nodes import resolve_spares
from dtctl.supervisor import work


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that Slurm has taken."""

    ref: JobRef
    tasks: tuple[int, ...]
    """Indexes of the tasks, if it is an array."""
    notes: tuple[str, ...]
    """Settings of the spec or the shell that Slurm was not asked for; a sentence each."""

    def job_of(self, index: int) -> JobRef:
        """Return one task of the array, as the job that it is."""
        job = arrays.job_of_task(self.ref.job, index)
        return replace(self.ref, job=job, folder=f"{self.ref.folder}/{index}")


def python_at(spec: Spec, site: Site) -> str:
    """Return the interpreter for dtctl's own small programs there."""
    return (spec.cluster.python or "python3") if isinstance(site, LoginSite) else sys.executable


def submit(
    spec: Spec,
    site: Site,
    run: str,
    code: CodePush | None,
    *,
    followed: bool,
    out: Path | None = None,
    earlier: str = "",
    before: Callable[[JobRef], None] | None = None,
) -> Submission:
    """Submit the job of a spec.

    Args:
        spec: the checked spec.
        site: where Slurm's commands are.
        run: run id.
        code: the scanned code; None when the job needs none.
        followed: whether a launcher follows the run: then each worker's output has a file of its own.
        out: a further place for the batch file.
        earlier: folder of the run whose outputs this one continues; empty for none.
        before: called with the job, which has no number yet, before it is submitted.

    Raises:
        DtctlError: of the class for the problem; nothing was submitted.
    """
    tasks = array_of(spec)
    if followed:
        _check_allocation(site, os.environ)
    plan = first_plan(spec, cluster_of(spec, start=False), run=run)
    secrets = read_secrets(spec.job.secrets, os.environ)
    if code is not None:
        check_program_files(spec, code.tree)
    python = python_at(spec, site)
    spares = 0 if spec.is_plain else len(resolve_spares(spec))
    away = check_offer(spec, plan, spares, login_client.ask(site, python, Offer))
    workdir = spec.cluster.workdir if isinstance(site, LoginSite) else str(state_folder(spec.base_dir, "slurm").parent)
    folder = Path(login_client.ask(site, python, RunPlace, workdir=workdir, run=run).folder)
    code_folder = _bring(site, code, folder, python=python, workdir=workdir) if code is not None else spec.code_folder
    text, launcher = make_files(spec, plan, folder, followed=followed)
    files = {names.BATCH_FILE: text, names.RUN_SPEC_FILE: dump_spec(spec)}
    binary = {LAUNCHER_FILE: base64.b64encode(launcher).decode()} if launcher else {}
    task_folders = [str(index) for index in tasks] if followed else []
    login_client.ask(
        site, python, Filled, folder=str(folder), code=code_folder, pushed=code is not None, files=files,
        binary=binary, folders=task_folders, earlier=earlier, outputs=list(spec.job.outputs),
    )  # fmt: skip
    if out is not None:
        write(out, text.encode())
    ref = JobRef(
        job="",
        folder=str(folder),
        python=python,
        workers_apart=plan.per_worker,
        slots=plan.head.slots,
        max_attempts=plan.max_restarts,
    )
    if before is not None:
        before(ref)
    answer = login_client.ask(site, python, Submitted, folder=str(folder), env=secrets, test=not away)
    if answer.code:
        raise LaunchError(f"Slurm refuses the job: {words(answer.said)}", where=str(out or folder / names.BATCH_FILE))
    return Submission(
        ref=replace(ref, job=answer.job),
        tasks=tuple(tasks),
        notes=(*batch.job_warnings(spec, plan), *away, *_about_variables(answer)),
    )


def make_files(spec: Spec, plan: Plan, folder: Path, *, followed: bool) -> tuple[str, bytes]:
    """Make the batch file of a job, and its launcher; empty in plain mode.

    Args:
        spec: the checked spec.
        plan: what it comes to.
        folder: of the run, which all nodes see.
        followed: whether a launcher follows the run.

    Raises:
        PlanError: a key of the spec cannot be expressed in Slurm.
        RenderError: a template is missing or wrong.
    """
    top, is_array = folder / work.FOLDER, bool(array_of(spec))
    launcher = b"" if spec.is_plain else make_launcher(
        spec, plan.run, code="" if is_array else str(top), is_followed=followed,
        snapshots="" if followed or is_array else str(top / "snapshots"),
    )  # fmt: skip
    text = batch.text(
        spec,
        plan,
        chdir=top,
        output=Path(batch.literal(folder)) / _output(followed=followed, array=is_array),
        folder=folder,
        followed=followed,
        launcher=folder / LAUNCHER_FILE,
        launcher_digest=digest_of(launcher),
    )
    return text, launcher


def locate_folder(spec: Spec, run: str) -> Path:
    """Return where the folder of a run would be, as far as that is known before the login node is asked."""
    above = Path(spec.cluster.workdir) if spec.cluster.login else spec.base_dir.resolve() / names.STATE_DIR
    return above / "slurm" / run


def _about_variables(answer: Submitted) -> list[str]:
    """Return what became of the variables of the submitting shell that sbatch would have obeyed."""
    notes = []
    if answer.ignored:
        notes.append(f"{', '.join(answer.ignored)} of the environment is not used: the spec says what the job asks for")
    if answer.used:
        notes.append(f"{', '.join(answer.used)} of the environment is used: the spec says nothing about it")
    return notes


def _check_allocation(site: Site, environ: Mapping[str, str]) -> None:
    """Refuse to submit from inside an allocation: the job would wait until it ends, which may be for this very command.

    Raises:
        LaunchError: this process is inside one; the error describes how to use it.
    """
    job = environ.get("SLURM_JOB_ID")
    if job and isinstance(site, LocalSite) and not site.env:
        here = "dtctl sbatch --out job.sbatch && srun --overlap --nodes=1 --ntasks=1 bash job.sbatch"
        raise LaunchError(
            f"this shell is inside job {job}, and a launch would queue another job behind it",
            where="SLURM_JOB_ID",
            hint=f"in this allocation: `{here}`; to queue another job all the same: env -u SLURM_JOB_ID dtctl launch",
        )


def array_of(spec: Spec) -> list[int]:
    """Return the tasks of the job array that a spec requests; empty where it requests one job.

    Raises:
        PlanError: its value is no array.
    """
    array = spec.slurm.array if spec.slurm is not None else None
    return [] if array is None else arrays.indexes(array, where=spec.written_at("slurm.array"))


def _output(*, followed: bool, array: bool) -> str:
    """File of the job's output in the folder of the run."""
    if followed:
        return f"%a/{JOB_LOG}" if array else JOB_LOG
    return "%A_%a.log" if array else "%j.log"


def check_offer(spec: Spec, plan: Plan, spares: int, offer: Offer) -> list[str]:
    """Refuse a job that can never start on this cluster; a sentence if it has to wait for nodes that are away.

    Args:
        spec: the checked spec.
        plan: what it comes to.
        spares: how many nodes it asks for beyond those of the plan.
        offer: what the cluster has.

    Raises:
        PlanError: it asks for what is not there; names the key.
    """
    found = list(lacks(batch.asked_of_slurm(spec, plan), len(plan.nodes) + spares, offer))
    for lack in found:
        if lack.never:
            raise PlanError(lack.summary, where=spec.written_at(lack.key), hint=lack.fix)
    return [f"{lack.summary}; it waits for them: {lack.fix}" for lack in found if lack.check == "job-nodes"]


def write(path: Path, content: bytes) -> None:
    """Write a batch file, or its launcher.

    Raises:
        UsageError: it cannot be written.
    """
    is_new = not path.exists()
    try:
        # It holds the job's variables, which are private.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.fchmod(fd, 0o600)
            file.write(content)
    except OSError as exc:
        if is_new:  # on a full disk it would stay, empty
            path.unlink(missing_ok=True)
        raise UsageError(f"the file cannot be written: {exc.strerror}", where=str(path)) from exc


def _bring(site: Site, code: CodePush, folder: Path, *, python: str, workdir: str) -> str:
    """Bring the code; the folder there that is to be copied into the run's, empty if it is in that already."""
    if isinstance(site, LoginSite):
        return login_client.push(site, code, python=python, workdir=workdir)
    try:
        _copy(code.tree, folder / work.FOLDER)
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
    """Return the messages of sbatch, without its name on every line."""
    lines = [re.sub(r"^(sbatch: |error: |allocation failure: )+", "", line) for line in output.splitlines()]
    return "; ".join(line for line in lines if line) or "no message"
