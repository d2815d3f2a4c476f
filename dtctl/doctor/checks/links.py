"""Links that are slower, later or lossier than those of the other nodes. Pure.

A node is judged by its best way: one slow node slows a way of each of the others, and most ways of three nodes.
A bad way is measured again while the rest is quiet, and only a way that is bad every time is reported. With each
repetition both ends measure the way to themselves, which has no cable in it: if it is slow, the reason is their load.
The median of these counts: a single one that met a moment of load would excuse a cable that is always slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from dtctl.doctor.findings import Finding, Status, cover
from dtctl.doctor.node_report import NodeReport
from dtctl.doctor.rounds import Way

RAN = ("stream", "packet-loss", "duplicate-packets", "bandwidth", "latency")
DOUBT = 0.6
SLOW = 0.4
VERY_SLOW = 0.1
"""Parts of the other nodes' bandwidth: below the first a way is measured again; then reported; then a failure."""
MIN_MBIT_S = 100.0
"""Slow whatever the others have: no training over several nodes is worth its time on less."""
LOSS = 0.004
MUCH_LOSS = 0.05
EXPECTED_LOSSES = 4.6
"""Losses that a try leads one to expect; to see none of so many happens once in 100 times (Poisson)."""
TWICE = 0.01
BREAKS = 3
"""Number of times that a stream has to break off, and then always."""
LATE_TIMES = 8.0
LATE_MS = 0.5
"""A round trip is late when it takes this many times as long as the others', and this much longer."""
COMPARABLE_MBIT_S = 10_000.0
"""Mbit/s beyond which links are not compared: one stream then measures the processors, not the link."""
AGAIN_PER_NODE = 2
AGAIN_AT_MOST = 12
TRIES = 4
"""Number of times that a way is measured that never looks good."""


def doubtful(reports: Sequence[NodeReport]) -> list[Way]:
    """Ways to measure again: the worst few of each machine that could be the reason."""
    tries_of = _said(reports)
    usual, usual_trip = _usual(_rates(tries_of)), _usual_trip(tries_of)
    rank: dict[Way, float] = {}
    for way, tries in tries_of.items():
        if len(tries) >= TRIES or _breaks(tries):
            continue
        rate, lost, late = _rate(tries), _loss(tries), _late(tries, usual_trip)
        if lost >= LOSS or late or _twice(tries) >= TWICE:
            rank[way] = -lost
        if _broken(tries[-1]):
            rank[way] = -2.0
            continue
        if rate is None or rate < max(DOUBT * usual, MIN_MBIT_S):
            rank[way] = min(rank.get(way, 0.0), (rate or 0.0) / usual - 1 if usual else -1.0)
    chosen: dict[Way, None] = {}
    for node in cover(list(rank)):
        worst = sorted((way for way in rank if node in way and way not in chosen), key=lambda way: rank[way])
        # Of two pairs where there are two: only then it is known whether the machine is at fault, or one pair.
        pairs = {frozenset(way): way for way in reversed(worst)}
        chosen.update(dict.fromkeys([*reversed(pairs.values()), *worst][:AGAIN_PER_NODE]))
    return list(chosen)[:AGAIN_AT_MOST]


