"""Rules that combine the message of an error with other facts from the same logs. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from dtctl.doctor.explain import signatures
from dtctl.doctor.explain.diagnosis import Diagnosis, Evidence
from dtctl.doctor.explain.lines import render_terminal_line
from dtctl.doctor.explain.log_findings import LogFindings, SignatureMatch
from dtctl.doctor.explain.timeline import CauseCandidate

_BY_VERSIONS = frozenset(
    ("nccl-address", "nccl-settings-differ", "nccl-error", "remote-error", "collective-mismatch", "no-interface",
     "distributed-error", "peer-closed")
)  # fmt: skip
"""Errors that ranks with different versions of NCCL print."""
_CRASHES = frozenset(("segfault", "aborted", "bus-error", "crashed", "signalled"))
_KEYS = re.compile(r"(?P<kind>Missing|Unexpected) key\(s\) in state_dict: (?P<keys>.*)")
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "base_model.model.", "model.", "_forward_module.")
"""Prefixes of parameter names from DDP, torch.compile, FSDP, adapters and trainers."""
_OF_FILES = frozenset(("missing-file", "storage-failed", "missing-library", "bad-data", "checkpoint-damaged"))
_CACHE = re.compile(
    r"(?P<path>/[^'\": ]*(?:torch_extensions|torchinductor_\w*|\.triton|torch_compile_cache|inductor_cache)/[^'\": ]*)"
)
"""Pattern of paths in which compilers of kernels cache their results."""
_REASON = re.compile(
    r"\[ERROR\] (?!/etc/)|nvidia-container-cli: |failed to execute|[Dd]enied|No such file|[Uu]nauthorized|not found"
)
_SAID_BEFORE = 40
"""Number of lines before an exception in which the program may have printed the reason."""


def replace_signature(found: Diagnosis, signature: signatures.Signature, cause: str) -> Diagnosis:
    """Return a diagnosis with another signature, to which other facts point, and with its cause."""
    return replace(found, id=signature.id, cause=cause, fix=signature.fix, source=signature.source, confidence="medium")


def apply_combination_rules(found: Diagnosis, candidate: CauseCandidate, all_: LogFindings) -> Diagnosis:
    """Return a diagnosis, extended by other facts about it."""
    if found.id in _BY_VERSIONS and all_.facts.conflicting_nccl_versions:
        return _by_versions(found, all_)
    for ids, rule in _RULES:
        if found.id in ids:
            found = rule(found, candidate, all_)
    if candidate.first.raised is not None and candidate.first.weight < 2:
        found = _said_before(found, candidate.first, all_)
    return found


def _by_versions(found: Diagnosis, all_: LogFindings) -> Diagnosis:
    signature, versions = signatures.by_id("nccl-version-mismatch"), all_.facts.conflicting_nccl_versions
    lines = [all_.facts.versions[version] for version in versions][:2]
    evidence = tuple(
        Evidence(file=line.file, line=line.number, text=render_terminal_line(line.raw).strip()[:400]) for line in lines
    )
    found = replace_signature(found, signature, f"{signature.cause}: these logs name {' and '.join(versions)}")
    return replace(found, evidence=(*found.evidence[:2], *evidence))


def _in_a_cache(found: Diagnosis, candidate: CauseCandidate, all_: LogFindings) -> Diagnosis:
    """Replace the diagnosis of a missing file by that of a compiler's damaged cache, if the file is in one."""
    del all_
    texts = [hit.raised.text if hit.raised is not None else hit.line.text for hit in candidate.hits]
    path = next((named["path"] for text in texts if (named := _CACHE.search(text)) is not None), "")
    if not path:
        return found
    signature = signatures.by_id("compile-cache")
    return replace_signature(found, signature, signature.cause.replace("{path}", path))


def _without_interface(found: Diagnosis, candidate: CauseCandidate, all_: LogFindings) -> Diagnosis:
    """Report a missing interface instead, if no process found the one that NCCL was set to use."""
    del candidate
    facts, signature = all_.facts, signatures.by_id("no-interface")
    if not facts.wanted_interface or facts.found_interface:
        return found
    return replace_signature(found, signature, f"{signature.cause}; it is {facts.wanted_interface}")


