"""Damage as disks and copies make it; also for benchmarks/damage.py."""

from __future__ import annotations

import random
from pathlib import Path


def hurt(kind: str, folder: Path, source: random.Random) -> str:
    """Damage one file below a folder.

    Args:
        kind: `flip` one bit, `truncate` or `delete`.
        folder: with the files.
        source: of chance. Each byte is as likely as any other, or each file, half of the times each; each file for
            `delete`.

    Returns:
        What was done.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    (path,) = source.choices(files, sizes if source.random() < 0.5 and kind != "delete" else None)
    if kind == "delete":
        path.unlink()
        return f"{path.name} deleted"
    whole = bytearray(path.read_bytes())
    place = source.randrange(len(whole))
    if kind == "truncate":
        del whole[place:]
    else:
        whole[place] ^= 1 << source.randrange(8)
    path.write_bytes(whole)
    return f"{kind} at {place} of {path.name}"
