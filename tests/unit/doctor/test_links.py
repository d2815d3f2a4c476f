"""Which way is slow, late or lossy, told from measurements; and who measures with whom."""

from __future__ import annotations

import socket
import time
from itertools import combinations, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtctl.doctor.checks import links, network
from dtctl.doctor.findings import Finding, order_findings
from dtctl.doctor.node_report import NodeReport
from dtctl.doctor.rounds import arrange_all_pairs, build_disjoint_rounds
from dtctl.supervisor.probe import pairs, quality


@given(st.integers(min_value=0, max_value=33))
def test_every_pair_meets_once_in_rounds_of_disjoint_pairs(count: int) -> None:
    names = [f"n{i}" for i in range(count)]
    every = arrange_all_pairs(names)
    assert len(every) == max(0, count - 1 + count % 2 if count > 1 else 0)
    for one in every:
        assert len({name for pair in one for name in pair}) == 2 * len(one)
    met = sorted(tuple(sorted(pair)) for one in every for pair in one)
    assert met == sorted(tuple(sorted(pair)) for pair in combinations(names, 2))


def test_ways_that_share_a_node_are_in_different_rounds() -> None:
    assert build_disjoint_rounds([("a", "b"), ("c", "d"), ("b", "a"), ("a", "c")]) == [
        [("a", "b"), ("c", "d")],
        [("b", "a")],
        [("a", "c")],
    ]


def cluster(names: str, **changed: list[dict[str, Any]]) -> list[NodeReport]:
    """Nodes whose ways carry 10 Gbit/s, apart from those that are named, such as ab=[...]."""
    well = {"mbit_s": 10_000.0, "rtt_ms": [0.1, 0.2], "sent": 500, "lost": 0}
    seen = {name: NodeReport(name=name) for name in names}
    for one, other in permutations(names, 2):
        seen[one].measured[other] = [{**well, **tried} for tried in changed.get(one + other, [{}])]
    return list(seen.values())


def found(seen: list[NodeReport]) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(one.check, one.status, one.nodes) for one in links.check_links(seen)]


def test_a_healthy_cluster_has_nothing_to_tell_and_nothing_to_repeat() -> None:
    for names in ("ab", "abc", "abcdefgh"):
        assert found(cluster(names)) == []
        assert links.choose_doubtful_links(cluster(names)) == []


@pytest.mark.parametrize("rate", [3000.0, 500.0, 5.0])
@pytest.mark.parametrize("names", ["abc", "abcd", "abcdefgh"])
def test_a_slow_node_is_named_of_three_nodes_too(names: str, rate: float) -> None:
    twice = [{"mbit_s": rate}] * 2
    ways = {one + other: twice for one, other in permutations(names, 2) if "b" in (one, other)}
    assert found(cluster(names, **ways)) == [("bandwidth", "warn", ("b",))]


BAD_WAYS = [({"mbit_s": 191.0}, "bandwidth"), ({"lost": 10}, "packet-loss"), ({"rtt_ms": [3.0, 9.0]}, "latency")]


@pytest.mark.parametrize("names", ["abc", "abcdefgh"])
@pytest.mark.parametrize("repeated", [("ab", "bc"), ("ba", "cb"), ("ab", "cb")])
@pytest.mark.parametrize(("tried", "check"), BAD_WAYS)
def test_whichever_of_its_ways_were_measured_again_the_node_with_most_bad_ways_is_named(
    names: str, repeated: tuple[str, str], tried: dict[str, Any], check: str
) -> None:
    bad = {one + other: [tried] for one, other in permutations(names, 2) if "b" in (one, other)}
    bad |= dict.fromkeys(repeated, [tried] * 4)
    assert [(one, nodes) for one, _, nodes in found(cluster(names, **bad))] == [(check, ("b",))]


@pytest.mark.parametrize("names", ["abc", "abcdefgh"])
@pytest.mark.parametrize("disturbed", ["ba", "ab", "bc"])
@pytest.mark.parametrize(("tried", "check"), BAD_WAYS)
def test_a_way_that_was_disturbed_once_accuses_no_machine_beside_a_bad_pair(
    names: str, disturbed: str, tried: dict[str, Any], check: str
) -> None:
    """The pair of a and c is bad both ways, and another way of a or c was measured while something else ran there."""
    bad = {"ac": [tried] * 2, "ca": [tried], disturbed: [tried]}
    ways = {*bad, "ac", "ca"}
    (one,) = links.check_links(cluster(names, **bad))
    assert (one.check, {*one.nodes, *one.peers}, len(one.ways)) == (check, {"a", "c"}, 2)
    again = links.choose_doubtful_links(cluster(names, **{way: [tried] for way in ways}))
    assert {"ac", "ca"} & {caller + called for caller, called in again}
    assert tuple(disturbed) in again, "a second measurement says whether it was disturbed"


