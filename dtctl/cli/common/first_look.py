"""The quick examination before a launch: nothing is started where it is certain that nothing can run."""

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
"""Seconds that healthy nodes are not examined again: examining 16 of them takes a second."""
SEEN_FILE = "doctor.json"
LEFT_TO_LAUNCH = (
    "loopback-name", "names",
    "reach", "host-key", "login", "python", "shell-output", "workdir", "disk",
)  # fmt: skip
"""Failures that do not keep a launch from being tried: the first are harmless to it, for workers get numeric addresses
and the interface to use; the launch reports the others itself before it starts anything."""


def look_first(spec: Spec, requested: bool | None) -> None:
    """Examine the nodes of a job that is about to be launched, if requested or due.

    Args:
        spec: the checked spec.
        requested: the option of the command line; None: not given.

    Raises:
        DoctorFailed: the job cannot run on them; nothing was started.
    """
    if requested is False or (requested is None and not _is_due(spec)):
        return
    from dtctl.doctor.examine import COSTLY, examine
    from dtctl.errors import DoctorFailed
    from dtctl.launch.cluster import cluster_of

    examination = examine(spec, cluster_of(spec, start=True), skip=COSTLY, progress=lambda _: None)
    failed = [item for item in examination.findings if item.status == "fail" and item.check not in LEFT_TO_LAUNCH]
    for finding in failed[1:]:
        output.err(f"doctor: {finding.check}: {finding.summary}", "red")
    if failed:
        hint = f"{failed[0].fix}; `dtctl doctor` shows everything, `--no-doctor` launches anyway"
        raise DoctorFailed(f"nothing was started: {failed[0].summary}", where=failed[0].check, hint=hint)
    if not _has_problems(examination.findings):
        _remember(spec)


def _has_problems(findings: tuple[Finding, ...]) -> bool:
    return any(finding.status in ("warn", "fail") for finding in findings)


def _is_due(spec: Spec) -> bool:
    """Return whether to examine: not this machine, virtual hosts without faults, or nodes found healthy recently."""
    if spec.cluster.transport == "sandbox":
        from dtctl.sandbox import control, faults

        sandbox = control.find(control.default_name())
        return sandbox is not None and bool(faults.recorded(sandbox))
    if spec.cluster.transport != "ssh":
        return False
    try:
        last_check = json.loads(folders.read_regular(str(spec.base_dir / ".dtctl" / SEEN_FILE), 1 << 20))
        return not 0 <= time.time() - float(last_check[_key(spec)]) < FRESH_S
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def _remember(spec: Spec) -> None:
    """Record that these nodes are healthy; only the most recent cluster is kept."""
    from dtctl.launch.records.run_writer import state_folder, write_private

    folder = state_folder(spec.base_dir, "runs").parent
    write_private(folder / SEEN_FILE, json.dumps({_key(spec): time.time()}) + "\n")


def _key(spec: Spec) -> str:
    """Return a key for the nodes and how they are reached."""
    text = spec.model_dump_json(include={"cluster", "network"})
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
