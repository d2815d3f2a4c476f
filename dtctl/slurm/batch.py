"""Render a plan as an sbatch file. Pure: the same spec gives the same text.

Some values are known only inside the allocation: the nodes, the address and port of the rendezvous, the number of the
attempt. A few lines of shell and two small programs, which are part of the file, determine them there. The rest is
equal to a launch over SSH: the same argv, the same variables.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import dtctl
from dtctl import names, shell
from dtctl.errors import PlanError
from dtctl.plan import environment
from dtctl.plan.commands import replace_torchrun_options
from dtctl.plan.model import Plan
from dtctl.plan.warnings import list_warnings
from dtctl.render import list_template_folders, render_template
from dtctl.slurm.job_file import LAUNCHER_FILE
from dtctl.spec.model import Slurm, Spec
from dtctl.spec.nodes import join_gres, resolve_nodes, resolve_spares
from dtctl.supervisor import processes, run_workdir

TEMPLATE: Final = "job.sbatch.j2"
"""Template of a job that runs dtctl's launcher."""
PLAIN_TEMPLATE: Final = "job_plain.sbatch.j2"
"""Template of plain mode: srun starts the workers once, and dtctl does not run in the job."""
MOST_PLAIN_BYTES: Final = 120_000
"""Largest size of the file in plain mode. Its tasks' script is one argument of srun, at most 128 KiB on Linux."""
_KEY: Final = re.compile(r"[a-z][a-z0-9-]*\Z")
LATE_OPTIONS: Final = {
    "--node-rank": shell.ShellExpansion("--node-rank=$SLURM_NODEID"),
    "--master-addr": shell.ShellExpansion("--master-addr=$MASTER_ADDR"),
    "--master-port": shell.ShellExpansion("--master-port=$MASTER_PORT"),
    "--rdzv-id": shell.ShellExpansion(f"--rdzv-id=${names.RUN_ID}.${names.ATTEMPT}"),
}
"""Options of torchrun whose values are known only inside the allocation."""


def render_batch_file(
    spec: Spec,
    plan: Plan,
    *,
    chdir: Path,
    output: Path,
    folder: Path,
    followed: bool = False,
    launcher: Path = Path(LAUNCHER_FILE),
    launcher_digest: str = "",
) -> str:
    """Return the batch file.

    Args:
        spec: the spec.
        plan: the plan of the spec; only the number of its nodes matters.
        chdir: folder of the code, on a disk that all nodes share.
        output: file for the output of the job; `%j` in it is the job's id.
        folder: folder of the run, on a disk that all nodes share; the job writes its records there.
        followed: whether a launcher follows the run, so that each worker's output has a file of its own, and metrics
            and snapshots are in `folder`. If not, the workers' output goes to `output`, and the workers choose the
            folder of their snapshots.
        launcher: the zip with dtctl's launcher, if it is inside the job.
        launcher_digest: SHA-256 of that zip.

    Raises:
        PlanError: a key of the spec cannot be expressed in Slurm.
        RenderError: the template is missing or wrong.
    """
    slurm = spec.slurm or Slurm()
    node, plain = plan.head, spec.is_plain
    _check_batch_spec(spec, plan)
    fixed_port = spec.network.rendezvous_port
    own_folder = slurm.array is not None and chdir == folder / run_workdir.FOLDER
    options, wrapper = _build_container_words(slurm, chdir=chdir, folder=folder, own_folder=own_folder)
    spares = 0 if plain else len(resolve_spares(spec))
    values = {
        "version": dtctl.__version__,
        "names": names,
        "plan": plan,
        "node": node,
        "notes": list_job_warnings(spec, plan),
        "secret_words": {name: "${" + name + "+set}" for name in plan.secrets},
        "groups": [group for group in node.env_by_origin if group.origin != environment.PLACE],
        "directives": list_directives(slurm, plan, chdir=chdir, output=output, outlives_nodes=not plain, spares=spares),
        "tasks": _count_tasks_per_node(plan),
        "each": " or ".join(dict.fromkeys(str(each.slots) for each in plan.nodes)),
        "place": _build_task_variables(plan, str(node.slots)),
        "unit": "worker" if plan.per_worker else "node",
        "array": slurm.array is not None,
        "srun": [*_srun_options(slurm), *options, *slurm.srun],
        "container": wrapper,
        "python": node.python or "python3",
        "port": fixed_port if isinstance(fixed_port, int) else 0,
        "threads": _count_worker_threads(slurm, plan),
        "count": len(plan.nodes),
        "may_lack_gpus": _may_lack_gpus(slurm, plan),
        "on_cpus": f"{environment.ON_CPUS.name}=${{{environment.ON_CPUS.name}-{environment.ON_CPUS.value}}}",
        "argv": replace_torchrun_options(node.argv, LATE_OPTIONS) if plan.kind == "torchrun" else node.argv,
        "mark": f"TASK_{hashlib.blake2b(repr(node).encode(), digest_size=6).hexdigest()}",
        "folder": str(folder),
        # Other users must not read the files of a task.
        "own_folder": own_folder,
        "code": str(chdir),
        "seen": str(folder if followed else chdir),
        "followed": followed,
        # Tasks of an array that share a folder would continue from each other's snapshots.
        "own_files": followed or slurm.array is not None,
        "log": shell.ShellExpansion("rank-$SLURM_PROCID.log") if plan.per_worker else "agent.log",
        "run_token": processes.TOKEN,
        "launcher": str(launcher),
        "launcher_digest": launcher_digest,
        "requeues": slurm.requeues if slurm.requeue else 0,
        "requeue_exit": names.REQUEUE_EXIT,
    }
    made = render_template(PLAIN_TEMPLATE if plain else TEMPLATE, values, folders=list_template_folders(spec.base_dir))
    if plain and len(made.encode()) > MOST_PLAIN_BYTES:
        raise PlanError(
            f"the script of the workers has more than {MOST_PLAIN_BYTES:,} bytes, too many for one argument of srun",
            where=spec.written_at("slurm.launcher"),
            hint="move job.setup, job.args or job.env into files of the job's folder, or use `slurm.launcher: auto`",
        )
    return made


