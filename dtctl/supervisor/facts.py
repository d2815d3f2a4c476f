"""Descriptions of the system's answers and errors for the control machine. Stdlib only, Python 3.8."""

from __future__ import annotations

import errno
import os


def find_server_address() -> str:
    """Return the address of this node to which the control machine connected; empty if it is not known."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else ""


def choose_hint_code(exc: OSError) -> str:
    """Return a code by which the control machine chooses its hint."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk-full"
    return "permission" if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else "os"


def describe_os_error(exc: OSError) -> str:
    """Return the system's error text, with the file if there is one."""
    return f"{exc.strerror}: {exc.filename}" if exc.filename else str(exc.strerror)