def test_a_slow_way_is_named_once_it_was_slow_twice() -> None:
    assert links.choose_doubtful_links(cluster("abcd", ac=[{"mbit_s": 900.0}])) == [("a", "c")]
    assert found(cluster("abcd", ac=[{"mbit_s": 900.0}])) == []
    assert found(cluster("abcd", ac=[{"mbit_s": 900.0}, {"mbit_s": 9000.0}])) == []
    assert found(cluster("abcd", ac=[{"mbit_s": 900.0}, {"mbit_s": 950.0}])) == [("bandwidth", "warn", ("c",))]


def test_a_way_that_is_no_slower_than_its_ends_are_to_themselves_is_not_slow() -> None:
    """A loaded machine carries less on every way, also on the one that has no cable in it."""
    seen = cluster("abc", ac=[{"mbit_s": 3500.0}] * 4, ab=[{"rtt_ms": [3.0, 9.0]}] * 4, bc=[{"lost": 5}] * 4)
    assert {one.check for one in links.check_links(seen)} == {"bandwidth", "latency", "packet-loss"}
    for node in seen:
        node.own = [{"mbit_s": 12_000.0, "rtt_ms": [0.1, 0.2], "sent": 500, "lost": 0}]
    assert {one.check for one in links.check_links(seen)} == {"bandwidth", "latency", "packet-loss"}
    for node in seen:
        node.own.append({"mbit_s": 4000.0, "rtt_ms": [2.0, 5.0], "sent": 500, "lost": 4})
        node.own.append({"mbit_s": 4100.0, "rtt_ms": [2.0, 5.0], "sent": 500, "lost": 4})
    assert found(seen) == []


def test_a_stream_that_breaks_off_every_time_is_told_and_not_called_slow() -> None:
    stalled = {"mbit_s": 80.0, "carried": 8_000_000, "broken": "stalled"}
    assert links.choose_doubtful_links(cluster("abc", ab=[stalled])) == [("a", "b")]
    assert found(cluster("abc", ab=[stalled, {}, stalled])) == [], "once it did not"
    assert found(cluster("abc", ab=[stalled] * 3)) == [("stream", "fail", ("b",))]
    (both,) = links.check_links(cluster("abc", ab=[stalled] * 3, cb=[stalled] * 3))
    assert both.nodes == ("b",)
    assert "inbound" in both.fix
    assert "8.0 MB" in both.summary
    lossy = {**stalled, "lost": 40}
    assert "stream" not in {one.check for one in links.check_links(cluster("abc", ab=[lossy] * 4))}


def test_packets_that_arrive_twice_are_told() -> None:
    assert found(cluster("abc", ab=[{"twice": 200}] * 2)) == [("duplicate-packets", "warn", ("b",))]
    assert found(cluster("abc", ab=[{"twice": 200}, {"twice": 0}])) == []


def test_two_nodes_whose_only_link_is_slow_have_no_others_to_compare_with() -> None:
    slow = [{"mbit_s": 50.0}] * 2
    (one,) = links.check_links(cluster("ab", ab=slow, ba=slow))
    assert (one.check, one.status) == ("bandwidth", "warn")
    assert "the other pairs are as slow" in one.summary


@pytest.mark.parametrize(
    ("tries", "is_told"),
    [
        ([(500, 10), (100, 0), (500, 9)], True),  # none of 100 is no wonder at 2%
        ([(500, 10), (500, 0), (500, 9)], False),  # none of 500 is: what lost some was a moment
        ([(500, 10), (100, 0)], False),  # seen once
        ([(100, 2), (100, 0), (100, 3), (100, 0)], True),
        ([(500, 40), (100, 0), (100, 1)], False),
    ],
)
def test_a_short_try_without_a_loss_says_little(tries: list[tuple[int, int]], is_told: bool) -> None:
    measured = [{"sent": sent, "lost": lost} for sent, lost in tries]
    assert found(cluster("abc", ab=measured)) == ([("packet-loss", "warn", ("b",))] if is_told else [])


def test_loss_counts_when_it_was_seen_twice() -> None:
    once, never = {"lost": 10}, {"lost": 0}
    assert links.choose_doubtful_links(cluster("abc", ab=[once])) == [("a", "b")]
    assert found(cluster("abc", ab=[once, never])) == []
    assert found(cluster("abc", ab=[once, once])) == [("packet-loss", "warn", ("b",))]
    much = {"lost": 60}
    assert found(cluster("abc", ab=[much, much])) == [("packet-loss", "warn", ("b",))]


@pytest.mark.parametrize(
    ("tried", "spoiled", "check"),
    [
        ({"mbit_s": 191.0}, {"mbit_s": 350.0}, "bandwidth"),
        ({"mbit_s": 191.0}, {"error": "timed out"}, "bandwidth"),
        ({"lost": 10}, {"lost": 200}, "packet-loss"),
        ({"rtt_ms": [3.0, 9.0]}, {"rtt_ms": [50.0, 60.0]}, "latency"),
    ],
)
def test_one_measurement_that_was_disturbed_excuses_no_cable(
    tried: dict[str, Any], spoiled: dict[str, Any], check: str
) -> None:
    """Node b's cable is bad; its peer's way to itself was measured once while something else ran there."""
    bad = {one + other: [tried] * 4 for one, other in permutations("abc", 2) if "b" in (one, other)}
    seen = cluster("abc", **bad)
    for node in seen:
        node.own = [{"mbit_s": 12_000.0, "rtt_ms": [0.1, 0.2], "sent": 500, "lost": 0} for _ in range(3)]
    seen[0].own[1].update(spoiled)
    if "error" in spoiled:
        seen[0].own[1] = spoiled
    assert [(one, nodes) for one, _, nodes in found(seen)] == [(check, ("b",))]


