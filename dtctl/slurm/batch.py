"""A plan as an sbatch file. Pure: the same spec gives the same text.

What is known only inside the allocation (the nodes, the address and the port to meet at, which start this is) is worked
out there by a few lines of shell, and by two small programs that are sent along as text. The rest is what a launch over
SSH would use: the same argv, the same variables.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import dtctl
from dtctl import names, shell
from dtctl.errors import PlanError
from dtctl.plan.model import Plan
from dtctl.render import render, template_folders
from dtctl.render.standalone import standalone
from dtctl.slurm import placement
from dtctl.spec.model import Slurm, Spec
from dtctl.supervisor import processes

TEMPLATE: Final = "job.sbatch.j2"
PLACE: Final = "dtctl: place in the job"
_RUN: Final = "import sys; sys.path.append(sys.path.pop(0)); from dtctl.slurm.{} import main; main()"
"""Python code: modules of the job's own code, which is the working folder, come last."""
_TIME: Final = re.compile(r"\d+(:\d\d){0,2}\Z|\d+-\d\d?(:\d\d){0,2}\Z|(?i:infinite|unlimited)\Z")
_KEY: Final = re.compile(r"[a-z][a-z0-9-]*\Z")
LATE_OPTIONS: Final = {
    "--node-rank": shell.Late("--node-rank=$SLURM_NODEID"),
    "--master-addr": shell.Late("--master-addr=$MASTER_ADDR"),
    "--master-port": shell.Late("--master-port=$MASTER_PORT"),
    "--rdzv-id": shell.Late(f"--rdzv-id=${names.RUN_ID}.${names.ATTEMPT}"),
}
"""Options of torchrun whose values are known only inside the allocation."""


