"""Which snapshots stay."""

from __future__ import annotations

import shutil
from pathlib import Path

from dtctl.runtime.snapshot import layout


def prune(folder: Path, *, newest: int, keep: int, best: int | None = None) -> list[Path]:
    """Remove snapshots that are no longer kept, right after that of step `newest` was committed.

    Kept are `newest`, which the disk has confirmed, and the whole ones before it, up to `keep` in all; one that lacks
    files does not count. Those of later steps are of a future that this run did not resume from, because they were
    found bad. So the only good snapshot is never removed. That of step `best` is kept on top.

    Returns:
        What was removed.
    """
    good = 0
    gone = []
    for step, path in layout.listing(folder):
        if step == best and step <= newest:
            good += step == newest
        elif step <= newest and good < keep and (path / layout.COMMIT).is_file():
            good += 1
        else:
            gone.append(path)
    gone += [path for path in folder.iterdir() if path.name.startswith(".") and path.name.endswith(layout.DRAFT_SUFFIX)]
    for path in gone:
        # Without its commit record it is no snapshot any more, should the removal be cut short.
        (path / layout.COMMIT).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    return gone
