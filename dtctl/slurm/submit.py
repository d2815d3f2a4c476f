"""Submission of a job to Slurm: its folder, a copy of the code, the batch file, sbatch."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtctl import names
from dtctl.errors import LaunchError, PlanError, UsageError
from dtctl.launch.cluster import ResolvedCluster, build_first_plan, resolve_cluster
from dtctl.launch.files.tree import FileTree, check_program_files
from dtctl.launch.job_builder import CodePush
from dtctl.launch.records.run_writer import prepare_state_folder
from dtctl.plan.environment import read_job_secrets
from dtctl.plan.model import Plan
from dtctl.slurm import arrays, batch, remote_commands
from dtctl.slurm.answers import ClusterResources, SbatchResult, SubmissionSite
from dtctl.slurm.job_file import LAUNCHER_FILE
from dtctl.slurm.job_output import JOB_LOG
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.launcher_files import compute_launcher_digest, make_launcher
from dtctl.slurm.partition_checks import check_job_offer
from dtctl.slurm.site import CommandHost, LocalCommandHost, LoginCommandHost, choose_slurm_host
from dtctl.spec.load import dump_spec
from dtctl.spec.model import Spec
from dtctl.spec.nodes import NodeSpec, resolve_spares
from dtctl.supervisor import environments, run_workdir
from dtctl.supervisor.messages.setup import EnvironmentOrder

if TYPE_CHECKING:
    from dtctl.launch.files.environment import EnvironmentPush


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedJob:
    """A job that Slurm has accepted."""

    ref: JobRef
    tasks: tuple[int, ...]
    """Indexes of the tasks, if the job is an array."""
    notes: tuple[str, ...]
    """Settings of the spec or the shell that were not passed to Slurm, as one sentence each."""

    def get_array_task(self, index: int) -> JobRef:
        """Return the reference to one task of the array, which is a job of its own."""
        job = arrays.format_task_id(self.ref.job, index)
        return replace(self.ref, job=job, folder=f"{self.ref.folder}/{index}")


def choose_site_python(spec: Spec, site: CommandHost) -> str:
    """Return the Python interpreter for dtctl's own small programs on the machine with Slurm's commands."""
    return (spec.cluster.python or "python3") if isinstance(site, LoginCommandHost) else sys.executable


def submit_job(
    spec: Spec,
    site: CommandHost,
    run: str,
    code: CodePush | None,
    *,
    followed: bool,
    out: Path | None = None,
    earlier: str = "",
    environment: EnvironmentPush | None = None,
    specs: Mapping[int, Spec] | None = None,
    before: Callable[[JobRef], None] | None = None,
) -> SubmittedJob:
    """Submit the job of a spec.

    Args:
        spec: the checked spec.
        site: machine with Slurm's commands.
        run: run id.
        code: the scanned code; None when the job needs none.
        followed: whether a launcher follows the run; each worker's output then has a file of its own.
        out: path of a second copy of the batch file.
        earlier: folder of the run whose outputs this one continues; empty for none.
        environment: files from which the nodes make the job's environment; None: the job has none.
        specs: specs of the tasks of an array by their index, if the tasks differ.
        before: called with the job, which has no number yet, before the submission.

    Raises:
        DtctlError: nothing was submitted; the class names the problem.
    """
    tasks = list_array_indexes(spec)
    if followed:
        _check_allocation(site, os.environ)
    plan = build_first_plan(spec, resolve_cluster(spec, start=False), run=run)
    secrets = read_job_secrets(spec.job.secrets, os.environ)
    if code is not None:
        for each in (specs or {0: spec}).values():
            check_program_files(each, code.tree)
    python = choose_site_python(spec, site)
    spares = 0 if spec.is_plain else len(resolve_spares(spec))
    workdir = (
        spec.cluster.workdir
        if isinstance(site, LoginCommandHost)
        else str(prepare_state_folder(spec.base_dir, "slurm").parent)
    )
    place = remote_commands.send_login_request(site, python, SubmissionSite, workdir=workdir, run=run)
    away = check_offer(spec, plan, spares, place)
    folder = Path(place.folder)
    code_folder = (
        _push_job_code(site, code, folder, python=python, workdir=workdir) if code is not None else spec.code_folder
    )
    order = None
    if environment is not None:
        top = str(folder.parent.parent)
        order = remote_commands.push_environment_to_site(site, environment, python=python, workdir=top)
    text, launcher = make_files(spec, plan, folder, followed=followed, environment=order, specs=specs)
    files = {names.BATCH_FILE: text, names.RUN_SPEC_FILE: dump_spec(spec)}
    if order is not None:
        files[environments.ORDER_FILE] = json.dumps(order.to_json())
    if environment is not None and environment.locked.credentials:
        secrets[names.INDEX_CREDENTIALS] = json.dumps(dict(environment.locked.credentials))
    binary = {LAUNCHER_FILE: base64.b64encode(launcher).decode()} if launcher else {}
    task_folders = [str(index) for index in tasks] if followed else []
    if out is not None:
        write_batch_file(out, text.encode())
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
    answer = remote_commands.send_login_request(
        site, python, SbatchResult, folder=str(folder), code=code_folder, pushed=code is not None, files=files,
        binary=binary, folders=task_folders, earlier=earlier, outputs=list(spec.job.outputs), env=secrets,
        test=not away,
    )  # fmt: skip
    if answer.code:
        raise LaunchError(
            f"Slurm refuses the job: {format_sbatch_messages(answer.said)}", where=str(out or folder / names.BATCH_FILE)
        )
    return SubmittedJob(
        ref=replace(ref, job=answer.job),
        tasks=tuple(tasks),
        notes=(*batch.list_job_warnings(spec, plan), *away, *_about_variables(answer)),
    )


def make_files(
    spec: Spec,
    plan: Plan,
    folder: Path,
    *,
    followed: bool,
    environment: EnvironmentOrder | None = None,
    specs: Mapping[int, Spec] | None = None,
) -> tuple[str, bytes]:
    """Make the batch file of a job, and the zip of its launcher, which is empty in plain mode.

    Args:
        spec: the checked spec.
        plan: the plan of the job.
        folder: folder of the run, on a disk that all nodes share.
        followed: whether a launcher follows the run.
        environment: the order to make the environment of `job.environment`.
        specs: specs of the tasks of an array by their index, if the tasks differ.

    Raises:
        PlanError: a key of the spec cannot be expressed in Slurm.
        RenderError: a template is missing or wrong.
    """
    top, is_array = folder / run_workdir.FOLDER, bool(list_array_indexes(spec))
    launcher = b"" if spec.is_plain else make_launcher(
        spec, plan.run, code="" if is_array else str(top), is_followed=followed,
        snapshots="" if followed or is_array else str(top / "snapshots"), environment=environment,
        tasks=specs,
    )  # fmt: skip
    text = batch.render_batch_file(
        spec,
        plan,
        chdir=top,
        output=Path(batch.escape_file_pattern(folder)) / _choose_output_name(followed=followed, array=is_array),
        folder=folder,
        followed=followed,
        launcher=folder / LAUNCHER_FILE,
        launcher_digest=compute_launcher_digest(launcher),
    )
    return text, launcher


def require_equal_jobs(specs: Mapping[int, Spec], plans: Mapping[int, Plan]) -> None:
    """Refuse specs that cannot share one array: their tasks request different jobs from Slurm, or need other files.

    Args:
        specs: specs of the tasks by their index.
        plans: plans of the tasks by their index.

    Raises:
        PlanError: two tasks differ in more than the workers' input.
    """
    folder = Path("/")
    first, *others = specs
    if specs[first].is_plain:
        raise PlanError(
            f"{specs[first].plain_reason}, and the batch file starts the same workers in all tasks",
            where=specs[first].written_at("slurm"),
            hint="launch each setting with --set",
        )

    def list_job_facts(index: int) -> list[object]:
        spec, plan = specs[index], replace(plans[index], run="")
        text = batch.render_batch_file(spec, plan, chdir=folder, output=folder, folder=folder, followed=True)
        lines = [line for line in text.splitlines() if not line.startswith("# ")]
        return [lines, spec.cluster, spec.job.files, spec.job.environment, spec.job.outputs, spec.job.secrets]

    expected = list_job_facts(first)
    for index in others:
        if list_job_facts(index) != expected:
            raise PlanError(
                "--sweep submits one array, and its tasks would be jobs of different kinds, or with different files",
                where=f"task {index}",
                hint="sweep what the workers get (`train`, `job.args`, `job.env`), and launch each of the other "
                "settings with --set",
            )


def locate_folder(spec: Spec, run: str) -> Path:
    """Return the folder that a run would get, as far as it is known before the login node is contacted."""
    above = Path(spec.cluster.workdir) if spec.cluster.login else spec.base_dir.resolve() / names.STATE_DIR
    return above / "slurm" / run


def locate_stores(spec: Spec) -> ResolvedCluster:
    """Return the disk that all nodes share and that has the environments of jobs, as the one node of a cluster.

    Raises:
        LaunchError: Slurm's commands are in the sandbox, which is not running.
    """
    site = choose_slurm_host(spec)
    workdir = str(locate_folder(spec, "").resolve().parent)
    if isinstance(site, LoginCommandHost):
        workdir = spec.cluster.workdir
    node = NodeSpec(name=site.name, address="", slots=1, workdir=workdir, python=choose_site_python(spec, site))
    return ResolvedCluster(nodes=(node,), targets={site.name: site.target}, make_transport=lambda: site.transport)


def _about_variables(answer: SbatchResult) -> list[str]:
    """Return messages about the variables of the submitting shell that sbatch would have obeyed."""
    notes = []
    if answer.ignored:
        notes.append(f"{', '.join(answer.ignored)} of the environment is not used: the spec determines the resources")
    if answer.used:
        notes.append(f"{', '.join(answer.used)} of the environment is used: the spec does not set it")
    return notes


def _check_allocation(site: CommandHost, environ: Mapping[str, str]) -> None:
    """Refuse to submit from inside an allocation: the job could wait for the end of this very allocation.

    Raises:
        LaunchError: this process is inside an allocation; the error describes how to use it.
    """
    job = environ.get("SLURM_JOB_ID")
    if job and isinstance(site, LocalCommandHost) and not site.env:
        here = "dtctl sbatch --out job.sbatch && srun --overlap --nodes=1 --ntasks=1 bash job.sbatch"
        raise LaunchError(
            f"this shell is inside job {job}, and a launch would queue another job behind it",
            where="SLURM_JOB_ID",
            hint=f"in this allocation: `{here}`; to queue another job anyway: env -u SLURM_JOB_ID dtctl launch",
        )


def list_array_indexes(spec: Spec) -> list[int]:
    """Return the indexes of the job array that a spec requests; empty if it requests one job.

    Raises:
        PlanError: the value of `slurm.array` is not an array.
    """
    array = spec.slurm.array if spec.slurm is not None else None
    return [] if array is None else arrays.parse_array_indexes(array, where=spec.written_at("slurm.array"))


def _choose_output_name(*, followed: bool, array: bool) -> str:
    """Return the name of the job's output file in the folder of the run."""
    if followed:
        return f"%a/{JOB_LOG}" if array else JOB_LOG
    return "%A_%a.log" if array else "%j.log"


