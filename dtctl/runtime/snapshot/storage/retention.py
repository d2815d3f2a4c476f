"""Retention of snapshots: the newest ones, some older ones at an interval, and the best ones."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dtctl import folders
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.storage.place import Place, RemotePath

FACT: Final = "retention"
"""Key in a manifest of the rule that its writer followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionRule:
    """Rule for the snapshots to keep: a snapshot that any of its fields names is kept."""

    keep: int = 1
    """Number of the newest snapshots that are kept."""
    every_s: float | None = None
    """Minimum interval in seconds between older snapshots that are kept, counted from the oldest."""
    best: Collection[int] = ()
    """Steps with the best evaluations, whose snapshots are kept."""

    def document(self) -> dict[str, Any]:
        """Return the rule as JSON."""
        return {"keep": self.keep, "every_s": self.every_s, "best": sorted(self.best)}

    @classmethod
    def from_manifest_facts(cls, facts: Mapping[str, Any]) -> RetentionRule:
        """Return the rule in a manifest's facts; the default rule if they have none that is valid."""
        recorded = facts.get(FACT)
        recorded = recorded if isinstance(recorded, dict) else {}
        keep, every_s, best = recorded.get("keep"), recorded.get("every_s"), recorded.get("best")
        return cls(
            keep=keep if type(keep) is int and keep > 0 else 1,
            every_s=float(every_s) if isinstance(every_s, int | float) and every_s > 0 else None,
            best=[step for step in best if type(step) is int] if isinstance(best, list) else (),
        )

    def choose_retained_steps(self, good: Sequence[tuple[int, float]]) -> set[int]:
        """Return the steps of the snapshots to keep.

        Args:
            good: step and time in seconds of each snapshot that counts.
        """
        steps = {step for step, _ in sorted(good)[-max(1, self.keep) :]}
        # Counted from the oldest, so that a snapshot that was kept once is kept when newer ones are added.
        last_s = None
        for step, made_s in sorted(good) if self.every_s is not None else ():
            if last_s is None or made_s - last_s >= (self.every_s or 0.0):
                steps.add(step)
                last_s = made_s
        return steps | {step for step, _ in good if step in self.best}


def find_creation_time(path: Place) -> float:
    """Return the time when a snapshot was made, in seconds since the epoch."""
    return (path / layout.COMMIT).modified_s() if isinstance(path, RemotePath) else path.stat().st_mtime


def remove_expired_snapshots(folder: Place, *, newest: Place, rule: RetentionRule) -> list[Place]:
    """Remove snapshots that the rule no longer keeps, right after `newest` was committed.

    `newest` is durable and is always kept, so the only good snapshot is never removed. Snapshots without a commit
    record are removed. Snapshots of later steps are removed as well: this run did not resume from them because they
    were damaged.

    Returns:
        Paths that were removed.
    """
    listed, last = layout.list_step_folders(folder), layout.parse_snapshot_step(newest) or 0
    steps: dict[Place, int] = {}
    for step, path in listed:
        # Of the same step only `newest` stays: any other one is damaged, or is replaced by it.
        is_candidate = step < last or path == newest
        if is_candidate and (path / layout.COMMIT).is_file():
            steps[path] = step
    made = [(step, find_creation_time(path) if rule.every_s else 0.0) for path, step in steps.items()]
    kept_steps = rule.choose_retained_steps(made) | {last}
    gone = [path for _, path in listed if steps.get(path) not in kept_steps]
    gone += [path for path in folder.iterdir() if _is_draft(path)]
    remove_snapshot_folders(gone)
    return gone


def _is_draft(path: Place) -> bool:
    """Return whether a path is a snapshot that was not written completely."""
    return path.name.startswith(".") and path.name.endswith(layout.DRAFT_SUFFIX)


def remove_snapshot_folders(paths: Sequence[Place]) -> list[Place]:
    """Remove snapshots and drafts, but follow no links and leave what is mounted below them.

    Returns:
        Paths that still exist.
    """
    left: list[Place] = []
    for path in paths:
        if isinstance(path, RemotePath):
            (path / layout.COMMIT).unlink(missing_ok=True)
            path.remove()
        elif path.is_symlink():  # its target is an archive, or belongs to another run
            left.append(path)
        else:
            if path.is_dir():
                # The commit record goes first, so that an interrupted removal leaves no valid snapshot.
                with contextlib.suppress(OSError):
                    (path / layout.COMMIT).unlink(missing_ok=True)
            if folders.remove_folder_tree(str(path)):
                left.append(path)
    return left
