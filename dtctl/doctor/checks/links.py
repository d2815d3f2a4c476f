"""Checks of links that are slower, later or lossier than those of other nodes. Pure.

A node is judged by its best link: one slow node makes a link of each other node slow, and most links of three nodes. A
bad link is measured again without other traffic, and only a link that is bad every time is reported. With each
repetition both ends measure the connection to themselves, which uses no cable: if that is slow, too, the cause is their
load. The median of these measurements counts: a single one during a moment of load would excuse a cable that is always
slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dtctl.doctor.findings import Finding, Status, choose_covering_nodes
from dtctl.doctor.node_report import NodeReport
from dtctl.doctor.rounds import Way

RAN = ("stream", "packet-loss", "duplicate-packets", "bandwidth", "latency")
DOUBT = 0.6
SLOW = 0.4
"""Shares of the other nodes' bandwidth. A link below the first is measured again; below the second it is reported.

A slow or lossy link is a warning however bad it is, since a launch over it trains; connections that break are failures.
"""
MIN_MBIT_S = 100.0
"""Bandwidth in Mbit/s below which a link is slow even if all links are: a run over several nodes would not pay off."""
LOSS = 0.004
EXPECTED_LOSSES = 4.6
"""Expected number of lost packets from which a try without any loss counts: by chance that is one in 100 (Poisson)."""
TWICE = 0.01
BREAKS = 3
"""Number of tries that must all break off before a stream is reported."""
LATE_TIMES = 8.0
LATE_MS = 0.5
"""A round trip is slow if it takes `LATE_TIMES` times as long as the usual one, and `LATE_MS` longer."""
COMPARABLE_MBIT_S = 10_000.0
"""Bandwidth in Mbit/s above which links are not compared: one stream then measures the processors, not the link."""
AGAIN_PER_NODE = 2
AGAIN_AT_MOST = 12
TRIES = 4
"""Largest number of measurements of a link that is bad each time."""


def choose_doubtful_links(reports: Sequence[NodeReport]) -> list[Way]:
    """Return the links to measure again: the worst few of each node that could be the cause."""
    tries_of = _collect_link_measurements(reports)
    usual, usual_trip = _compute_usual_bandwidth(_collect_best_rates(tries_of)), _usual_trip(tries_of)
    rank: dict[Way, float] = {}
    for way, tries in tries_of.items():
        if len(tries) >= TRIES or _is_always_broken(tries):
            continue
        rate, lost, late = _find_best_rate(tries), _compute_packet_loss(tries), _has_high_latency(tries, usual_trip)
        if lost >= LOSS or late or _compute_duplicate_rate(tries) >= TWICE:
            rank[way] = -lost
        if _describe_broken_stream(tries[-1]):
            rank[way] = -2.0
            continue
        if rate is None or rate < max(DOUBT * usual, MIN_MBIT_S):
            rank[way] = min(rank.get(way, 0.0), (rate or 0.0) / usual - 1 if usual else -1.0)
    chosen: dict[Way, None] = {}
    for node in choose_covering_nodes(list(rank)):
        worst = sorted((way for way in rank if node in way and way not in chosen), key=lambda way: rank[way])
        # Two different pairs are preferred, since only they show if the node or one pair is at fault.
        pairs = {frozenset(way): way for way in reversed(worst)}
        chosen.update(dict.fromkeys([*reversed(pairs.values()), *worst][:AGAIN_PER_NODE]))
    return list(chosen)[:AGAIN_AT_MOST]


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredLink:
    """Measurements of one link, and what its two ends measured on connections to themselves."""

    tries: Sequence[Mapping[str, Any]]
    able_mbit_s: float
    """Bandwidth that both ends reach with their load."""
    own_loss: float
    """Share of lost packets that the load of an end explains."""
    own_trip_ms: float
    """Round trip that the load of an end explains."""

    @property
    def lost_share(self) -> float:
        """Return the share of lost packets."""
        return _compute_packet_loss(self.tries)

    @property
    def is_lossy(self) -> bool:
        """Return whether the link loses packets, more than its ends do."""
        return _always_lossy(self.tries) and self.lost_share >= max(LOSS, 2 * self.own_loss)

    @property
    def is_slow(self) -> bool:
        """Return whether the link is slower than its ends."""
        rate = _find_best_rate(self.tries)
        return rate is not None and rate < max(SLOW * self.able_mbit_s, MIN_MBIT_S)

    @property
    def is_late(self) -> bool:
        """Return whether round trips take longer than usual, and longer than at its ends."""
        return _has_high_latency(self.tries, self.own_trip_ms)

    @property
    def has_duplicates(self) -> bool:
        """Return whether packets arrive twice."""
        return _compute_duplicate_rate(self.tries) >= TWICE

    @property
    def is_breaking(self) -> bool:
        """Return whether connections break. TCP over a link that loses packets may stall and then continue."""
        return _is_always_broken(self.tries) and self.lost_share < LOSS and not has_never_connected(self.tries)


def _collect_measured_links(
    reports: Sequence[NodeReport], usual_mbit_s: float, usual_trip_ms: float
) -> dict[Way, _MeasuredLink]:
    own = {node.name: node.own for node in reports}
    found = {}
    for way, tries in _collect_link_measurements(reports).items():
        rates, losses, trips = [usual_mbit_s], [0.0], [usual_trip_ms]
        for measured in (own[name] for name in way if own[name]):
            own_rates = [rate for one in measured if (rate := _find_best_rate([one])) is not None]
            rates += [median(own_rates)] if own_rates else []
            losses.append(median(_compute_packet_loss([one]) for one in measured))
            trips.append(median(_find_shortest_trip([one]) for one in measured))
        found[way] = _MeasuredLink(tries=tries, able_mbit_s=min(rates), own_loss=max(losses), own_trip_ms=max(trips))
    return found


def check_links(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings from the measurements of all links."""
    tries_of = _collect_link_measurements(reports)
    if not tries_of:
        return
    usual, usual_trip = _compute_usual_bandwidth(_collect_best_rates(tries_of)), _usual_trip(tries_of)
    links = _collect_measured_links(reports, usual, usual_trip)
    breaking = _select_confirmed(links, lambda link: link.is_breaking)
    slow = _select_confirmed(links, lambda link: link.is_slow)
    if breaking:
        yield _build_breaking_finding(breaking)
    if duplicating := _select_confirmed(links, lambda link: link.has_duplicates):
        rates = {way: _compute_duplicate_rate(link.tries) for way, link in duplicating.items()}
        yield _build_link_finding(
            "duplicate-packets",
            "warn",
            {way: f"{rate:.0%} of small packets arrive twice" for way, rate in rates.items()},
            "packets arrive twice",
            "look for a loop or a mirrored port in the switch, and for a bond whose two ends disagree "
            "(cat /proc/net/bonding/*; bridge link; sudo iptables -t mangle -S | grep TEE)",
        )
    if lossy := _select_confirmed(links, lambda link: link.is_lossy):
        yield _build_loss_finding({way: link.lost_share for way, link in lossy.items()}, len(links))
    if slow := {way: link for way, link in slow.items() if way not in breaking}:
        yield _build_bandwidth_finding(slow, usual, reports)
    if late := _select_confirmed(links, lambda link: link.is_late):
        yield _build_link_finding(
            "latency",
            "warn",
            {way: f"{_find_shortest_trip(link.tries):.2f} ms round trip" for way, link in late.items()},
            f"slower than the others ({usual_trip:.2f} ms)",
            "look for another route or a busy switch: traceroute; ip route get ADDRESS; ethtool -c (interrupt delay)",
        )


