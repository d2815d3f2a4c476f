"""`dtctl sbatch`: write the job of a spec as a batch file for Slurm."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.cli.common.agreement import Settings, Yes, require_spec_agreement
from dtctl.cli.common.batch_job_view import tell_unmeasured
from dtctl.errors import PlanError, UsageError

if TYPE_CHECKING:
    from dtctl.spec.model import Spec


def sbatch(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="The spec; - is standard input.")] = Path(
        names.SPEC_FILE
    ),
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the file here.  [default: print it]", show_default=False)
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Submit it to Slurm, with a copy of the code.")] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="A short file in which srun alone starts the workers; no restarts.")
    ] = False,
    set_: Settings = None,
    yes: Yes = False,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Write the job as an sbatch file, or submit it.

    The machine that runs it needs no dtctl; all nodes must see its folder.
    """
    from dtctl.launch.records.record import make_run_id
    from dtctl.spec.load import load_spec

    checked = load_spec(spec, (*(set_ or ()), *(("slurm.launcher=none",) if plain else ())))
    checked = _for_slurm(checked)
    tell_unmeasured(checked)
    run = make_run_id(checked.job.name, now=time.time())
    if submit:
        require_spec_agreement(checked, yes=yes)
        _submit_batch_job(checked, run, out=out, as_json=json_)
        return
    if checked.job.environment is not None:
        raise PlanError(
            "a batch file that is submitted by hand has no environment, since only dtctl's submission sends the "
            "lock and the wheels",
            where=checked.written_at("job.environment"),
            hint="`dtctl sbatch --submit`, or `dtctl launch --detach`",
        )
    beside = (out or Path(names.BATCH_FILE)).with_suffix(".launcher.zip").absolute()
    text, launcher = _build_batch_file(checked, run, launcher=beside)
    if out is None:
        output.print_raw_text(text)
        if launcher:
            output.print_stderr(
                f"it starts {beside.name}, which `dtctl sbatch --out {names.BATCH_FILE}` writes beside it"
            )
        return
    from dtctl.slurm.submit import write_batch_file

    is_new = not out.exists()
    write_batch_file(out, text.encode())
    if launcher:
        try:
            write_batch_file(beside, launcher)
        except UsageError:
            if is_new:  # a batch file without its launcher cannot run
                out.unlink(missing_ok=True)
            raise
    _keep_spec(checked, run)
    output.print_stderr(
        f"wrote {out}{f' and {beside.name}' if launcher else ''}; submit it with: sbatch --parsable {out}"
    )


def _for_slurm(spec: Spec) -> Spec:
    """Return a spec for Slurm from one for this machine, whose cores and Python do not apply to the nodes."""
    cluster = spec.cluster
    if cluster.transport not in ("local", "sandbox"):
        return spec
    nodes = cluster.nodes or 1
    return spec.model_copy(update={"cluster": cluster.model_copy(update={"transport": "slurm", "nodes": nodes})})


def _build_batch_file(spec: Spec, run: str, *, launcher: Path) -> tuple[str, bytes]:
    """Return the batch file, and the launcher that it starts, if the job has one."""
    from dtctl.launch.cluster import build_first_plan, resolve_cluster
    from dtctl.slurm import batch
    from dtctl.slurm.launcher_files import compute_launcher_digest, make_launcher

    plan = build_first_plan(spec, resolve_cluster(spec, start=False), run=run)
    base = spec.base_dir.resolve()
    is_array = spec.slurm is not None and spec.slurm.array is not None
    content = b""
    if not spec.is_plain:
        snapshots = "" if is_array else str(base / "snapshots")
        content = make_launcher(spec, run, code=str(base), snapshots=snapshots, is_followed=False)
    output_file = Path(batch.escape_file_pattern(base)) / f"{run}-{'%A_%a' if is_array else '%j'}.log"
    folder = base / names.STATE_DIR / "slurm" / run
    text = batch.render_batch_file(
        spec, plan, chdir=base, output=output_file, folder=folder, launcher=launcher,
        launcher_digest=compute_launcher_digest(content),
    )  # fmt: skip
    return text, content


def _keep_spec(spec: Spec, run: str) -> None:
    """Store the spec in the parent of the jobs' folders, for `status`, `logs` and `stop` of these jobs."""
    from dtctl.launch.records.run_writer import prepare_state_folder, write_private
    from dtctl.spec.load import dump_spec

    folder = prepare_state_folder(spec.base_dir, "slurm") / run
    folder.mkdir(mode=0o700, exist_ok=True)
    write_private(folder / names.RUN_SPEC_FILE, dump_spec(spec))


def _submit_batch_job(spec: Spec, run: str, *, out: Path | None, as_json: bool) -> None:
    """Copy the code, so that later edits do not change a waiting job; then submit the file."""
    from dtctl.cli.common.followed_run import build_environment_push
    from dtctl.launch.job_builder import CodePush
    from dtctl.slurm.site import choose_slurm_host
    from dtctl.slurm.submit import submit_job

    with closing(choose_slurm_host(spec)) as site:
        environment = build_environment_push(spec)
        submission = submit_job(
            spec, site, run, CodePush(spec) if spec.pushes else None, followed=False, out=out, environment=environment
        )
    ref = submission.ref
    for note in submission.notes:
        output.print_stderr(note, "yellow")
    log = f"{ref.folder}/{ref.job}{'_%a' if submission.tasks else ''}.log"
    if as_json:
        file = str(out or Path(ref.folder) / names.BATCH_FILE)
        output.emit_json({"job": ref.job, "run": run, "file": file, "log": log})
    else:
        output.print_stdout(f"job {ref.job}: run {run}")
        output.print_stderr(f"its output: {log}\n`dtctl logs {ref.job}` shows it, `dtctl stop {ref.job}` ends it")
