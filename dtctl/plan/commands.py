"""The argv that a node starts, for each kind of job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from dtctl.errors import PlanError
from dtctl.plan.model import NodeRanks, Rendezvous

SHELL: Final = ("bash", "-e", "-o", "pipefail", "-c")
SHELLS: Final = {".sh": "bash", ".bash": "bash", ".zsh": "zsh", ".ksh": "ksh", ".fish": "fish"}
"""Ending of a script's name -> program that runs it if its first line does not name one."""


def choose_interpreter(script: str, source: str) -> tuple[str, ...]:
    """Return the program that runs a script that is not Python, by its first line or its name; empty for Python.

    Args:
        script: its path.
        source: its text; empty when that is not known here.
    """
    if PurePosixPath(script).suffix == ".py":
        return ()
    first_line = source.partition("\n")[0].rstrip("\r")
    words = first_line[2:].split() if first_line.startswith("#!") else []
    if words and PurePosixPath(words[0]).name == "env":
        words = [word for word in words[1:] if word != "-S"]
    if words:
        return () if PurePosixPath(words[0]).name.startswith(("python", "pypy")) else tuple(words)
    by_name = SHELLS.get(PurePosixPath(script).suffix)
    return (by_name,) if by_name else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UserProgram:
    """Program of the user: exactly one of script, module and command."""

    script: str | None = None
    module: str | None = None
    command: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    shell: bool = False
    """True if the command is a line for bash."""
    interpreter: tuple[str, ...] = ()
    """Program that runs the script, where that is not Python."""

    @property
    def is_python(self) -> bool:
        """Return whether a Python runs it, so that torchrun can start it."""
        return not (self.command or self.interpreter)

    def with_python(self, python: str) -> tuple[str, ...]:
        """Return the argv that runs this under the interpreter `python`, or under its own."""
        if self.shell:
            return (*SHELL, *self.command, SHELL[0], *self.args)
        if self.command:
            return (*self.command, *self.args)
        if self.interpreter:
            return (*self.interpreter, str(self.script), *self.args)
        target = ("-m", self.module) if self.module else (str(self.script),)
        return (python, "-u", *target, *self.args)


def build_node_argv(
    program: UserProgram, *, kind: str, python: str | None, placement: NodeRanks, nodes: int, rendezvous: Rendezvous
) -> tuple[str, ...]:
    """Return the command at the end of the node script.

    Args:
        program: the user's program.
        kind: of the job; decides which program starts the workers.
        python: interpreter on the node; None leaves the choice to the node's PATH.
        placement: the node's ranks.
        nodes: number of nodes.
        rendezvous: where the workers meet.

    Raises:
        PlanError: the kind cannot run this program.
    """
    if kind == "torchrun":
        return _build_torchrun_argv(program, python=python, placement=placement, nodes=nodes, rendezvous=rendezvous)
    return program.with_python(python or "python3")


def _build_torchrun_argv(
    program: UserProgram, *, python: str | None, placement: NodeRanks, nodes: int, rendezvous: Rendezvous
) -> tuple[str, ...]:
    if not program.is_python:
        subject = (
            f"{program.script} is one of {program.interpreter[0]}" if program.interpreter else "the job has a command"
        )
        raise PlanError(
            f"torchrun starts a Python script or module, and {subject}",
            where="job.kind",
            hint="`job.kind: command` runs it once per node, `direct` once per worker",
        )
    start = (python, "-m", "torch.distributed.run") if python else ("torchrun",)
    options = (
        f"--nnodes={nodes}",
        f"--nproc-per-node={placement.slots}",
        f"--node-rank={placement.node_rank}",
        # The static back end gives ranks in the order of the spec; c10d gives them in the order in which agents arrive.
        "--rdzv-backend=static",
        f"--rdzv-id={rendezvous.run_id}",
        f"--master-addr={rendezvous.address}",
        f"--master-port={rendezvous.port}",
        # dtctl restarts all workers together, with a new rendezvous. torchrun's own restart keeps one store for all
        # attempts, so that a worker may read an address of the previous attempt (see docs: restarts).
        "--max-restarts=0",
        # Standard output and error of every worker go to the agent's output, each line with the rank in front.
        "--tee=3",
    )
    target = ("-m", program.module) if program.module else (str(program.script),)
    return (*start, *options, *target, *program.args)


def replace_torchrun_options(argv: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Return an argv of torchrun with other words for some of its options; nothing behind the script is touched."""
    words: list[str] = []
    for at, word in enumerate(argv):
        is_script = at > 0 and not word.startswith("-") and argv[at - 1] != "-m"
        if is_script:
            return [*words, *argv[at:]]
        words.append(options.get(word.partition("=")[0], word))
    return words
