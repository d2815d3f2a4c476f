"""Verification of snapshots, without torch. Nothing is used before its digest is verified, and bad ones are skipped."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from dtctl.errors import SnapshotError
from dtctl.runtime.snapshot import assembly
from dtctl.runtime.snapshot.format import headers, layout
from dtctl.runtime.snapshot.storage.memory_files import map_file
from dtctl.runtime.snapshot.storage.place import Place

Contents = MutableMapping[str, memoryview]
"""File name -> bytes of the file."""
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
    """Manifest of the snapshot; None unless the status is ok."""


def verify_commit_record(path: Place) -> SnapshotVerdict:
    """Return whether manifest and commit record of a snapshot are valid, without a check of its files.

    Raises:
        SnapshotError: as in `verify_snapshot`.
    """
    step = layout.parse_snapshot_step(path)
    if step is None or not path.is_dir():
        raise SnapshotError(
            "there is no snapshot here", where=str(path), hint="a snapshot is a folder like step-00000100"
        )
    missing = tuple(f"{name} is missing" for name in (layout.COMMIT, layout.MANIFEST) if not (path / name).is_file())
    if missing:
        return SnapshotVerdict(path=path, step=step, status="incomplete", bad=missing)
    try:
        for name in (layout.COMMIT, layout.MANIFEST):
            if layout.read_file_size(path / name) > layout.RECORD_BYTES:
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
    except headers.MalformedFile as exc:
        return SnapshotVerdict(path=path, step=step, status="corrupt", bad=(str(exc),))
    if manifest.step != step:
        bad = f"the folder is named after step {step} and holds step {manifest.step}"
        return SnapshotVerdict(path=path, step=step, status="corrupt", bad=(bad,))
    return SnapshotVerdict(path=path, step=step, status="ok", manifest=manifest)


def verify_snapshot(path: Place, contents: Contents | None = None) -> SnapshotVerdict:
    """Read every byte of a snapshot, compare digests, and check that the files fit together.

    Args:
        path: folder of the snapshot.
        contents: receives the bytes of the files whose digest is right.

    Raises:
        SnapshotError: the snapshot has a later format, or its hash needs a package that is missing. Neither means
            damage, so older snapshots are not tried.
    """
    found = verify_commit_record(path)
    manifest, step = found.manifest, found.step
    if manifest is None:
        return found
    present = layout.list_folder_entries(path)
    absent = [f"{name} is missing" for name in manifest.files if present.get(name) is None]
    if absent:
        return SnapshotVerdict(path=path, step=step, status="incomplete", bad=tuple(absent))
    own: Contents = {} if contents is None else contents
    wrong = list(find_file_faults(path, manifest, list(manifest.files), contents).values())
    if not wrong:
        try:
            heads = {name: _read_checked_header(path / name, own.get(name)) for name in manifest.files}
            assembly.assemble_part_trees((manifest.part_of(name), name, header) for name, header in heads.items())
        except assembly.InconsistentSnapshot as exc:
            wrong = [exc.message]
        except OSError as exc:
            wrong = [str(exc)]
    if wrong:
        return SnapshotVerdict(path=path, step=step, status="corrupt", bad=tuple(wrong))
    return found


def _read_checked_header(path: Place, content: memoryview | None) -> headers.FileHeader:
    if content is None:
        with path.open("rb") as file:
            return headers.read_header(file, layout.read_file_size(path))
    header = headers.parse_header(content)
    headers.check_data(header, len(content))
    return header


def find_file_faults(
    path: Place, manifest: layout.Manifest, names: Sequence[str], contents: Contents | None = None
) -> dict[str, str]:
    """Read some files of a snapshot; return the damaged ones, each with its damage.

    Args:
        path: folder of the snapshot.
        manifest: manifest of the snapshot, with the digests.
        names: names of the files.
        contents: receives the bytes of the good files.
    """
    # Reading and hashing release the interpreter's lock, so files are read in parallel.
    with ThreadPoolExecutor(max_workers=READERS) as pool:
        phrases = pool.map(
            lambda name: _describe_file_fault(path / name, manifest.files[name], manifest.hash, contents), names
        )
        return {name: phrase for name, phrase in zip(names, phrases, strict=True) if phrase}


def _describe_file_fault(path: Place, entry: layout.SnapshotFile, name: str, contents: Contents | None) -> str | None:
    try:
        size_bytes = layout.read_file_size(path)
        if size_bytes != entry.size_bytes:
            return f"{path.name} has {size_bytes} bytes and should have {entry.size_bytes}"
        buffer: memoryview | None
        if name == layout.HASH_IN_MEMORY and isinstance(path, Path):
            buffer = map_file(path)
            digest = layout.compute_bytes_digest(buffer, name)
        else:
            buffer = None if contents is None else layout.allocate_zeroed_memory(size_bytes)
            digest = layout.compute_file_digest(path, name, buffer)
        if digest != entry.digest:
            return f"{path.name} does not have the digest that was recorded"
        _read_checked_header(path, buffer)
    except headers.MalformedFile as exc:
        return f"{path.name} is no part of a snapshot: {exc}"
    except OSError as exc:
        return f"{path.name} cannot be read: {exc.strerror}"
    if contents is not None and buffer is not None:
        contents[path.name] = buffer
    return None


def find_newest_good(
    folder: Place, contents: Contents | None = None
) -> tuple[SnapshotVerdict | None, list[SnapshotVerdict]]:
    """Return the newest snapshot that verifies, and the newer ones that did not.

    Args:
        folder: folder of all snapshots.
        contents: receives the bytes of the snapshot that verifies, so that nothing is read twice.

    Raises:
        SnapshotError: as in `verify_snapshot`.
    """
    for left in reversed(range(RETRIES)):
        rejected: list[SnapshotVerdict] = []
        vanished = False
        for _, path in layout.list_step_folders(folder):
            try:
                verdict = verify_snapshot(path, contents)
            except SnapshotError:
                if path.exists():
                    raise
                verdict = None
            if verdict is not None and verdict.status == "ok":
                return verdict, rejected
            if contents is not None:
                contents.clear()
            # The snapshot was removed during reading since there is a newer one, which does not count as damage.
            if verdict is None or not path.exists():
                vanished = True
            else:
                rejected.append(verdict)
        if not (vanished and left):
            break
    return None, rejected


def parse_snapshot_contents(
    contents: Contents, manifest: layout.Manifest
) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """Return the parts as trees of `assembly.TensorEntry`, and the data of each file.

    Raises:
        SnapshotError: a tensor is incomplete.
    """
    headed = {name: headers.parse_header(contents[name]) for name in manifest.files}
    trees = assembly.assemble_part_trees((manifest.part_of(name), name, header) for name, header in headed.items())
    return trees, {name: contents[name][header.size_bytes :] for name, header in headed.items()}
