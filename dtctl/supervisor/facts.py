"""What a node says about itself before a job starts on it. Stdlib only, Python 3.8; nothing is installed or changed."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time

from dtctl import node_facts


def hello(workdir: str, ports: list[int]) -> dict:  # type: ignore[type-arg]  # typing is slow to import
    """The node's answer to `hello`.

    Args:
        workdir: absolute path of the folder that dtctl may write to.
        ports: candidates for the rendezvous, in order of preference; empty on all nodes but the head.
    """
    return {
        "op": "hello",
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "hostname": socket.gethostname(),
        "workdir": workdir,
        "pid": os.getpid(),
        "cpus": os.cpu_count(),
        "gpus": node_facts.count_gpus(os.environ),
        "address": server_address(),
        "port": node_facts.first_free(ports),
        "time": time.time(),
    }


def server_address() -> str:
    """This node's own address on the way that the control machine came by; empty when not known."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2] if len(fields) == 4 else ""


def code_of(exc: OSError) -> str:
    """A word for the control machine to choose its hint by."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk-full"
    return "permission" if exc.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else "os"


def describe(exc: OSError) -> str:
    """What the system refused, and where."""
    return f"{exc.strerror}: {exc.filename}" if exc.filename else str(exc.strerror)
