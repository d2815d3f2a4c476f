"""Old runs, trees of code and sandboxes: looked for here and on the nodes of a spec, and removed if that is agreed."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dtctl import folders, names
from dtctl.errors import DtctlError, SandboxError
from dtctl.launch.cluster import ResolvedCluster
from dtctl.launch.control.link import Kind, open_node
from dtctl.launch.records.record import RunRecord, list_runs
from dtctl.launch.records.state import state_of
from dtctl.spec.nodes import NodeSpec
from dtctl.supervisor.messages.base import Message
from dtctl.supervisor.messages.stored import ItemsRemoved, ListStored, RemoveStored, StoredItems
from dtctl.transport.fanout import fan_out

SILENCE_S = 600.0
"""Seconds that a node may be silent: it may have to visit many files to determine the size of its runs."""
HERE: Final = ""
"""Name of this machine in the place of a node's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Something that can be removed."""

    node: str
    kind: str
    """run, tree or sandbox"""
    name: str
    bytes: int
    age_s: float
    has: tuple[str, ...] = ()
    """Contents that may be worth something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRule:
    """Age and size from which something is removed."""

    older_s: float
    larger_bytes: int

    def covers(self, item: Item) -> bool:
        """Return whether an item goes."""
        return item.age_s >= self.older_s and item.bytes >= self.larger_bytes


def items_here(base_dir: Path) -> list[Item]:
    """Return runs of this folder that are over, and sandboxes that are down."""
    runs = [record for record in list_runs(base_dir) if _is_over(record)]
    return [*map(_run, runs), *_sandboxes()]


def _run(record: RunRecord) -> Item:
    """Return a run of this folder; that of a job of Slurm with the files that the job has left in the same folder."""
    item = _item("run", record.folder, ("outputs",))
    folder = _job_folder(record)
    if folder is None:
        return item
    job = _item("run", folder, ("snapshots", "outputs"))
    return replace(
        item,
        bytes=item.bytes + job.bytes,
        age_s=min(item.age_s, job.age_s),
        has=tuple({**dict.fromkeys(item.has + job.has)}),
    )


def _job_folder(record: RunRecord) -> Path | None:
    """Return the folder with the files of a job of Slurm, if it lies next to its record."""
    folder = record.folder.parent.parent / "slurm" / record.run
    is_beside = folder.is_dir() and not folder.is_symlink() and not folder.parent.is_symlink()
    return folder if record.info().slurm and is_beside else None


def runs_elsewhere(base_dir: Path, asked: Collection[str]) -> frozenset[str]:
    """Return the runs with files on nodes that were not queried: the record here is the only trace of those files.

    Args:
        base_dir: folder that they were launched from.
        asked: nodes that have listed their files.
    """
    plans = {record.run: record.plan() for record in list_runs(base_dir) if not record.info().slurm}
    return frozenset(
        run
        for run, plan in plans.items()
        if plan.get("transport") in ("local", "ssh") and not {node["name"] for node in plan["nodes"]} <= set(asked)
    )


def needed_runs(base_dir: Path, going: Iterable[str]) -> frozenset[str]:
    """Runs that one which stays has been continued from: its snapshots and outputs are theirs.

    Args:
        base_dir: folder that they were launched from.
        going: runs that are to be removed.
    """
    earlier = {record.run: record.info().resumes for record in list_runs(base_dir)}
    needed, staying = set[str](), earlier.keys() - set(going)
    while staying:
        staying = {earlier[run] for run in staying if earlier.get(run)} - needed
        needed |= staying
    return frozenset(needed)


def _is_over(record: RunRecord) -> bool:
    state = state_of(record)
    return state.over and state.status != "unattended" and not record.has_launcher()


def _sandboxes() -> Iterator[Item]:
    from dtctl.sandbox import control, layout

    top = layout.state_dir("x").parent
    for folder in sorted(top.iterdir()) if top.is_dir() else ():
        is_ours = (folder / folders.MARKER).is_file() and not folder.is_symlink()
        if is_ours and control.find(folder.name) is None:
            yield _item("sandbox", folder, ())


def _item(kind: str, folder: Path, valued: Iterable[str]) -> Item:
    size, newest = 0, folder.lstat().st_mtime
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                info = os.lstat(os.path.join(path, name))  # noqa: PTH118 - many of them
            except OSError:
                continue
            size, newest = size + info.st_blocks * 512, max(newest, info.st_mtime)
    has = tuple(name for name in valued if (folder / name).is_dir())
    return Item(node=HERE, kind=kind, name=folder.name, bytes=size, age_s=max(0.0, time.time() - newest), has=has)


def remove_here(base_dir: Path, items: Iterable[Item]) -> list[str]:
    """Remove items of this machine; what is left of them."""
    from dtctl.sandbox import control

    left = []
    for item in items:
        if item.kind == "run":
            record = RunRecord(base_dir / names.STATE_DIR / names.RUNS_DIR / item.name)
            if not _is_over(record):
                left.append(str(record.folder))
                continue
            job = _job_folder(record)  # first: the record is its only trace
            left += (folders.remove_tree(str(job)) if job else []) or folders.remove_tree(str(record.folder))
        elif item.kind == "sandbox":
            try:
                control.down(item.name)
            except SandboxError as exc:
                left.append(str(exc))
    return left


class NodeStores:
    """The workdirs of the nodes of a spec."""

    def __init__(self, cluster: ResolvedCluster) -> None:
        self._nodes = {node.name: node for node in (*cluster.nodes, *cluster.spares)}
        self._targets = cluster.targets
        self._transport = cluster.make_transport()

    @property
    def names(self) -> set[str]:
        """Return the names of the nodes."""
        return set(self._nodes)

    def items(self) -> tuple[list[Item], dict[str, DtctlError]]:
        """Return what no process uses, and the nodes that could not be asked."""
        answers = fan_out(self._nodes, lambda node: self._ask(node, ListStored(), StoredItems))
        items = [
            Item(node=node, kind=each.kind, name=each.name, bytes=each.bytes, age_s=each.age_s, has=tuple(each.has))
            for node, answer in answers.items()
            if isinstance(answer, StoredItems)
            for each in answer.items
            if not each.is_used
        ]
        return items, {node: answer for node, answer in answers.items() if isinstance(answer, DtctlError)}

    def remove(self, items: Iterable[Item]) -> Mapping[str, list[str] | DtctlError]:
        """Remove items: node -> what is left of them there."""
        chosen: dict[str, list[tuple[str, str]]] = {}
        for item in items:
            chosen.setdefault(item.node, []).append((item.kind, item.name))

        def remove_on(name: str) -> list[str]:
            return self._ask(self._nodes[name], RemoveStored(items=chosen[name]), ItemsRemoved).left

        return fan_out({name: name for name in chosen}, remove_on)

    def _ask(self, node: NodeSpec, request: Message, kind: type[Kind]) -> Kind:
        target = self._targets[node.name]
        with open_node(
            self._transport, target, request, python=node.python, workdir=node.workdir, silence_s=SILENCE_S
        ) as link:
            return link.expect(kind)
