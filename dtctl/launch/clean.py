"""Removal of old runs, trees of code and sandboxes, on this machine and on the nodes of a spec."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dtctl import folders, names
from dtctl.errors import DtctlError, LaunchError, SandboxError
from dtctl.launch.cluster import ResolvedCluster
from dtctl.launch.control.link import Kind, open_node
from dtctl.launch.files.data import CACHE_DIR
from dtctl.launch.files.wheels import CACHE as WHEELS_DIR
from dtctl.launch.records.record import RunRecord, check_no_link, list_run_records
from dtctl.launch.records.run_writer import RunWriter
from dtctl.launch.records.state import read_run_state
from dtctl.spec.nodes import NodeSpec
from dtctl.supervisor.messages.base import Message
from dtctl.supervisor.messages.stored import ItemsRemoved, ListStored, RemoveStored, StoredItems
from dtctl.transport.fanout import fan_out

SILENCE_S = 600.0
"""Seconds that a node may be silent: to determine the size of its runs, it may have to visit many files."""
HERE: Final = ""
"""Value of `RemovableItem.node` for items of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovableItem:
    """Something that can be removed."""

    node: str
    kind: str
    """One of run, tree, wheel and sandbox."""
    name: str
    bytes: int
    age_s: float
    has: tuple[str, ...] = ()
    """Contents that the user may want to keep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanRule:
    """Age and size from which something is removed."""

    older_s: float
    larger_bytes: int

    def covers(self, item: RemovableItem) -> bool:
        """Return whether the rule removes an item."""
        return item.age_s >= self.older_s and item.bytes >= self.larger_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanPlan:
    """Items that a rule removes, and the reasons why others stay."""

    items: list[RemovableItem]
    foreign: list[RemovableItem]
    """Those of `items` that are or have runs without a record in this folder, which other people may need."""
    below_limits: list[RemovableItem]
    """Items that are too young or too small for the rule."""
    unreachable_runs: int
    """Number of runs that stay because nodes with their files were not queried."""
    errors: dict[str, DtctlError]
    """Errors of the nodes that could not be queried, by node."""

    @property
    def own_items(self) -> list[RemovableItem]:
        """Return the items that no other folder has launched: runs of this folder, and caches."""
        return [item for item in self.items if item not in self.foreign]


def plan_removal(base_dir: Path, stores: NodeStores | None, rule: CleanRule) -> CleanPlan:
    """Return what a rule removes from this folder and from the nodes; no run goes that another one continues."""
    on_nodes: list[RemovableItem] = []
    errors: dict[str, DtctlError] = {}
    answered: set[str] = set()
    if stores is not None:
        on_nodes, errors = stores.items()
        answered = stores.names - errors.keys()
    found = [*list_removable_items(base_dir), *on_nodes]
    covered = [item for item in found if rule.covers(item)]
    own_runs = {item.name for item in covered if item.kind == "run" and item.node == HERE}
    needed = find_needed_runs(base_dir, own_runs)
    elsewhere = find_runs_elsewhere(base_dir, answered)
    unreachable = elsewhere & (own_runs - needed)
    staying = needed | unreachable
    items = [item for item in covered if item.kind != "run" or item.name not in staying]
    launched = {record.run for record in list_run_records(base_dir)}
    return CleanPlan(
        items=items,
        foreign=[item for item in items if not _list_runs_in(item) <= launched],
        below_limits=[item for item in found if item.name not in elsewhere and not rule.covers(item)],
        unreachable_runs=len(unreachable),
        errors=errors,
    )


def _list_runs_in(item: RemovableItem) -> set[str]:
    """Return the runs whose files go with an item."""
    if item.kind == "sandbox":
        from dtctl.sandbox import control

        return set(control.list_sandbox_runs(item.name))
    return {item.name} if item.kind == "run" else set()


def remove_items(
    base_dir: Path, stores: NodeStores | None, items: Sequence[RemovableItem]
) -> tuple[list[str], dict[str, DtctlError]]:
    """Remove items of a plan; return those that are left, and the errors of the nodes by their names.

    The records of runs that stay here have a note of the nodes that have no files of them any more.
    """
    left = remove_here(base_dir, [item for item in items if item.node == HERE])
    errors: dict[str, DtctlError] = {}
    if stores is None:
        return left, errors
    far = [item for item in items if item.node != HERE]
    for node, answer in stores.remove(far).items():
        if isinstance(answer, DtctlError):
            errors[node] = answer
            continue
        left += [f"{node}: {name}" for name in answer]
        gone = [item.name for item in far if item.node == node and item.kind == "run" and item.name not in answer]
        _note_removed_files(base_dir, node, gone)
    return left, errors


def _note_removed_files(base_dir: Path, node: str, runs: Collection[str]) -> None:
    """Note in the records of runs that a node has no files of them any more, so that other commands can report it."""
    for record in list_run_records(base_dir):
        if record.run not in runs:
            continue
        info = record.info()
        with contextlib.suppress(LaunchError):  # The note is not needed: the node can be asked.
            RunWriter(record.folder).write_info(replace(info, removed={**info.removed, node: time.time()}))


def list_removable_items(base_dir: Path) -> list[RemovableItem]:
    """Return runs of this folder that are over, wheels that were downloaded for nodes, and sandboxes that are down."""
    runs = [record for record in list_run_records(base_dir) if _is_over(record)]
    wheels = [item for _, item in _find_downloaded_wheels(base_dir)]
    return [*map(_build_run_item, runs), *wheels, *_find_unused_sandboxes()]


def _find_downloaded_wheels(base_dir: Path) -> Iterator[tuple[Path, RemovableItem]]:
    """Yield the folder and the item of each wheel; the age of an item is the time since a launch last used it."""
    check_no_link(base_dir, CACHE_DIR)
    top = base_dir / names.STATE_DIR / CACHE_DIR / WHEELS_DIR
    if not top.is_dir() or top.is_symlink():
        return
    for folder in sorted(top.iterdir()):
        if folder.is_symlink() or not re.fullmatch("[0-9a-f]{64}", folder.name):
            continue
        item = _build_folder_item("wheel", folder, ())
        used = [path.stat().st_mtime for path in folder.glob("*.whl")]
        age_s = max(0.0, time.time() - max(used)) if used else item.age_s
        file_name = next((path.name for path in folder.glob("*.whl")), "")
        yield folder, replace(item, name=f"{folder.name[:8]}/{file_name}", age_s=age_s)


def _build_run_item(record: RunRecord) -> RemovableItem:
    """Return the item of a run; for a run of Slurm it includes the files that the job has left in its own folder."""
    item = _build_folder_item("run", record.folder, ("outputs",))
    folder = _job_folder(record)
    if folder is None:
        return item
    job = _build_folder_item("run", folder, ("snapshots", "outputs"))
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


def find_runs_elsewhere(base_dir: Path, asked: Collection[str]) -> frozenset[str]:
    """Return the runs with files on nodes that were not queried: the record here is the only trace of those files.

    Args:
        base_dir: folder that the runs were launched from.
        asked: nodes that have listed their files.
    """
    plans = {record.run: record.plan() for record in list_run_records(base_dir) if not record.info().slurm}
    return frozenset(
        run
        for run, plan in plans.items()
        if plan.get("transport") in ("local", "ssh") and not {node["name"] for node in plan["nodes"]} <= set(asked)
    )


def find_needed_runs(base_dir: Path, going: Iterable[str]) -> frozenset[str]:
    """Return the runs that a remaining run continues: the remaining run uses their snapshots and outputs.

    Args:
        base_dir: folder that the runs were launched from.
        going: runs that are to be removed.
    """
    earlier = {record.run: record.info().resumed_run for record in list_run_records(base_dir)}
    needed, staying = set[str](), earlier.keys() - set(going)
    while staying:
        staying = {earlier[run] for run in staying if earlier.get(run)} - needed
        needed |= staying
    return frozenset(needed)


def _is_over(record: RunRecord) -> bool:
    state = read_run_state(record)
    return state.over and state.status != "unattended" and not record.has_launcher()


def _find_unused_sandboxes() -> Iterator[RemovableItem]:
    from dtctl.sandbox import control, layout

    top = layout.build_state_dir("x").parent
    for folder in sorted(top.iterdir()) if top.is_dir() else ():
        is_ours = (folder / folders.MARKER).is_file() and not folder.is_symlink()
        if is_ours and control.find_running_sandbox(folder.name) is None:
            yield _build_folder_item("sandbox", folder, ())


def _build_folder_item(kind: str, folder: Path, valued: Iterable[str]) -> RemovableItem:
    size, newest = 0, folder.lstat().st_mtime
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                info = os.lstat(os.path.join(path, name))  # noqa: PTH118 - a Path for each of many files is slow
            except OSError:
                continue
            size, newest = size + info.st_blocks * 512, max(newest, info.st_mtime)
    has = tuple(name for name in valued if (folder / name).is_dir())
    return RemovableItem(
        node=HERE, kind=kind, name=folder.name, bytes=size, age_s=max(0.0, time.time() - newest), has=has
    )


def remove_here(base_dir: Path, items: Iterable[RemovableItem]) -> list[str]:
    """Remove items of this machine; return the paths that could not be removed, or the errors."""
    from dtctl.sandbox import control

    left = []
    for item in items:
        if item.kind == "run":
            left += _remove_run(RunRecord(base_dir / names.STATE_DIR / names.RUNS_DIR / item.name))
        elif item.kind == "wheel":
            folders_of_wheel = [
                folder for folder, found in _find_downloaded_wheels(base_dir) if found.name == item.name
            ]
            for folder in folders_of_wheel:
                left += folders.remove_folder_tree(str(folder))
        else:
            try:
                control.remove_sandbox(item.name)
            except SandboxError as exc:
                left.append(str(exc))
    return left


def _remove_run(record: RunRecord) -> list[str]:
    """Remove a run that is over, with the files of its job of Slurm; return the paths that are left."""
    if not _is_over(record):
        return [str(record.folder)]
    # The job's folder is removed before the record, which is the only trace of that folder.
    job = _job_folder(record)
    left = folders.remove_folder_tree(str(job)) if job else []
    return left or folders.remove_folder_tree(str(record.folder))


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

    def items(self) -> tuple[list[RemovableItem], dict[str, DtctlError]]:
        """Return the items that no process uses, and node -> error for the nodes that could not be queried."""
        answers = fan_out(self._nodes, lambda node: self._send_store_request(node, ListStored(), StoredItems))
        items = [
            RemovableItem(
                node=node, kind=each.kind, name=each.name, bytes=each.bytes, age_s=each.age_s, has=tuple(each.has)
            )
            for node, answer in answers.items()
            if isinstance(answer, StoredItems)
            for each in answer.items
            if not each.is_used
        ]
        return items, {node: answer for node, answer in answers.items() if isinstance(answer, DtctlError)}

    def remove(self, items: Iterable[RemovableItem]) -> Mapping[str, list[str] | DtctlError]:
        """Remove items; return node -> items that are left there, or the error."""
        chosen: dict[str, list[tuple[str, str]]] = {}
        for item in items:
            chosen.setdefault(item.node, []).append((item.kind, item.name))

        def remove_on(name: str) -> list[str]:
            return self._send_store_request(self._nodes[name], RemoveStored(items=chosen[name]), ItemsRemoved).left

        return fan_out({name: name for name in chosen}, remove_on)

    def _send_store_request(self, node: NodeSpec, request: Message, kind: type[Kind]) -> Kind:
        target = self._targets[node.name]
        with open_node(
            self._transport, target, request, python=node.python, workdir=node.workdir, silence_s=SILENCE_S
        ) as link:
            return link.expect(kind)
