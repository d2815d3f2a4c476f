"""Commands in a step of a Slurm job, which enters the job through one of its workers.

The command gets the environment of that worker, without its rank and without the values of secrets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from dtctl import names, shell
from dtctl.errors import LaunchError
from dtctl.launch.exec_in_run import format_command_line
from dtctl.launch.records.record import RunRecord, build_node_error
from dtctl.slurm import remote_commands
from dtctl.slurm.answers import JobStatus
from dtctl.slurm.job_ref import JobRef
from dtctl.slurm.job_state import RUNNING
from dtctl.slurm.site import CommandHost, LocalCommandHost
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


def check_node(record: RunRecord, site: CommandHost, ref: JobRef, node: str) -> None:
    """Refuse a node that does not belong to the job now.

    Raises:
        LaunchError: the job does not run, or the node is none of its nodes; the error lists them.
    """
    state = remote_commands.send_login_request(
        site, ref.python, JobStatus, job=ref.job, folder=ref.folder, urgent=True
    ).job
    if state.state not in RUNNING:
        reason = f": {state.reason}" if state.reason not in ("", "None") else ""
        raise LaunchError(f"job {ref.job} of run {record.run} does not run ({state.state}{reason})", where=site.name)
    if node not in state.nodes:
        raise build_node_error(record.run, node, state.nodes, where="NODE")


def build_job_command(
    argv: Sequence[str],
    *,
    site: CommandHost,
    ref: JobRef,
    run: str,
    node: str,
    secrets: Sequence[str],
    window: tuple[int, int] | None,
) -> str:
    """Return the shell text that runs a command inside of a job, for the machine with Slurm's commands.

    Args:
        argv: the command; a single word with blanks or operators is a line for a shell.
        site: machine with Slurm's commands.
        ref: the job.
        run: name of the run.
        node: node on which the command runs.
        secrets: names of variables that the command does not get.
        window: columns and rows of the command's terminal; None: no terminal.
    """
    script = _ENTER.format(
        run=shell.quote_word(f"{names.RUN_ID}={run}"), node=names.NODE, token=processes.TOKEN,
        left_out=" | ".join((*OF_ONE_WORKER, *secrets)), command=format_command_line(argv, window),
    )  # fmt: skip
    env: Mapping[str, str] = site.env if isinstance(site, LocalCommandHost) else {}
    # The command shares the workers' resources: memory 0 requests no memory of its own.
    srun = ["srun", "--overlap", f"--jobid={ref.job}", f"--nodelist={node}", "--nodes=1", "--ntasks=1", "--mem=0"]
    step = [*srun, "--quiet", "--chdir=/", "bash", "-c", script]
    return shell.join_command(["env", *(f"{name}={value}" for name, value in env.items()), *step])
