"""The argv that a node starts, for each kind of job."""

from __future__ import annotations

from dataclasses import dataclass

from dtctl.errors import PlanError
from dtctl.plan.model import Placement, Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What the user wants to run: exactly one of script, module and command."""

    script: str | None = None
    module: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()

    def with_python(self, python: str) -> tuple[str, ...]:
        """The argv that runs this under the interpreter `python`, or as it is when it is a command."""
        if self.command:
            return (*self.command, *self.args)
        target = ("-m", self.module) if self.module else (str(self.script),)
        return (python, "-u", *target, *self.args)


def node_argv(
    program: Program, *, kind: str, python: str | None, placement: Placement, nodes: int, rendezvous: Rendezvous
) -> tuple[str, ...]:
    """What the node script ends with.

    Args:
        program: the user's program.
        kind: of the job; decides who starts the workers.
        python: interpreter on the node; None leaves the choice to the node's PATH.
        placement: the node's ranks.
        nodes: number of nodes.
        rendezvous: where the workers meet.

    Raises:
        PlanError: the kind cannot run this program.
    """
    if kind == "torchrun":
        return _torchrun(program, python=python, placement=placement, nodes=nodes, rendezvous=rendezvous)
    return program.with_python(python or "python3")


def _torchrun(
    program: Program, *, python: str | None, placement: Placement, nodes: int, rendezvous: Rendezvous
) -> tuple[str, ...]:
    if program.command:
        raise PlanError(
            "torchrun starts a Python script or module, and the job has a command",
            where="job.command",
            hint="use `job.script`, or `job.kind: command` to run the command once per node",
        )
    start = (python, "-m", "torch.distributed.run") if python else ("torchrun",)
    options = (
        f"--nnodes={nodes}",
        f"--nproc-per-node={placement.slots}",
        f"--node-rank={placement.node_rank}",
        # Static: ranks follow the spec. With c10d they follow the order in which agents happen to arrive.
        "--rdzv-backend=static",
        f"--rdzv-id={rendezvous.run_id}",
        f"--master-addr={rendezvous.address}",
        f"--master-port={rendezvous.port}",
        # The gang is restarted as a whole, by dtctl, with a new rendezvous. torchrun's own restart keeps one store over
        # all attempts, so that a worker may read an address of the attempt before (see docs: restarts).
        "--max-restarts=0",
        # Out and err of every worker to the agent's output, line by line with the rank in front.
        "--tee=3",
    )
    target = ("-m", program.module) if program.module else (str(program.script),)
    return (*start, *options, *target, *program.args)
