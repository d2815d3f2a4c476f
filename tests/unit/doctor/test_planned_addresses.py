"""What a launch will use on each node, logins that run nothing, and whom a way that fails is blamed on."""

from __future__ import annotations

from typing import Any

import pytest

from dtctl.doctor.checks import address_checks, network, node
from dtctl.doctor.findings import Finding, order_findings
from dtctl.doctor.node_report import LoginShell, NodeReport
from dtctl.doctor.planned_addresses import (
    NCCL,
    choose_data_address,
    find_named_interfaces,
    is_loopback,
    resolve_rendezvous_address,
)
from dtctl.errors import ConnectError, NodeError
from dtctl.spec.model import Spec
from dtctl.supervisor.frames import BrokenFrame

MAC = "02:00:00:00:00:0"


def interface(name: str, address: str, *, up: bool = True, mac: str = MAC + "1") -> dict[str, Any]:
    return {"name": name, "address": address, "up": up, "mtu": 1500, "mbit_s": 0, "mac": mac}


def cluster(count: int = 3) -> list[NodeReport]:
    """Nodes with a loopback interface, a network card, and the bridge that Docker leaves everywhere."""
    seen = []
    for number in range(1, count + 1):
        address = f"10.0.0.{number}"
        rows = [
            interface("lo", "127.0.0.1"),
            interface("eth0", address, mac=f"{MAC}{number}"),
            interface("docker0", "172.17.0.1"),
        ]
        facts = {
            "hostname": f"node{number}",
            "interfaces": rows,
            "addresses": ["127.0.0.1", address, "172.17.0.1"],
            "ways": {f"10.0.0.{other}": "eth0" for other in range(1, count + 1)},
            "looked_up": {},
            "neighbours": {},
            "ports": [32768, 60999],
        }
        one = NodeReport(name=f"node{number}", address=address, facts=facts)
        one.data_address = one.meeting = address
        seen.append(one)
    return seen


def spec(**changed: Any) -> Spec:
    return Spec.model_validate({"cluster": {"transport": "ssh", "nodes": ["node1", "node2", "node3"]}, **changed})


def judged(seen: list[NodeReport], of: Spec, envs: dict[str, dict[str, str]] | None = None) -> list[Finding]:
    named = {one.name: find_named_interfaces(one, of, (envs or {}).get(one.name, {})) for one in seen}
    for one in seen:
        one.data_address = choose_data_address(one, named[one.name])
    return list(address_checks.check_named_interfaces(seen, named))


def test_nothing_is_said_of_what_dtctl_chooses_itself() -> None:
    assert judged(cluster(), spec()) == []
    assert judged(cluster(), spec(network={"interface": "eth0"})) == []


@pytest.mark.parametrize(
    ("name", "said"), [("lo", "127.0.0.1"), ("docker0", "172.17.0.1 on node2, node3"), ("ib0", "no such interface")]
)
def test_an_interface_by_which_nobody_meets(name: str, said: str) -> None:
    (found,) = judged(cluster(), spec(network={"interface": name}))
    assert (found.check, found.nodes) == ("interface", ("node1", "node2", "node3"))
    assert said in found.summary
    assert "network.interface: auto" in found.fix
    assert "eth0" in found.fix


def test_a_variable_of_one_node_wins_over_the_spec_and_is_named() -> None:
    (found,) = judged(cluster(), spec(network={"interface": "eth0"}), {"node2": {NCCL: "^eth"}})
    assert found.nodes == ("node2",)
    assert "NCCL_SOCKET_IFNAME=^eth" in found.summary
    assert "NCCL_SOCKET_IFNAME" in found.fix


def test_an_interface_that_the_others_do_not_reach_is_told_from_a_node_that_they_do_not() -> None:
    seen = cluster()
    seen[1].facts["interfaces"].append(interface("st0", "192.168.5.2"))
    for one in (seen[0], seen[2]):
        one.answers = [
            {"node": "node2", "port": 40000, "kind": "data-0", "result": "dropped"},
            {"node": "node2", "port": 40000, "kind": "reached", "result": "ok"},
        ]
    of = spec(network={"interface": {"node1": "eth0", "node2": "st0", "node3": "eth0"}})
    (found,) = judged(seen, of)
    assert found.nodes == ("node2",)
    assert "192.168.5.2 (st0)" in found.summary
    blamed = list(network.check_node_pairs(seen, rendezvous=(), fixed=False, explained=found.nodes))
    assert blamed == [], "that nobody reaches it there needs no other cause"
    for one in (seen[0], seen[2]):
        one.answers[1]["result"] = "dropped"
    assert judged(seen, of) == []
    assert [one.check for one in network.check_node_pairs(seen, rendezvous=(), fixed=False)] == ["data-ports"]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1", "loopback"),
        ("::1", "loopback"),
        ("10.0.0.9", "not an address of node1"),
        ("10.0.0.2", "but of node2"),
        ("172.17.0.1", "node2, node3, too"),
        ("head", "cannot be resolved on node1, node2, node3"),
    ],
)
def test_a_rendezvous_address_that_is_not_the_head_nodes(address: str, said: str) -> None:
    seen, of = cluster(), spec(network={"rendezvous_address": address})
    for one in seen:
        one.meeting = resolve_rendezvous_address(of, seen[0], one)
    (found,) = address_checks.check_rendezvous_address(seen, address)
    assert (found.check, found.nodes) == ("rendezvous-address", ("node1",))
    assert said in found.summary
    assert "10.0.0.1" in found.fix


