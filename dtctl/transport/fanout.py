"""Actions on many nodes at once: one answer each, in the order of the nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from dtctl.errors import DtctlError, NodeFailures

Item = TypeVar("Item")
Answer = TypeVar("Answer")

MAX_PARALLEL = 64


def fan_out(
    items: Mapping[str, Item], action: Callable[[Item], Answer], *, max_parallel: int = MAX_PARALLEL
) -> dict[str, Answer | DtctlError]:
    """Run `action` on every item in parallel; name -> its result, or the error it ended with.

    Waits for all, so that the fault of one node does not hide that of another. The threads are daemons: Ctrl-C leaves
    without waiting for a node that does not answer.

    Raises:
        Exception: a bug in `action`: an error that is not a `DtctlError`; the first in the order of the items.
    """
    results: dict[str, Answer | DtctlError] = {}
    bugs: dict[str, BaseException] = {}
    todo = list(items.items())
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                name, item = todo.pop(0)
            try:
                results[name] = action(item)
            except DtctlError as exc:
                results[name] = exc
            except BaseException as exc:  # noqa: BLE001 - kept for the thread that waits
                bugs[name] = exc

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(max_parallel, len(todo)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in items:
        if name in bugs:
            raise bugs[name]
    return {name: results[name] for name in items}


def raise_failures(failures: Mapping[str, DtctlError]) -> None:
    """Raise the one error there is, or all of them as one.

    Raises:
        DtctlError: the only one of `failures`.
        NodeFailures: there are several.
    """
    if len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        raise NodeFailures(failures)