def _select_confirmed(
    links: Mapping[Way, _MeasuredLink], is_bad: Callable[[_MeasuredLink], bool]
) -> dict[Way, _MeasuredLink]:
    """Return the bad links, without those that were bad once.

    A link that was bad once counts if its pair was bad twice, or if links to two other nodes were bad, too. The faulty
    node is derived from all bad links, since few are measured again. A single pair does not identify a node: a link
    that another program delayed for a moment would then count as part of the same fault.
    """
    bad = {way: link for way, link in links.items() if is_bad(link)}
    pairs = {frozenset(way) for way, link in bad.items() if len(link.tries) > 1}
    machines = {name for name in choose_covering_nodes([*bad]) if sum(name in pair for pair in pairs) > 1}
    return {way: link for way, link in bad.items() if frozenset(way) in pairs or {*way} & machines}


def _collect_link_measurements(reports: Sequence[NodeReport]) -> dict[Way, list[dict[str, Any]]]:
    names = {node.name for node in reports}
    return {(node.name, other): tries for node in reports for other, tries in node.measured.items() if other in names}


def _describe_broken_stream(one: Mapping[str, Any]) -> str:
    """Return how a stream was interrupted (stalled, reset, or another error); empty if it was not."""
    return str(one.get("broken") or one.get("error") or "")


