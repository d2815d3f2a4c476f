"""Continuation of an earlier run from its snapshots.

The new run reads and writes the snapshots where they are, on the same nodes: nothing is copied, and both runs share
the earlier run's folder. A launch does not continue a run by default, for this reason: a user who changes a script and
launches again mostly wants to start from scratch.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from dtctl.errors import DtctlError, LaunchError, SnapshotError
from dtctl.launch.records.record import RunRecord, describe_removal
from dtctl.launch.records.state import read_run_state
from dtctl.launch.run_spec import load_run_spec
from dtctl.launch.snapshot_answers import SnapshotListing
from dtctl.launch.snapshots import RunSnapshots, lies_in_run_folder
from dtctl.spec.model import Spec, Train
from dtctl.supervisor import run_workdir


def format_resume_command(run: str) -> str:
    """Return the command that continues a run."""
    return f"dtctl launch --resume {run}"


def require_over(earlier: RunRecord) -> None:
    """Refuse a run that still writes snapshots.

    Raises:
        LaunchError: the run is not over.
    """
    if not read_run_state(earlier).over:
        raise LaunchError(
            f"run {earlier.run} is not over", where=str(earlier.folder), hint=f"`dtctl stop {earlier.run}` ends it"
        )


def build_continuation_spec(spec: Spec, earlier: RunRecord) -> tuple[Spec, Mapping[str, str]]:
    """Return the spec and the folders of snapshots, by node, of a run that continues an earlier one.

    Raises:
        LaunchError: the earlier run has no snapshot, and the job keeps no other state; or its files were removed.
        SpecError: the copy of its spec is gone or broken.
        TransportError: none of its nodes can be queried.
    """
    folder, has_own_state = load_run_spec(earlier).snapshot_dir, keeps_own_state(spec)
    if lies_in_run_folder(folder) and (has_own_state or not earlier.info().snapshots):
        nodes = [node["name"] for node in earlier.whole_plan()["nodes"]]
        if removal := describe_removal(earlier.run, earlier.info().removed, nodes):
            raise LaunchError(removal, where=str(earlier.folder), hint="a launch without --resume starts anew")
    if not has_own_state:
        _require_snapshot(earlier)
    if folder is not None and ("://" in folder or posixpath.isabs(folder)):
        return set_snapshot_folder(spec, folder), {}
    return set_snapshot_folder(spec, None), find_snapshot_folders(earlier, folder)


def keeps_own_state(spec: Spec) -> bool:
    """Return whether the program of a spec resumes from its outputs or shared checkpoints, without snapshots."""
    return spec.train is None and bool(spec.job.outputs or spec.job.shared)


def list_state_paths(spec: Spec) -> list[str]:
    """Return the paths in the working folder from which a program that keeps its own state resumes."""
    return [*spec.job.outputs, *(f"{entry.path}/" for entry in spec.job.shared_folders)]


def describe_fresh_start(spec: Spec, earlier: str) -> str:
    """Return the note that an earlier run has no file from which a program with its own state could resume."""
    return (
        f"run {earlier} has no file in {', '.join(list_state_paths(spec))} to continue from: the program starts anew, "
        "unless it keeps its state elsewhere"
    )


def find_snapshot_folders(earlier: RunRecord, job_folder: str | None) -> dict[str, str]:
    """Return the folder of a run's snapshots on each node; `job_folder` is relative to the run's working folder."""
    code, inherited = earlier.read_code_folders(), earlier.info().snapshots
    folder_of = {}
    for node in earlier.whole_plan()["nodes"]:
        name = node["name"]
        run_dir = posixpath.join(node["workdir"], "runs", earlier.run)
        own = inherited.get(name, posixpath.join(run_dir, "snapshots"))
        folder_of[name] = (
            posixpath.join(run_dir, run_workdir.FOLDER, job_folder) if job_folder and name in code else own
        )
    return folder_of


def find_shared_snapshot_folder(record: RunRecord) -> str | None:
    """Return the folder or URL of snapshots in a run's spec, if it is the same one for every launch of the spec."""
    folder = load_run_spec(record).snapshot_dir
    return folder if folder is not None and ("://" in folder or posixpath.isabs(folder)) else None


def set_snapshot_folder(spec: Spec, folder: str | None) -> Spec:
    """Return the spec with this folder of snapshots; None: the run's own folder."""
    if folder == spec.snapshot_dir:
        return spec
    snapshot = {key: value for key, value in spec.settings.get("snapshot", {}).items() if key != "dir"}
    if folder is not None:
        snapshot["dir"] = folder
    spec = spec.model_copy(update={"train": Train.build_section({**spec.settings, "snapshot": snapshot})})
    spec.model_fields_set.add("train")
    return spec


def _require_snapshot(earlier: RunRecord) -> None:
    """Refuse a run without snapshots: a run that continues it would start from scratch without notice."""
    answers = RunSnapshots(earlier).query_nodes(SnapshotListing, [])
    if any(
        row.committed for answer in answers.values() if isinstance(answer, SnapshotListing) for row in answer.snapshots
    ):
        return
    # SnapshotError is an answer of the node: it has no folder of snapshots.
    errors = [each for each in answers.values() if isinstance(each, DtctlError) and not isinstance(each, SnapshotError)]
    if errors and len(errors) == len(answers):
        raise errors[0]
    silent = f"; {len(errors)} of its nodes do not answer" if errors else ""
    raise LaunchError(
        f"run {earlier.run} has no snapshot to resume from{silent}",
        where=str(earlier.folder),
        hint="`dtctl snapshot ls RUN` lists those of a run; files of the program itself are kept where "
        "`job.outputs` or `job.shared` names them, in the spec of the earlier run or of this one",
    )
