"""Verifying snapshots, without torch: nothing is used before its digest was found right; a bad one is passed over."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import assembly
from dtctl.runtime.snapshot.format import headers, layout
from dtctl.runtime.snapshot.storage.place import Place

Contents = MutableMapping[str, memoryview]
"""File name -> its bytes."""
READERS: Final = 4
RETRIES: Final = 5
"""Attempts to list a folder while another process removes snapshots from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotVerdict:
    """Result of verifying a snapshot."""

    path: Place
    step: int
    status: Literal["ok", "corrupt", "incomplete"]
    bad: tuple[str, ...] = ()
    """Damage, one phrase per file."""
    manifest: layout.Manifest | None = None
    """None unless the status is ok."""


def record(path: Place) -> SnapshotVerdict:
    """Return whether manifest and commit record of a snapshot are right; its files are not checked.

    Raises:
        SnapshotError: as `verify`.
    """
    step = layout.step_of(path)
    if step is None or not path.is_dir():
        raise SnapshotError(
            "there is no snapshot here", where=str(path), hint="a snapshot is a folder like step-00000100"
        )
    missing = tuple(f"{name} is missing" for name in (layout.COMMIT, layout.MANIFEST) if not (path / name).is_file())
    if missing:
        return SnapshotVerdict(path=path, step=step, status="incomplete", bad=missing)
    try:
        for name in (layout.COMMIT, layout.MANIFEST):
            if layout.size_bytes(path / name) > layout.RECORD_BYTES:
                bad = f"{name} is larger than {layout.RECORD_BYTES >> 20} MiB"
                return SnapshotVerdict(path=path, step=step, status="corrupt", bad=(bad,))
        commit, text = (path / layout.COMMIT).read_bytes(), (path / layout.MANIFEST).read_bytes()
    except OSError as exc:
        return SnapshotVerdict(
            path=path, step=step, status="corrupt", bad=(f"{Path(exc.filename).name}: {exc.strerror}",)
        )
    name = commit.split(b" ")[0].decode(errors="replace")
    if name not in layout.HASHES or commit != layout.commit_record(text, name):
        bad = f"{layout.MANIFEST} and {layout.COMMIT} do not agree"
        return SnapshotVerdict(path=path, step=step, status="corrupt", bad=(bad,))
    try:
        manifest = layout.Manifest.from_bytes(text, where=str(path))
    except headers.Malformed as exc:
        return SnapshotVerdict(path=path, step=step, status="corrupt", bad=(str(exc),))
    if manifest.step != step:
        bad = f"the folder is named after step {step} and holds step {manifest.step}"
        return SnapshotVerdict(path=path, step=step, status="corrupt", bad=(bad,))
    return SnapshotVerdict(path=path, step=step, status="ok", manifest=manifest)


def verify(path: Place, contents: Contents | None = None) -> SnapshotVerdict:
    """Read every byte of a snapshot, compare digests, and see whether the files fit together.

    Args:
        path: folder of the snapshot.
        contents: takes the bytes that were read, of files whose digest is right.

    Raises:
        SnapshotError: it is of a later format, or its hash needs a package that is missing. Neither means damage, so
            older snapshots are no way out.
    """
    found = record(path)
    manifest, step = found.manifest, found.step
    if manifest is None:
        return found
    present = layout.entries(path)
    absent = [f"{name} is missing" for name in manifest.files if present.get(name) is None]
    if absent:
        return SnapshotVerdict(path=path, step=step, status="incomplete", bad=tuple(absent))
    own: Contents = {} if contents is None else contents
    wrong = list(faults(path, manifest, list(manifest.files), contents).values())
    if not wrong:
        try:
            heads = {name: _head(path / name, own.get(name)) for name in manifest.files}
            assembly.assembled((manifest.part_of(name), name, header) for name, header in heads.items())
        except assembly.Misfit as exc:
            wrong = [exc.message]
        except OSError as exc:
            wrong = [str(exc)]
    if wrong:
        return SnapshotVerdict(path=path, step=step, status="corrupt", bad=tuple(wrong))
    return found


def _head(path: Place, content: memoryview | None) -> headers.Header:
    if content is None:
        with path.open("rb") as file:
            return headers.read(file, layout.size_bytes(path))
    header = headers.parse(content)
    headers.check_data(header, len(content))
    return header


def faults(
    path: Place, manifest: layout.Manifest, names: Sequence[str], contents: Contents | None = None
) -> dict[str, str]:
    """Read some files of a snapshot: name -> what is wrong with it, of those that are.

    Args:
        path: folder of the snapshot.
        manifest: its digests.
        names: of files.
        contents: takes the bytes of those that are right.
    """
    # Reading and hashing release the interpreter's lock, so files are read in parallel.
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        phrases = pool.map(lambda name: _fault(path / name, manifest.files[name], manifest.hash, contents), names)
        return {name: phrase for name, phrase in zip(names, phrases, strict=True) if phrase}


def _fault(path: Place, entry: layout.SnapshotFile, name: str, contents: Contents | None) -> str | None:
    try:
        size_bytes = layout.size_bytes(path)
        if size_bytes != entry.size_bytes:
            return f"{path.name} has {size_bytes} bytes and should have {entry.size_bytes}"
        buffer: memoryview | None
        if name == layout.HASH_IN_MEMORY and isinstance(path, Path):
            buffer = layout.map_file(path)
            digest = layout.digest_of(buffer, name)
        else:
            buffer = None if contents is None else layout.memory(size_bytes)
            digest = layout.file_digest(path, name, buffer)
        if digest != entry.digest:
            return f"{path.name} does not have the digest that was recorded"
        _head(path, buffer)
    except headers.Malformed as exc:
        return f"{path.name} is no part of a snapshot: {exc}"
    except OSError as exc:
        return f"{path.name} cannot be read: {exc.strerror}"
    if contents is not None and buffer is not None:
        contents[path.name] = buffer
    return None


def newest_good(
    folder: Place, contents: Contents | None = None
) -> tuple[SnapshotVerdict | None, list[SnapshotVerdict]]:
    """Return the newest snapshot that verifies, and the newer ones that did not.

    Args:
        folder: of all snapshots.
        contents: takes the bytes of the snapshot that verifies, so that nothing is read twice.

    Raises:
        SnapshotError: as `verify`.
    """
    for left in reversed(range(RETRIES)):
        rejected: list[SnapshotVerdict] = []
        vanished = False
        for _, path in layout.listing(folder):
            try:
                verdict = verify(path, contents)
            except SnapshotError:
                if path.exists():
                    raise
                verdict = None
            if verdict is not None and verdict.status == "ok":
                return verdict, rejected
            if contents is not None:
                contents.clear()
            # Removed while it was read, since there is a newer one: that is no damage.
            if verdict is None or not path.exists():
                vanished = True
            else:
                rejected.append(verdict)
        if not (vanished and left):
            break
    return None, rejected


def opened(contents: Contents, manifest: layout.Manifest) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """Parts as trees of `assembly.TreeEntry`, and the data of each file.

    Raises:
        SnapshotError: a tensor is not all there.
    """
    headed = {name: headers.parse(contents[name]) for name in manifest.files}
    trees = assembly.assembled((manifest.part_of(name), name, header) for name, header in headed.items())
    return trees, {name: contents[name][header.size_bytes :] for name, header in headed.items()}
