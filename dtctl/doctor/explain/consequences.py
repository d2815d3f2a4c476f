"""Diagnoses next to a primary cause, which must agree with it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from dtctl.doctor.explain import exception_classes
from dtctl.doctor.explain.diagnosis import Diagnosis
from dtctl.doctor.explain.lines import find_log_run_folder
from dtctl.doctor.explain.log_findings import LogFindings, SignatureMatch

_ERROR_ELSEWHERE = ("worker-failed", "torchrun-no-traceback")
"""Messages of a launcher about a worker whose own error the launcher has not seen; the worker's output may have it."""
_OF_LAUNCHERS = frozenset((*_ERROR_ELSEWHERE, "agent-signalled", "stopped", "hangup", "derived", "cancelled"))
_TOLD_TO_STOP = frozenset(["agent-signalled", "stopped", "cancelled", "hangup", "interrupted"])
"""Kinds that cannot have caused other failures, since the job was stopped on purpose."""
_AGENT = re.compile(r"/torch/distributed/(?:run\.py|launch|elastic/(?:agent|rendezvous))")
"""Pattern of torchrun's own files: an exception from there is not a worker's."""


def without_errors_that_are_here(group: Sequence[SignatureMatch], found: LogFindings) -> list[SignatureMatch]:
    """Return a group without launchers' messages about ranks whose own error is in these logs."""
    if group[0].signature.id not in _ERROR_ELSEWHERE:
        return list(group)
    here = {(find_log_run_folder(hit.line.file), hit.rank) for hit in found.hits if _error_of_a_worker(hit)}
    left: list[SignatureMatch] = []
    for hit in group:
        run = find_log_run_folder(hit.line.file)
        if (run, None) in here:  # an error without a rank
            continue
        ranks = tuple(sorted({*hit.ranks, *(() if hit.rank is None else (hit.rank,))}))
        missing = tuple(rank for rank in ranks if (run, rank) not in here)
        if missing:
            left.append(replace(hit, ranks=missing, rank=missing[0] if len(missing) == 1 else None))
        elif not ranks and all(there != run for there, _ in here):
            left.append(hit)
    return left


def _error_of_a_worker(hit: SignatureMatch) -> bool:
    signature = hit.signature
    if hit.end is not None or hit.survived or hit.warned or signature.role == "note" or signature.id in _OF_LAUNCHERS:
        return False
    if hit.raised is None:
        return hit.rank is not None
    of_agent = any(_AGENT.search(frame.path) for frame in hit.raised.frames)
    return hit.raised.short not in exception_classes.PASSING_ON and not (hit.rank is None and of_agent)


def in_one_run(one: SignatureMatch, other: SignatureMatch) -> bool:
    """Return whether two findings may come from the same run of dtctl: their paths do not name different runs."""
    runs = {find_log_run_folder(hit.line.file) for hit in (one, other)} - {None}
    return len(runs) < 2


def told_as_consequence(one: Diagnosis, group: Sequence[SignatureMatch], first: Diagnosis) -> Diagnosis:
    """Return a diagnosis as a consequence of the first one, with a text that suggests no other cause."""
    one, cause = replace(one, follows=True), group[0].signature.follows
    if not cause or first.id in _TOLD_TO_STOP:
        return one
    return replace(one, cause=cause, fix=f"see {first.id}, which led to it")
