"""Refinement of a primary cause by facts from other ranks, addresses, and the last activity. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from dtctl.doctor.explain import collective, interfaces, signatures
from dtctl.doctor.explain.combine import apply_combination_rules, replace_signature
from dtctl.doctor.explain.diagnosis import Confidence, Diagnosis
from dtctl.doctor.explain.log_findings import LogFindings, SignatureMatch
from dtctl.doctor.explain.timeline import CauseCandidate

_WAITING = (
    "watchdog-timeout",
    "gloo-timeout",
    "heartbeat-timeout",
    "watchdog-stuck",
    "monitored-barrier",
    "rank-silent",
    "rank-behind",
    "clients-missing",
    "store-unreachable",
    "nccl-id-missing",
    "peer-late",
    "tasks-missing",
)
"""Diagnoses of a process that made others wait; its last activity is part of the cause."""
_CONNECTING = (
    "no-route",
    "connect-timeout",
    "connect-refused",
    "gloo-connect",
    "loopback-advertised",
    "data-ports-dropped",
    "nccl-error",
    "remote-error",
    "peer-closed",
    "no-common-subnet",
    "connect-aborted",
    "ib-connect-timeout",
    "store-unreachable",
)
_OF_COLLECTIVES = ("watchdog-timeout", "heartbeat-timeout", "watchdog-stuck", "watchdog-follow-up")
_STORE_ERRORS = {
    111: (
        "the connection was refused, so no process listens on that port; the worker of rank 0 has not started, has "
        "ended, or serves another address",
        "see in the log of rank 0 whether it runs; MASTER_ADDR and MASTER_PORT have to be its own; `dtctl "
        "doctor` tests the port from every node",
    ),
    110: (
        "nothing answers at that address; it is wrong, or a firewall drops the connection",
        "`dtctl doctor` distinguishes a dropped packet from a wrong address; open the rendezvous port between the "
        "nodes, or give the address that the other nodes can reach (network.rendezvous_address)",
    ),
    113: (
        "there is no route to that address, or a firewall rejects the connection",
        "ip route get ADDRESS on that node; open the rendezvous port between the nodes; `dtctl doctor` names the pair",
    ),
    101: (
        "this node has no network to that address",
        "ip route get ADDRESS on that node; give the address of the network that both nodes are in",
    ),
}
_PEER = re.compile(r"closed by peer \[(?P<peer>[^\]]+)\]")
XIDS = {
    48: "an error of its memory that ECC could not correct",
    61: "an error of its internal micro-controller",
    62: "an error of its internal micro-controller",
    63: "a row of its memory was remapped or retired",
    64: "a row of its memory could not be remapped",
    69: "an error of its graphics engine",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    92: "many corrected ECC errors",
    94: "a contained ECC error",
    95: "an uncontained ECC error",
    109: "a context switch timed out",
    119: "its firmware (GSP) does not answer",
    120: "an error of its firmware (GSP)",
    140: "an unrecovered ECC error",
    145: "an NVLink error",
    149: "an NVLink error",
    154: "it has to be reset",
}


def refine_diagnosis(
    found: Diagnosis, candidate: CauseCandidate, all_: LogFindings
) -> tuple[Diagnosis, Confidence | None]:
    """Return a primary cause refined by all facts, and the confidence that they allow; None for its own confidence."""
    before, group = found.confidence, candidate.hits
    if found.id in _OF_COLLECTIVES:
        found = _refine_collective_timeout(found, all_)
    elif found.id == "gloo-timeout":
        found = _refine_gloo_timeout(found, all_)
    elif found.id == "store-barrier":
        found = _at_the_barrier(found, group)
    elif found.id == "gpu-fell-off":
        found = _refine_gpu_error(found, group)
    elif found.id == "store-unreachable":
        found = _refine_store_error(found, group)
    elif found.id == "peer-closed":
        found = _refine_closed_peer(found, group)
    elif found.id == "collective-mismatch":
        found = _refine_mismatch(found, group, all_)
    elif found.id == "tasks-missing":
        found = _refine_missing_tasks(found, group)
    if found.id in _CONNECTING:
        found = _refine_failed_address(found, group, all_)
    if found.id in _WAITING:
        found = _add_last_activity(found, group)
    found = apply_combination_rules(found, candidate, all_)
    if found.confidence == "low" and candidate.signature.role in ("effect", "symptom"):
        found = _without_a_word(found, all_)
    return found, None if found.confidence == before else found.confidence


def _refine_collective_timeout(found: Diagnosis, all_: LogFindings) -> Diagnosis:
    table = collective.collect_watchdog_reports(all_.watching)
    verdict = collective.diagnose_collective_timeout(table, all_.ranks, all_.world)
    if verdict is not None and verdict.kind == "unfinished":
        signature = signatures.by_id("collective-unfinished")
        return replace_signature(found, signature, f"{signature.cause}: {verdict.said}")
    if verdict is not None:
        return apply_collective_verdict(found, verdict, all_.node_of)
    if (apart := table.diverging_ranks) is not None:
        who, said = apart
        return replace(
            found,
            id="collective-mismatch",
            ranks=who,
            nodes=_find_rank_nodes(who, all_.node_of),
            confidence="medium",
            cause=f"the ranks are out of step: {said}",
        )
    if not table.timed_out_call:
        return found
    waited = tuple(sorted(table.calls))
    if len(waited) == 1:
        found = replace(found, ranks=waited, nodes=_find_rank_nodes(waited, all_.node_of))
    return replace(found, cause=f"{found.cause}; {_format_ranks(waited)} waited for {table.timed_out_call}")


def _refine_gloo_timeout(found: Diagnosis, all_: LogFindings) -> Diagnosis:
    ways = {hit.groups.get("way") for hit in all_.hits if hit.signature.id == "gloo-timeout"}
    if not ways >= {"send", "recv"}:
        return found
    # Ranks that call different collectives look the same (test log own-wrong-order.log), so this stays ambiguous.
    return replace(
        found,
        cause="one rank cannot send and another waits for it: large packets are lost between them (MTU), or the "
        "ranks called different collectives",
        fix="`dtctl doctor` tests large packets on every pair; else rerun with TORCH_DISTRIBUTED_DEBUG=DETAIL",
    )


def _refine_closed_peer(found: Diagnosis, group: list[SignatureMatch]) -> Diagnosis:
    """Add the node of the peer that closed its connection, if the lines name exactly one."""
    texts = [hit.raised.text if hit.raised else hit.line.text for hit in group]
    peers = {match["peer"] for text in texts if (match := _PEER.search(text))}
    if len(peers) != 1 or found.nodes or peers & {"127.0.0.1"}:
        return found
    return replace(found, nodes=tuple(peers))


def _refine_mismatch(found: Diagnosis, group: list[SignatureMatch], all_: LogFindings) -> Diagnosis:
    """Add all ranks whose collective a line names."""
    texts = [hit.raised.text if hit.raised else hit.line.text for hit in group]
    told = {int(rank) for text in texts for rank in re.findall(r"\b[Rr]ank (\d+) is running", text)}
    ranks = tuple(sorted({*found.ranks, *told}))
    return replace(found, ranks=ranks, nodes=tuple(sorted({*found.nodes, *_find_rank_nodes(ranks, all_.node_of)})))


def _refine_missing_tasks(found: Diagnosis, group: list[SignatureMatch]) -> Diagnosis:
    """Name the processes for which a coordinator of XLA or TensorFlow has waited."""
    texts = [hit.raised.text if hit.raised else hit.line.text for hit in group]
    late = sorted({int(task) for text in texts for task in re.findall(r"/task:(\d+)\b", text)})
    return (
        replace(found, ranks=tuple(late), cause=f"{found.cause}; it waited for {_format_ranks(late)}")
        if late
        else found
    )


def _add_last_activity(found: Diagnosis, group: list[SignatureMatch]) -> Diagnosis:
    """Add the last activity of the program before the wait to the cause."""
    doing = next((hit.before for hit in group if hit.before is not None and hit.before.doing), None)
    said = next((hit.before for hit in group if hit.before is not None), None)
    if doing is not None:
        return replace(
            found,
            cause=f"{found.cause}; just before, the program was {doing.doing}: {doing.line!r}",
            fix=f"{doing.fix}; {found.fix}",
        )
    return found if said is None else replace(found, cause=f"{found.cause}; its last line before that: {said.line!r}")


def _without_a_word(found: Diagnosis, all_: LogFindings) -> Diagnosis:
    """Blame the few ranks without an error, if the logs of all ranks are available."""
    complained = {rank for hit in all_.hits for rank in (hit.rank, *hit.ranks) if rank is not None}
    silent = sorted(all_.ranks - complained)
    complete = len(all_.ranks) >= (all_.world or max(all_.ranks, default=0) + 1)
    if len(complained) < 2 or not silent or not complete or len(silent) > len(all_.ranks) / 2:
        return found
    return replace(
        found,
        ranks=tuple(silent),
        nodes=_find_rank_nodes(silent, all_.node_of),
        confidence="medium",
        cause=f"{_format_ranks(silent)} ended without a message and the others lost the connection to it",
    )


def _refine_store_error(found: Diagnosis, group: list[SignatureMatch]) -> Diagnosis:
    """Distinguish a refused connection from a missing answer, if earlier attempts show it."""
    texts = " ".join(hit.line.text for hit in group)
    number = next((number for number in _STORE_ERRORS if f"errno: {number} " in texts), None)
    if number is None:
        return found
    why, fix = _STORE_ERRORS[number]
    return replace(found, cause=f"the rendezvous store could not be reached: {why}", fix=fix, confidence="medium")


def _at_the_barrier(found: Diagnosis, group: list[SignatureMatch]) -> Diagnosis:
    groups = next((hit.groups for hit in group if "joined" in hit.groups), None)
    if groups is None:
        return replace(found, cause="not all processes reached the first barrier of the process group in time")
    joined, world = int(groups["joined"]), int(groups["world"])
    why = (
        "more processes were started than the world size, or the store still has the entries of an earlier run "
        "or attempt"
        if joined > world
        else "the others did not start, have ended, or cannot reach the store"
    )
    return replace(found, cause=f"{joined} processes reached the first barrier, and the world size is {world}: {why}")


_GPU_ERRORS = (
    (("fallen off the bus", "NVRM: The NVIDIA"), "it has fallen off the bus"),
    (("ECC", "remap"), "its memory has an error that could not be corrected (ECC)"),
    (("GSP",), "its firmware (GSP) does not answer"),
    (("NVLink", "SXid"), "an NVLink has failed"),
)
"""Words of the kernel's message without a known Xid, and their meaning; the first that matches counts."""


