"""Reading snapshots: nothing is believed before its digest was found right; a bad one gives way to the one before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError  # the error alone: what `weights_only` raises
from typing import Any, Literal

import torch

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What was found when a snapshot was looked at."""

    path: Path
    step: int
    status: Literal["ok", "corrupt", "incomplete"]
    bad: tuple[str, ...] = ()
    """What is wrong, one phrase per file."""
    manifest: layout.Manifest | None = None
    """None unless the status is ok."""


def verify(path: Path) -> Verdict:
    """Read every byte of a snapshot and compare digests.

    Raises:
        SnapshotError: it is of a later format, or its hash needs a package that is missing; both say nothing about the
            snapshot, so older ones are no way out.
    """
    step = layout.step_of(path)
    if step is None or not path.is_dir():
        raise SnapshotError(
            "there is no snapshot here", where=str(path), hint="a snapshot is a folder like step-00000100"
        )
    missing = tuple(f"{name} is missing" for name in (layout.COMMIT, layout.MANIFEST) if not (path / name).is_file())
    if missing:
        return Verdict(path=path, step=step, status="incomplete", bad=missing)
    try:
        record, text = (path / layout.COMMIT).read_bytes(), (path / layout.MANIFEST).read_bytes()
    except OSError as exc:
        return Verdict(path=path, step=step, status="corrupt", bad=(f"{Path(exc.filename).name}: {exc.strerror}",))
    name = record.split(b" ")[0].decode(errors="replace")
    if name not in ("blake3", "sha256") or record != layout.commit_record(text, name):
        bad = f"{layout.MANIFEST} and {layout.COMMIT} do not agree"
        return Verdict(path=path, step=step, status="corrupt", bad=(bad,))
    manifest = layout.Manifest.from_bytes(text, where=str(path))
    if manifest.step != step:
        bad = f"the folder is named after step {step} and holds step {manifest.step}"
        return Verdict(path=path, step=step, status="corrupt", bad=(bad,))
    absent = [f"{name} is missing" for name in manifest.files if not (path / name).is_file()]
    if absent:
        return Verdict(path=path, step=step, status="incomplete", bad=tuple(absent))
    wrong = [phrase for name, entry in manifest.files.items() if (phrase := _fault(path / name, entry, manifest.hash))]
    if wrong:
        return Verdict(path=path, step=step, status="corrupt", bad=tuple(wrong))
    return Verdict(path=path, step=step, status="ok", manifest=manifest)


def _fault(path: Path, entry: layout.FileEntry, name: str) -> str | None:
    try:
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            return f"{path.name} has {size_bytes} bytes and should have {entry.size_bytes}"
        if layout.file_digest(path, name) != entry.digest:
            return f"{path.name} does not have the digest that was recorded"
    except OSError as exc:
        return f"{path.name} cannot be read: {exc.strerror}"
    return None


def newest_good(folder: Path) -> tuple[Verdict | None, list[Verdict]]:
    """The newest snapshot that verifies, and the newer ones that did not.

    Raises:
        SnapshotError: as `verify`.
    """
    rejected: list[Verdict] = []
    for _, path in layout.listing(folder):
        verdict = verify(path)
        if verdict.status == "ok":
            return verdict, rejected
        rejected.append(verdict)
    return None, rejected


def load(verdict: Verdict) -> dict[str, Any]:
    """The parts of a snapshot that verified, on the CPU.

    Raises:
        SnapshotError: it did not verify, or changed since.
    """
    if verdict.manifest is None:
        raise SnapshotError(f"the snapshot is {verdict.status}: {'; '.join(verdict.bad)}", where=str(verdict.path))
    parts = {}
    for name in verdict.manifest.files:
        try:
            tree = torch.load(verdict.path / name, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, UnpicklingError) as exc:
            first_line = str(exc).partition("\n")[0]
            raise SnapshotError(f"{name} cannot be read: {first_line}", where=str(verdict.path)) from exc
        parts[name.removesuffix(layout.PART_SUFFIX)] = tree
    return parts
