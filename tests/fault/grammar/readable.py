# ruff: noqa: E501 - a fault is a line or two, as they are typed
"""Third collection: faults whose cause can be read on the node, and clusters that look odd and train.

A usable fix names the setting that was read: the rule, the buffer, the queue, the route, the limit, the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.fault.grammar.fault import NODES, Collection, Fault, address_of, nodes_with

_OTHERS = "-i eth0 -p tcp ! --dport 22"
_LOSES = "packet-loss bandwidth stream data-ports latency"


def add(made: Collection) -> None:
    _buffers_and_queues(made)
    _filters(made)
    _limits(made)
    _files(made)


def _buffers_and_queues(made: Collection) -> None:
    for name in ("rmem", "wmem"):
        node = made.host()
        made.add(f"read: tcp_{name} of 16 KiB", "buffers", "bandwidth", [node], rf"tcp_{name}",
                 (node, f"echo '4096 8192 16384' >/proc/sys/net/ipv4/tcp_{name}"), fatal=False)  # fmt: skip
    node = made.host()
    made.add("read: both buffers of 4 KiB", "buffers", "bandwidth latency", [node], r"tcp_rmem.*tcp_wmem|tcp_wmem.*tcp_rmem",
             (node, "for b in rmem wmem; do echo '4096 4096 4096' >/proc/sys/net/ipv4/tcp_$b; done"), fatal=False)  # fmt: skip
    for word, queue, checks in (
        ("of 5 Mbit/s", "tbf rate 5mbit burst 10kb latency 50ms", "bandwidth"),
        ("of 1 Mbit/s", "tbf rate 1mbit burst 10kb latency 50ms", "bandwidth"),
        ("of 40 Mbit/s", "tbf rate 40mbit burst 20kb latency 20ms", "bandwidth"),
    ):
        node = made.host()
        made.add(f"read: a queue {word}", "queues", checks, [node], r"tc qdisc del dev eth0",
                 (node, f"tc qdisc replace dev eth0 root {queue}"), fatal=False)  # fmt: skip


def _filters(made: Collection) -> None:
    for word, rules, checks, fix, fatal in (
        ("40 packets a second", f"iptables -A INPUT {_OTHERS} -m limit --limit 40/sec --limit-burst 40 -j ACCEPT; iptables -A INPUT {_OTHERS} -j DROP",
         _LOSES, r"-m limit", False),
        ("200 kB a second", f"iptables -A INPUT {_OTHERS} -m hashlimit --hashlimit-above 200kb/s --hashlimit-mode srcip --hashlimit-name bw -j DROP",
         "bandwidth stream", r"hashlimit", False),
        ("two connections of a peer", f"iptables -A INPUT {_OTHERS} --syn -m connlimit --connlimit-above 1 -j REJECT --reject-with tcp-reset",
         "data-ports rendezvous-port", r"connlimit", True),
        ("2 MB of all", f"iptables -A INPUT {_OTHERS} -m quota --quota 2000000 -j ACCEPT; iptables -A INPUT {_OTHERS} -j DROP",
         "stream data-ports rendezvous-port packet-loss", r"quota", True),
        ("every tenth packet lost, outbound", "iptables -A OUTPUT -o eth0 -p udp -m statistic --mode random --probability 0.1 -j DROP",
         "packet-loss", r"statistic", False),
        ("port 22 only", "iptables -A INPUT -i lo -j ACCEPT; iptables -A INPUT -m state --state ESTABLISHED,RELATED -j ACCEPT; "
         "iptables -A INPUT -p tcp --dport 22 -j ACCEPT; iptables -P INPUT DROP", "data-ports rendezvous-port", r"-P INPUT ACCEPT|let TCP", True),
    ):  # fmt: skip
        node = made.host()
        made.add(f"read: a filter, {word}", "filters", checks, [node], fix, (node, rules), fatal=fatal)
    one, other = made.two()
    made.add("read: a filter, one peer by address", "filters", "data-ports", [one, other], r"-D INPUT -s|iptables",
             (one, f"iptables -A INPUT -s {address_of(other)} -p tcp -j DROP"), pair=True)  # fmt: skip
    one, other = made.two()
    made.add("read: a route that leads nowhere", "routes", "data-ports interface", [one, other], r"blackhole",
             (one, f"ip route add blackhole {address_of(other)}/32"), pair=True)  # fmt: skip
    one, other = made.two()
    made.add("read: a rule that prohibits a peer", "routes", "data-ports interface", [one, other], r"prohibit",
             (one, f"ip rule add pref 70 to {address_of(other)}/32 prohibit"), pair=True)  # fmt: skip


def _limits(made: Collection) -> None:
    for word, option, checks, fix in (
        ("32 open files", "--nofile=32:32", "nofile python reach start-up", r"ulimit -n|nofile|LimitNOFILE"),
        ("2 s of processor time", "--cpu=2:2", "limits python", r"ulimit -t|LimitCPU|\bcpu\b"),
        (
            "900 MB of addresses",
            "--as=900000000",
            "limits python-environment torch memory",
            r"ulimit -v|LimitAS|address",
        ),
        ("files of 64 KiB", "--fsize=65536", "limits", r"ulimit -f|fsize|LimitFSIZE"),
    ):
        node = made.host()
        made.add(
            f"read: a limit, {word}", "limits", checks, [node], fix, (node, f"limit {option}"), fatal=word != "2 s of processor time"
        )  # fmt: skip
    node = made.host()
    made.add("read: a group of 150 MB", "limits", "memory", [node], r"MemoryMax|--mem|memory limit|memory\.limit|memory\.max",
             (node, "group memory memory.limit_in_bytes 150M"))  # fmt: skip
    node = made.host()
    made.add("read: a group of 12 processes", "limits", "processes", [node], r"TasksMax|pids\.max|pids",
             (node, "group pids pids.max 12"))  # fmt: skip


def _files(made: Collection) -> None:
    for word, checks, fix, script, keys in (
        ("the workdir", "workdir", r"file|folder", "rm -rf /tmp/work; : >/tmp/work", {"workdir": "/tmp/work"}),
        ("above the workdir", "workdir", r"file|folder", "rm -rf /tmp/up; : >/tmp/up", {"workdir": "/tmp/up/a/b"}),
        ("TMPDIR", "tmpdir", r"TMPDIR", ": >/tmp/tmpfile", {"env": {"TMPDIR": "/tmp/tmpfile"}}),
        ("HF_HOME", "cache file-variable", r"HF_HOME", ": >/tmp/hub", {"env": {"HF_HOME": "/tmp/hub"}}),
        ("above NCCL_DEBUG_FILE", "file-variable cache", r"NCCL_DEBUG_FILE", ": >/tmp/logs", {"env": {"NCCL_DEBUG_FILE": "/tmp/logs/nccl.%h"}}),
    ):  # fmt: skip
        node = made.host()
        made.add(f"read: a file in place of a folder, {word}", "files", checks, [node], fix, (node, script),
                 spec=nodes_with(node, **keys), fatal=word in ("the workdir", "above the workdir"))  # fmt: skip
    node = made.host()
    made.add("read: a workdir that is a link to nothing", "files", "workdir", [node], r"link|folder|mkdir|missing",
             (node, "rm -rf /tmp/lost; ln -s /tmp/nowhere/x /tmp/lost"), spec=nodes_with(node, workdir="/tmp/lost"))  # fmt: skip


def odd() -> Iterator[Fault]:
    """Yield clusters that look odd and train."""

    def one(name: str, *do: tuple[str, str], **more: Any) -> Fault:
        return Fault(name=f"odd: {name}", layer="odd", do=do, **more)

    yield one("a rule that logs some packets", ("node2", "iptables -A INPUT -m limit --limit 5/min -j ACCEPT"))
    yield one(
        "buffers of half a MiB", *((node, "echo '4096 131072 524288' >/proc/sys/net/ipv4/tcp_rmem") for node in NODES)
    )
    yield one("a port that nobody needs is closed", ("node3", "iptables -A INPUT -p tcp --dport 25 -j DROP"))
    yield one("a blackhole for another network", *((node, "ip route add blackhole 198.18.0.0/15") for node in NODES))
    yield one("another queue", ("node1", "tc qdisc replace dev eth0 root fq_codel"))
    yield one("2,048 open files", ("node2", "limit --nofile=2048:2048"))
    yield one("a group of 6 GB", ("node3", "group memory memory.limit_in_bytes 6G"))
    yield one("a workdir that is a link", ("node1", "mkdir -p /tmp/disk; ln -sfn /tmp/disk /tmp/link"),
              spec=nodes_with("node1", workdir="/tmp/link"))  # fmt: skip
    yield one("another time zone and language", spec={"job.env": {"TZ": "Asia/Tokyo", "LC_ALL": "C"}})
    yield one("a second address on the loopback, and an interface that is down",
              ("node2", "ip addr add 127.0.1.1/8 dev lo; ip link add dummy7 type dummy"))  # fmt: skip