def _build_task_variables(plan: Plan, slots: str) -> dict[str, str]:
    """Return the variables for a task's rank and rendezvous, as shell expressions that each task evaluates."""
    rank, run_id, attempt = shell.ShellExpansion("$SLURM_PROCID"), names.RUN_ID, names.ATTEMPT
    place = environment.build_node_variables(
        plan.kind,
        node_rank=shell.ShellExpansion("$SLURM_NODEID"),
        nodes=shell.ShellExpansion("$SLURM_NNODES"),
        slots=slots,
        world_size=str(plan.world_size),
        rendezvous_id=shell.ShellExpansion(f"${run_id}.${attempt}"),
        attempt=shell.ShellExpansion(f"${attempt}"),
        max_restarts=str(plan.max_restarts),
    )
    if plan.per_worker:
        place |= environment.build_worker_variables(
            plan.kind, rank=rank, local_rank=shell.ShellExpansion("$SLURM_LOCALID")
        )
    return place


def list_job_warnings(spec: Spec, plan: Plan) -> list[str]:
    """Return the warnings about this job, for a user who launches or submits it with any transport."""
    spec = spec.model_copy(update={"cluster": spec.cluster.model_copy(update={"transport": "slurm"})})
    return list_warnings(spec, resolve_nodes(spec), per_worker=plan.per_worker)


def list_directives(
    slurm: Slurm, plan: Plan, *, chdir: Path, output: Path, outlives_nodes: bool = False, spares: int = 0
) -> list[str]:
    """Return the options of the lines `#SBATCH OPTION`.

    Args:
        slurm: the spec's section for Slurm.
        plan: the plan made of the spec.
        chdir: folder of the code.
        output: file for the output of the job.
        outlives_nodes: whether the job continues after the loss of a node, which a spare replaces.
        spares: number of nodes to request in addition to those of the plan.

    Raises:
        PlanError: a value cannot be expressed in a batch file.
    """
    options = {
        "job-name": plan.job,
        **_node_options(
            slurm, nodes=len(plan.nodes) + spares, tasks=_count_tasks_per_node(plan), gres=format_job_gres(plan) or None
        ),
        **_job_options(slurm, chdir=chdir, output=output),
        "no-kill": outlives_nodes,
    }
    return _format_sbatch_lines({**options, **slurm.extra})


def complete_slurm_section(spec: Spec, plan: Plan) -> Slurm:
    """Return a spec's section for Slurm, completed with the resources of its nodes."""
    return (spec.slurm or Slurm()).model_copy(update={"gres": format_job_gres(plan) or None})


def format_job_gres(plan: Plan) -> str:
    """Return the generic resources that a job requests on each of its nodes; empty for none.

    Raises:
        PlanError: the nodes request different kinds of resources.
    """
    try:
        return join_gres(node.gres for node in plan.nodes)
    except ValueError as exc:
        raise PlanError(
            f"nodes that ask for different kinds of resources would be several jobs of Slurm: {exc}",
            where="cluster.nodes",
            hint="give all nodes the same kinds in gres; their numbers may differ",
        ) from exc


