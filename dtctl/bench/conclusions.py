"""Conclusions from the figures of a benchmark: the slow node or pair, and the remedy. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from dtctl.doctor.checks.links import SLOW
from dtctl.doctor.findings import choose_covering_nodes
from dtctl.doctor.rounds import Way

EFFICIENT = 0.7
"""Share of a single worker's speed below which training on several workers counts as slow."""


def build_conclusions(
    pairs: Mapping[str, Any], training: Sequence[Mapping[str, Any]], owners: Sequence[str]
) -> list[dict[str, Any]]:
    """Return sentences about the figures, each with the `nodes` it names and the `fix`, empty where nothing is wrong.

    Args:
        pairs: `gb_s` from rank (row) to rank (column), empty where it was not measured.
        training: rows of `workers` and `efficiency`.
        owners: the node of each rank.
    """
    sentences = []
    rates = _between_nodes(pairs.get("gb_s") or (), owners)
    if rates:
        best: dict[str, float] = {}
        for way, rate in rates.items():
            for node in way:
                best[node] = max(best.get(node, 0.0), rate)
        usual = median(best.values())
        slow = {way: rate for way, rate in rates.items() if rate < SLOW * usual}
        if slow:
            nodes = choose_covering_nodes(list(slow))
            (caller, called), rate = min(slow.items(), key=lambda item: item[1])
            summary = f"{', '.join(nodes)}: slow between nodes, down to {rate:.3f} GB/s from {caller} to {called}; "
            fix = "`dtctl doctor` measures the links without torch; this shows whether the network or the node is slow"
            sentences.append({"summary": f"{summary}the usual is {usual:.3f}", "nodes": list(nodes), "fix": fix})
        else:
            (caller, called), rate = min(rates.items(), key=lambda item: item[1])
            summary = (
                f"no pair of nodes stands out: the slowest, {caller} to {called}, reaches {rate / usual:.0%} "
                f"of the usual"
            )
            sentences.append({"summary": f"{summary} {usual:.3f} GB/s", "nodes": [], "fix": ""})
    if training:
        last = min(training, key=lambda row: row["efficiency"])
        if last["efficiency"] < EFFICIENT:
            summary = f"{last['workers']} workers train at {last['efficiency']:.0%} of the speed of a single worker"
            fix = (
                "make the exchange cheaper: a larger train.micro_batch or train.accumulate, or workers that share "
                "no cores"
            )
            sentences.append({"summary": summary, "nodes": [], "fix": fix})
    return sentences


def _between_nodes(gb_s: Sequence[Sequence[float | None]], owners: Sequence[str]) -> dict[Way, float]:
    """Return the best rate of each direction between two nodes; one of several workers may have waited for its core."""
    rates: dict[Way, float] = {}
    for sender, row in enumerate(gb_s):
        for receiver, rate in enumerate(row):
            if rate is None or max(sender, receiver) >= len(owners) or owners[sender] == owners[receiver]:
                continue
            way = (owners[sender], owners[receiver])
            rates[way] = max(rates.get(way, 0.0), rate)
    return rates
