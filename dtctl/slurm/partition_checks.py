"""Checks of a spec against the offer of the cluster before a job is submitted; each problem names the key of the spec.

Slurm itself accepts many jobs that can never start and lets them wait. Pure; slurm_commands.py queries Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dtctl.printable import format_count
from dtctl.slurm.answers import ClusterResources
from dtctl.spec.model import Slurm

CHECKS: Final = ("partition", "account", "time-limit", "requeue", "job-nodes", "gres", "features", "submit")
"""Checks that are made before a job is submitted; the last is Slurm's own check (`sbatch --test-only`)."""
_GONE: Final = re.compile(r"down|drain|fail|not_resp|maint|resv|reserved|unk", re.IGNORECASE)
_UNLIMITED: Final = ("UNLIMITED", "INFINITE", "NONE", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmetRequirement:
    """A request of the spec that the cluster does not fulfil."""

    check: str
    key: str
    """Key of the spec."""
    summary: str
    fix: str
    never: bool
    """True if the job can never start; False if it may have to wait for a repair."""
    evidence: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    """Nodes that need a repair; empty if the problem lies in the spec or in the partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionNode:
    """A node in a partition, as sinfo lists it."""

    name: str
    state: str
    gres: str
    features: frozenset[str]

    @property
    def is_usable(self) -> bool:
        """Return whether jobs can run on the node, now or after other jobs have ended."""
        return not _GONE.search(self.state) and not self.state.endswith("*")


def check_job_offer(slurm: Slurm, nodes: int, offer: ClusterResources) -> Iterator[UnmetRequirement]:
    """Yield the reasons why a job cannot start.

    Args:
        slurm: the spec's section for Slurm.
        nodes: number of nodes that the job needs.
        offer: resources of the cluster.
    """
    partitions = {row["PartitionName"]: row for row in offer.partitions}
    name = slurm.partition or next((name for name, row in partitions.items() if row.get("Default") == "YES"), None)
    if name is None:
        if partitions:
            yield UnmetRequirement(
                check="partition", key="slurm.partition", never=True,
                summary="the cluster has no default partition, and the spec names none",
                fix=f"one of: {', '.join(partitions)}",
            )  # fmt: skip
        return
    # A job may name several partitions; Slurm takes the first one that can run it.
    named = name.split(",")
    unknown = [partition for partition in named if partition not in partitions]
    if unknown:
        yield UnmetRequirement(
            check="partition", key="slurm.partition", never=True,
            summary=f"there is no partition {unknown[0]}", fix=f"one of: {', '.join(partitions)}",
        )  # fmt: skip
        return
    named_partitions = [partitions[partition] for partition in named]
    if all(row.get("State", "UP") != "UP" for row in named_partitions):
        yield UnmetRequirement(
            check="partition", key="slurm.partition", never=False,
            summary=f"partition {name} is {named_partitions[0]['State'].lower()}",
            fix="choose another, or wait until it is up",
        )  # fmt: skip
    yield from _check_account(slurm, named_partitions, name)
    yield from _check_time_limit(slurm, named_partitions, name)
    yield from _check_requeue(slurm, named_partitions)
    rows = [_parse_node_row(row) for row in offer.nodes if row[1].rstrip("*") in named]
    yield from _check_job_nodes(slurm, nodes, {node.name: node for node in rows}, named_partitions, name)


def _check_account(slurm: Slurm, partitions: Sequence[Mapping[str, str]], name: str) -> Iterator[UnmetRequirement]:
    for key, allowed, denied in (("account", "AllowAccounts", "DenyAccounts"), ("qos", "AllowQos", "DenyQos")):
        value = getattr(slurm, key)
        if value is None:
            continue
        lists = [row.get(allowed, "ALL") for row in partitions]
        if not any(_accepts(row, value, allowed, denied) for row in partitions):
            yield UnmetRequirement(
                check="account", key=f"slurm.{key}", never=True,
                summary=f"partition {name} does not take {key} {value}", fix=f"it takes {', '.join(lists)}",
                evidence=tuple(f"{allowed}={accounts}" for accounts in lists),
            )  # fmt: skip


def _accepts(partition: Mapping[str, str], value: str, allowed: str, denied: str) -> bool:
    """Return whether a partition takes an account or a QOS, by its lists of allowed and of denied ones."""
    accepted = partition.get(allowed, "ALL")
    is_allowed = accepted == "ALL" or value in accepted.split(",")
    return is_allowed and value not in partition.get(denied, "").split(",")


def _check_time_limit(slurm: Slurm, partitions: Sequence[Mapping[str, str]], name: str) -> Iterator[UnmetRequirement]:
    requested_min = parse_time_limit(slurm.time) if slurm.time else None
    limits = [row.get("MaxTime", "") for row in partitions]
    limits_min = [parse_time_limit(limit) for limit in limits if limit.upper() not in _UNLIMITED]
    if requested_min is None or len(limits_min) < len(limits):
        return
    finite_min = [limit_min for limit_min in limits_min if limit_min is not None]
    if finite_min and requested_min > max(finite_min):
        yield UnmetRequirement(
            check="time-limit", key="slurm.time", never=True,
            summary=f"{slurm.time} is more than partition {name} allows", fix=f"at most {', '.join(limits)}",
            evidence=tuple(f"MaxTime={limit}" for limit in limits),
        )  # fmt: skip


def _check_requeue(slurm: Slurm, partitions: Sequence[Mapping[str, str]]) -> Iterator[UnmetRequirement]:
    """Yield the reasons why an interrupted job could not continue: it must be warned in time, and requeued."""
    limits = [slurm.time] if slurm.time else [row.get("DefaultTime", "") for row in partitions]
    shortest = min((limit for text in limits if (limit := parse_time_limit(text)) is not None), default=None)
    if shortest is not None and shortest * 60 <= slurm.warn_s:
        yield UnmetRequirement(
            check="requeue", key="slurm.warn_s", never=False,  # a job without training is not affected
            summary=f"the workers would have to save and end as soon as they start: the job may run for "
            f"{shortest * 60:.0f} s, and the warning comes {slurm.warn_s} s before that",
            fix="a longer slurm.time, or a later warning",
            evidence=() if slurm.time else tuple(f"DefaultTime={limit}" for limit in limits),
        )  # fmt: skip
    cancelling = [row for row in partitions if row.get("PreemptMode", "").startswith("CANCEL")]
    if slurm.requeues and cancelling:
        row = cancelling[0]
        yield UnmetRequirement(
            check="requeue", key="slurm.partition", never=False,
            summary=f"partition {row['PartitionName']} cancels the jobs that it preempts, and they are not requeued",
            fix="choose a partition or slurm.qos that requeues; or run `dtctl launch` again, which continues "
            "from the last snapshot",
            evidence=tuple(f"{key}={row[key]}" for key in ("PreemptMode", "GraceTime") if key in row),
        )  # fmt: skip


def _list_node_repairs(nodes: Mapping[str, PartitionNode]) -> Iterator[str]:
    """Yield the commands to type about nodes that take no jobs, grouped by the reason."""
    away = [node for node in nodes.values() if not node.is_usable]
    reserved = [node.name for node in away if re.search("resv|reserved", node.state, re.IGNORECASE)]
    broken = [node.name for node in away if node.name not in reserved]
    if reserved:
        reservation = "scontrol show reservation; with the right to it: slurm.extra: {reservation: NAME}"
        yield f"{','.join(reserved)} belong to a reservation: {reservation}"
    if broken:
        names = ",".join(broken)
        resume = f"sudo scontrol update nodename={names} state=resume"
        yield f"sinfo -R -n {names} shows the reason; after the repair: {resume}"


def _check_job_nodes(
    slurm: Slurm, needed: int, nodes: Mapping[str, PartitionNode], partitions: Sequence[Mapping[str, str]], name: str
) -> Iterator[UnmetRequirement]:
    usable = [node for node in nodes.values() if node.is_usable]
    unusable = [node for node in nodes.values() if not node.is_usable]
    limits = [row.get("MaxNodes", "UNLIMITED") for row in partitions]
    max_nodes = max((int(limit) if limit.isdigit() else len(nodes) for limit in limits), default=len(nodes))
    offered = min(max_nodes, len(nodes))
    if needed > offered:
        yield UnmetRequirement(
            check="job-nodes", key="cluster.nodes", never=True,
            summary=f"the job needs {format_count(needed, 'node')}, and partition {name} gives {offered}",
            fix="use fewer nodes, or another partition",
        )  # fmt: skip
        return
    if needed > len(usable):
        yield UnmetRequirement(
            check="job-nodes", key="cluster.nodes", never=False,
            summary=f"the job needs {format_count(needed, 'node')}, and {len(usable)} of the {len(nodes)} of "
            f"partition {name} work",
            fix="; ".join(["take fewer nodes, or wait", *_list_node_repairs(nodes)]),
            evidence=tuple(f"{node.name}: {node.state}" for node in unusable[:8]),
            nodes=tuple(node.name for node in unusable),
        )  # fmt: skip
    yield from _check_gres(slurm.gres, needed, nodes, name)
    yield from _check_features(str(slurm.extra.get("constraint", "")), needed, nodes, name)


def _check_gres(
    request: str | None, needed: int, nodes: Mapping[str, PartitionNode], name: str
) -> Iterator[UnmetRequirement]:
    kind, count = _parse_gres_request(request)
    if not kind:
        return
    have = [node for node in nodes.values() if _count_offered_gres(node.gres, kind) >= count]
    if len(have) < needed:
        offered = sorted({node.gres for node in nodes.values()} - {"", "(null)"})
        yield UnmetRequirement(
            check="gres", key="slurm.gres", never=True,
            summary=f"{_format_node_share(have, nodes)} of partition {name} have {request}, and the job needs {needed}",
            fix=f"they have {'; '.join(offered) or 'none'}",
        )  # fmt: skip


def _check_features(
    request: str, needed: int, nodes: Mapping[str, PartitionNode], name: str
) -> Iterator[UnmetRequirement]:
    if not re.fullmatch(r"[\w.-]+(&[\w.-]+)*", request):  # other expressions of Slurm are left to Slurm
        return
    wanted = {*request.split("&")}
    have = [node for node in nodes.values() if wanted <= node.features]
    if len(have) < needed:
        offered = sorted(frozenset().union(*(node.features for node in nodes.values())))
        yield UnmetRequirement(
            check="features", key="slurm.extra.constraint", never=True,
            summary=f"{_format_node_share(have, nodes)} of partition {name} have {request}, and the job needs {needed}",
            fix=f"they have {', '.join(offered) or 'none'}",
        )  # fmt: skip


def _format_node_share(matching: Sequence[PartitionNode], nodes: Mapping[str, PartitionNode]) -> str:
    return f"{len(matching)} of the {len(nodes)} nodes"


def _parse_node_row(row: Sequence[str]) -> PartitionNode:
    name, _, state, gres, features = row
    feature_names = frozenset(features.split(",")) - {"(null)", ""}
    return PartitionNode(name=name, state=state, gres=gres, features=feature_names)


def _parse_gres_request(text: str | None) -> tuple[str, int]:
    """Return kind (`gpu:a100`) and count of `gpu:a100:4`; an empty kind if the text is not one plain request."""
    match = re.fullmatch(r"(?:gres[/:])?([A-Za-z_]\w*(?::[A-Za-z_][\w.-]*)?)(?:[:=](\d+))?", text or "")
    return (match[1], int(match[2] or 1)) if match else ("", 0)


def _count_offered_gres(offered: str, kind: str) -> int:
    """Return the number of resources of a kind on a node, from sinfo's `gpu:a100:8(S:0-1),shard:16`."""
    total = 0
    for item in re.sub(r"\([^)]*\)", "", offered).split(","):
        fields = item.split(":")
        if fields[-1].isdigit() and (":".join(fields[:-1]) == kind or fields[0] == kind):
            total += int(fields[-1])
    return total


def parse_time_limit(text: str) -> float | None:
    """Return a time limit of Slurm in minutes: `90`, `30:00`, `1:30:00`, `1-12`, `1-12:30:00`; None for no limit."""
    if text.upper() in _UNLIMITED:
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(field) for field in clock.split(":")]
    if dash:
        hours, mins, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 1:
        hours, mins, seconds = 0, parts[0], 0
    elif len(parts) == 2:
        hours, mins, seconds = 0, *parts
    else:
        hours, mins, seconds = parts
    return int(days or 0) * 1440 + hours * 60 + mins + seconds / 60