def _count_tasks_per_node(plan: Plan) -> int:
    """Return the number of tasks on each node; unequal nodes all get the largest number."""
    return max(node.slots for node in plan.nodes) if plan.per_worker else 1


def _node_options(slurm: Slurm, *, nodes: int, tasks: int, gres: str | None) -> dict[str, object]:
    return {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "nodes": nodes,
        "nodelist": slurm.nodelist,
        "ntasks-per-node": tasks,
        "cpus-per-task": slurm.cpus_per_task,
        "mem": slurm.mem,
        "exclusive": slurm.exclusive,
        "gres": gres,
    }


def _job_options(slurm: Slurm, *, chdir: Path, output: Path) -> dict[str, object]:
    return {
        "array": slurm.array,
        "chdir": str(chdir),
        "output": str(output),
        "open-mode": "append",  # a restarted job appends to the same file
        "requeue": slurm.requeue,
        "no-requeue": not slurm.requeue,  # set in both cases, since the default depends on the site
        "signal": f"B:USR1@{slurm.warn_s}",  # the signal goes to the batch script alone, before the time is over
    }


def _count_worker_threads(slurm: Slurm, plan: Plan) -> int | None:
    """Return the threads of each worker; 0: the job counts them where it runs, None: the spec sets them."""
    node = plan.head
    if any(variable.name == environment.THREADS for variable in node.env):
        return None
    if slurm.cpus_per_task is None:
        return 0
    return max(1, slurm.cpus_per_task // (1 if plan.per_worker else node.slots))


def _may_lack_gpus(slurm: Slurm, plan: Plan) -> bool:
    """Return whether the workers' nodes may lack GPUs; accelerate then needs an option for that."""
    asked = " ".join(map(str, (*slurm.extra.items(), *slurm.srun, *(node.gres for node in plan.nodes))))
    return plan.kind == "accelerate" and "gpu" not in asked


def _srun_options(slurm: Slurm) -> list[str]:
    return [] if slurm.cpus_per_task is None else [f"--cpus-per-task={slurm.cpus_per_task}"]


def _build_container_words(slurm: Slurm, *, chdir: Path, folder: Path, own_folder: bool) -> tuple[list[str], list[str]]:
    """Return options of srun that start the tasks in their container, and the words before the tasks' shell."""
    container = slurm.container
    if container is None:
        return [], []
    own = [str(path) for path in dict.fromkeys((chdir, folder)) if not (path == folder and chdir in folder.parents)]
    begin = shell.ShellExpansion(f"${names.RUN_DIR}/{run_workdir.FOLDER}") if own_folder else str(chdir)
    mounts = [*(f"{path}:{path}" for path in own), *container.mounts]
    if container.runtime == "pyxis":
        return [
            f"--container-image={container.image}",
            f"--container-mounts={','.join(mounts)}",
            type(begin)(f"--container-workdir={begin}"),
        ], []
    return [], [
        "apptainer", "exec", *(f"--bind={mount}" for mount in mounts), type(begin)(f"--pwd={begin}"),
        *container.options, container.image,
    ]  # fmt: skip


def _format_sbatch_lines(options: Mapping[str, object]) -> list[str]:
    lines = []
    for key, value in options.items():
        if value is None or value is False:
            continue
        if not _KEY.match(key):
            raise PlanError(f"{key!r} cannot be an option of sbatch", where="slurm.extra")
        lines.append(f"--{key}" if value is True else f"--{key}={_quote_sbatch_value(key, str(value))}")
    return lines


def _quote_sbatch_value(key: str, value: str) -> str:
    """Quote a word of a directive for sbatch: blanks and `#` need quotation marks, and a line break is an error."""
    if not value.isprintable():
        raise PlanError(f"{value!r} cannot stand in a line of a batch file", where=f"slurm: {key}")
    if re.fullmatch(r"[\w@%+=:,./\[\]&|*!-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def escape_file_pattern(path: Path) -> str:
    """Escape a path for a file name pattern of Slurm, in which `%` begins a replacement."""
    return str(path).replace("%", "%%")


def _check_batch_spec(spec: Spec, plan: Plan) -> None:
    format_job_gres(plan)
    if spec.slurm and spec.slurm.array and spec.snapshot_dir:
        raise PlanError(
            "all tasks of the array would continue from the same snapshots",
            where=spec.written_at("train.snapshot.dir"),
            hint="leave it out: each task then has a folder of its own",
        )
    if spec.slurm and spec.slurm.container and plan.transport != "slurm":
        raise PlanError(
            "Slurm has to start the container of the workers",
            where=spec.written_at("slurm.container"),
            hint="set `cluster.transport: slurm`",
        )
