"""`dtctl sbatch`: the job of a spec as a batch file of Slurm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import names
from dtctl.cli import output
from dtctl.errors import UsageError

if TYPE_CHECKING:
    from dtctl.spec.model import Spec


def sbatch(
    spec: Annotated[Path, typer.Argument(help="The spec; - is standard input.")] = Path(names.SPEC_FILE),
    out: Annotated[
        Path | None, typer.Option(help="Write the file here.  [default: print it]", show_default=False)
    ] = None,
    submit: Annotated[bool, typer.Option("--submit", help="Give it to Slurm, with a copy of the code.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Write the job as an sbatch file, or submit it.

    The file needs no dtctl where it runs, and a folder that all nodes see.
    """
    from dtctl.launch.record import new_run_id
    from dtctl.spec.load import load_spec

    checked = load_spec(spec, set_ or ())
    run = new_run_id(checked.job.name, now=time.time())
    if submit:
        _submit(checked, run, out=out, as_json=json_)
        return
    text = _text(checked, run, chdir=checked.base_dir, log=checked.base_dir / f"{run}-%j.log")
    if out is None:
        output.raw(text)
        return
    _write(out, text)
    output.err(f"wrote {out}; submit it with: sbatch --parsable {out}")


def _text(spec: Spec, run: str, *, chdir: Path, log: Path) -> str:
    from dtctl.launch.assemble import cluster_of, first_plan
    from dtctl.slurm import batch

    plan = first_plan(spec, cluster_of(spec, start=False), run=run)
    return batch.text(spec, plan, chdir=chdir.resolve(), output=log.resolve())


def _submit(spec: Spec, run: str, *, out: Path | None, as_json: bool) -> None:
    """Copy the code, so that later edits do not change a job that waits; then hand the file over."""
    from dtctl.launch.assemble import check_program_files
    from dtctl.launch.record import state_folder, write_private
    from dtctl.launch.tree import scan
    from dtctl.slurm import submit as slurm
    from dtctl.spec.load import dump_spec

    slurm.require()
    tree = scan(spec.base_dir, include=spec.job.files.include, exclude=spec.job.files.exclude)
    check_program_files(spec, tree)
    folder = state_folder(spec.base_dir, "slurm") / run
    text = _text(spec, run, chdir=folder / "code", log=folder / "%j.log")
    try:
        folder.mkdir(mode=0o700)
        slurm.copy(tree, folder / "code")
    except OSError as exc:
        raise UsageError(f"the code cannot be copied: {exc.strerror}", where=str(exc.filename or folder)) from exc
    write_private(folder / names.RUN_SPEC_FILE, dump_spec(spec))
    file = out or folder / "job.sbatch"
    _write(file, text)
    job = slurm.submit(file)
    log = folder / f"{job}.log"
    if as_json:
        output.emit_json({"job": job, "run": run, "file": str(file), "log": str(log)})
    else:
        output.out(f"job {job}: run {run}")
        output.err(f"its output: {log}\nto end it: scancel {job}")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"the file cannot be written: {exc.strerror}", where=str(path)) from exc
