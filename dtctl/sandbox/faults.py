"""Faults of virtual hosts, injected with the kernel's own means, and their removal.

Each fault is a function (sandbox, ...) that changes one host or the cable to it. `remove_host_faults` removes all of
them. STATE/faults.json lists the current faults for the user; their removal does not depend on it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from dtctl.errors import SandboxError, UsageError
from dtctl.sandbox import control, layout, world
from dtctl.sandbox.layout import Sandbox, SandboxNode

FAULTS_FILE = "faults.json"
DISK = "dtctl-full-disk"
"""Name of the small file systems, by which they are identified."""
BURST_S = 0.008
"""Seconds of traffic that a limited cable may send in a burst after the machine was delayed."""
LARGE_BYTES = 1200
"""IP packets longer than this are lost by `lose-large`: more than any ping, less than a full Ethernet frame."""


def run_in_network(sandbox: Sandbox, node: SandboxNode | None, argv: Sequence[str]) -> None:
    """Run an administrator's command in a host's network, or in that of the bridge.

    Raises:
        SandboxError: it failed.
    """
    if node is not None:
        control.check_on(node)
    prefix: list[str] = []
    if node is not None or sandbox.rootless:
        user = ["--user", "--preserve-credentials"] if sandbox.rootless else []
        prefix = ["nsenter", "--target", str(node.pid if node else sandbox.keeper), *user, "--net"]
    # iptables keeps a lock file in /run, where an ordinary user may not write.
    environ = {**os.environ, "XTABLES_LOCKFILE": str(sandbox.state / "xtables.lock")}
    environ["PATH"] = environ.get("PATH", "") + ":/usr/sbin:/sbin"
    done = subprocess.run([*prefix, *argv], capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
        place = f"host {node.name}" if node else "the bridge"
        raise SandboxError(f"{' '.join(argv)} failed: {errors[-1]}", where=place)


def _add_iptables_rule(sandbox: Sandbox, node: SandboxNode, *rule: str) -> None:
    run_in_network(sandbox, node, ["iptables", "-w", "-A", *rule])


def disconnect_host(sandbox: Sandbox, node: SandboxNode, peer: SandboxNode | None) -> None:
    """Cut a host's cable, or block all packets between two hosts."""
    if peer is None:
        run_in_network(sandbox, None, ["ip", "link", "set", layout.link_name(sandbox.state, node.index), "down"])
        return
    _add_iptables_rule(sandbox, node, "INPUT", "-s", peer.address, "-j", "DROP")
    _add_iptables_rule(sandbox, node, "OUTPUT", "-d", peer.address, "-j", "DROP")


def block_ports(sandbox: Sandbox, node: SandboxNode, *, ports: str, source: SandboxNode | None, reject: bool) -> None:
    """Drop (in silence) or reject (with a reset) connections to TCP ports of a host, from all hosts or from one.

    Args:
        sandbox: the sandbox.
        node: the host that has the ports.
        ports: one port, or a range `1024:65535`.
        source: only connections from this host.
        reject: reset instead of silence.
    """
    first, _, last = ports.partition(":")
    if not (first.isdigit() and (last or first).isdigit() and 0 < int(first) <= int(last or first) <= 65_535):
        raise UsageError(f"{ports!r} is not a port or a range of ports", hint="write 29500 or 32768:60999")
    sender = ["-s", source.address] if source else []
    verdict = ["REJECT", "--reject-with", "tcp-reset"] if reject else ["DROP"]
    _add_iptables_rule(sandbox, node, "INPUT", "-p", "tcp", *sender, "--dport", ports, "-j", *verdict)


def drop_large_packets(sandbox: Sandbox, node: SandboxNode, peer: SandboxNode | None) -> None:
    """Drop packets above a size to a host, like a path with a smaller MTU that is not announced."""
    sender = ["-s", peer.address] if peer else []
    _add_iptables_rule(
        sandbox, node, "INPUT", *sender, "-m", "length", "--length", f"{LARGE_BYTES + 1}:65535", "-j", "DROP"
    )


def drop_packets(sandbox: Sandbox, node: SandboxNode, *, percent: float, source: SandboxNode | None = None) -> None:
    """Drop packets to a host at random, from all hosts or from one."""
    if not 0 < percent <= 100:
        raise UsageError(
            f"{percent:g} % is not a share of packets that can be dropped", hint="give a number above 0, at most 100"
        )
    sender = ["-s", source.address] if source else []
    probability = ["-m", "statistic", "--mode", "random", "--probability", f"{percent / 100:.5f}"]
    _add_iptables_rule(sandbox, node, "INPUT", "-i", "eth0", *sender, *probability, "-j", "DROP")


def limit_bandwidth(sandbox: Sandbox, node: SandboxNode, *, rate: str, peer: SandboxNode | None = None) -> None:
    """Limit a host's cable to a rate such as `50mbit`, in both directions; or only between two hosts."""
    if peer is not None:
        _limit_towards(sandbox, node, peer, rate)
        _limit_towards(sandbox, peer, node, rate)
        return
    shape = ["root", "tbf", "rate", rate, "burst", _compute_burst_bytes(rate), "latency", "100ms"]
    run_in_network(sandbox, node, ["tc", "qdisc", "replace", "dev", "eth0", *shape])
    run_in_network(
        sandbox, None, ["tc", "qdisc", "replace", "dev", layout.link_name(sandbox.state, node.index), *shape]
    )


