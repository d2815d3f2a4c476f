"""Input of a launcher inside a job, decided when the job was submitted: job.json in the launcher's zip.

The file is written on the machine that has the spec, and read on the job's first node, which may lack pydantic and
Jinja.
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
from dtctl.shell import ShellExpansion
from dtctl.supervisor.messages.attempt import RunOrigin

JOB_FILE: Final = "job.json"
LAUNCHER_FILE: Final = "launcher.zip"
LATE_OPTIONS: Final = {
    "--nnodes": ShellExpansion(f"--nnodes=${names.NODES}"),
    "--node-rank": ShellExpansion(f"--node-rank=${names.NODE_INDEX}"),
    "--rdzv-id": ShellExpansion(f"--rdzv-id=${names.RUN_ID}.${names.ATTEMPT}"),
    "--master-addr": ShellExpansion("--master-addr=$DTCTL_MASTER_ADDR"),
    "--master-port": ShellExpansion("--master-port=$DTCTL_MASTER_PORT"),
}
"""Options of torchrun in the nodes' script whose values are known when an attempt begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """Input of a launcher inside a job; see the module's docstring."""

    template: PlanTemplate
    scripts: tuple[str, ...]
    """Scripts by node rank; they lack the variables that depend on the node's place and on the attempt."""
    settings: Mapping[str, Any]
    """Fields of a `LaunchJob`."""
    requeues: int
    """Number of times that the job may be requeued."""
    warn_s: int
    """Seconds between the warning to the workers and the end of the job's time."""
    code: str
    """Folder of the code on a disk that all nodes share; empty: a folder below that of the run."""
    snapshots: str
    """Folder of the snapshots; empty: a folder below that of the run."""
    is_followed: bool
    """True if a launcher follows the run. If not, the workers' output is written to the job's output."""
    environment: Mapping[str, Any]
    """Order from which the nodes make the workers' environment; empty: the job has none."""
    launched_from: str
    command: str
    """Command that submitted the job."""
    started: float
    """Time of the submission, in seconds since the epoch."""

    @property
    def origin(self) -> RunOrigin:
        """Return the origin of the run, which supervisors store on the nodes."""
        return RunOrigin(launched_from=self.launched_from, command=self.command, started=self.started)

    def to_text(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self), indent=1)

    def make_script(self, plan: Plan, node: NodePlan, given: Mapping[str, str] | None = None) -> str:
        """Return the script of a node in an attempt: the variables of the attempt, then the job's script.

        Args:
            plan: plan of the attempt.
            node: one of the nodes in that plan.
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
        lines = [f"export {name}={shell.quote_word(value)}\n" for name, value in variables.items()]
        first, end, rest = self.scripts[rank].partition("\n")
        return "".join([first, end, *lines, rest]) if first.startswith("#!") else "".join([*lines, self.scripts[rank]])


def name_job_file(task: object) -> str:
    """Return the name of the file for one task of an array whose tasks have different settings."""
    return f"job.{task}.json"


def read_job_file(launcher: Path, task: str = "") -> JobFile:
    """Read the job file of the launcher in a zip.

    Args:
        launcher: the zip.
        task: index of this task of an array; empty: the job is no array.

    Raises:
        LaunchError: the file cannot be read.
    """
    where = f"{JOB_FILE} in {launcher}"
    try:
        with zipfile.ZipFile(launcher) as archive:
            own = name_job_file(task)
            document = json.loads(archive.read(own if own in archive.namelist() else JOB_FILE))
        settings = document["settings"]
        settings |= {name: tuple(settings[name]) for name in ("outputs", "shared")}
        template, scripts = bind.parse_plan_template(document["template"]), tuple(document["scripts"])
        return JobFile(**{**document, "template": template, "scripts": scripts, "settings": settings})
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as exc:
        raise LaunchError(f"the launcher's job file cannot be read: {exc}", where=where) from exc
