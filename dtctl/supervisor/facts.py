"""Descriptions of the system's answers and errors for the control machine. Stdlib only, Python 3.8."""

from __future__ import annotations

import errno
import os


def server_address() -> str:
    """This node's own address on the way that the control machine came by; empty when not known."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else ""


def code_of(exc: OSError) -> str:
    """Return a word for the control machine to choose its hint by."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk-full"
    return "permission" if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else "os"


def describe(exc: OSError) -> str:
    """Return what the system refused, and where."""
    return f"{exc.strerror}: {exc.filename}" if exc.filename else str(exc.strerror)
