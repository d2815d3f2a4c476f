"""Quick examination before a launch, which starts nothing if the job certainly cannot run."""

from __future__ import annotations

import hashlib
import json
import time
from typing import TYPE_CHECKING

from dtctl import folders
from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.doctor.findings import Finding
    from dtctl.spec.model import Spec

FRESH_S = 3600.0
"""Seconds for which healthy nodes are not examined again; an examination of 16 nodes takes a second."""
SEEN_FILE = "doctor.json"
LEFT_TO_LAUNCH = (
    "loopback-name", "names",
    "reach", "host-key", "login", "python", "shell-output", "workdir", "disk",
)  # fmt: skip
"""Failures that do not prevent a launch. The first ones do no harm, since workers get numeric addresses and the
interface to use; the launch reports the others itself before it starts anything."""


def look_first(spec: Spec, requested: bool | None) -> None:
    """Examine the nodes of a job that is about to be launched, if requested or due.

    Args:
        spec: the checked spec.
        requested: value of the command line's option; None: not given.

    Raises:
        DoctorFailed: the job cannot run on these nodes; nothing was started.
    """
    if requested is False or (requested is None and not _is_due(spec)):
        return
    from dtctl.doctor.examine import COSTLY, examine_spec_nodes
    from dtctl.errors import DoctorFailed
    from dtctl.launch.cluster import resolve_cluster

    examination = examine_spec_nodes(spec, resolve_cluster(spec, start=True), skip=COSTLY, progress=lambda _: None)
    failed = [item for item in examination.findings if item.status == "fail" and item.check not in LEFT_TO_LAUNCH]
    for finding in failed[1:]:
        output.print_stderr(f"doctor: {finding.check}: {finding.summary}", "red")
    if failed:
        hint = f"{failed[0].fix}; `dtctl doctor` shows everything, `--no-doctor` launches anyway"
        raise DoctorFailed(f"nothing was started: {failed[0].summary}", where=failed[0].check, hint=hint)
    if not _has_problems(examination.findings):
        _record_healthy_nodes(spec)


def _has_problems(findings: tuple[Finding, ...]) -> bool:
    return any(finding.status in ("warn", "fail") for finding in findings)


def _is_due(spec: Spec) -> bool:
    """Return whether to examine the nodes: not in a sandbox without faults, and not soon after a healthy result."""
    if spec.cluster.transport == "sandbox":
        from dtctl.sandbox import control, faults

        sandbox = control.find_running_sandbox(control.choose_default_name())
        return sandbox is not None and bool(faults.read_recorded_faults(sandbox))
    if spec.cluster.transport != "ssh":
        return False
    try:
        last_check = json.loads(folders.read_regular(str(spec.base_dir / ".dtctl" / SEEN_FILE), 1 << 20))
        return not 0 <= time.time() - float(last_check[_compute_cluster_key(spec)]) < FRESH_S
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def _record_healthy_nodes(spec: Spec) -> None:
    """Record that these nodes are healthy; the record has only the most recent cluster."""
    from dtctl.launch.records.run_writer import prepare_state_folder, write_private

    folder = prepare_state_folder(spec.base_dir, "runs").parent
    write_private(folder / SEEN_FILE, json.dumps({_compute_cluster_key(spec): time.time()}) + "\n")


def _compute_cluster_key(spec: Spec) -> str:
    """Return a key of the nodes and of the way to reach them."""
    text = spec.model_dump_json(include={"cluster", "network"})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