def _refine_gpu_error(found: Diagnosis, group: list[SignatureMatch]) -> Diagnosis:
    """Name the GPU and the meaning of the Xid in the lines."""
    groups: dict[str, str] = {}
    for hit in group:
        groups = {**hit.groups, **groups}
    pci = f" {groups['pci'].rstrip('.')}" if "pci" in groups else ""
    said = " ".join(hit.line.text for hit in group)
    number = int(groups.get("xid", 0))
    meaning = XIDS.get(number) or next((text for words, text in _GPU_ERRORS if any(word in said for word in words)), "")
    xid = f"Xid {number}" if number else ""
    what = ", ".join(filter(None, (xid, meaning))) or "its driver reports it"
    return replace(found, cause=f"GPU{pci} has failed: {what}")


def _refine_failed_address(found: Diagnosis, group: list[SignatureMatch], all_: LogFindings) -> Diagnosis:
    """Name the interface of an address that failed, and the interface to use."""
    known = all_.interfaces
    texts = [text for hit in group for text in (hit.line.text, hit.raised.text if hit.raised else "")]
    for address in interfaces.addresses_in(texts):
        odd, name = interfaces.what_is(address, known)
        # A store on this node may have such an address.
        if found.id == "store-unreachable" and not address.startswith("0."):
            continue
        if odd:
            return replace(
                found,
                cause=f"other nodes cannot reach the address that is used: {address} is {odd} ({found.cause})",
                fix=f"{interfaces.format_interface_advice(known)}; {found.fix}",
                confidence=found.confidence if found.id == "peer-closed" else "high",
            )
        if name:
            found = replace(found, cause=f"{found.cause}; {address} is on {name}")
    if found.id in ("nccl-error", "remote-error") and known.virtual and known.usable:
        virtual = ", ".join(known.virtual[:4])
        return replace(
            found,
            id="virtual-interfaces",
            cause=(
                f"NCCL uses interfaces of containers or tunnels ({virtual}) beside {known.usable[0]}; their "
                f"addresses cannot be reached from other nodes"
            ),
            fix=interfaces.format_interface_advice(known),
            confidence="medium",
        )
    return found


