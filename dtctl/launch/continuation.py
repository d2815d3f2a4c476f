"""Continuation of an earlier run from its snapshots: where these lie, and whether there are any.

The new run reads and writes them where they are, on the same nodes: nothing is copied, and the earlier run's folder is
the new one's, too. On purpose, a launch does not do so by default: a user who changes a script and launches again
mostly wants to start from scratch.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from dtctl.errors import DtctlError, LaunchError, SnapshotError
from dtctl.launch.assemble import spec_of_run
from dtctl.launch.records.record import RunRecord
from dtctl.launch.records.state import state_of
from dtctl.launch.snapshot_answers import Listing
from dtctl.launch.snapshots import RunSnapshots
from dtctl.spec.model import Spec, Train
from dtctl.supervisor import work


def command(run: str) -> str:
    """Return the command that continues a run."""
    return f"dtctl launch --resume {run}"


def require_over(earlier: RunRecord) -> None:
    """Refuse a run that still writes snapshots.

    Raises:
        LaunchError: the run is not over.
    """
    if not state_of(earlier).over:
        raise LaunchError(
            f"run {earlier.run} is not over", where=str(earlier.folder), hint=f"`dtctl stop {earlier.run}` ends it"
        )


def continued(spec: Spec, earlier: RunRecord) -> tuple[Spec, Mapping[str, str]]:
    """Return the spec and the folders of snapshots, by node, of a run that continues an earlier one.

    Raises:
        LaunchError: the earlier run has no snapshot, and the job keeps nothing else.
        SpecError: the copy of its spec is gone or broken.
        TransportError: none of its nodes can be asked.
    """
    if spec.train is not None or not (spec.job.outputs or spec.job.shared):
        _require_snapshot(earlier)
    folder = spec_of_run(earlier).snapshot_dir
    if folder is not None and ("://" in folder or posixpath.isabs(folder)):
        return with_folder(spec, folder), {}
    return with_folder(spec, None), folders(earlier, folder)


def folders(earlier: RunRecord, job_folder: str | None) -> dict[str, str]:
    """Node -> folder on it that holds a run's snapshots; `job_folder` is relative to where its programs start."""
    code, inherited = earlier.code_folders(), earlier.info().snapshots
    folder_of = {}
    for node in earlier.whole_plan()["nodes"]:
        name = node["name"]
        run_dir = posixpath.join(node["workdir"], "runs", earlier.run)
        own = inherited.get(name, posixpath.join(run_dir, "snapshots"))
        folder_of[name] = posixpath.join(run_dir, work.FOLDER, job_folder) if job_folder and name in code else own
    return folder_of


def shared_folder(record: RunRecord) -> str | None:
    """Return the folder or URL of snapshots that a run's spec names, if every launch of it finds the same there."""
    folder = spec_of_run(record).snapshot_dir
    return folder if folder is not None and ("://" in folder or posixpath.isabs(folder)) else None


def with_folder(spec: Spec, folder: str | None) -> Spec:
    """Return the spec with this folder of snapshots; None: that of the run."""
    if folder == spec.snapshot_dir:
        return spec
    snapshot = {key: value for key, value in spec.settings.get("snapshot", {}).items() if key != "dir"}
    if folder is not None:
        snapshot["dir"] = folder
    spec = spec.model_copy(update={"train": Train.of({**spec.settings, "snapshot": snapshot})})
    spec.model_fields_set.add("train")
    return spec


def _require_snapshot(earlier: RunRecord) -> None:
    """Refuse a run without snapshots: its successor would start from scratch without notice."""
    answers = RunSnapshots(earlier).ask(Listing, [])
    if any(row.committed for answer in answers.values() if isinstance(answer, Listing) for row in answer.snapshots):
        return
    # A node that answers that there is no folder has been asked.
    errors = [each for each in answers.values() if isinstance(each, DtctlError) and not isinstance(each, SnapshotError)]
    if errors and len(errors) == len(answers):
        raise errors[0]
    silent = f"; {len(errors)} of its nodes cannot be asked" if errors else ""
    raise LaunchError(
        f"run {earlier.run} has no snapshot to resume from{silent}",
        where=str(earlier.folder),
        hint="`dtctl snapshot ls RUN` lists those of a run; files of the program itself are kept where "
        "`job.outputs` or `job.shared` names them, in the spec of the earlier run or of this one",
    )
