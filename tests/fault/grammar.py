# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""A grammar of faults of a cluster: layers x places x directions x times, each with what an examiner has to say of it.

A fault is shell text that an administrator of one host runs, changes of the spec, or files beside the job's script; its
expectation was written from knowledge of the fault, before any doctor was asked. `FAULTS` are single ones, `PAIRS` two of them
on different hosts at once, and `HARMLESS` what looks odd and keeps nobody from training. By the hash of its name each is
in the half that the doctor is developed on (`is_held` false) or in the one that is only scored.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NODES = ("node1", "node2", "node3")
ALL = NODES
PRELUDE = """
set -e
conf() { { printf '%s\\n' "$1"; grep -v "^${1%% *} " "$SELF/ssh/sshd_config"; } >/tmp/sshd_config; again; }
again() { kill $(pgrep -x sshd); while pgrep -x sshd >/dev/null; do sleep 0.05; done; /usr/sbin/sshd -f /tmp/sshd_config; }
shell_of() { sed "s#^\\(root:.*:\\)[^:]*\\$#\\1$1#" /etc/passwd >/tmp/passwd; mount --bind /tmp/passwd /etc/passwd; }
rc() { shell_of /bin/bash; printf '%s\\n' "$1" >"$LOGIN/.bashrc"; }
hosts() { sed "$1" /etc/hosts >/tmp/hosts; mount --bind /tmp/hosts /etc/hosts; }
group() { mkdir -p /sys/fs/cgroup/$1/$GROUP; echo "$3" >/sys/fs/cgroup/$1/$GROUP/$2;
          for p in $(pgrep -x sshd); do echo $p >/sys/fs/cgroup/$1/$GROUP/cgroup.procs || true; done; }
limit() { for p in $(pgrep -x sshd); do prlimit --pid $p "$1" || true; done; }
later() { (sleep $1; shift; "$@") >/dev/null 2>&1 </dev/null & }
"""
"""Beside it a script has P1, P2, P3 (addresses), HERE, SELF (the host's own files), LOGIN (home), PY, and GROUP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a good examiner says of a fault."""

    checks: tuple[str, ...]
    """Any of these, as the primary finding."""
    nodes: tuple[str, ...]
    """The machines to act on; with `pair` the two ends, either of which may be named with the other as its peer."""
    fix: str
    """A usable fix has this (a regular expression, any case)."""
    pair: bool = False
    fatal: bool = True
    """A launch dies or hangs: `can train` is never right. Else a warning is as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, or what only looks like one."""

    name: str
    layer: str
    do: tuple[tuple[str, str], ...] = ()
    """(host, script of its administrator)"""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key of the spec -> value."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Beside the job's script."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Of the doctor's own process, as a scheduler sets it."""
    during: tuple[tuple[str, str, str], ...] = ()
    """(words of the progress, host, what happens to it then: `kill`, `freeze` or `cut`)"""
    expected: tuple[Expected, ...] = ()

    @property
    def is_held(self) -> bool:
        """Whether it is only scored, never developed on."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 1

    @property
    def order(self) -> str:
        """A sample is taken from the front of this order."""
        return hashlib.sha256(f"order {self.name}".encode()).hexdigest()


_found: list[Fault] = []
_turn = itertools.count()


def _host() -> str:
    """Each host in its turn, so that a fault is not always where the last one was."""
    return NODES[next(_turn) % 3]


def _two() -> tuple[str, str]:
    one = next(_turn) % 3
    return NODES[one], NODES[(one + 1 + one % 2) % 3]


def _p(node: str) -> str:
    return f"$P{node[-1]}"


def _add(
    name: str,
    layer: str,
    checks: str,
    nodes: Sequence[str],
    fix: str,
    *do: tuple[str, str],
    pair: bool = False,
    fatal: bool = True,
    **more: Any,
) -> None:
    wanted = Expected(checks=tuple(checks.split()), nodes=tuple(nodes), fix=fix, pair=pair, fatal=fatal)
    _found.append(Fault(name=name, layer=layer, do=do, expected=(wanted,), **more))


def _nodes_with(node: str, **keys: Any) -> dict[str, Any]:
    return {"cluster.nodes": [{"name": one, **keys} if one == node else one for one in NODES]}


# -- ports ---------------------------------------------------------------------------------------------------------------


def _ports() -> None:
    verdicts = {
        "dropped": "DROP",
        "reset": "REJECT --reject-with tcp-reset",
        "prohibited": "REJECT --reject-with icmp-admin-prohibited",
    }
    for word, verdict in verdicts.items():
        for chain, way, opposite in (("INPUT", "inbound", "-s"), ("OUTPUT", "outbound", "-d")):
            fix = r"\bin\b.*from|inbound|INPUT" if chain == "INPUT" else r"\bout\b|outbound|OUTPUT"
            node = _host()
            rule = f"iptables -A {chain} -p tcp --syn --dport 32768:60999 -j {verdict}"
            _add(f"ports: {way} {word}, all", "ports", "data-ports", [node], fix, (node, rule))
            one, other = _two()
            rule = f"iptables -A {chain} -p tcp --syn {opposite} {_p(other)} --dport 32768:60999 -j {verdict}"
            _add(f"ports: {way} {word}, one peer", "ports", "data-ports", [one, other], fix, (one, rule), pair=True)
    port = {"network.rendezvous_port": 29555}
    for word, verdict in verdicts.items():
        rule = f"iptables -A INPUT -p tcp --syn --dport 29555 -j {verdict}"
        fix = r"29555.*\bin\b|inbound|INPUT"
        _add(f"rendezvous: {word}, all", "ports", "rendezvous-port", ["node1"], fix, ("node1", rule), spec=port)
    for node in ("node2", "node3"):
        rule = f"iptables -A INPUT -p tcp --syn -s {_p(node)} --dport 29555 -j DROP"
        _add(f"rendezvous: dropped from {node}", "ports", "rendezvous-port", ["node1", node], "29555",
             ("node1", rule), pair=True, spec=port)  # fmt: skip
        rule = "iptables -A OUTPUT -p tcp --syn --dport 29555 -j DROP"
        _add(f"rendezvous: outbound dropped on {node}", "ports", "rendezvous-port", ["node1", node], r"29555.*\bout\b|outbound|OUTPUT",
             (node, rule), pair=True, spec=port)  # fmt: skip
    hold = '$PY -c "import socket,time; s=socket.socket({}); s.setsockopt(1,2,1); s.bind(({},29555)); s.listen(); time.sleep(600)" >/dev/null 2>&1 </dev/null & sleep 1'
    for word, family, at in (
        ("everywhere", "", "''"),
        ("at its address", "", "'$P1'"),
        ("for both families", "socket.AF_INET6", "'::'"),
    ):
        _add(f"rendezvous: taken {word}", "ports", "rendezvous-port", ["node1"], r"ss -|lsof|auto|another port",
             ("node1", hold.format(family, at)), spec=port)  # fmt: skip
    for way, opposite in (("INPUT", "-s"), ("OUTPUT", "-d")):
        one, other = _two()
        _add(f"ports: nothing passes, {way.lower()}", "ports", "data-ports", [one, other], r"iptables|nft|firewall|security",
             (one, f"iptables -A {way} {opposite} {_p(other)} -j DROP"), pair=True)  # fmt: skip
    for most in (1, 2):
        node = _host()
        _add(f"ports: at most {most} connections a peer", "ports", "data-ports stream", [node], r"iptables|nft|firewall|connlimit",
             (node, f"iptables -A INPUT -i eth0 -p tcp --syn ! --dport 22 -m connlimit --connlimit-above {most} -j REJECT --reject-with tcp-reset"))  # fmt: skip
    for first, last in ((60000, 60010), (61000, 61002), (32768, 32771)):
        node = _host()
        _add(f"ephemeral ports: {first}-{last}", "ports", "ephemeral-ports", [node], r"sysctl.*ip_local_port_range",
             (node, f"echo '{first} {last}' >/proc/sys/net/ipv4/ip_local_port_range"))  # fmt: skip


# -- streams -------------------------------------------------------------------------------------------------------------


def _streams() -> None:
    counted = "-m connbytes --connbytes {}: --connbytes-dir {} --connbytes-mode bytes"
    cause = r"firewall|conntrack|middlebox|inspection|iptables|nft|offload"
    for size, words in ((1_500_000, "1.5 MB"), (8_000_000, "8 MB"), (30_000_000, "30 MB")):
        node = _host()
        rule = f"iptables -A INPUT -i eth0 -p tcp ! --dport 22 {counted.format(size, 'original')} -j DROP"
        _add(f"stream: stalls after {words}, into one node", "streams", "stream", [node], cause, (node, rule))
        one, other = _two()
        rule = f"iptables -A OUTPUT -p tcp ! --sport 22 -d {_p(other)} {counted.format(size, 'original')} -j DROP"
        _add(
            f"stream: stalls after {words}, out to one peer",
            "streams",
            "stream",
            [one, other],
            cause,
            (one, rule),
            pair=True,
        )
        node = _host()
        rule = f"iptables -A INPUT -i eth0 -p tcp ! --dport 22 ! --sport 22 {counted.format(size, 'both')} -j REJECT --reject-with tcp-reset"
        _add(f"stream: reset after {words}, one node", "streams", "stream", [node], cause, (node, rule))
        one, other = _two()
        rule = f"iptables -A INPUT -s {_p(other)} -p tcp ! --dport 22 {counted.format(size, 'original')} -j REJECT --reject-with tcp-reset"
        _add(
            f"stream: reset after {words}, from one peer",
            "streams",
            "stream",
            [one, other],
            cause,
            (one, rule),
            pair=True,
        )
    for size in (1200, 600):
        for chain, flag in (("INPUT", "-s"), ("OUTPUT", "-d")):
            node = _host()
            which = "-i eth0" if chain == "INPUT" else "-o eth0"
            rule = f"iptables -A {chain} {which} -p tcp ! --dport 22 -m length --length {size}:65535 -j DROP"
            if chain == "OUTPUT":
                rule = f"iptables -A OUTPUT -o eth0 -p tcp ! --sport 22 -m length --length {size}:65535 -j DROP"
            _add(
                f"large packets: above {size}, {chain.lower()}, all",
                "streams",
                "large-packets",
                [node],
                r"mtu",
                (node, rule),
            )
            one, other = _two()
            rule = f"iptables -A {chain} {flag} {_p(other)} -m length --length {size}:65535 -j DROP"
            _add(f"large packets: above {size}, {chain.lower()}, one peer", "streams", "large-packets", [one, other], r"mtu",
                 (one, rule), pair=True)  # fmt: skip
    jumbo = "ip link set eth0 mtu 4000"
    one, other = _two()
    _add("large packets: jumbo frames on two nodes, switch without", "streams", "large-packets mtu", [one, other], r"mtu",
         (one, jumbo), (other, jumbo), pair=True)  # fmt: skip
    for size in (1400, 1280, 9000):
        node = _host()
        _add(
            f"mtu: {size} on one node",
            "streams",
            "mtu",
            [node],
            rf"mtu 1500.*{node}|{node}.*mtu 1500",
            (node, f"ip link set eth0 mtu {size}"),
            fatal=False,
        )
    for share in (1, 4, 15):
        probability = f"-m statistic --mode random --probability {share / 100}"
        cable = r"ethtool|ip -s link|cable"
        node = _host()
        _add(f"loss: {share}% into one node", "streams", "packet-loss", [node], cable,
             (node, f"iptables -A INPUT -i eth0 {probability} -j DROP"), fatal=False)  # fmt: skip
        node = _host()
        _add(f"loss: {share}% out of one node", "streams", "packet-loss", [node], cable,
             (node, f"iptables -A OUTPUT -o eth0 {probability} -j DROP"), fatal=False)  # fmt: skip
        one, other = _two()
        _add(f"loss: {share}% from one peer", "streams", "packet-loss", [one, other], cable,
             (one, f"iptables -A INPUT -s {_p(other)} {probability} -j DROP"), pair=True, fatal=False)  # fmt: skip
    for rate in ("5mbit", "30mbit", "150mbit", "600mbit"):
        size = max(65_536, int(rate[:-4]) * 1000)
        shape = f"tc qdisc replace dev eth0 root tbf rate {rate} burst {size} latency 100ms"
        speed = r"ethtool|tc qdisc"
        node = _host()
        _add(f"slow: {rate} out of one node", "streams", "bandwidth", [node], speed, (node, shape), fatal=False)
        one, other = _two()
        towards = (
            "tc qdisc replace dev eth0 root handle 1: htb; "
            f"tc class replace dev eth0 parent 1: classid 1:1 htb rate {rate}; "
            f"tc filter add dev eth0 parent 1: protocol ip u32 match ip dst {_p(other)}/32 flowid 1:1"
        )
        _add(
            f"slow: {rate} to one peer",
            "streams",
            "bandwidth",
            [one, other],
            speed,
            (one, towards),
            pair=True,
            fatal=False,
        )
    for rate in ("20mb", "2mb"):
        node = _host()
        _add(f"slow: a policer drops above {rate}/s into one node", "streams", "bandwidth packet-loss", [node], r"ethtool|tc |polic",
             (node, f"iptables -A INPUT -i eth0 -p tcp ! --dport 22 -m hashlimit --hashlimit-name x --hashlimit-above {rate}/s --hashlimit-burst 2500kb -j DROP"),
             fatal=False)  # fmt: skip
    one, other = _two()
    _add("duplicates: every packet to one peer twice", "streams", "duplicate-packets packet-loss", [one, other], r"bond|loop|spanning|mirror|switch",
         (one, f"iptables -t mangle -A POSTROUTING -o eth0 -d {_p(other)} -j TEE --gateway {_p(other)}"), pair=True, fatal=False)  # fmt: skip
    node = _host()
    rules = "; ".join(
        f"iptables -t mangle -A POSTROUTING -o eth0 -d {_p(one)} -j TEE --gateway {_p(one)}"
        for one in NODES
        if one != node
    )
    _add("duplicates: every packet out of one node twice", "streams", "duplicate-packets packet-loss", [node], r"bond|loop|spanning|mirror|switch",
         (node, rules), fatal=False)  # fmt: skip


# -- addresses, routes, names ---------------------------------------------------------------------------------------------


def _addresses() -> None:
    for at in ("lo", "eth0"):
        one, other = _two()
        _add(f"address: that of another node on {at}", "addresses", "duplicate-address", sorted([one, other]), r"ip addr del",
             (one, f"ip addr add {_p(other)}/32 dev {at}"))  # fmt: skip
    one, other = _two()
    _add("address: the same on two nodes, on an interface that is down", "addresses", "duplicate-address", sorted([one, other]), r"ip addr del",
         (one, f"ip link add x0 type veth peer name x1; ip addr add {_p(other)}/32 dev x0"))  # fmt: skip
    for index in range(2):
        one, other = _two()
        do = f"(: >/dev/tcp/{_p(other)}/22); m=$(ip neigh show {_p(other)} | sed 's/.*lladdr \\([^ ]*\\).*/\\1/'); ip link set eth0 down; ip link set eth0 address $m; ip link set eth0 up"
        _add(
            f"address: the MAC of another node, {index}",
            "addresses",
            "duplicate-mac reach",
            sorted([one, other]),
            r"MAC|ip link set .* address|hwaddr",
            (one, do),
        )
    for kind in ("blackhole", "unreachable", "prohibit"):
        one, other = _two()
        _add(
            f"route: {kind} to one peer",
            "addresses",
            "data-ports",
            [one, other],
            r"ip route",
            (one, f"ip route add {kind} {_p(other)}/32"),
            pair=True,
        )
    one, other = _two()
    _add("route: to one peer by an interface without a cable", "addresses", "data-ports", [one, other], r"ip route",
         (one, f"ip link add x0 type veth peer name x1; ip link set x0 up; ip link set x1 up; ip addr add 192.168.77.1/24 dev x0; ip route add {_p(other)}/32 dev x0"), pair=True)  # fmt: skip
    for index in range(2):
        one, other = _two()
        _add(f"neighbour: a wrong MAC for one peer, {index}", "addresses", "data-ports", [one, other], r"ip neigh|arp",
             (one, f"ip neigh replace {_p(other)} lladdr 02:00:00:00:00:99 dev eth0 nud permanent"), pair=True)  # fmt: skip
    for index in range(2):
        node = _host()
        _add(f"nat: source address translated on the way out, {index}", "addresses", "nat", [node], r"nat|masquerade|network host",
             (node, 'x=${HERE%.*}.240; ip addr add $x/24 dev eth0; iptables -t nat -A POSTROUTING -o eth0 -p tcp ! --sport 22 -j SNAT --to $x'))  # fmt: skip
    name_fix = r"/etc/hosts"
    for address in ("127.0.1.1", "127.0.0.1"):
        node = _host()
        _add(f"names: its own name is {address}", "names", "loopback-name", [node], name_fix,
             (node, f"hosts 's/^[0-9].* {node}$/{address} {node}/'"), fatal=False)  # fmt: skip
    for index in range(2):
        one, other = _two()
        _add(f"names: another node's name means a third address, {index}", "names", "names", [one], name_fix,
             (one, f"hosts 's/^[0-9].* {other}$/10.255.255.7 {other}/'"), fatal=False)  # fmt: skip
    one, other = _two()
    _add("names: its own name means another node", "names", "names", [one], name_fix,
         (one, f"hosts \"s/^[0-9].* {one}$/{_p(other)} {one}/\""), fatal=False)  # fmt: skip
    node = _host()
    _add("names: localhost is a foreign address", "names", "names localhost", [node], r"/etc/hosts.*127\.0\.0\.1|127\.0\.0\.1.*/etc/hosts",
         (node, "hosts 's/^127.0.0.1 localhost/10.255.255.8 localhost/'"))  # fmt: skip
    node = _host()
    _add(
        "names: no localhost",
        "names",
        "names localhost",
        [node],
        r"/etc/hosts",
        (node, "hosts '/localhost/d'"),
        fatal=False,
    )
    for index in range(2):
        one, other = _two()
        _add(f"names: the host name of another node, {index}", "names", "duplicate-hostname", sorted([one, other]), r"hostnamectl|hostname",
             (one, f"hostname {other}"), fatal=False)  # fmt: skip
    _add("names: all are called localhost", "names", "duplicate-hostname loopback-name", ALL, r"hostnamectl|hostname",
         *((node, "hostname localhost") for node in NODES), fatal=False)  # fmt: skip


# -- what the plan names ---------------------------------------------------------------------------------------------------

BRIDGE = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up"
"""What an installation of Docker leaves on every node: one address for all."""
STORAGE = "ip link add st0 type veth peer name st1; ip link set st1 up; ip link set st0 up; ip addr add 192.168.50.${HERE##*.}/24 dev st0"
"""A network card of each node whose cable ends nowhere."""


def _plan() -> None:
    everywhere = tuple((node, BRIDGE) for node in NODES)
    apart = tuple((node, STORAGE) for node in NODES)
    key = r"network\.interface|_SOCKET_IFNAME"
    for name, do in (("lo", ()), ("docker0", everywhere), ("st0", apart)):
        _add(f"plan: network.interface {name}", "plan", "interface", ALL, key, *do, spec={"network.interface": name})
        _add(
            f"plan: GLOO_SOCKET_IFNAME={name} for all",
            "plan",
            "interface",
            ALL,
            key,
            *do,
            spec={"job.env": {"GLOO_SOCKET_IFNAME": name}},
        )
        node = _host()
        _add(f"plan: GLOO_SOCKET_IFNAME={name} on one node", "plan", "interface", [node], key, *do,
             spec=_nodes_with(node, env={"GLOO_SOCKET_IFNAME": name}))  # fmt: skip
        _add(f"plan: network.interface {name} on one node", "plan", "interface", [node], key, *do,
             spec={"network.interface": {one: name if one == node else "eth0" for one in NODES}})  # fmt: skip
    _add("plan: network.interface that no node has", "plan", "interface", ALL, key, spec={"network.interface": "ib0"})
    node = _host()
    _add("plan: network.interface that one node lacks", "plan", "interface", [node], key,
         spec={"network.interface": {one: "ens9f1" if one == node else "eth0" for one in NODES}})  # fmt: skip
    _add(
        "plan: NCCL_SOCKET_IFNAME=lo for all",
        "plan",
        "interface",
        ALL,
        key,
        spec={"job.env": {"NCCL_SOCKET_IFNAME": "lo"}},
    )
    _add(
        "plan: NCCL_SOCKET_IFNAME=^eth for all",
        "plan",
        "interface",
        ALL,
        key,
        spec={"job.env": {"NCCL_SOCKET_IFNAME": "^eth"}},
    )
    _add(
        "plan: NCCL_SOCKET_IFNAME=docker0 for all",
        "plan",
        "interface",
        ALL,
        key,
        *everywhere,
        spec={"job.env": {"NCCL_SOCKET_IFNAME": "=docker0"}},
    )
    where = r"network\.rendezvous_address"
    for word, address in (
        ("a loopback address", "127.0.0.1"),
        ("a loopback name", "localhost"),
        ("an address of nobody", "{prefix}.250"),
        ("the address of another node", "{node2}"),
        ("an unknown name", "head.example.invalid"),
    ):
        _add(f"plan: rendezvous_address is {word}", "plan", "rendezvous-address rendezvous-port", ["node1"], where,
             spec={"network.rendezvous_address": address})  # fmt: skip
    _add("plan: rendezvous_address is on a network without a cable", "plan", "rendezvous-address rendezvous-port", ["node1"], where,
         *apart, spec={"network.rendezvous_address": "192.168.50.{last1}"})  # fmt: skip
    _add("plan: rendezvous_address is the bridge of every node", "plan", "rendezvous-address rendezvous-port", ["node1"], where,
         *everywhere, spec={"network.rendezvous_address": "172.17.0.1"})  # fmt: skip
    for index in range(2):
        node = _host()
        _add(f"plan: several slots, no way of a node to itself, {index}", "plan", "data-ports", [node], r"\blo\b|loopback|itself",
             (node, "iptables -A INPUT -i lo -p tcp --syn -s $HERE -j DROP"), spec={"cluster.slots": 2})  # fmt: skip
    node = _host()
    _add(
        "plan: several slots, lo is down",
        "plan",
        "data-ports interface",
        [node],
        r"ip link set lo up",
        (node, "ip link set lo down"),
        spec={"cluster.slots": 2},
    )
    _add(
        "plan: gloo's transport does not exist",
        "plan",
        "collective env-unknown",
        ALL,
        r"GLOO_DEVICE_TRANSPORT",
        spec={"job.env": {"GLOO_DEVICE_TRANSPORT": "RDMA"}},
    )
    _add(
        "plan: TORCH_DISTRIBUTED_DEBUG has no such value",
        "plan",
        "collective env-unknown",
        ALL,
        r"TORCH_DISTRIBUTED_DEBUG",
        spec={"job.env": {"TORCH_DISTRIBUTED_DEBUG": "VERBOSE"}},
    )


# -- the node's limits and files ---------------------------------------------------------------------------------------------


def _limits() -> None:
    for size, fatal in (("80M", True), ("120M", True), ("400M", False)):
        node = _host()
        _add(f"cgroup: {size} of memory", "limits", "memory", [node], r"MemoryMax|--mem|memory limit|memory\.limit|memory\.max",
             (node, f"group memory memory.limit_in_bytes {size}"), fatal=fatal)  # fmt: skip
    for count in (8, 25):
        node = _host()
        _add(
            f"cgroup: {count} processes",
            "limits",
            "processes",
            [node],
            r"TasksMax|pids\.max|pids",
            (node, f"group pids pids.max {count}"),
        )
    for share in (10_000, 30_000):
        node = _host()
        _add(f"cgroup: {share // 1000}% of a core", "limits", "cpus", [node], r"CPUQuota|--cpus|cpu\.max|cfs_quota",
             (node, f"group cpu cpu.cfs_quota_us {share}"), fatal=False)  # fmt: skip
    for index in range(2):
        node = _host()
        _add(f"affinity: one core, {index}", "limits", "cpus", [node], r"affinity|taskset|CPUAffinity|cpus",
             (node, "for p in $(pgrep -x sshd); do taskset -p 1 $p >/dev/null; done"), fatal=False)  # fmt: skip
    _add("limits: 64 workers on two cores", "limits", "cpus", ALL, r"slots", spec={"cluster.slots": 64}, fatal=False)
    for count in (64, 200):
        node = _host()
        _add(
            f"limits: {count} open files",
            "limits",
            "nofile",
            [node],
            r"ulimit -n|nofile|LimitNOFILE",
            (node, f"limit --nofile={count}:{count}"),
        )
    node = _host()
    _add(
        "limits: 1.5 GB of address space",
        "limits",
        "memory limits",
        [node],
        r"ulimit -v|\bas\b|address space|LimitAS",
        (node, "limit --as=1500000000"),
    )
    node = _host()
    _add(
        "limits: files of 1 MB",
        "limits",
        "limits file-size",
        [node],
        r"ulimit -f|fsize|LimitFSIZE",
        (node, "limit --fsize=1000000"),
    )
    node = _host()
    _add(
        "limits: 30 s of processor time",
        "limits",
        "limits cpu-time",
        [node],
        r"ulimit -t|\bcpu\b|LimitCPU",
        (node, "limit --cpu=30"),
    )
    work = {"cluster.workdir": "~/small"}
    node = _host()
    _add(
        "disk: the workdir is full",
        "files",
        "disk",
        [node],
        r"df |free|workdir",
        (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=100k none $LOGIN/small"),
        spec=work,
    )
    node = _host()
    _add(
        "disk: the workdir has 40 MB",
        "files",
        "disk",
        [node],
        r"df |free|workdir",
        (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=40m none $LOGIN/small"),
        spec=work,
    )
    node = _host()
    _add(
        "disk: the workdir has 500 MB",
        "files",
        "disk",
        [node],
        r"df |free|workdir",
        (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=500m none $LOGIN/small"),
        spec=work,
        fatal=False,
    )
    for few in (2, 40):
        node = _host()
        _add(f"disk: {few} inodes", "files", "disk inodes", [node], r"df -i|inodes|small files",
             (node, f"mkdir -p $LOGIN/small; mount -t tmpfs -o size=10g,nr_inodes={few} none $LOGIN/small"), spec=work)  # fmt: skip
    for index in range(2):
        node = _host()
        _add(f"disk: the workdir is read-only, {index}", "files", "workdir", [node], r"workdir|remount",
             (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=10g,ro none $LOGIN/small"), spec=work)  # fmt: skip
    node = _host()
    _add("disk: the workdir is a file", "files", "workdir", [node], r"workdir", (node, "touch $LOGIN/small"), spec=work)
    node = _host()
    _add(
        "disk: the workdir is noexec",
        "files",
        "workdir",
        [node],
        r"workdir|exec",
        (node, "mkdir -p $LOGIN/small; mount -t tmpfs -o size=10g,noexec none $LOGIN/small"),
        spec=work,
        fatal=False,
    )
    tmp = r"TMPDIR|/tmp"
    for size in ("8k", "4m"):
        node = _host()
        _add(
            f"tmp: {size} in all",
            "files",
            "tmpdir",
            [node],
            tmp,
            (node, f"mount -t tmpfs -o size={size},mode=1777 none /tmp"),
        )
    node = _host()
    _add(
        "tmp: full",
        "files",
        "tmpdir",
        [node],
        tmp,
        (node, "mount -t tmpfs -o size=50m,mode=1777 none /tmp; head -c 60000000 /dev/zero >/tmp/core.1 || true"),
    )
    node = _host()
    _add("tmp: read-only", "files", "tmpdir", [node], tmp, (node, "mount -t tmpfs -o size=5g,mode=1777,ro none /tmp"))
    node = _host()
    _add(
        "tmp: noexec",
        "files",
        "tmpdir",
        [node],
        tmp,
        (node, "mount -t tmpfs -o size=5g,mode=1777,noexec none /tmp"),
        fatal=False,
    )
    node = _host()
    _add(
        "tmp: TMPDIR is not there",
        "files",
        "tmpdir",
        [node],
        tmp,
        spec=_nodes_with(node, env={"TMPDIR": "/scratch/nobody"}),
    )
    _add("tmp: TMPDIR of all is read-only", "files", "tmpdir", ALL, tmp, spec={"job.env": {"TMPDIR": "/proc"}})
    for size in ("1m", "30m"):
        node = _host()
        _add(
            f"shm: {size}",
            "files",
            "shm",
            [node],
            r"shm-size|remount|ipc=host",
            (node, f"mount -t tmpfs -o size={size} none /dev/shm"),
        )
    for size in (200, 600):
        node = _host()
        _add(f"shm: {size} MB, full", "files", "shm", [node], r"\brm\b|remove|delete|left|owner|fuser",
             (node, f"mount -t tmpfs -o size={size}m none /dev/shm; head -c {size}m /dev/zero >/dev/shm/nccl-Xa83 || true"))  # fmt: skip
    node = _host()
    _add("shm: read-only", "files", "shm", [node], r"mount", (node, "mount -t tmpfs -o size=5g,ro none /dev/shm"))
    for variable in (
        "HF_HOME",
        "TORCH_HOME",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "XDG_CACHE_HOME",
        "HF_DATASETS_CACHE",
        "WANDB_DIR",
        "TORCH_EXTENSIONS_DIR",
    ):
        node = _host()
        everyone = variable in ("TRITON_CACHE_DIR", "WANDB_DIR")
        spec = {"job.env": {variable: "/proc/cache"}} if everyone else _nodes_with(node, env={variable: "/sys/cache"})
        _add(
            f"cache: {variable} cannot be written to",
            "files",
            "cache",
            ALL if everyone else [node],
            variable,
            spec=spec,
            fatal=False,
        )
    for variable, value in (
        ("NCCL_TOPO_FILE", "/etc/nccl/topo.xml"),
        ("SSL_CERT_FILE", "/nowhere/ca.pem"),
        ("NCCL_CONF_FILE", "/nowhere/nccl.conf"),
        ("LD_PRELOAD", "/nowhere/libfoo.so"),
    ):
        node = _host()
        _add(f"file: {variable} names one that is not there", "files", "cache file-variable env-differs", [node], variable,
             spec=_nodes_with(node, env={variable: value}), fatal=False)  # fmt: skip
    node = _host()
    _add("file: NCCL_DEBUG_FILE in a folder that is not there", "files", "cache file-variable env-differs", [node], "NCCL_DEBUG_FILE",
         spec=_nodes_with(node, env={"NCCL_DEBUG_FILE": "/nowhere/log.%h"}), fatal=False)  # fmt: skip


# -- Python ------------------------------------------------------------------------------------------------------------------


def _python() -> None:
    for variable, value in (
        ("PYTHONHOME", "/nowhere"),
        ("PYTHONIOENCODING", "utf-99"),
        ("PYTHONHASHSEED", "abc"),
        ("PYTHONMALLOC", "fast"),
        ("PYTHONUTF8", "2"),
    ):
        node = _host()
        _add(
            f"python: {variable} on one node",
            "python",
            "python-environment",
            [node],
            variable,
            spec=_nodes_with(node, env={variable: value}),
        )
        if variable in ("PYTHONHOME", "PYTHONHASHSEED"):
            _add(
                f"python: {variable} for all",
                "python",
                "python-environment",
                ALL,
                variable,
                spec={"job.env": {variable: value}},
            )
    for name, fatal in (
        ("random", True),
        ("torch", True),
        ("types", True),
        ("socket", True),
        ("numpy", True),
        ("queue", True),
        ("statistics", False),
        ("logging", True),
    ):
        _add(f"python: {name}.py beside the script", "python", "shadowing", ALL, rf"(rename|move|mv).*{name}|{name}.*(rename|move)",
             files={f"{name}.py": "SETTINGS = {'lr': 0.1}\n"}, fatal=fatal)  # fmt: skip
    node = _host()
    broken = "mkdir -p /tmp/stub/torch; printf '%s\\n' \"{}\" >/tmp/stub/torch/__init__.py"
    _add("python: torch on PYTHONPATH is another one", "python", "torch shadowing", [node], r"PYTHONPATH|pip install",
         (node, broken.format("__version__ = '1.13.1'") + "; echo \"__version__ = '1.13.1'\" >/tmp/stub/torch/version.py"), spec=_nodes_with(node, env={"PYTHONPATH": "/tmp/stub"}))  # fmt: skip
    node = _host()
    _add("python: torch cannot load its libraries", "python", "torch collective", [node], r"install|LD_LIBRARY_PATH|import torch",
         (node, broken.format("raise ImportError('libcudart.so.12: cannot open shared object file')")), spec=_nodes_with(node, env={"PYTHONPATH": "/tmp/stub"}))  # fmt: skip
    node = _host()
    _add("python: a module of the standard library on PYTHONPATH", "python", "shadowing", [node], r"PYTHONPATH|rename|move",
         (node, "mkdir -p /tmp/stub; echo 'x = 1' >/tmp/stub/random.py"), spec=_nodes_with(node, env={"PYTHONPATH": "/tmp/stub"}))  # fmt: skip
    node = _host()
    _add("python: sitecustomize exits", "python", "python-environment", [node], r"sitecustomize|PYTHONPATH",
         (node, "mkdir -p /tmp/stub; echo 'raise SystemExit(7)' >/tmp/stub/sitecustomize.py"), spec=_nodes_with(node, env={"PYTHONPATH": "/tmp/stub"}))  # fmt: skip
    wrap = "mkdir -p /tmp/w; printf '#!/bin/sh\\n%s\\n' '{}' >/tmp/w/python3; chmod 755 /tmp/w/python3"

    def wrapped(name: str, checks: str, fix: str, body: str, *, fatal: bool = True, mode: str = "") -> None:
        node = _host()
        _add(
            name,
            "python",
            checks,
            [node],
            fix,
            (node, wrap.format(body) + mode),
            spec=_nodes_with(node, python="/tmp/w/python3"),
            fatal=fatal,
        )

    wrapped(
        "python: no torch",
        "torch",
        r"install",
        'if [ "$1" = -I ]; then exec $PY "$@"; else exec $PY -S "$@"; fi'.replace("$PY", "@PYTHON@"),
    )
    wrapped(
        "python: prints before it starts",
        "shell-output",
        r"print|output|start-up",
        'echo loading modules; exec @PYTHON@ "$@"',
    )
    wrapped("python: hangs", "reach python", r".", "exec sleep 300")
    wrapped("python: ends at once", "python", r".", "exit 3")
    wrapped(
        "python: may not be run",
        "python",
        r"cluster\.python|install|chmod",
        "exit 0",
        mode="; chmod 644 /tmp/w/python3",
    )
    wrapped("python: an old one", "python", r"3\.8", 'echo "SyntaxError: invalid syntax" >&2; exit 1')
    node = _host()
    _add(
        "python: not at its path",
        "python",
        "python",
        [node],
        r"cluster\.python|install",
        spec=_nodes_with(node, python="/opt/conda/bin/python9"),
    )
    for shift in (5, -40, 4000):
        node = _host()
        text = f"import time; real = time.time; time.time = lambda: real() + {shift}"
        body = 'case "$1" in -I) shift 3; exec @PYTHON@ -I -S -c "import sys;sys.path.insert(0,\\"/tmp/w\\");import late;exec(sys.argv.pop(1))" "$@";; *) exec @PYTHON@ "$@";; esac'
        _add(f"clock: {shift:+d} s", "limits", "clock", [node], r"ntp|chrony",
             (node, wrap.format(body) + f"; echo '{text}' >/tmp/w/late.py"), spec=_nodes_with(node, python="/tmp/w/python3"), fatal=abs(shift) > 300)  # fmt: skip


# -- the way in ----------------------------------------------------------------------------------------------------------------


def _way_in() -> None:
    start = r"\.bashrc|start-up|interactive"
    for word, text, checks, fatal in (
        ("prints", "echo Welcome to the cluster", "shell-output", True),
        ("exits with 1", "exit 1", "shell-output start-up python", True),
        ("exits with 0", "exit 0", "shell-output start-up python", True),
        ("sleeps for a minute", "sleep 60", "reach start-up slow-login", True),
        ("sleeps for 5 s", "sleep 5", "slow-login", False),
        ("becomes a shell that is not there", "exec /usr/bin/fish-nowhere", "shell-output start-up python", True),
        ("waits for an answer", "read -r answer; [ $answer = yes ] || exit", "start-up reach shell-output", True),
        ("exports PYTHONHOME", "export PYTHONHOME=/nowhere", "python-environment", True),
        ("exports NCCL_P2P_DISABLE", "export NCCL_P2P_DISABLE=1", "env-differs", True),
        ("exports GLOO_SOCKET_IFNAME=lo", "export GLOO_SOCKET_IFNAME=lo", "env-differs interface", True),
        ("limits open files", "ulimit -n 100", "nofile", True),
        ("prints at the end", "trap 'echo Goodbye' EXIT", "shell-output", False),
    ):
        node = _host()
        fix = {"python-environment": "PYTHONHOME", "nofile": "ulimit -n|nofile"}.get(
            checks, start if "env" not in checks else r"unset|GLOO|NCCL|alike"
        )
        _add(
            f"start-up file: {word}",
            "way in",
            checks,
            [node],
            fix,
            (node, f'rc "{text}"' if "'" in text else f"rc '{text}'"),
            fatal=fatal,
        )
    for word, line, checks, fix in (
        (
            "a forced command",
            "ForceCommand echo this account is restricted",
            "login shell-output start-up",
            r"ForceCommand|command=|forced",
        ),
        ("a forced shell script", "ForceCommand sleep 100", "login reach start-up", r"."),
        ("sessions are not allowed", "MaxSessions 0", "login reach", r"MaxSessions|sshd"),
        ("no keys are read", "AuthorizedKeysFile none", "login", r"key|authorized"),
        ("the user is not among those allowed", "AllowUsers nobody", "login", r"AllowUsers|login|sshd|authorized"),
        (
            "an old key exchange alone",
            "KexAlgorithms diffie-hellman-group1-sha1",
            "reach login",
            r"[Kk]ex|key exchange|algorithm|sshd",
        ),
        ("root may not log in", "PermitRootLogin no", "login", r"login|PermitRootLogin|key|user"),
    ):
        node = _host()
        _add(f"sshd: {word}", "way in", checks, [node], fix, (node, f"conf '{line}'"))
    for shell, checks in (
        ("/usr/sbin/nologin", "login shell-output start-up"),
        ("/bin/false", "login python start-up"),
        ("/nowhere/zsh", "login"),
    ):
        node = _host()
        _add(
            f"sshd: the shell is {shell}",
            "way in",
            checks,
            [node],
            r"shell|chsh|usermod|nologin",
            (node, f"shell_of {shell}"),
        )
    node = _host()
    _add("sshd: dead", "way in", "reach", [node], r"ssh", (node, "kill $(pgrep -x sshd)"))
    node = _host()
    _add("sshd: frozen", "way in", "reach", [node], r".", (node, "kill -STOP $(pgrep -x sshd)"))
    for verdict in ("DROP", "REJECT --reject-with tcp-reset"):
        node = _host()
        _add(
            f"sshd: port 22 {verdict.split()[0]}",
            "way in",
            "reach",
            [node],
            r".",
            (node, f"iptables -A INPUT -p tcp --dport 22 -j {verdict}"),
        )
    node = _host()
    _add("sshd: another host key", "way in", "host-key", [node], r"known_hosts|ssh-keygen|ssh-keyscan",
         (node, "ssh-keygen -q -t ed25519 -N '' -f /tmp/key; conf 'HostKey /tmp/key'"))  # fmt: skip


# -- times --------------------------------------------------------------------------------------------------------------------


def _times() -> None:
    for words, when in (("asking", "while nodes are asked"), ("testing every pair", "while pairs are tested"), ("round 1", "in the first round"),
                        ("round 3", "in the last round"), ("adding up", "while numbers are added up")):  # fmt: skip
        for what in ("kill", "freeze") if words in ("round 1", "adding up") else ("kill",):
            node = _host()
            _add(f"time: {what} {when}", "times", "reach", [node], r".", during=((words, node, what),))
    for seconds in (1, 60):
        node = _host()
        _add(
            f"time: the cable is pulled after {seconds / 10:g} s",
            "times",
            "reach",
            [node],
            r".",
            during=(("asking" if seconds == 1 else "round 2", node, "cut"),),
        )
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}
    for left, fatal in ((30, True), (400, False)):
        _add(f"time: a job that ends in {left} s", "times", "time-left", ["node1"], r"--time|requeue",
             environ={**inside, "SLURM_JOB_END_TIME": f"+{left}"}, fatal=fatal)  # fmt: skip
    _add(
        "time: fewer nodes than the spec",
        "times",
        "tasks",
        ["node1"],
        r"--nodes",
        environ={**inside, "SLURM_JOB_NUM_NODES": "2"},
    )
    _add("time: several tasks a node", "times", "tasks", ["node1"], r"ntasks-per-node", environ={**inside, "SLURM_NTASKS_PER_NODE": "4"},
         spec={"job.kind": "torchrun"}, fatal=False)  # fmt: skip


# -- variables ------------------------------------------------------------------------------------------------------------------


def _variables() -> None:
    for variable, value in (
        ("NCCL_BUFFSIZE", "8388608"),
        ("NCCL_PROTO", "Simple"),
        ("NCCL_NTHREADS", "256"),
        ("NCCL_MIN_CTAS", "4"),
        ("NCCL_IB_TC", "106"),
    ):
        node = _host()
        _add(
            f"variables: {variable} on one node",
            "variables",
            "env-differs",
            [node],
            variable,
            spec=_nodes_with(node, env={variable: value}),
        )
    for variable, value, checks, fix in (
        ("NCCL_SOKET_IFNAME", "eth0", "env-unknown", "NCCL_SOCKET_IFNAME"),
        ("NCCL_DEBUG", "VERBOSE", "env-unknown", "INFO|WARN"),
        ("NCCL_ALGO", "Ring", "env-dangerous", "unset"),
        ("NCCL_LL_THRESHOLD", "0", "env-dead", "unset"),
        ("OMP_NUM_THREADS", "abc", "env-unknown python-environment cpus", "OMP_NUM_THREADS"),
        ("OMP_NUM_THREADS", "0", "env-unknown python-environment cpus", "OMP_NUM_THREADS"),
    ):
        _add(
            f"variables: {variable}={value}",
            "variables",
            checks,
            ALL,
            fix,
            spec={"job.env": {variable: value}},
            fatal=False,
        )


def _harmless() -> Iterator[Fault]:
    def one(name: str, *do: tuple[str, str], **more: Any) -> Fault:
        return Fault(name=f"harmless: {name}", layer="harmless", do=do, **more)

    yield one("Docker's bridge on every node", *((node, BRIDGE) for node in NODES))
    yield one("a network for storage", *((node, STORAGE) for node in NODES))
    yield one("no ICMP", *((node, "iptables -A INPUT -p icmp -j DROP") for node in NODES))
    yield one("no UDP", *((node, "iptables -A INPUT -i eth0 -p udp -j DROP") for node in NODES))
    yield one("a smaller MTU everywhere", *((node, "ip link set eth0 mtu 1400") for node in NODES))
    yield one("a start-up file that is silent", *((node, "rc 'export EDITOR=vi; umask 022'") for node in NODES))
    yield one("a message on standard error", ("node2", "rc 'echo stty: not a terminal >&2'"))
    yield one("a banner of sshd", ("node3", "echo Welcome >/tmp/banner; conf 'Banner /tmp/banner'"))
    yield one("the job's own modules", files={"model.py": "x = 1\n", "utils.py": "x = 1\n", "data/__init__.py": "\n"})
    yield one("interface named", spec={"network.interface": "eth0"})
    yield one("rendezvous address named", spec={"network.rendezvous_address": "{node1}"})
    yield one("two slots", spec={"cluster.slots": 2})
    yield one(
        "caches that are not there yet", spec={"job.env": {"HF_HOME": "/tmp/hf/new", "TRITON_CACHE_DIR": "/tmp/tr"}}
    )
    yield one(
        "verbose",
        spec={"job.env": {"NCCL_DEBUG": "INFO", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PYTHONFAULTHANDLER": "1"}},
    )
    yield one("a firewall that lets the nodes in", *((node, "for p in $P1 $P2 $P3; do iptables -A INPUT -s $p -j ACCEPT; done; iptables -A INPUT -i lo -j ACCEPT; iptables -A INPUT -p tcp --dport 22 -j ACCEPT; iptables -A INPUT -j DROP") for node in NODES))  # fmt: skip


for _make in (_ports, _streams, _addresses, _plan, _limits, _python, _way_in, _times, _variables):
    _make()
FAULTS = tuple(_found)
HARMLESS = tuple(_harmless())


def _pairs(wanted: int) -> Iterator[Fault]:
    """Two faults on different hosts, of different layers, both of the same half; as many of each half as there are."""
    for held in (False, True):
        able = [
            one
            for one in sorted(FAULTS, key=lambda fault: fault.order)
            if one.is_held is held
            and len(one.do) == 1
            and not one.spec
            and not one.expected[0].pair
            and one.layer != "way in"
        ]
        found = 0
        for first, second in itertools.combinations(able, 2):
            hosts = {first.do[0][0], second.do[0][0]}
            name = f"pair: {first.name} + {second.name}"
            if (
                len(hosts) == 2
                and first.layer != second.layer
                and hashlib.sha256(name.encode()).digest()[1] % 4 == 0
                and found < wanted // 2
            ):
                found += 1
                yield Fault(
                    name=name, layer="pairs", do=(*first.do, *second.do), expected=(*first.expected, *second.expected)
                )


PAIRS = tuple(_pairs(56))


def of_half(held: bool) -> list[Fault]:
    """Single faults and pairs of one half, in the order from whose front a sample is taken."""
    # A pair is in the half of its faults.
    names = {fault.name for fault in FAULTS if fault.is_held is held}
    pairs = [fault for fault in PAIRS if fault.name.removeprefix("pair: ").partition(" + ")[0] in names]
    return sorted([*(fault for fault in FAULTS if fault.name in names), *pairs], key=lambda fault: fault.order)
