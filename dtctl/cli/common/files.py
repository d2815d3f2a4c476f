"""Files for results whose paths the user has given."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from dtctl import folders
from dtctl.errors import UsageError


def write_named(path: Path, text: str, *, option: str, private: bool = False) -> None:
    """Write a result to a path from the user completely or not at all, without changing the type of the path.

    A file, or the target of a link, is replaced in one step; a device or a pipe receives the text.

    Args:
        path: path in the user's words.
        text: content of the file.
        option: option of the command line with the path, for errors.
        private: whether only this user may read the file, since it has a job's environment.

    Raises:
        UsageError: the file cannot be written; an existing file is unchanged.
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
        folders.sync_folder_entries(str(target.parent))
    except OSError as exc:
        if partial is not None:
            with contextlib.suppress(OSError):
                partial.unlink()
        raise UsageError(f"{path} cannot be written: {exc.strerror}", where=option) from exc
