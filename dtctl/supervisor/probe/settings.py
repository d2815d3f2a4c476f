"""Settings of a node that limit its network: buffers, packet filters, queues and routes. Stdlib only, Python 3.8.

They are read only where the doctor has measured a symptom. A filter can only be read by root, so `sudo -n` is tried.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

SYSCTLS = (
    "net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem", "net/core/rmem_max", "net/core/wmem_max", "net/ipv4/tcp_mem",
    "net/core/somaxconn", "net/ipv4/tcp_max_syn_backlog", "net/ipv4/tcp_window_scaling", "net/ipv4/tcp_sack",
    "net/netfilter/nf_conntrack_max", "net/netfilter/nf_conntrack_count",
)  # fmt: skip
"""Files below /proc/sys."""
FILTERS = (("iptables-save",), ("nft", "list", "ruleset"))
"""Commands that print the packet filters, the first one that exists is used."""
QUEUES = ("tc", "qdisc", "show")
ROUTES = (("ip", "-4", "route", "show", "table", "all"), ("ip", "-4", "rule", "show"))
TIME_LIMIT_S = 3.0
MOST = 40
"""Largest number of lines of one command."""
_SBIN = "/usr/sbin:/sbin:/usr/local/sbin"
_REFUSING = re.compile(
    r"-j (DROP|REJECT|TARPIT|DNAT|SNAT|REDIRECT|MASQUERADE|TEE)|^:\w+ DROP|"
    r"-m (limit|hashlimit|connlimit|connbytes|quota|statistic|recent|length)\b|"
    r"\b(drop|reject)\b|policy drop|limit rate|ct count|quota|numgen|\b[ds]nat\b|masquerade|redirect"
)
"""Rules that keep packets away, change their addresses, or count them."""
_USUAL_QUEUE = re.compile(r"^qdisc (noqueue|pfifo_fast|fq|fq_codel|mq|mqprio|pfifo|bfifo|noop|clsact|ingress) ")
_REFUSING_ROUTE = re.compile(r"^(blackhole|prohibit|unreachable|throw) |\b(blackhole|prohibit|unreachable)\b")


def read_network_settings() -> dict:  # type: ignore[type-arg]
    """Return `sysctls` by name, the lines of `filters`, `queues` and `routes` that stand out, and `unread`.

    `unread` has the reason why the filters could not be read; empty if they were.
    """
    filters, unread = _read_filters()
    queues = [line for line in _run_tool(QUEUES)[0] if not _USUAL_QUEUE.match(line)]
    routes = [line for argv in ROUTES for line in _run_tool(argv)[0] if _REFUSING_ROUTE.search(line)]
    return {
        "sysctls": _read_sysctls(), "filters": filters, "unread": unread, "queues": queues[:MOST],
        "routes": routes[:MOST],
    }  # fmt: skip


def _read_sysctls() -> dict:  # type: ignore[type-arg]
    found = {}
    for path in SYSCTLS:
        try:
            with open("/proc/sys/" + path, encoding="ascii") as file:
                found[path.replace("/", ".")] = " ".join(file.read(256).split())
        except (OSError, ValueError):
            continue
    return found


def _read_filters() -> tuple:  # type: ignore[type-arg]
    why = "there is neither iptables-save nor nft"
    for argv in FILTERS:
        lines, error = _run_tool(argv, as_root=True)
        if not error:
            return [line for line in lines if _REFUSING.search(line)][:MOST], ""
        if error != "missing":
            why = "%s: %s" % (argv[0], error)
    return [], why


def _run_tool(argv: tuple, *, as_root: bool = False) -> tuple:  # type: ignore[type-arg]
    """Return the lines that a tool prints, and why it failed: `missing` if it is not installed; empty if it did not."""
    path = os.environ.get("PATH", "/usr/bin:/bin") + ":" + _SBIN
    tool = shutil.which(argv[0], path=path)
    if tool is None:
        return [], "missing"
    command = [tool, *argv[1:]]
    if as_root and os.geteuid() != 0:
        command = ["sudo", "-n", *command]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=TIME_LIMIT_S,
            env={**os.environ, "PATH": path, "LC_ALL": "C"}, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        return [], type(exc).__name__ if isinstance(exc, subprocess.TimeoutExpired) else str(exc.strerror)
    lines = [line.strip()[:300] for line in done.stdout.decode("utf-8", "replace").splitlines() if line.strip()]
    if done.returncode:
        complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return [], (complaint[-1][:200] if complaint else "exit code %d" % done.returncode)
    return lines, ""