def text(spec: Spec, plan: Plan, *, chdir: Path, output: Path, folder: Path | None = None) -> str:
    """The file.

    Args:
        spec: the spec.
        plan: what it comes to; its nodes are only counted.
        chdir: folder of the code, which all nodes see.
        output: file for the output of the job; `%j` in it is the job's id.
        folder: folder of the run, which all nodes see: for metrics, snapshots, and a log per worker. None: what workers
            print goes to `output`, and the rest where they put it.

    Raises:
        PlanError: a key of the spec cannot be said to Slurm.
        RenderError: the template is missing or wrong.
    """
    slurm = spec.slurm or Slurm()
    node, direct = plan.head, plan.per_worker
    _check(spec, plan)
    package_folder = Path(__file__).parent
    fixed_port = spec.network.rendezvous_port
    component_list = components(slurm, plan, chdir=chdir, output=output)
    several = len(component_list) > 1
    values = {
        "version": dtctl.__version__,
        "names": names,
        "plan": plan,
        "node": node,
        "groups": [group for group in node.env_by_origin if group.origin != PLACE],
        "components": component_list,
        "each": " or ".join(str(part.slots) for part in component_list),
        # Of several kinds of nodes, each task is told its own number.
        "slots": shell.Late("$1") if several else node.slots,
        "unit": "worker" if direct else "node",
        "srun": list(slurm.srun),
        "python": node.python or "python3",
        "port": fixed_port if isinstance(fixed_port, int) else 0,
        "meeting": standalone(package_folder / "pick_endpoint.py"),
        "route": standalone(package_folder / "find_interface.py"),
        "argv": _with_late_values(node.argv) if plan.kind == "torchrun" else node.argv,
        "mark": f"TASK_{hashlib.blake2b(repr(node).encode(), digest_size=6).hexdigest()}",
        "folder": str(folder) if folder else "",
        "log": shell.Late("rank-$SLURM_PROCID.log") if direct else "agent.log",
        "monitor": _RUN.format("monitor"),
        "next_start": _RUN.format("next_start"),
        "trains": spec.train is not None,
        "run_token": processes.TOKEN,
        "hang_s": str(spec.job.hang_s),
        "hang_start_s": str(spec.job.hang_start_s),
        "placement": placement.to_text([node.slots for node in plan.nodes]),
        "restarts": plan.max_restarts,
        "requeues": slurm.requeues,
        "requeue_exit": names.REQUEUE_EXIT,
    }
    return render(TEMPLATE, values, folders=template_folders(spec.base_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """Nodes of one kind: what Slurm calls a component of a heterogeneous job, or all of the job."""

    slots: int
    tasks: int
    """Per node."""
    directives: tuple[str, ...]
    """What follows `#SBATCH `, an option each."""


def components(slurm: Slurm, plan: Plan, *, chdir: Path, output: Path) -> list[Component]:
    """The nodes in runs of equal numbers of workers, in the order of their ranks.

    Raises:
        PlanError: a value cannot be said in a batch file.
    """
    result: list[Component] = []
    for slots, nodes in groupby(plan.nodes, key=lambda node: node.slots):
        tasks = slots if plan.per_worker else 1
        options = _node_options(slurm, nodes=len(list(nodes)), tasks=tasks)
        if not result:  # what is said of the job as a whole stands before its first nodes
            options = {"job-name": plan.job, **options, **_job_options(slurm, chdir=chdir, output=output)}
        result.append(Component(slots=slots, tasks=tasks, directives=tuple(_lines({**options, **slurm.extra}))))
    return result


def _node_options(slurm: Slurm, *, nodes: int, tasks: int) -> dict[str, object]:
    return {
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "time": slurm.time,
        "nodes": nodes,
        "ntasks-per-node": tasks,
        "gres": slurm.gres,
    }


def _job_options(slurm: Slurm, *, chdir: Path, output: Path) -> dict[str, object]:
    return {
        "array": slurm.array,
        "chdir": str(chdir),
        "output": str(output),
        "open-mode": "append",  # a job that is started again goes on in the same file
        "requeue": True,
        "signal": f"B:USR1@{slurm.warn_s}",  # to the batch script alone, before the time is over
    }


def _lines(options: Mapping[str, object]) -> list[str]:
    lines = []
    for key, value in options.items():
        if value is None or value is False:
            continue
        if not _KEY.match(key):
            raise PlanError(f"{key!r} cannot be an option of sbatch", where="slurm.extra")
        lines.append(f"--{key}" if value is True else f"--{key}={_quoted(key, str(value))}")
    return lines


def _quoted(key: str, value: str) -> str:
    """As sbatch reads the words of a directive: blanks and `#` need quotation marks, and a line is a line."""
    if not value.isprintable():
        raise PlanError(f"{value!r} cannot stand in a line of a batch file", where=f"slurm: {key}")
    if re.fullmatch(r"[\w@%+=:,./\[\]&|*!-]+", value):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def literal(path: Path) -> str:
    """A path in a file name pattern of Slurm, where `%` begins a replacement."""
    return str(path).replace("%", "%%")


def _with_late_values(argv: Sequence[str]) -> list[str]:
    """The argv of torchrun with what is known in the allocation only; nothing behind the script is touched."""
    end = next(
        (at for at, argument in enumerate(argv) if at and not argument.startswith("-") and argv[at - 1] != "-m"),
        len(argv),
    )
    return [
        LATE_OPTIONS.get(argument.partition("=")[0], argument) if at < end else argument
        for at, argument in enumerate(argv)
    ]


def _check(spec: Spec, plan: Plan) -> None:
    slots = {node.slots for node in plan.nodes}
    if len(slots) > 1 and not plan.per_worker:
        raise PlanError(
            f"nodes with {' and '.join(map(str, sorted(slots)))} workers are more than one kind of node",
            where="cluster.nodes",
            hint="with `kind: direct` they are the components of a heterogeneous job",
        )
    if len(slots) > 1 and spec.slurm and spec.slurm.array:
        raise PlanError(
            "Slurm has no arrays of heterogeneous jobs",
            where=spec.written_at("slurm.array"),
            hint="give all nodes the same slots",
        )
    time = spec.slurm.time if spec.slurm else None
    if time is not None and not _TIME.match(time):
        raise PlanError(
            f"{time!r} is not a time limit of Slurm",
            where=spec.written_at("slurm.time"),
            hint='write minutes, H:MM:SS or D-HH:MM:SS, as text: `time: "12:00:00"`',
        )
