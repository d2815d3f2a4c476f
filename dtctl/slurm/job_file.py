"""What a launcher inside a job is told, decided when the job was submitted: job.json in the job's folder.

Written where the spec is, read on the job's first node, where neither pydantic nor Jinja has to be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from dtctl import shell
from dtctl.errors import LaunchError
from dtctl.plan import bind
from dtctl.plan.bind import PlanTemplate
from dtctl.plan.model import NodePlan
from dtctl.supervisor.messages import RunOrigin

JOB_FILE: Final = "job.json"
LAUNCHER_FILE: Final = "launcher.zip"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """See the module."""

    template: PlanTemplate
    script: str
    """What each node runs, but for the variables that depend on its place and on the attempt."""
    settings: Mapping[str, Any]
    """Fields of a `LaunchJob`."""
    launched_from: str
    command: str
    """Who has submitted the job, and how."""
    started: float
    """When, in seconds since the epoch."""

    @property
    def origin(self) -> RunOrigin:
        """What the nodes are told of it."""
        return RunOrigin(launched_from=self.launched_from, command=self.command, started=self.started)

    def to_text(self) -> str:
        """Return the text of the file."""
        return json.dumps(asdict(self), indent=1)

    def make_script(self, node: NodePlan) -> str:
        """Return the script of a node in an attempt: that of the job, behind the variables that it lacks."""
        known = {variable.name for variable in self.template.nodes[0].env}
        lines = [
            f"export {variable.name}={shell.quote(variable.value)}\n"
            for variable in node.env
            if variable.name not in known
        ]
        first, end, rest = self.script.partition("\n")
        return "".join([first, end, *lines, rest]) if first.startswith("#!") else "".join([*lines, self.script])


def read_job_file(folder: Path) -> JobFile:
    """Read the file of a job.

    Raises:
        LaunchError: it cannot be read.
    """
    path = folder / JOB_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        settings = {**document["settings"], "outputs": tuple(document["settings"]["outputs"])}
        return JobFile(**{**document, "template": bind.from_json(document["template"]), "settings": settings})
    except OSError as exc:
        raise LaunchError(f"the job's description cannot be read: {exc.strerror}", where=str(path)) from exc
    except (ValueError, KeyError, TypeError) as exc:
        raise LaunchError(f"the job's description is damaged: {exc}", where=str(path)) from exc