def test_a_rendezvous_address_of_the_head_node_is_fine_by_name_too() -> None:
    seen = cluster()
    for one in seen:
        one.facts["looked_up"]["head"] = ["10.0.0.1"]
        one.meeting = resolve_rendezvous_address(spec(network={"rendezvous_address": "head"}), seen[0], one)
    assert list(address_checks.check_rendezvous_address(seen, "head")) == []
    assert list(address_checks.check_rendezvous_address(seen, None)) == []


def test_loopback_addresses_of_both_families_are_known() -> None:
    assert [is_loopback(one) for one in ("127.0.1.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "name")] == [True] * 3 + [
        False
    ] * 2


@pytest.mark.parametrize(
    ("shell", "error", "check"),
    [
        (LoginShell(answered=False), ConnectError("no answer within 18 s", node="a"), "start-up"),
        (LoginShell(answered=False, refused=True), ConnectError("opening a channel failed", node="a"), "login"),
        (LoginShell(answered=True, status=1), NodeError("exited with status 1", node="a"), "start-up"),
        (LoginShell(answered=True, other="This account is not available", status=1), NodeError("x", node="a"), "login"),
        (LoginShell(answered=True, has_run=True), ConnectError("no answer within 18 s", node="a"), "python"),
        (LoginShell(answered=True, has_run=True), NodeError("python3: not found", node="a"), "python"),
    ],
)
def test_what_a_plain_command_did_tells_what_keeps_programs_from_starting(
    shell: LoginShell, error: NodeError | ConnectError, check: str
) -> None:
    (found,) = node.check_reachability([NodeReport(name="a", error=error, shell=shell)])
    assert (found.check, found.nodes, found.status) == (check, ("a",), "fail")
    assert found.fix


def test_the_jump_host_that_does_not_answer_is_named() -> None:
    error = ConnectError("no answer", node="gpu1 (jump host bastion)")
    (found,) = node.check_reachability([NodeReport(name="gpu1", error=error)])
    assert (found.nodes, found.summary) == (("gpu1",), "gpu1 (jump host bastion): no answer")


def test_a_start_up_file_that_prints_is_quoted() -> None:
    error = NodeError("the node answered with output that is not dtctl's", node="a")
    error.__cause__ = BrokenFrame("not a frame")
    shell = LoginShell(answered=True, has_run=True, other="Welcome")
    (found,) = node.check_reachability([NodeReport(name="a", error=error, shell=shell)])
    assert (found.check, "Welcome" in found.summary, ".bashrc" in found.fix) == ("shell-output", True, True)


def test_a_login_is_slow_when_it_was_so_twice_and_the_others_are_not() -> None:
    def logins(*took_s: list[float]) -> list[Finding]:
        return list(node.check_reachability([NodeReport(name=f"n{i}", login_s=one) for i, one in enumerate(took_s)]))

    assert logins([0.3], [0.3], [6.0, 0.4]) == []
    assert logins([4.0, 4.0], [4.0, 4.0], [6.0, 5.0]) == []
    (found,) = logins([0.3], [0.3], [6.0, 5.0])
    assert (found.check, found.nodes, found.status) == ("slow-login", ("n2",), "warn")


def test_two_nodes_behind_one_hardware_address_are_named_by_what_this_machine_sees() -> None:
    seen = [NodeReport(name="a", target="10.0.0.1"), NodeReport(name="b", target="10.0.0.2")]
    seen[1].error = ConnectError("no answer", node="b")
    same = {"10.0.0.1": MAC + "1", "10.0.0.2": MAC + "1"}
    first = next(node.check_reachability(seen, same))
    assert (first.check, first.nodes) == ("duplicate-mac", ("a", "b"))
    other = {**same, "10.0.0.2": MAC + "2"}
    assert [one.check for one in node.check_reachability(seen, other)] == ["reach"]


def failing(seen: list[NodeReport], *ways: tuple[str, str]) -> list[NodeReport]:
    for one in seen:
        one.answers = [
            {"node": called, "port": 40000, "kind": "data-0", "result": "dropped", "said": "timed out"}
            for caller, called in ways
            if caller == one.name
        ]
    return seen


def test_a_fix_opens_what_is_closed_inbound_or_outbound_and_of_one_way_both() -> None:
    into = failing(cluster(), ("node1", "node2"), ("node3", "node2"))
    (found,) = network.check_node_pairs(into, rendezvous=(), fixed=False)
    assert found.nodes == ("node2",)
    assert "iptables -I INPUT -p tcp -s 10.0.0.1,10.0.0.3 --dport 32768:60999 -j ACCEPT" in found.fix
    assert "OUTPUT" not in found.fix
    (found,) = network.check_node_pairs(
        failing(cluster(), ("node2", "node1"), ("node2", "node3")), rendezvous=(), fixed=False
    )
    assert found.nodes == ("node2",)
    assert "iptables -I OUTPUT -p tcp -d 10.0.0.1,10.0.0.3" in found.fix
    assert "INPUT" not in found.fix
    (found,) = network.check_node_pairs(failing(cluster(), ("node1", "node3")), rendezvous=(), fixed=False)
    assert "on node3: let TCP 32768:60999 in from node1" in found.fix
    assert "on node1: let TCP 32768:60999 out to node3" in found.fix


def test_a_full_table_of_neighbours_is_told_instead_of_a_firewall() -> None:
    seen = failing(cluster(), ("node1", "node2"), ("node1", "node3"), ("node3", "node1"), ("node3", "node2"))
    seen[0].answers[0] |= {"result": "no-room"}
    full, closed = network.check_node_pairs(seen, rendezvous=(), fixed=False)
    assert (full.check, full.nodes, full.ways) == ("neighbour-table", ("node1",), (("node1", "node2"),))
    assert "gc_thresh3" in full.fix
    assert (closed.check, closed.ways) == ("data-ports", (("node3", "node2"),))
    seen[2].answers.pop()
    assert [one.check for one in network.check_node_pairs(seen, rendezvous=(), fixed=False)] == ["neighbour-table"]


def test_a_route_or_a_neighbour_that_leads_astray_is_told_instead_of_a_firewall() -> None:
    seen = failing(cluster(), ("node1", "node3"))
    seen[0].facts["ways"]["10.0.0.3"] = ""
    (found,) = network.check_node_pairs(seen, rendezvous=(), fixed=False)
    assert (found.nodes, "ip route get 10.0.0.3" in found.fix, "iptables" in found.fix) == (("node1",), True, False)
    seen[0].facts["ways"]["10.0.0.3"] = "tun0"
    (found,) = network.check_node_pairs(seen, rendezvous=(), fixed=False)
    assert "ip route del 10.0.0.3/32 dev tun0" in found.fix
    seen[0].facts["ways"]["10.0.0.3"] = "eth0"
    seen[0].facts["neighbours"] = {"10.0.0.3": MAC + "9"}
    (found,) = network.check_node_pairs(seen, rendezvous=(), fixed=False)
    assert "ip neigh del 10.0.0.3 dev eth0" in found.fix
    seen[0].facts["neighbours"] = {"10.0.0.3": MAC + "3"}
    (found,) = network.check_node_pairs(seen, rendezvous=(), fixed=False)
    assert "iptables" in found.fix


def test_a_node_that_cannot_call_itself_is_told() -> None:
    seen = failing(cluster(), ("node2", "node2"))
    (found,) = network.check_node_pairs(seen, rendezvous=(), fixed=False)
    assert (found.check, found.nodes, "-i lo" in found.fix) == ("data-ports", ("node2",), True)
    seen[1].facts["interfaces"][0]["up"] = False
    (found,) = network.check_node_pairs(seen, rendezvous=(), fixed=False)
    assert "ip link set lo up" in found.fix


def test_a_finding_follows_only_where_the_way_is_shared() -> None:
    ports = Finding(check="data-ports", status="fail", nodes=("b",), peers=("a",), ways=(("a", "b"),))
    there = Finding(check="bandwidth", status="warn", nodes=("a",), peers=("b",), ways=(("b", "a"),))
    elsewhere = Finding(check="latency", status="warn", nodes=("b",), peers=("c",), ways=(("c", "b"),))
    found = order_findings([elsewhere, ports, there], ran=[])
    assert {one.check: one.follows for one in found} == {"data-ports": "", "bandwidth": "data-ports", "latency": ""}
