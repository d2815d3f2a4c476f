"""`dtctl logs`: the output of a run's workers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtctl import folders, names
from dtctl.cli import output

if TYPE_CHECKING:
    from dtctl.launch.records.logs import Lines
    from dtctl.launch.records.record import RunRecord

POLL_S = 0.1
PIECE_BYTES = 1 << 20


def logs(
    run: Annotated[str | None, typer.Argument(help="The run.  [default: the newest]", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the output until the run ends.")] = False,
    node: Annotated[str | None, typer.Option(help="Only this node.")] = None,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
) -> None:
    """Print the output of the workers, each line with its node and rank."""
    from dtctl.errors import LaunchError
    from dtctl.launch.records.record import find_run
    from dtctl.launch.records.state import state_of

    record = find_run(Path.cwd(), run)
    if node is not None and node not in state_of(record).nodes:
        names = ", ".join(state_of(record).nodes)
        raise LaunchError(f"run {record.run} has no node {node}", where="--node", hint=f"its nodes are {names}")
    size = record.plan().get("world_size")
    if rank is not None and size is not None and not 0 <= rank < int(size):
        raise LaunchError(f"run {record.run} has no rank {rank}", where="--rank", hint=f"its ranks are 0 to {size - 1}")
    if follow:
        from dtctl.cli.take_up import take_up_if_alone

        take_up_if_alone(record)
    reader = _Reader(record, node, rank)
    reader.print_new()
    while follow:
        over = state_of(record).over  # looked at before reading, so that nothing printed last is missed
        reader.print_new()
        if over:
            break
        time.sleep(POLL_S)
    reader.print_rest()


class _Reader:
    """Reads a run's log files, each from where it stopped."""

    def __init__(self, record: RunRecord, node: str | None, rank: int | None) -> None:
        self._folder = record.folder / names.LOGS_DIR
        self._node = node
        self._rank = rank
        self._read: dict[Path, int] = {}
        self._partial: dict[Path, Lines] = {}

    def print_new(self) -> None:
        """Print all whole lines that were not printed yet."""
        for path in sorted(self._folder.glob("*/*.log")):
            if self._is_selected(path):
                self._print(path)

    def print_rest(self) -> None:
        """Print lines that were begun and never ended."""
        for path, lines in self._partial.items():
            if text := lines.flush():
                output.out(_prefix(path) + text)
        self._partial.clear()

    def _is_selected(self, path: Path) -> bool:
        if self._node is not None and path.parent.name != self._node:
            return False
        return self._rank is None or path.name == f"rank-{self._rank}.log"

    def _print(self, path: Path) -> None:
        from dtctl.launch.records.logs import Lines

        try:
            file = os.fdopen(folders.open_regular(str(path)), "rb")
        except OSError as exc:
            if path not in self._read:
                output.err(f"{path} cannot be read: {exc.strerror}", "yellow")
            self._read[path] = 0
            return
        lines = self._partial.setdefault(path, Lines())
        with file:
            file.seek(self._read.get(path, 0))
            while data := file.read(PIECE_BYTES):
                self._read[path] = file.tell()
                for line in lines.feed(data):
                    output.out(_prefix(path) + line)


def _prefix(path: Path) -> str:
    origin = "agent" if path.name == "agent.log" else path.stem.removeprefix("rank-")
    return f"[{path.parent.name}:{origin}] "
