"""Which snapshots stay: the newest, one every so often, and the best."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dtctl.runtime.snapshot import layout
from dtctl.runtime.snapshot.place import Place, Remote

FACT: Final = "retention"
"""Under which a manifest has the rule that its writer followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is kept; everything that one of its lines names stays."""

    keep: int = 1
    """How many of the newest."""
    every_s: float | None = None
    """Of older ones, those that are at least so many seconds apart, counted from the oldest."""
    best: Collection[int] = ()
    """Steps."""

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"keep": self.keep, "every_s": self.every_s, "best": sorted(self.best)}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Rule:
        """The rule that a manifest's facts have; the newest alone if they have none."""
        return cls(**facts.get(FACT, {}))

    def stays(self, good: Sequence[tuple[int, float]]) -> set[int]:
        """The steps of snapshots that stay.

        Args:
            good: step, and when it was made, in seconds; of snapshots that count.
        """
        kept = {step for step, _ in sorted(good)[-self.keep :]}
        # From the oldest on: what is kept once is kept again, whatever comes later.
        last_s = None
        for step, made_s in sorted(good) if self.every_s is not None else ():
            if last_s is None or made_s - last_s >= (self.every_s or 0.0):
                kept.add(step)
                last_s = made_s
        return kept | {step for step, _ in good if step in self.best}


def made_s(path: Place) -> float:
    """When a snapshot was made, in seconds since the epoch."""
    return (path / layout.COMMIT).modified_s() if isinstance(path, Remote) else path.stat().st_mtime


def prune(folder: Place, *, newest: Place, rule: Rule) -> list[Place]:
    """Remove snapshots that are no longer kept, right after `newest` was committed.

    That one the disk has confirmed, and it always stays; so the only good snapshot is never removed. Those that lack a
    commit record do not count, and go. So do those of later steps: they are of a future that this run did not resume
    from, because they were found bad.

    Returns:
        What was removed.
    """
    found, last = layout.listing(folder), layout.step_of(newest) or 0
    # Of its step, that one alone stays: another was found bad, or is made again.
    count = [(step, path) for step, path in found if step < last or path == newest]
    whole = [(step, path) for step, path in count if (path / layout.COMMIT).is_file()]
    stays = rule.stays([(step, made_s(path) if rule.every_s else 0.0) for step, path in whole]) | {last}
    kept = {path for step, path in whole if step in stays}
    gone = [path for _, path in found if path not in kept]
    gone += [path for path in folder.iterdir() if path.name.startswith(".") and path.name.endswith(layout.DRAFT_SUFFIX)]
    remove(gone)
    return gone


def remove(paths: Sequence[Place]) -> None:
    """Remove snapshots and drafts."""
    for path in paths:
        if isinstance(path, Remote):
            (path / layout.COMMIT).unlink(missing_ok=True)
            path.remove()
            continue
        if not path.is_dir():  # a sign that a worker left which was killed before it took it away (stores.py)
            path.unlink(missing_ok=True)
            continue
        # Without its commit record it is no snapshot any more, should the removal be cut short.
        (path / layout.COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)  # nodes with one disk do the same at the same time