def check_offer(spec: Spec, plan: Plan, spares: int, offer: ClusterResources) -> list[str]:
    """Refuse a job that can never start on this cluster; return a sentence if it has to wait for unavailable nodes.

    Args:
        spec: the checked spec.
        plan: the plan of the job.
        spares: number of nodes that the job requests beyond those of the plan.
        offer: resources of the cluster.

    Raises:
        PlanError: the job requests something that the cluster lacks; the error names the key.
    """
    found = list(check_job_offer(batch.complete_slurm_section(spec, plan), len(plan.nodes) + spares, offer))
    for lack in found:
        if lack.never:
            raise PlanError(lack.summary, where=spec.written_at(lack.key), hint=lack.fix)
    return [f"{lack.summary}; it waits for them: {lack.fix}" for lack in found if lack.check == "job-nodes"]


def write_batch_file(path: Path, content: bytes) -> None:
    """Write a batch file, or its launcher.

    Raises:
        UsageError: the file cannot be written.
    """
    is_new = not path.exists()
    try:
        # The file has the job's variables, which are private.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.fchmod(fd, 0o600)
            file.write(content)
    except OSError as exc:
        if is_new:  # on a full disk an empty file would stay
            with contextlib.suppress(OSError):  # on a disk that is read-only there is none
                path.unlink(missing_ok=True)
        raise UsageError(f"the file cannot be written: {exc.strerror}", where=str(path)) from exc


