"""What is set on a node becomes evidence of what was measured there, with the command that changes it."""

from __future__ import annotations

from typing import Any

import pytest

from dtctl.doctor.checks.network_settings import explain_by_settings
from dtctl.doctor.findings import Finding
from dtctl.supervisor.probe import settings as probe_settings

BUFFERS = {"net.ipv4.tcp_rmem": "4096 131072 6291456", "net.ipv4.tcp_wmem": "4096 16384 4194304"}


def explain(check: str, *, nodes: tuple[str, ...] = ("n1",), **found: Any) -> Finding:
    settings = {"sysctls": BUFFERS, "filters": [], "unread": "", "queues": [], "routes": [], **found}
    finding = Finding(check=check, status="fail", nodes=nodes, peers=("n2",), fix="look at the cable")
    return explain_by_settings(finding, {"n1": settings})


def test_nothing_that_stands_out_changes_nothing() -> None:
    assert explain("bandwidth") == Finding(
        check="bandwidth", status="fail", nodes=("n1",), peers=("n2",), fix="look at the cable"
    )


@pytest.mark.parametrize("name", ["net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"])
def test_small_buffers_explain_a_slow_link(name: str) -> None:
    told = explain("bandwidth", sysctls={**BUFFERS, name: "4096 4096 4096"})
    assert told.evidence == (f"n1 has {name} = 4096 4096 4096, at most 4 KiB for a connection",)
    assert told.fix.startswith(f"on n1: sudo sysctl -w {name}='4096 ")
    assert told.fix.endswith("else look at the cable")
    assert explain("data-ports", sysctls={**BUFFERS, name: "4096 4096 4096"}).evidence == ()


@pytest.mark.parametrize(
    ("check", "line", "fix"),
    [
        ("packet-loss", "-A INPUT -i eth0 -m statistic --mode nth --every 30 -j DROP", "-D INPUT -i eth0 -m statistic"),
        ("data-ports", "-A INPUT -p tcp --dport 40000:50000 -j DROP", "iptables -D INPUT -p tcp --dport"),
        ("data-ports", ":INPUT DROP [0:0]", "remove that rule"),
        ("data-ports", ":INPUT DROP", "iptables -P INPUT ACCEPT"),
        ("nat", "-A PREROUTING -p tcp -j DNAT --to-destination 10.0.0.1", "iptables -t nat -D PREROUTING"),
        ("data-ports", "ct count over 8 drop", "nft delete rule"),
    ],
)
def test_a_filter_is_named_with_the_command_that_removes_it(check: str, line: str, fix: str) -> None:
    told = explain(check, filters=[line])
    assert told.evidence == (f"n1 has a packet filter: {line}",)
    assert fix in told.fix


def test_only_filters_that_count_explain_a_slow_link() -> None:
    assert explain("bandwidth", filters=["-A INPUT -p tcp --dport 9 -j DROP"]).evidence == ()
    assert explain("bandwidth", filters=["-A INPUT -m limit --limit 90/sec -j ACCEPT"]).evidence


def test_a_queue_and_a_route() -> None:
    told = explain("bandwidth", queues=["qdisc tbf 8001: dev eth0 root refcnt 2 rate 10Mbit"])
    assert told.fix.startswith("on n1: sudo tc qdisc del dev eth0 root")
    told = explain("data-ports", routes=["50: from all to 10.0.0.2 blackhole"])
    assert "ip rule del from all to 10.0.0.2 blackhole" in told.fix
    assert "ip route del blackhole 10.0.0.2" in explain("data-ports", routes=["blackhole 10.0.0.2"]).fix


def test_a_full_table_of_connections() -> None:
    sysctls = {"net.netfilter.nf_conntrack_max": "100", "net.netfilter.nf_conntrack_count": "99"}
    assert "nf_conntrack_max=262144" in explain("data-ports", sysctls=sysctls).fix
    assert explain("data-ports", sysctls={**sysctls, "net.netfilter.nf_conntrack_count": "9"}).evidence == ()


@pytest.mark.parametrize("text", ["-A INPUT; reboot -j DROP", "-A INPUT `id` -j DROP", "-A INPUT | sh -j DROP"])
def test_a_text_of_a_node_becomes_no_command(text: str) -> None:
    told = explain("data-ports", filters=[text], routes=[text.replace("-A", "blackhole")])
    assert text[3:] not in told.fix
    assert text in told.evidence[0], "it is shown as what it is"


def test_what_could_not_be_read_is_said() -> None:
    told = explain("data-ports", unread="sudo: a password is required")
    assert told.evidence == ("n1: its packet filters were not read (sudo: a password is required)",)
    assert told.fix == "look at the cable"


def test_other_findings_stay_as_they_are() -> None:
    assert explain("disk", filters=["-A INPUT -j DROP"]).evidence == ()


def test_this_machine_can_be_read() -> None:
    found = probe_settings.read_network_settings()
    assert found["sysctls"]["net.ipv4.tcp_rmem"].split()[-1].isdecimal()
    assert isinstance(found["unread"], str)
    assert all(isinstance(line, str) for name in ("filters", "queues", "routes") for line in found[name])
