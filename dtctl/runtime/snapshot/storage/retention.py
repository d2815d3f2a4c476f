"""Retention of snapshots: the newest, one every so often, and the best."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dtctl import folders
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.storage.place import Place, Remote

FACT: Final = "retention"
"""Key in a manifest of the rule that its writer followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """Rule for the snapshots to keep; a snapshot that one of its lines names stays."""

    keep: int = 1
    """Number of the newest snapshots that are kept."""
    every_s: float | None = None
    """Seconds between older snapshots that are kept, at least, counted from the oldest."""
    best: Collection[int] = ()
    """Steps."""

    def document(self) -> dict[str, Any]:
        """Return the rule as JSON."""
        return {"keep": self.keep, "every_s": self.every_s, "best": sorted(self.best)}

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> RetentionRule:
        """Return the rule that a manifest's facts have; the newest alone if they have none that makes sense."""
        recorded = facts.get(FACT)
        recorded = recorded if isinstance(recorded, dict) else {}
        keep, every_s, best = recorded.get("keep"), recorded.get("every_s"), recorded.get("best")
        return cls(
            keep=keep if type(keep) is int and keep > 0 else 1,
            every_s=float(every_s) if isinstance(every_s, int | float) and every_s > 0 else None,
            best=[step for step in best if type(step) is int] if isinstance(best, list) else (),
        )

    def stays(self, good: Sequence[tuple[int, float]]) -> set[int]:
        """Return the steps of snapshots that stay.

        Args:
            good: step, and when it was made, in seconds; of snapshots that count.
        """
        steps = {step for step, _ in sorted(good)[-max(1, self.keep) :]}
        # From the oldest on: what is kept once is kept again, whatever comes later.
        last_s = None
        for step, made_s in sorted(good) if self.every_s is not None else ():
            if last_s is None or made_s - last_s >= (self.every_s or 0.0):
                steps.add(step)
                last_s = made_s
        return steps | {step for step, _ in good if step in self.best}


def made_s(path: Place) -> float:
    """Return when a snapshot was made, in seconds since the epoch."""
    return (path / layout.COMMIT).modified_s() if isinstance(path, Remote) else path.stat().st_mtime


def prune(folder: Place, *, newest: Place, rule: RetentionRule) -> list[Place]:
    """Remove snapshots that are no longer kept, right after `newest` was committed.

    That one the disk has confirmed, and it always stays; so the only good snapshot is never removed. Those that lack a
    commit record do not count, and go. So do those of later steps: they are of a future that this run did not resume
    from, because they were found bad.

    Returns:
        What was removed.
    """
    listed, last = layout.listing(folder), layout.step_of(newest) or 0
    # Of its step, that one alone stays: another was found bad, or is made again.
    count = [(step, path) for step, path in listed if step < last or path == newest]
    whole = [(step, path) for step, path in count if (path / layout.COMMIT).is_file()]
    stays = rule.stays([(step, made_s(path) if rule.every_s else 0.0) for step, path in whole]) | {last}
    kept_paths = {path for step, path in whole if step in stays}
    gone = [path for _, path in listed if path not in kept_paths]
    gone += [path for path in folder.iterdir() if path.name.startswith(".") and path.name.endswith(layout.DRAFT_SUFFIX)]
    remove(gone)
    return gone


def remove(paths: Sequence[Place]) -> list[Place]:
    """Remove snapshots and drafts, but nothing that a link among them leads to, or that is mounted in one.

    Returns:
        Those that are still there.
    """
    left: list[Place] = []
    for path in paths:
        if isinstance(path, Remote):
            (path / layout.COMMIT).unlink(missing_ok=True)
            path.remove()
        elif path.is_symlink():  # what it leads to is an archive's, or another run's
            left.append(path)
        else:
            if path.is_dir():
                # Without its commit record it is no snapshot any more, should the removal be cut short.
                with contextlib.suppress(OSError):
                    (path / layout.COMMIT).unlink(missing_ok=True)
            if folders.remove_tree(str(path)):
                left.append(path)
    return left
