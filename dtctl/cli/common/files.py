"""Files that a user has named for a result."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from dtctl import folders
from dtctl.errors import UsageError


def write_named(path: Path, text: str, *, option: str, private: bool = False) -> None:
    """Write a result to a path from the user: whole or not at all, without changing the type of the path.

    A file is replaced in one step; so is the target of a link; a device or a pipe is written to.

    Args:
        path: as it was given.
        text: what to write.
        option: that named the path, for errors.
        private: whether it holds a job's environment, and so is for this user alone.

    Raises:
        UsageError: it cannot be written; what was there is untouched.
    """
    target = Path(os.path.realpath(path))
    partial = None
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        partial = Path(name)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if target.exists() and not private:
            partial.chmod(target.stat().st_mode & 0o777)
        partial.replace(target)
        folders.sync_folder(str(target.parent))
    except OSError as exc:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink()
        raise UsageError(f"{path} cannot be written: {exc.strerror}", where=option) from exc