def _is_always_broken(tries: Sequence[Mapping[str, Any]]) -> bool:
    return len(tries) >= BREAKS and all(map(_describe_broken_stream, tries))


def has_never_connected(tries: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether no measurement could connect, although earlier calls on this link succeeded."""
    return _is_always_broken(tries) and all(one.get("result") for one in tries)


def _compute_duplicate_rate(tries: Sequence[Mapping[str, Any]]) -> float:
    return min(
        (int(attempt.get("twice") or 0) / int(attempt["sent"]) for attempt in tries if attempt.get("sent")), default=0.0
    )


def _find_best_rate(tries: Sequence[Mapping[str, Any]]) -> float | None:
    return max((float(attempt["mbit_s"]) for attempt in tries if attempt.get("mbit_s")), default=None)


def _collect_best_rates(tries_of: Mapping[Way, Sequence[Mapping[str, Any]]]) -> dict[Way, float]:
    return {way: rate for way, tries in tries_of.items() if (rate := _find_best_rate(tries)) is not None}


def _compute_usual_bandwidth(rates: Mapping[Way, float]) -> float:
    """Return the usual bandwidth of a node in Mbit/s: the median of the nodes' best links."""
    best: dict[str, float] = {}
    for way, rate in rates.items():
        for node in way:
            best[node] = max(best.get(node, 0.0), rate)
    return min(median(best.values()), COMPARABLE_MBIT_S) if best else 0.0


def _compute_packet_loss(tries: Sequence[Mapping[str, Any]]) -> float:
    counted = [one for one in tries if one.get("lost") is not None]
    sent = sum(int(one["sent"]) for one in counted)
    return sum(int(one["lost"]) for one in counted) / sent if sent else 0.0


def _always_lossy(tries: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether packets were lost in two tries (or in the only one), and no try contradicts this.

    A try without a loss contradicts a rate of loss only with enough packets: with 100 packets and a rate of 2%, one try
    in eight loses none. On a busy machine a try may not have more packets (`PHASE_LIMIT_S` of the probe).
    """
    counted = [one for one in tries if one.get("lost") is not None]
    for one in counted:
        rate = _compute_packet_loss([other for other in counted if other is not one])
        if not one["lost"] and rate * one["sent"] >= EXPECTED_LOSSES:
            return False
    return sum(bool(one["lost"]) for one in counted) >= min(2, len(counted))


def _find_shortest_trip(tries: Sequence[Mapping[str, Any]]) -> float:
    return min((float(attempt["rtt_ms"][0]) for attempt in tries if attempt.get("rtt_ms")), default=0.0)


def _usual_trip(tries_of: Mapping[Way, Sequence[Mapping[str, Any]]]) -> float:
    best: dict[str, float] = {}
    for way, tries in tries_of.items():
        for node in way if _find_shortest_trip(tries) else ():
            best[node] = min(best.get(node, float("inf")), _find_shortest_trip(tries))
    return median(best.values()) if best else 0.0


def _has_high_latency(tries: Sequence[Mapping[str, Any]], usual: float) -> bool:
    trip = _find_shortest_trip(tries)
    return trip > LATE_TIMES * usual and trip > usual + LATE_MS


def format_rate(mbit_s: float) -> str:
    """Return a rate in the form `47 Mbit/s` or `9.8 Gbit/s`."""
    return f"{mbit_s / 1000:.1f} Gbit/s" if mbit_s >= 1000 else f"{mbit_s:.0f} Mbit/s"


def _build_loss_finding(loss: Mapping[Way, float], ways: int) -> Finding:
    return _build_link_finding(
        "packet-loss",
        "warn",
        {way: f"{part:.1%} of small packets lost" for way, part in loss.items()},
        f"{len(loss)} of {ways} ways lose packets, up to {max(loss.values()):.1%}",
        "look at the counters of errors and drops there (ip -s link; ethtool -S INTERFACE | grep -iE 'err|drop|crc'), "
        "then at cable, transceiver and switch port",
    )


def _build_bandwidth_finding(slow: Mapping[Way, _MeasuredLink], usual: float, reports: Sequence[NodeReport]) -> Finding:
    rates = {way: _find_best_rate(link.tries) or 0.0 for way, link in slow.items()}
    worst = min(rates.values())
    known = {interface for node in reports for interface in node.facts.get("ways", {}).values() if interface}
    device = next(iter(known)) if len(known) == 1 else "INTERFACE"
    told = {way: format_rate(rate) + _format_retransmissions(slow[way].tries) for way, rate in rates.items()}
    more = " or more" if usual == COMPARABLE_MBIT_S else ""
    others = f"the usual is {format_rate(usual)}{more}" if usual > worst / SLOW else "the other pairs are as slow"
    return _build_link_finding(
        "bandwidth",
        "warn",
        told,
        f"a slow link, down to {format_rate(worst)}; {others}",
        f"see what speed it has (ethtool {device}; tc qdisc show dev {device}), whether the route takes another "
        "interface (ip route get ADDRESS), and which other traffic uses it (ip -s link)",
    )


def _build_breaking_finding(breaking: Mapping[Way, _MeasuredLink]) -> Finding:
    told = {}
    words = {"stalled": "stalls after", "reset": "is reset after"}
    for way, link in breaking.items():
        carried = [int(attempt["carried"]) for attempt in link.tries if attempt.get("carried")]
        how = _describe_broken_stream(link.tries[-1])
        size = f" {min(carried) / 1e6:.1f} MB" if carried else " it was opened"
        told[way] = f"a stream {words[how]}{size}" if how in words else how
    nodes = choose_covering_nodes(list(told))
    return _build_link_finding(
        "stream",
        "fail",
        told,
        f"connections are made and then break: {told[next(iter(told))]}, each of {BREAKS} times",
        f"a device limits the data of one connection{_describe_link_direction(nodes, told)}; "
        "look for it with sudo iptables -vnL | grep -E 'connbytes|quota|connlimit|limit', sudo nft list ruleset, "
        "sudo conntrack -S, then in firewalls and inspection between the nodes; as a trial without offloads: "
        "sudo ethtool -K INTERFACE tso off gso off gro off",
    )


def _describe_link_direction(nodes: Sequence[str], ways: Mapping[Way, str]) -> str:
    if len(ways) > 1 and all(called in nodes for _, called in ways):
        return " inbound"
    return " outbound" if len(ways) > 1 and all(caller in nodes for caller, _ in ways) else ""


def _format_retransmissions(tries: Sequence[Mapping[str, Any]]) -> str:
    again = sum(int(attempt.get("retransmitted") or 0) for attempt in tries)
    return f", {again} segments sent again" if again else ""


def _build_link_finding(check: str, status: Status, ways: Mapping[Way, str], what: str, fix: str) -> Finding:
    nodes = choose_covering_nodes(list(ways))
    return Finding(
        check=check,
        status=status,
        nodes=nodes,
        peers=tuple(dict.fromkeys(name for way in ways for name in way if name not in nodes)),
        summary=f"{', '.join(nodes)}: {what}",
        fix=f"on {', '.join(nodes)}: {fix}",
        evidence=tuple(f"{caller} -> {called}: {ways[caller, called]}" for caller, called in list(ways)[:8]),
        ways=tuple(ways),
    )
