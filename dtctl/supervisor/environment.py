"""What a worker's environment gets on the node itself, because only the node knows it. Stdlib only, Python 3.8."""

from __future__ import annotations

import os

from dtctl import node_facts


def complete(message: dict, run_dir: str) -> dict:  # type: ignore[type-arg]  # typing is slow to import on a node
    """A start message with this node's folders and the interface towards its peers filled in.

    What the message already sets stays: a user who names an interface knows better than the routing table.
    """
    env = {
        "DTCTL_RUN_DIR": run_dir,
        "DTCTL_METRICS": os.path.join(run_dir, "metrics.jsonl"),
        "DTCTL_SNAPSHOT_DIR": os.path.expanduser(message.get("snapshots", "")) or os.path.join(run_dir, "snapshots"),
        "DTCTL_PROGRESS": os.path.join(run_dir, f"attempt-{message['attempt']}", "progress"),
        # Where torchrun puts its own files, which would otherwise stay behind in /tmp.
        "PET_LOG_DIR": os.path.join(run_dir, f"attempt-{message['attempt']}", "torchrun"),
    }
    interface = node_facts.interface_towards(message["peer"]) if message["peer"] else ""
    if interface:
        env["GLOO_SOCKET_IFNAME"] = interface
        env["NCCL_SOCKET_IFNAME"] = "=" + interface  # "=": this one, not all whose names begin like it
    return {
        **message,
        "env": {**env, **message["env"]},
        "cwd": message["cwd"] or os.path.expanduser("~"),
        "interface": interface,
    }
