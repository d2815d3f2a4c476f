"""A command next to a job of Slurm on one of its nodes: a step of the job, entered through one of its workers.

Its variables come from the environment of one of the workers, without its rank and without the values of secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dtctl import names, shell
from dtctl.errors import LaunchError
from dtctl.launch.inside import command_line
from dtctl.launch.records.record import RunRecord
from dtctl.slurm import login_client
from dtctl.slurm.answers import JobAsked
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.job_state import RUNNING
from dtctl.slurm.site import LocalSite, Site
from dtctl.supervisor import processes

OF_ONE_WORKER: Final = (
    "RANK", "LOCAL_RANK", "ROLE_RANK", "CROSS_RANK", names.ERROR_FILE, "SLURM_PROCID", "SLURM_LOCALID",
)  # fmt: skip
_ENTER: Final = r"""
for each in /proc/[0-9]*; do
  tr '\0' '\n' <"$each/environ" 2>/dev/null | grep -qxF {run} || continue
  tr '\0' '\n' <"$each/environ" | grep -qxF "{node}=$SLURMD_NODENAME" || continue
  tr '\0' '\n' <"$each/environ" | grep -q '^{token}=' && worker=$each && break
done
[ -n "${{worker:-}}" ] || {{ echo "no worker of the run is on $SLURMD_NODENAME now" >&2; exit 7; }}
while IFS= read -r -d '' pair; do
  case "${{pair%%=*}}" in
    {left_out} | *[!A-Za-z0-9_]* | '' | SLURM_STEP* | SLURM_TASK*) ;;
    *) export "$pair" ;;
  esac
done <"$worker/environ"
unset {token}
cd "$worker/cwd" && cd "$(pwd -P)" || exit 7
exec {command}
"""


def check_node(record: RunRecord, site: Site, ref: JobRef, node: str) -> None:
    """Refuse a node that the job does not have now.

    Raises:
        LaunchError: the node is none of the job's, which the error names, or the job does not run.
    """
    state = login_client.ask(site, ref.python, JobAsked, job=ref.job, folder=ref.folder, urgent=True).job
    if state.state not in RUNNING:
        reason = f": {state.reason}" if state.reason not in ("", "None") else ""
        raise LaunchError(f"job {ref.job} of run {record.run} does not run ({state.state}{reason})", where=site.name)
    if node not in state.nodes:
        raise LaunchError(
            f"run {record.run} has no node {node}", where="NODE", hint=f"its nodes are {', '.join(state.nodes)}"
        )


def command_text(
    argv: Sequence[str],
    *,
    site: Site,
    ref: JobRef,
    run: str,
    node: str,
    secrets: Sequence[str],
    window: tuple[int, int] | None,
) -> str:
    """Return the shell text, for the machine of Slurm's commands, that runs a command inside of a job.

    Args:
        argv: the command; one word with blanks or operators in it is a line for a shell.
        site: where Slurm's commands are.
        ref: the job.
        run: name of the run.
        node: where.
        secrets: variables that are left out.
        window: columns and rows of a terminal that the command is to have; None: none.
    """
    script = _ENTER.format(
        run=shell.quote(f"{names.RUN_ID}={run}"), node=names.NODE, token=processes.TOKEN,
        left_out=" | ".join((*OF_ONE_WORKER, *secrets)), command=command_line(argv, window),
    )  # fmt: skip
    env: Mapping[str, str] = site.env if isinstance(site, LocalSite) else {}
    # Beside the workers, with what they have been given: memory 0 asks for none of its own.
    srun = ["srun", "--overlap", f"--jobid={ref.job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--mem=0"]
    step = [*srun, "--quiet", "--chdir=/", "bash", "-c", script]
    return shell.join(["env", *(f"{name}={value}" for name, value in env.items()), *step])