def links(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Yield findings from the measurements of all ways."""
    tries_of = _said(reports)
    if not tries_of:
        return
    usual, usual_trip = _usual(_rates(tries_of)), _usual_trip(tries_of)
    ends = {way: [node.own for node in reports if node.name in way and node.own] for way in tries_of}
    lost = {way: max((median(_loss([one]) for one in own) for own in ends[way]), default=0.0) for way in tries_of}
    trips = {way: max([usual_trip, *(median(_trip([one]) for one in own) for own in ends[way])]) for way in tries_of}
    rates = {node.name: [rate for one in node.own if (rate := _rate([one])) is not None] for node in reports}
    able = {way: min([usual, *(median(rates[name]) for name in way if rates[name])]) for way in tries_of}
    lossy = {
        way: tries
        for way, tries in tries_of.items()
        if _always_lossy(tries) and _loss(tries) >= max(LOSS, 2 * lost[way])
    }
    slow = {
        way: rate for way, tries in tries_of.items() if (rate := _rate(tries)) is not None and _is_slow(rate, able[way])
    }
    late = {way: tries for way, tries in tries_of.items() if _late(tries, trips[way])}
    twice = {way: tries for way, tries in tries_of.items() if _twice(tries) >= TWICE}
    # TCP over a link that loses packets may be silent for long, and continue all the same.
    ends_early = {
        way: tries
        for way, tries in tries_of.items()
        if _breaks(tries) and _loss(tries) < LOSS and not never_begun(tries)
    }
    for bad in (lossy, slow, late, twice, ends_early):
        _only_confirmed(bad, tries_of)
    slow = {way: rate for way, rate in slow.items() if way not in ends_early}
    if ends_early:
        yield _break_off(ends_early)
    if twice:
        yield _tell(
            "duplicate-packets",
            "warn",
            {way: f"{_twice(tries):.0%} of small packets arrive twice" for way, tries in twice.items()},
            "packets arrive twice",
            "look for a loop or a mirrored port in the switch, and for a bond whose two ends disagree "
            "(cat /proc/net/bonding/*; bridge link; sudo iptables -t mangle -S | grep TEE)",
        )
    if lossy:
        yield _lossy({way: _loss(tries) for way, tries in lossy.items()}, len(tries_of))
    if slow:
        yield _slow(slow, usual, tries_of, reports)
    if late:
        yield _tell(
            "latency",
            "warn",
            {way: f"{_trip(tries):.2f} ms there and back" for way, tries in late.items()},
            f"later than the others ({usual_trip:.2f} ms)",
            "look for another route or a busy switch: traceroute; ip route get ADDRESS; ethtool -c (interrupt delay)",
        )


def _only_confirmed(bad: dict[Way, Any], tries_of: Mapping[Way, Sequence[Mapping[str, Any]]]) -> None:
    """Drop a way that was bad once, unless the same pair was bad twice, or ways to two others of the same machine were.

    The machine follows from all bad ways, since few are measured again. A single pair does not identify a machine: with
    it, a way that another program delayed for a moment would be taken for a part of the same fault.
    """
    pairs = {frozenset(way) for way in bad if len(tries_of[way]) > 1}
    machines = {name for name in cover([*bad]) if sum(name in pair for pair in pairs) > 1}
    for way in [way for way in bad if frozenset(way) not in pairs and not {*way} & machines]:
        del bad[way]


def _said(reports: Sequence[NodeReport]) -> dict[Way, list[dict[str, Any]]]:
    names = {node.name for node in reports}
    return {(node.name, other): tries for node in reports for other, tries in node.measured.items() if other in names}


def _broken(one: Mapping[str, Any]) -> str:
    """Return how a stream has broken off: stalled, reset, or what else was wrong; empty if it has not."""
    return str(one.get("broken") or one.get("error") or "")


def _breaks(tries: Sequence[Mapping[str, Any]]) -> bool:
    return len(tries) >= BREAKS and all(map(_broken, tries))


def never_begun(tries: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether no connection was made any of these times, though calls of the same way had gone well before."""
    return _breaks(tries) and all(one.get("result") for one in tries)


def _twice(tries: Sequence[Mapping[str, Any]]) -> float:
    return min(
        (int(attempt.get("twice") or 0) / int(attempt["sent"]) for attempt in tries if attempt.get("sent")), default=0.0
    )


def _rate(tries: Sequence[Mapping[str, Any]]) -> float | None:
    return max((float(attempt["mbit_s"]) for attempt in tries if attempt.get("mbit_s")), default=None)


def _rates(tries_of: Mapping[Way, Sequence[Mapping[str, Any]]]) -> dict[Way, float]:
    return {way: rate for way, tries in tries_of.items() if (rate := _rate(tries)) is not None}


def _usual(rates: Mapping[Way, float]) -> float:
    """The bandwidth that a node of this cluster has, in Mbit/s: half of the nodes do better on their best way."""
    best: dict[str, float] = {}
    for way, rate in rates.items():
        for node in way:
            best[node] = max(best.get(node, 0.0), rate)
    return min(median(best.values()), COMPARABLE_MBIT_S) if best else 0.0


def _is_slow(rate: float, usual: float) -> bool:
    return rate < max(SLOW * usual, MIN_MBIT_S)


def _loss(tries: Sequence[Mapping[str, Any]]) -> float:
    counted = [one for one in tries if one.get("lost") is not None]
    sent = sum(int(one["sent"]) for one in counted)
    return sum(int(one["lost"]) for one in counted) / sent if sent else 0.0


def _always_lossy(tries: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether packets were lost twice, if measured twice, and no try without a loss contradicts the others.

    A try without a loss contradicts a rate only with enough packets: with 100 packets and a rate of 2%, one try in
    eight loses none. On a busy machine a try may have no more packets (`PHASE_LIMIT_S` of the probe).
    """
    counted = [one for one in tries if one.get("lost") is not None]
    for one in counted:
        rate = _loss([other for other in counted if other is not one])
        if not one["lost"] and rate * one["sent"] >= EXPECTED_LOSSES:
            return False
    return sum(bool(one["lost"]) for one in counted) >= min(2, len(counted))


def _trip(tries: Sequence[Mapping[str, Any]]) -> float:
    return min((float(attempt["rtt_ms"][0]) for attempt in tries if attempt.get("rtt_ms")), default=0.0)


def _usual_trip(tries_of: Mapping[Way, Sequence[Mapping[str, Any]]]) -> float:
    best: dict[str, float] = {}
    for way, tries in tries_of.items():
        for node in way if _trip(tries) else ():
            best[node] = min(best.get(node, float("inf")), _trip(tries))
    return median(best.values()) if best else 0.0


def _late(tries: Sequence[Mapping[str, Any]], usual: float) -> bool:
    trip = _trip(tries)
    return trip > LATE_TIMES * usual and trip > usual + LATE_MS


def rate_text(mbit_s: float) -> str:
    """`47 Mbit/s`, `9.8 Gbit/s`."""
    return f"{mbit_s / 1000:.1f} Gbit/s" if mbit_s >= 1000 else f"{mbit_s:.0f} Mbit/s"


def _lossy(loss: Mapping[Way, float], ways: int) -> Finding:
    much = max(loss.values()) >= MUCH_LOSS
    return _tell(
        "packet-loss",
        "fail" if much else "warn",
        {way: f"{part:.1%} of small packets lost" for way, part in loss.items()},
        f"{len(loss)} of {ways} ways lose packets, up to {max(loss.values()):.1%}",
        "look at the counters of errors and drops there (ip -s link; ethtool -S INTERFACE | grep -iE 'err|drop|crc'), "
        "then at cable, transceiver and switch port",
    )


def _slow(
    slow: Mapping[Way, float],
    usual: float,
    tries_of: Mapping[Way, Sequence[Mapping[str, Any]]],
    reports: Sequence[NodeReport],
) -> Finding:
    worst = min(slow.values())
    known = {interface for node in reports for interface in node.facts.get("ways", {}).values() if interface}
    device = next(iter(known)) if len(known) == 1 else "INTERFACE"
    told = {way: rate_text(rate) + _repeated(tries_of[way]) for way, rate in slow.items()}
    more = " or more" if usual == COMPARABLE_MBIT_S else ""
    others = f"the usual is {rate_text(usual)}{more}" if usual > worst / SLOW else "the others are no better"
    return _tell(
        "bandwidth",
        "fail" if worst < VERY_SLOW * usual else "warn",
        told,
        f"a slow link, down to {rate_text(worst)}; {others}",
        f"see what speed it has (ethtool {device}; tc qdisc show dev {device}), whether the route takes another "
        "interface (ip route get ADDRESS), and who else uses it (ip -s link)",
    )


def _break_off(ends_early: Mapping[Way, Sequence[Mapping[str, Any]]]) -> Finding:
    told = {}
    words = {"stalled": "stalls after", "reset": "is reset after"}
    for way, tries in ends_early.items():
        carried = [int(attempt["carried"]) for attempt in tries if attempt.get("carried")]
        how = _broken(tries[-1])
        size = f" {min(carried) / 1e6:.1f} MB" if carried else " it was opened"
        told[way] = f"a stream {words[how]}{size}" if how in words else how
    nodes = cover(list(told))
    return _tell(
        "stream",
        "fail",
        told,
        f"connections are made and do not last: {told[next(iter(told))]}, each of {BREAKS} times",
        f"something limits what one connection carries{_side(nodes, told)}; look for it with sudo iptables -vnL | "
        "grep -E 'connbytes|quota|connlimit|limit', sudo nft list ruleset, sudo conntrack -S, then in firewalls and "
        "inspection between the nodes; as a trial without offloads: sudo ethtool -K INTERFACE tso off gso off gro off",
    )


def _side(nodes: Sequence[str], ways: Mapping[Way, str]) -> str:
    if len(ways) > 1 and all(called in nodes for _, called in ways):
        return " inbound"
    return " outbound" if len(ways) > 1 and all(caller in nodes for caller, _ in ways) else ""


def _repeated(tries: Sequence[Mapping[str, Any]]) -> str:
    again = sum(int(attempt.get("retransmitted") or 0) for attempt in tries)
    return f", {again} segments sent again" if again else ""


def _tell(check: str, status: Status, ways: Mapping[Way, str], what: str, fix: str) -> Finding:
    nodes = cover(list(ways))
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
