"""A node's end of `dtctl clean`: a list of the runs and trees in its workdir, and the removal of chosen ones.

A run is removed by its name below `runs`, if the folder has a record of dtctl and its supervisor has ended; a tree is
removed in the same way as by a push (receive.py), if no run uses it. Stdlib only, Python 3.8.
"""

from __future__ import annotations

import fcntl
import os
import time

from dtctl import folders
from dtctl.supervisor import environments, processes, receive
from dtctl.supervisor.messages.base import Message, index_message_types
from dtctl.supervisor.messages.stored import STORED, ItemsRemoved, ListStored, RemoveStored, StoredItem, StoredItems
from dtctl.supervisor.requests import NodeRequests

RECORDS = (processes.RECORD, "work.json", "shared.json")
"""Names of files, one of which is in every folder of a run."""
KINDS_OF_TREES = {"tree": "code", "data": "data"}
"""Kinds of pushed trees in the list, each with its store."""
OF_VALUE = ("snapshots", "work")


class StoredRequests(NodeRequests):
    """Answers to `dtctl clean`."""

    KINDS = index_message_types(ListStored, RemoveStored)
    IDLE_LIMIT_S = 3600.0
    """Seconds in which the user reads the list and agrees."""

    def answer(self, request: Message) -> None:
        """List the stored items, or remove some of them."""
        if isinstance(request, ListStored):
            self.link.send_json(StoredItems(items=list_stored_items(self.workdir)))
        elif isinstance(request, RemoveStored):
            self.link.send_json(ItemsRemoved(left=remove_stored_items(self.workdir, request.items)))


def list_stored_items(workdir: str) -> list[StoredItem]:
    """Return the runs and trees, the oldest first."""
    items = []
    ordered = environments.list_ordered_names(workdir)
    runs = os.path.join(workdir, "runs")
    for name in os.listdir(runs) if os.path.isdir(runs) else ():
        path = os.path.join(runs, name)
        if folders.is_name(name) and _is_run(path):
            has = [each for each in OF_VALUE if os.path.isdir(os.path.join(path, each))]
            if os.path.isdir(folders.choose_memory_folder(path)):
                has.append("memory")  # An ended run has such a folder only if its supervisor was killed.
            items.append(_build_stored_item("run", name, path, is_used=_is_running(path), has=has))
    for kind, store in KINDS_OF_TREES.items():
        folder = os.path.join(workdir, store)
        if os.path.isfile(os.path.join(folder, folders.MARKER)):
            for name in receive._list_sealed_trees(folder):
                path = os.path.join(folder, name)
                items.append(
                    _build_stored_item(
                        kind, name, path, is_used=name in ordered or not _is_tree_unused(path),
                        at=os.stat(path + ".json").st_mtime,
                    )
                )  # fmt: skip
    items += [
        _build_stored_item(
            "env",
            name,
            path,
            is_used=name in ordered or environments.is_used(path),
            at=environments.read_last_use(path),
        )
        for name, path in environments.list_environments(workdir)
    ]
    return sorted(items, key=lambda item: -item.age_s)[:STORED]


def _build_stored_item(
    kind: str, name: str, path: str, *, is_used: bool, has: list[str] | None = None, at: float = 0
) -> StoredItem:
    size, newest = _measure_folder(path)
    if has and "memory" in has:
        size += _measure_folder(folders.choose_memory_folder(path))[0]
    age_s = max(0.0, time.time() - (at or newest))
    return StoredItem(kind=kind, name=name, bytes=size, age_s=age_s, is_used=is_used, has=has or [])


def _measure_folder(path: str) -> tuple[int, float]:
    """Return the bytes on the disk and the time of the last write of a folder with everything below it."""
    info = os.lstat(path)
    size, newest = info.st_blocks * 512, info.st_mtime
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    inner, time_of = _measure_folder(entry.path)
                else:
                    info = entry.stat(follow_symlinks=False)
                    inner, time_of = info.st_blocks * 512, info.st_mtime
            except OSError:
                continue  # The file was removed meanwhile, or is not readable.
            size, newest = size + inner, max(newest, time_of)
    return size, newest


def _is_run(path: str) -> bool:
    return not os.path.islink(path) and any(os.path.isfile(os.path.join(path, name)) for name in RECORDS)


def _is_running(path: str) -> bool:
    return processes.find_living_supervisor(path) is not None


def _is_tree_unused(path: str) -> bool:
    """Return whether no process uses a tree."""
    with receive._FileLock(path + ".json", fcntl.LOCK_EX | fcntl.LOCK_NB) as seal:
        return bool(seal.is_held)


def remove_stored_items(workdir: str, items: list[tuple[str, str]]) -> list[str]:
    """Remove the items that may still be removed; return the names of those that are wholly or partly left."""
    left = []
    ordered = environments.list_ordered_names(workdir)
    for kind, name in items:
        store = KINDS_OF_TREES.get(kind)
        if kind != "run" and name in ordered:
            is_gone = False
        elif kind == "env":
            is_gone = environments.remove_environment(workdir, name)
        else:
            is_gone = remove_pushed_tree(workdir, name, store) if store else remove_run(workdir, name)
        if not is_gone:
            left.append(name)
    return left


def remove_run(workdir: str, name: str) -> bool:
    """Remove a run's folder; return whether it is gone."""
    path = os.path.join(workdir, "runs", name)
    if not folders.is_name(name) or not _is_run(path) or _is_running(path):
        return False
    folders.remove_folder_tree(folders.choose_memory_folder(path))
    return not folders.remove_folder_tree(path)


def remove_pushed_tree(workdir: str, name: str, kind: str = "code") -> bool:
    """Remove a pushed tree, except files that were changed since; return whether it is gone."""
    store = os.path.join(workdir, kind)
    path = os.path.join(store, name)
    if not receive._is_tree(name) or not os.path.isfile(os.path.join(store, folders.MARKER)):
        return False
    with receive._FileLock(os.path.join(store, ".lock"), fcntl.LOCK_EX, os.O_CREAT):
        if not os.path.isfile(path + ".json"):
            return False
        with receive._FileLock(path + ".json", fcntl.LOCK_EX | fcntl.LOCK_NB) as seal:
            if seal.is_held:
                receive._discard_tree(path)
    return not os.path.lexists(path)
