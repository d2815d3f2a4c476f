"""Input of a launcher inside a job, decided when the job was submitted: job.json in the launcher's zip.

Written where the spec is, read on the job's first node, where neither pydantic nor Jinja has to be.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dtctl import names, shell
from dtctl.errors import LaunchError
from dtctl.plan import bind
from dtctl.plan.bind import PlanTemplate
from dtctl.plan.model import NodePlan, Plan
from dtctl.shell import Late
from dtctl.supervisor.messages.attempt import RunOrigin

JOB_FILE: Final = "job.json"
LAUNCHER_FILE: Final = "launcher.zip"
LATE_OPTIONS: Final = {
    "--nnodes": Late(f"--nnodes=${names.NODES}"),
    "--node-rank": Late(f"--node-rank=${names.NODE_INDEX}"),
    "--rdzv-id": Late(f"--rdzv-id=${names.RUN_ID}.${names.ATTEMPT}"),
    "--master-addr": Late("--master-addr=$DTCTL_MASTER_ADDR"),
    "--master-port": Late("--master-port=$DTCTL_MASTER_PORT"),
}
"""Options of torchrun in the nodes' script with values that are known when an attempt begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """See the module."""

    template: PlanTemplate
    scripts: tuple[str, ...]
    """Scripts by node rank, complete but for the variables that depend on its place and on the attempt."""
    settings: Mapping[str, Any]
    """Fields of a `LaunchJob`."""
    requeues: int
    """Number of times that Slurm may start the job again."""
    warn_s: int
    """Seconds before the end of its time at which the workers are warned."""
    code: str
    """Folder of the code, which all nodes see; empty: below that of the run."""
    snapshots: str
    """Folder of the snapshots; empty: below that of the run."""
    is_followed: bool
    """True if a launcher follows the run. If not, the workers' output goes into the job's output."""
    launched_from: str
    command: str
    """Command that submitted the job."""
    started: float
    """Time of the submission, in seconds since the epoch."""

    @property
    def origin(self) -> RunOrigin:
        """Return its description for the nodes."""
        return RunOrigin(launched_from=self.launched_from, command=self.command, started=self.started)

    def to_text(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self), indent=1)

    def make_script(self, plan: Plan, node: NodePlan, given: Mapping[str, str] | None = None) -> str:
        """Return the script of a node in an attempt: that of the job, behind the variables that it lacks.

        Args:
            plan: the attempt.
            node: one of its nodes.
            given: further variables.
        """
        rank = node.node_rank
        known = {variable.name for variable in self.template.nodes[rank].env}
        variables = {**(given or {})} | {
            variable.name: variable.value for variable in node.env if variable.name not in known
        }
        if plan.kind == "torchrun":
            variables |= {
                "DTCTL_MASTER_ADDR": plan.rendezvous.address,
                "DTCTL_MASTER_PORT": str(plan.rendezvous.port),
            }
        lines = [f"export {name}={shell.quote(value)}\n" for name, value in variables.items()]
        first, end, rest = self.scripts[rank].partition("\n")
        return "".join([first, end, *lines, rest]) if first.startswith("#!") else "".join([*lines, self.scripts[rank]])


def read_job_file(launcher: Path) -> JobFile:
    """Read the job file of the launcher in a zip.

    Raises:
        LaunchError: it cannot be read.
    """
    where = f"{JOB_FILE} in {launcher}"
    try:
        with zipfile.ZipFile(launcher) as archive:
            document = json.loads(archive.read(JOB_FILE))
        settings = document["settings"]
        settings |= {name: tuple(settings[name]) for name in ("outputs", "shared")}
        template, scripts = bind.from_json(document["template"]), tuple(document["scripts"])
        return JobFile(**{**document, "template": template, "scripts": scripts, "settings": settings})
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as exc:
        raise LaunchError(f"what the launcher is told cannot be read: {exc}", where=where) from exc