def _compute_burst_bytes(rate: str) -> str:
    """Return the size of a token bucket in bytes: all packets that are due while a busy machine delays its timers."""
    number = rate.rstrip("bitkmgKMG")
    unit = {"k": 1e3, "m": 1e6, "g": 1e9}.get(rate[len(number) : len(number) + 1].lower(), 1.0)
    try:
        return str(max(65_536, int(float(number) * unit / 8 * BURST_S)))
    except ValueError as exc:
        raise UsageError(f"{rate!r} is not a rate", hint="write 50mbit or 1gbit") from exc


def _limit_towards(sandbox: Sandbox, node: SandboxNode, peer: SandboxNode, rate: str) -> None:
    """Limit the rate towards one address by a separate class; other packets do not pass through it."""
    at = ["dev", "eth0"]
    run_in_network(sandbox, node, ["tc", "qdisc", "replace", *at, "root", "handle", "1:", "htb"])
    run_in_network(
        sandbox, node, ["tc", "class", "replace", *at, "parent", "1:", "classid", "1:1", "htb", "rate", rate]
    )
    match = ["u32", "match", "ip", "dst", f"{peer.address}/32", "flowid", "1:1"]
    run_in_network(sandbox, node, ["tc", "filter", "add", *at, "parent", "1:", "protocol", "ip", *match])


def power_off_host(sandbox: Sandbox, node: SandboxNode) -> None:
    """Switch a host off as a power failure does: all processes end, and peers are not notified."""
    control.check_on(node)
    # The cable is cut first; otherwise the kernel would close the host's connections in an orderly way.
    disconnect_host(sandbox, node, None)
    os.kill(node.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while control.is_host_running(node) and time.monotonic() < deadline:
        time.sleep(0.002)


def freeze_host(node: SandboxNode) -> None:
    """Stop every process of a host; its kernel still acknowledges packets, as that of a hanging machine does."""
    control.check_on(node)
    _signal_all(node, signal.SIGSTOP)


def _signal_all(node: SandboxNode, number: int) -> None:
    for pid in control.list_host_processes(node):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def fill_disk(sandbox: Sandbox, node: SandboxNode, *, path: str, size: str) -> None:
    """Mount a small file system over a folder of a host, so that it is soon full; it hides the folder's files."""
    full = sandbox.home / path
    command = ["mkdir", "-p", str(full)]
    _run_host_command(control.enter_argv(sandbox, node, command), node)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", DISK, str(full)]
    _run_host_command([*_build_nsenter_argv(sandbox, node), *mount], node)


def _build_nsenter_argv(sandbox: Sandbox, node: SandboxNode) -> list[str]:
    """Return the beginning of an argv that runs as root of a host."""
    return ["nsenter", "--target", str(node.pid), *control.build_namespace_flags(sandbox)]


def _run_host_command(argv: Sequence[str], node: SandboxNode) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SandboxError(f"{argv[-1]}: {done.stderr.strip()}", where=f"host {node.name}")


def remove_host_faults(sandbox: Sandbox, nodes: Sequence[SandboxNode]) -> None:
    """Remove every fault of these hosts; those that are off are switched on again.

    Raises:
        SandboxError: a host does not come back.
    """
    for node in nodes:
        if not control.is_host_running(node):
            answer, _ = world.send_keeper_request(sandbox, {"op": "power-on", "node": node.name}, timeout_s=30.0)
            if "error" in answer:
                raise SandboxError(f"the host cannot be switched on: {answer['error']}", where=f"host {node.name}")
            continue
        _signal_all(node, signal.SIGCONT)
        link = layout.link_name(sandbox.state, node.index)
        run_in_network(sandbox, None, ["ip", "link", "set", link, "up"])
        run_in_network(sandbox, node, ["iptables", "-w", "-F"])
        for network, device in ((node, "eth0"), (None, link)):
            with contextlib.suppress(SandboxError):  # the device had no such rule
                run_in_network(sandbox, network, ["tc", "qdisc", "del", "dev", device, "root"])
        _unmount_disks(sandbox, node)


def _unmount_disks(sandbox: Sandbox, node: SandboxNode) -> None:
    with open(f"/proc/{node.pid}/mounts", encoding="utf-8", errors="replace") as mounts:
        paths = [line.split()[1] for line in mounts if line.startswith(DISK + " ")]
    for path in reversed(paths):
        _run_host_command([*_build_nsenter_argv(sandbox, node), "umount", "--lazy", path], node)


def read_recorded_faults(sandbox: Sandbox) -> list[str]:
    """Return the current faults, as the user wrote them."""
    try:
        faults: list[str] = json.loads((sandbox.state / FAULTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return faults


def write_recorded_faults(sandbox: Sandbox, faults: list[str]) -> None:
    """Record the current faults."""
    (sandbox.state / FAULTS_FILE).write_text(json.dumps(faults) + "\n", encoding="utf-8")
