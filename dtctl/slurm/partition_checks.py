"""Requests of a spec that the cluster does not offer: checked before a job is submitted, by the spec's key.

Slurm itself takes many jobs that can never start and lets them wait. Pure; slurm_commands.py asks Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dtctl.slurm.answers import Offer
from dtctl.spec.model import Slurm

CHECKS: Final = ("partition", "account", "time-limit", "requeue", "job-nodes", "gres", "features", "submit")
"""Checks that are made before a job is submitted; the last is Slurm's own opinion (`sbatch --test-only`)."""
_GONE: Final = re.compile(r"down|drain|fail|not_resp|maint|resv|reserved|unk", re.IGNORECASE)
_UNLIMITED: Final = ("UNLIMITED", "INFINITE", "NONE", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Something that the spec requests and the cluster does not have."""

    check: str
    key: str
    """Key of the spec."""
    summary: str
    fix: str
    never: bool
    """True if the job can never start; if not, it may have to wait for a repair."""
    evidence: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    """The nodes to act on; empty where it is about the spec or the partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node in a partition, as sinfo lists it."""

    name: str
    state: str
    gres: str
    features: frozenset[str]

    @property
    def works(self) -> bool:
        """Return whether jobs can run on it, now or when others have ended."""
        return not _GONE.search(self.state) and not self.state.endswith("*")


def lacks(slurm: Slurm, nodes: int, offer: Offer) -> Iterator[Lack]:
    """Yield what stands in the way of a job.

    Args:
        slurm: the section of the spec.
        nodes: how many the job needs.
        offer: what the cluster has.
    """
    partitions = {row["PartitionName"]: row for row in offer.partitions}
    name = slurm.partition or next((name for name, row in partitions.items() if row.get("Default") == "YES"), None)
    if name is None:
        if partitions:
            yield Lack(
                check="partition", key="slurm.partition", never=True,
                summary="the cluster has no default partition, and the spec names none",
                fix=f"one of: {', '.join(partitions)}",
            )  # fmt: skip
        return
    # A job may name several; Slurm takes the first one that can run it.
    named = name.split(",")
    unknown = [partition for partition in named if partition not in partitions]
    if unknown:
        yield Lack(
            check="partition", key="slurm.partition", never=True,
            summary=f"there is no partition {unknown[0]}", fix=f"one of: {', '.join(partitions)}",
        )  # fmt: skip
        return
    named_partitions = [partitions[partition] for partition in named]
    if all(row.get("State", "UP") != "UP" for row in named_partitions):
        yield Lack(
            check="partition", key="slurm.partition", never=False,
            summary=f"partition {name} is {named_partitions[0]['State'].lower()}",
            fix="choose another, or wait until it is up",
        )  # fmt: skip
    yield from _account(slurm, named_partitions, name)
    yield from _time(slurm, named_partitions, name)
    yield from _requeue(slurm, named_partitions)
    rows = [_node(row) for row in offer.nodes if row[1].rstrip("*") in named]
    yield from _nodes(slurm, nodes, {node.name: node for node in rows}, named_partitions, name)


def _account(slurm: Slurm, partitions: Sequence[Mapping[str, str]], name: str) -> Iterator[Lack]:
    for key, allowed, denied in (("account", "AllowAccounts", "DenyAccounts"), ("qos", "AllowQos", "DenyQos")):
        value = getattr(slurm, key)
        if value is None:
            continue
        lists = [row.get(allowed, "ALL") for row in partitions]
        refused = all(
            (row.get(allowed, "ALL") != "ALL" and value not in row[allowed].split(","))
            or value in row.get(denied, "").split(",")
            for row in partitions
        )
        if refused:
            yield Lack(
                check="account", key=f"slurm.{key}", never=True,
                summary=f"partition {name} does not take {key} {value}", fix=f"it takes {', '.join(lists)}",
                evidence=tuple(f"{allowed}={accounts}" for accounts in lists),
            )  # fmt: skip


def _time(slurm: Slurm, partitions: Sequence[Mapping[str, str]], name: str) -> Iterator[Lack]:
    requested_min = minutes(slurm.time) if slurm.time else None
    limits = [row.get("MaxTime", "") for row in partitions]
    limits_min = [minutes(limit) for limit in limits if limit.upper() not in _UNLIMITED]
    if requested_min is None or len(limits_min) < len(limits):
        return
    finite_min = [limit_min for limit_min in limits_min if limit_min is not None]
    if finite_min and requested_min > max(finite_min):
        yield Lack(
            check="time-limit", key="slurm.time", never=True,
            summary=f"{slurm.time} is more than partition {name} allows", fix=f"at most {', '.join(limits)}",
            evidence=tuple(f"MaxTime={limit}" for limit in limits),
        )  # fmt: skip


def _requeue(slurm: Slurm, partitions: Sequence[Mapping[str, str]]) -> Iterator[Lack]:
    """Yield what keeps a job that was interrupted from going on: it must be warned in time, and started again."""
    limits = [slurm.time] if slurm.time else [row.get("DefaultTime", "") for row in partitions]
    shortest = min((limit for text in limits if (limit := minutes(text)) is not None), default=None)
    if shortest is not None and shortest * 60 <= slurm.warn_s:
        yield Lack(
            check="requeue", key="slurm.warn_s", never=False,  # a job that is no training does not mind
            summary=f"the workers would be told to save and end as soon as they start: the job may run for "
            f"{shortest * 60:.0f} s, and the warning comes {slurm.warn_s} s before that",
            fix="a longer slurm.time, or a later warning",
            evidence=() if slurm.time else tuple(f"DefaultTime={limit}" for limit in limits),
        )  # fmt: skip
    cancelling = [row for row in partitions if row.get("PreemptMode", "").startswith("CANCEL")]
    if slurm.requeues and cancelling:
        row = cancelling[0]
        yield Lack(
            check="requeue", key="slurm.partition", never=False,
            summary=f"partition {row['PartitionName']} cancels the jobs that it preempts: nobody starts them again",
            fix="a partition or slurm.qos that requeues; or `dtctl launch` again, which goes on from the last snapshot",
            evidence=tuple(f"{key}={row[key]}" for key in ("PreemptMode", "GraceTime") if key in row),
        )  # fmt: skip


def _repairs(nodes: Mapping[str, Node]) -> Iterator[str]:
    """Yield what to type about nodes that take no jobs, by why they take none."""
    away = [node for node in nodes.values() if not node.works]
    reserved = [node.name for node in away if re.search("resv|reserved", node.state, re.IGNORECASE)]
    broken = [node.name for node in away if node.name not in reserved]
    if reserved:
        reservation = "scontrol show reservation; with the right to it: slurm.extra: {reservation: NAME}"
        yield f"{','.join(reserved)} belong to a reservation: {reservation}"
    if broken:
        names = ",".join(broken)
        yield f"sinfo -R -n {names} says why; repaired: sudo scontrol update nodename={names} state=resume"


def _nodes(
    slurm: Slurm, needed: int, nodes: Mapping[str, Node], partitions: Sequence[Mapping[str, str]], name: str
) -> Iterator[Lack]:
    works = [node for node in nodes.values() if node.works]
    unavailable = tuple(f"{node.name}: {node.state}" for node in nodes.values() if not node.works)
    limits = [row.get("MaxNodes", "UNLIMITED") for row in partitions]
    max_nodes = max((int(limit) if limit.isdigit() else len(nodes) for limit in limits), default=len(nodes))
    if needed > min(max_nodes, len(nodes)):
        yield Lack(
            check="job-nodes", key="cluster.nodes", never=True,
            summary=f"the job needs {needed} nodes, and partition {name} gives {min(max_nodes, len(nodes))}",
            fix="fewer nodes, or another partition",
        )  # fmt: skip
        return
    if needed > len(works):
        yield Lack(
            check="job-nodes", key="cluster.nodes", never=False,
            summary=f"the job needs {needed} nodes, and {len(works)} of the {len(nodes)} of partition {name} work",
            fix="; ".join(["take fewer nodes, or wait", *_repairs(nodes)]), evidence=unavailable[:8],
            nodes=tuple(node.name for node in nodes.values() if not node.works),
        )  # fmt: skip
    kind, count = _gres(slurm.gres)
    if kind:
        have = [node for node in nodes.values() if _count(node.gres, kind) >= count]
        if len(have) < needed:
            offered = sorted({node.gres for node in nodes.values() if node.gres not in ("", "(null)")})
            yield Lack(
                check="gres", key="slurm.gres", never=True,
                summary=f"{_of(have, nodes)} of partition {name} have {slurm.gres}, and the job needs {needed}",
                fix=f"they have {'; '.join(offered) or 'none'}",
            )  # fmt: skip
    features = str(slurm.extra.get("constraint", ""))
    if re.fullmatch(r"[\w.-]+(&[\w.-]+)*", features):  # the rest of Slurm's language is left to Slurm
        need = {*features.split("&")}
        have = [node for node in nodes.values() if need <= node.features]
        if len(have) < needed:
            offered_features = sorted({feature for node in nodes.values() for feature in node.features})
            yield Lack(
                check="features", key="slurm.extra.constraint", never=True,
                summary=f"{_of(have, nodes)} of partition {name} have {features}, and the job needs {needed}",
                fix=f"they have {', '.join(offered_features) or 'none'}",
            )  # fmt: skip


def _of(matching: Sequence[Node], nodes: Mapping[str, Node]) -> str:
    return f"{len(matching)} of the {len(nodes)} nodes"


def _node(row: Sequence[str]) -> Node:
    name, _, state, gres, features = row
    feature_names = frozenset(features.split(",")) - {"(null)", ""}
    return Node(name=name, state=state, gres=gres, features=feature_names)


def _gres(text: str | None) -> tuple[str, int]:
    """`gpu:a100:4` as kind (`gpu:a100`) and count; an empty kind for what is not one plain request."""
    match = re.fullmatch(r"(?:gres[/:])?([A-Za-z_]\w*(?::[A-Za-z_][\w.-]*)?)(?:[:=](\d+))?", text or "")
    return (match[1], int(match[2] or 1)) if match else ("", 0)


def _count(offered: str, kind: str) -> int:
    """Return how many of a kind a node has, from sinfo's `gpu:a100:8(S:0-1),shard:16`."""
    total = 0
    for item in re.sub(r"\([^)]*\)", "", offered).split(","):
        fields = item.split(":")
        if fields[-1].isdigit() and (":".join(fields[:-1]) == kind or fields[0] == kind):
            total += int(fields[-1])
    return total


def minutes(text: str) -> float | None:
    """Return a time limit of Slurm in minutes: `90`, `30:00`, `1:30:00`, `1-12`, `1-12:30:00`; None if it has none."""
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