def _push_job_code(site: CommandHost, code: CodePush, folder: Path, *, python: str, workdir: str) -> str:
    """Copy the code; return the folder to copy into the run's folder, or an empty text if the code is there already."""
    if isinstance(site, LoginCommandHost):
        return remote_commands.push_code_to_login(site, code, python=python, workdir=workdir)
    try:
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700)
        _copy_tree_files(code.tree, folder / run_workdir.FOLDER)
    except OSError as exc:
        raise UsageError(f"the code cannot be copied: {exc.strerror}", where=str(exc.filename or folder)) from exc
    return ""


def _copy_tree_files(tree: FileTree, folder: Path) -> None:
    """Copy a tree into a new folder that only its owner can read."""
    folder.mkdir(mode=0o700, parents=True)
    for entry in tree.files:
        target = folder / os.fsdecode(entry.path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if entry.mode == stat.S_IFLNK:
            target.symlink_to(os.fsdecode(entry.link))
        else:
            shutil.copyfile(tree.root / os.fsdecode(entry.path), target)
            target.chmod(entry.mode)


def format_sbatch_messages(output: str) -> str:
    """Return the messages of sbatch, without the program's name on every line."""
    lines = [re.sub(r"^(sbatch: |error: |allocation failure: )+", "", line) for line in output.splitlines()]
    return "; ".join(line for line in lines if line) or "no message"