def _which_device(found: Diagnosis, candidate: CauseCandidate, all_: LogFindings) -> Diagnosis:
    """Distinguish too many workers from a global rank that is used as a device number."""
    local = _local_rank(candidate.hits, all_)
    rank = next(iter(found.ranks), None)
    gpus = all_.facts.gpus
    if local is None or rank is None:
        return found
    if rank != local and (not gpus or local < gpus):
        said = f"rank {rank} has local rank {local}: the global rank was used as the number of the GPU"
        return replace(found, cause=f"a rank uses a GPU number that its node does not have; {said}")
    said = f"local rank {local} is right for rank {rank}" + (f", and the node has {gpus}" if gpus else "")
    return replace(
        found,
        cause=f"a node has more workers than GPUs that they can use: {said}",
        fix="nvidia-smi -L; echo $CUDA_VISIBLE_DEVICES: at most as many workers as it shows (cluster.slots)",
    )


def _local_rank(hits: list[SignatureMatch], all_: LogFindings) -> int | None:
    """Return the local rank that a launcher prints for the process of these lines; None without one."""
    ranks = {hit.rank for hit in hits if hit.rank is not None}
    for rank in sorted(ranks):
        if rank in all_.facts.local_of:
            return all_.facts.local_of[rank]
    return None


def _which_keys(found: Diagnosis, candidate: CauseCandidate, all_: LogFindings) -> Diagnosis:
    """Name the prefix by which the keys of a checkpoint differ from those of the model."""
    del all_
    texts = [hit.raised.text if hit.raised is not None else hit.line.text for hit in candidate.hits]
    keys: dict[str, set[str]] = {"Missing": set(), "Unexpected": set()}
    for text in texts:
        for match in re.split(r"(?=Missing key|Unexpected key)", text):
            if (told := _KEYS.search(match)) is not None:
                keys[told["kind"]] |= set(re.findall(r'"([\w.]+)"', told["keys"]))
    for have, want, where in (("Unexpected", "Missing", "checkpoint"), ("Missing", "Unexpected", "model")):
        for prefix in _WRAPPERS:
            if any(key.startswith(prefix) and key.removeprefix(prefix) in keys[want] for key in keys[have]):
                said = f"the names in the {where} have the prefix '{prefix}' and those on the other side have not"
                return replace(
                    found,
                    cause=f"{said}: one of the two models is wrapped (DDP, torch.compile), the other one is not",
                    fix=f"save and load the inner model (model.module, model._orig_mod), or strip '{prefix}'",
                )
    return found


def _in_which_library(found: Diagnosis, candidate: CauseCandidate, all_: LogFindings) -> Diagnosis:
    del candidate
    native = all_.facts.native
    return replace(found, cause=f"{found.cause}; its native stack leads into {native[0]}") if native else found


def _said_before(found: Diagnosis, first: SignatureMatch, all_: LogFindings) -> Diagnosis:
    """Add the error that the program printed before it raised an exception without a known meaning."""
    start = first.line.number - (len(first.raised.frames) * 2 + 1 if first.raised is not None else 0)
    said = [
        hit
        for hit in all_.complaints
        if hit.line.file == first.line.file
        and 0 < start - hit.line.number <= _SAID_BEFORE
        and hit.rank in (None, first.rank)
    ]
    if not said:
        return found
    return replace(found, cause=f"{found.cause}; before that it printed: {said[-1].line.text.strip()[:200]!r}")


def _why_no_container(found: Diagnosis, candidate: CauseCandidate, all_: LogFindings) -> Diagnosis:
    """Add the line with the reason why a container cannot start; most lines only report the failure."""
    del all_
    why = next((hit.line.text for hit in candidate.hits if _REASON.search(hit.line.text)), "")
    return replace(found, cause=f"{found.cause}: {why.strip()[:240]}") if why else found


_Rule = Callable[[Diagnosis, CauseCandidate, LogFindings], Diagnosis]
_RULES: tuple[tuple[frozenset[str], _Rule], ...] = (
    (_OF_FILES, _in_a_cache),
    (frozenset(["nccl-address"]), _without_interface),
    (frozenset(["invalid-device"]), _which_device),
    (frozenset(["shapes-differ"]), _which_keys),
    (_CRASHES, _in_which_library),
    (frozenset(["container-start"]), _why_no_container),
)