def test_loss_is_unknown_where_no_udp_passes() -> None:
    assert found(cluster("ab", ab=[{"sent": 100, "lost": None}] * 2)) == []


def test_a_late_node_is_named() -> None:
    late = [{"rtt_ms": [4.0, 4.5]}] * 2
    ways = {one + other: late for one, other in permutations("abcd", 2) if "d" in (one, other)}
    assert found(cluster("abcd", **ways)) == [("latency", "warn", ("d",))]


def test_at_most_a_dozen_ways_are_repeated() -> None:
    names = "abcdefghijklmnop"
    ways = {one + other: [{"lost": 5}] for one, other in permutations(names, 2)}
    assert len(links.choose_doubtful_links(cluster(names, **ways))) == links.AGAIN_AT_MOST


def test_a_way_on_this_machine_is_measured() -> None:
    ears = pairs.ProbeListeners("b", "secret")
    port = ears.open(0)
    said = pairs.measure_peer_link("127.0.0.1", port, "secret", 0.05)
    assert said["mbit_s"] > 0
    assert (said["sent"], said["lost"]) == (quality.BURSTS * quality.BURST, 0)
    assert 0 < said["rtt_ms"][0] <= said["rtt_ms"][1]
    assert said["segments"] > 0
    wrong = pairs.measure_peer_link("127.0.0.1", port, "wrong", 0.05)
    assert wrong["error"]
    assert "result" not in wrong, "a connection was made"
    for ear in ears.sockets:
        ear.close()


def test_a_connection_that_is_never_made_is_told_as_any_other_call_that_fails() -> None:
    """A rule for some ports may spare the first calls: it meets the port of the caller, which each call has anew."""
    with socket.create_server(("127.0.0.1", 0)) as ear:
        port = ear.getsockname()[1]
    refused = pairs.measure_peer_link("127.0.0.1", port, "secret", 0.05)
    assert refused["result"] == "refused"
    dropped = {"mbit_s": None, "lost": None, "error": "timed out", "result": "dropped"}
    stalled = {"mbit_s": 80.0, "carried": 8_000_000, "broken": "stalled"}

    def told(**changed: list[dict[str, Any]]) -> list[tuple[str, tuple[str, ...]]]:
        seen = cluster("abc", **changed)
        for node in seen:
            node.ports["data-0"] = 40_000
            node.address = node.data_address = f"address of {node.name}"
        for node in seen:
            ways = {other.address: "eth0" for other in seen}
            node.facts = {"ways": ways, "neighbours": {}, "interfaces": [], "ports": [32_768, 60_999]}
        found = [*network.check_node_pairs(seen, rendezvous=(), fixed=False), *links.check_links(seen)]
        return [(one.check, one.nodes) for one in found]

    assert links.choose_doubtful_links(cluster("abc", ba=[dropped])) == [("b", "a")]
    assert told(ba=[dropped] * 3) == [("data-ports", ("a",))]
    assert told(ba=[dropped] * 3, bc=[dropped] * 3) == [("data-ports", ("b",))]
    assert told(ba=[dropped, {}]) == []
    assert told(ba=[dropped, stalled, dropped]) == [("stream", ("a",))]


def test_streams_that_break_off_where_calls_fail_follow_from_it() -> None:
    ways = (("b", "a"),)
    calls = Finding(check="data-ports", status="fail", nodes=("b",), ways=ways)
    stream = Finding(check="stream", status="fail", nodes=("a",), peers=("b",), ways=ways)
    elsewhere = Finding(check="stream", status="fail", nodes=("c",), peers=("a",), ways=(("a", "c"),))
    said = order_findings([stream, elsewhere, calls], ran=())
    assert [(one.check, one.follows) for one in said] == [("data-ports", ""), ("stream", "data-ports"), ("stream", "")]


def test_the_verdict_on_many_nodes_takes_a_moment() -> None:
    """64 nodes are 4032 ways; a look at all ways for each way took a minute."""
    names = [f"n{i}" for i in range(64)]
    well = {"mbit_s": 10_000.0, "rtt_ms": [0.1, 0.2], "sent": 500, "lost": 0}
    seen = [NodeReport(name=name, measured={other: [well] for other in names if other != name}) for name in names]
    begun = time.process_time()
    assert (links.choose_doubtful_links(seen), found(seen)) == ([], [])
    assert time.process_time() - begun < 2.0