def apply_collective_verdict(
    found: Diagnosis, verdict: collective.CollectiveVerdict, node_of: dict[int, str]
) -> Diagnosis:
    """Return the diagnosis with the ranks from a verdict on collectives."""
    who = _format_ranks(verdict.ranks)
    blamed = replace(found, ranks=verdict.ranks, nodes=_find_rank_nodes(verdict.ranks, node_of), confidence="high")
    if verdict.kind == "mismatch":
        return replace(
            blamed,
            id="collective-mismatch",
            cause=f"the ranks called different collectives: {verdict.said}",
            fix="let every rank call the same collectives in the same order; look for calls under `if rank == 0`, "
            "early exits and batches of different shape",
        )
    return replace(
        blamed,
        id="rank-behind" if verdict.kind == "behind" else "rank-silent",
        cause=f"{who} kept the others waiting: {verdict.said}",
        fix=f"read in the log of {who} what it was doing; while it hangs, py-spy dump --pid PID shows it",
        confidence="high" if verdict.kind == "behind" else "medium",
    )


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(str(rank) for rank in ranks)}"


def _find_rank_nodes(ranks: Iterable[int], node_of: dict[int, str]) -> tuple[str, ...]:
    return tuple(sorted({node_of[rank] for rank in ranks if rank in node_of}))
