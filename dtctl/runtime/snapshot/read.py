"""Reading snapshots: nothing is believed before its digest was found right; a bad one gives way to the one before."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import layout

Contents = MutableMapping[str, memoryview]
"""File name -> its bytes."""
READERS: Final = 4


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


def verify(path: Path, contents: Contents | None = None) -> Verdict:
    """Read every byte of a snapshot and compare digests.

    Args:
        path: folder of the snapshot.
        contents: takes the bytes that were read, of files whose digest is right.

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
    # Reading and hashing let go of the interpreter's lock, so files are read side by side.
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        phrases = list(
            pool.map(
                lambda item: _fault(path / item[0], item[1], manifest.hash, contents),
                manifest.files.items(),
            )
        )
    wrong = [phrase for phrase in phrases if phrase]
    if wrong:
        return Verdict(path=path, step=step, status="corrupt", bad=tuple(wrong))
    return Verdict(path=path, step=step, status="ok", manifest=manifest)


def _fault(path: Path, entry: layout.FileEntry, name: str, contents: Contents | None) -> str | None:
    try:
        size_bytes = path.stat().st_size
        if size_bytes != entry.size_bytes:
            return f"{path.name} has {size_bytes} bytes and should have {entry.size_bytes}"
        buffer = None if contents is None else layout.memory(size_bytes)
        if layout.file_digest(path, name, buffer) != entry.digest:
            return f"{path.name} does not have the digest that was recorded"
    except OSError as exc:
        return f"{path.name} cannot be read: {exc.strerror}"
    if contents is not None and buffer is not None:
        contents[path.name] = buffer
    return None


def newest_good(folder: Path, contents: Contents | None = None) -> tuple[Verdict | None, list[Verdict]]:
    """The newest snapshot that verifies, and the newer ones that did not.

    Args:
        folder: of all snapshots.
        contents: takes the bytes of the snapshot that verifies, so that nothing is read twice.

    Raises:
        SnapshotError: as `verify`.
    """
    rejected: list[Verdict] = []
    for _, path in layout.listing(folder):
        verdict = verify(path, contents)
        if verdict.status == "ok":
            return verdict, rejected
        if contents is not None:
            contents.clear()
        rejected.append(verdict)
    return None, rejected


def load(verdict: Verdict) -> dict[str, Any]:
    """The parts of a snapshot that verified, on the CPU; digests are compared once more, with the bytes that are used.

    Raises:
        SnapshotError: it did not verify, or changed since.
    """
    contents: dict[str, memoryview] = {}
    again = verify(verdict.path, contents) if verdict.status == "ok" else verdict
    if again.manifest is None:
        raise SnapshotError(f"the snapshot is {again.status}: {'; '.join(again.bad)}", where=str(verdict.path))
    return parts(contents)


def parts(contents: Contents) -> dict[str, Any]:
    """The parts in the contents of a snapshot's files; tensors are views of them."""
    # Who verifies snapshots need not have torch.
    import torch

    from dtctl.runtime.snapshot import packing

    return {
        name.removesuffix(layout.PART_SUFFIX): packing.unpack(torch.frombuffer(file, dtype=torch.uint8))
        for name, file in contents.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The newest good snapshot of a folder."""

    step: int
    facts: Mapping[str, Any]
    """As they were given to `save`."""
    parts: Mapping[str, Any]
    """As they were given to `save`, on the CPU; tuples are lists."""
    rejected: tuple[str, ...]
    """Newer ones that were passed over, each with the reason."""


def newest(folder: Path) -> Loaded | None:
    """The newest snapshot that verifies, loaded; None if there is none.

    Raises:
        SnapshotError: as `verify`.
    """
    contents: dict[str, memoryview] = {}
    found, rejected = newest_good(folder, contents)
    if found is None or found.manifest is None:
        return None
    reasons = tuple(f"{bad.path.name} is {bad.status}: {'; '.join(bad.bad)}" for bad in rejected)
    return Loaded(step=found.step, facts=found.manifest.facts, parts=parts(contents), rejected=reasons)
