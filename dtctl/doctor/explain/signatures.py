"""Catalogue of texts that failing jobs print, read from signatures.yaml."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module, resources
from typing import Any, Literal

# Python 3.10 has this module under its old name, about which newer versions warn.
_parser = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

Role = Literal["cause", "symptom", "effect", "note"]
Blames = Literal["self", "group", "all"]


SPOKEN_BY_TOOLS = re.compile(
    r"slurm|open-mpi|man\.openbsd|gnu\.org/software/bash|kubernetes|DeepSpeed/issues/4907|horovod/issues/467|man2/execve|container-toolkit|conda\.io"
)
"""Pattern of signature sources that are schedulers, shells and SSH; their messages need no mark of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Cause of a failure and the texts that identify it; the head of signatures.yaml documents the fields."""

    id: str
    patterns: tuple[re.Pattern[str], ...]
    cause: str
    fix: str
    source: str
    example: str
    role: Role = "cause"
    blames: Blames = "self"
    ambiguous: str = ""
    versions: str = ""
    yields: tuple[str, ...] = ()
    sure: bool = True
    follows: str = ""
    ends: bool = False


@functools.cache
def load_signatures() -> tuple[Signature, ...]:
    """Return all signatures in the order of the file: if two fit one line equally, the first one counts."""
    return tuple(
        Signature(
            patterns=tuple(re.compile(pattern) for pattern in entry.pop("match")),
            yields=tuple(entry.pop("yields", ())),
            **entry,
        )
        for entry in _load_yaml_entries("signatures.yaml")
    )


@functools.cache
def load_exception_kinds() -> dict[str, Signature]:
    """Return the kinds of exceptions without a known text, by id."""
    return {entry["id"]: Signature(patterns=(), **entry) for entry in _load_yaml_entries("kinds.yaml")}


def find_exception_kind(id_: str) -> Signature:
    """Return a kind by its id; an exception without a traceback counts as one of the program."""
    return (
        replace(load_exception_kinds()[id_], id="exception")
        if id_ == "not-in-traceback"
        else load_exception_kinds()[id_]
    )


def by_id(id_: str) -> Signature:
    """Return the signature with an id."""
    return next(signature for signature in load_signatures() if signature.id == id_)


def _load_yaml_entries(name: str) -> list[dict[str, Any]]:
    import yaml

    text = resources.files("dtctl.doctor.explain").joinpath(name).read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: list[dict[str, Any]] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, either of them
    return entries


_OTHER_DEVICES = re.compile(r"\b(?:HIP|XPU|NPU|HPU|MUSA)( out of memory| error: )")
"""Pattern of errors of other makers' devices, which have the same words as CUDA's errors."""
COMMUNICATION = re.compile(
    r"\bgloo/|ProcessGroup[A-Z]\w+|\bc10d/|NCCL (?:error|WARN)|\bnccl[A-Z]\w+|TCPStore|\b(?:ucp|ucs|uct|ucc)_\w+|"
    r"\bUCX  |\blibfabric\b"
)
"""Pattern of names of communication libraries, whose messages concern two processes."""
_ELSEWHERE = frozenset(
    ("storage-failed", "missing-file", "permission", "read-only", "offline", "tls", "hub-missing", "server-error")
)
"""Kinds for files and downloads; communication libraries use the same words about connections."""
LONGEST = 4000
"""Number of characters of a text that are searched."""
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True)
class _PatternIndex:
    """Index from words to the patterns that require them, so that most lines of a log need no further search."""

    by_word: dict[str, list[tuple[int, int, re.Pattern[str]]]]
    by_part: list[tuple[str, list[tuple[int, int, re.Pattern[str]]]]]
    """Parts of words, for patterns that require no whole word."""
    always: list[tuple[int, int, re.Pattern[str]]]


@functools.cache
def _build_pattern_index() -> _PatternIndex:
    by_word: dict[str, list[tuple[int, int, re.Pattern[str]]]] = {}
    by_part: dict[str, list[tuple[int, int, re.Pattern[str]]]] = {}
    always: list[tuple[int, int, re.Pattern[str]]] = []
    for number, signature in enumerate(load_signatures()):
        for place, pattern in enumerate(signature.patterns):
            needed = _find_required_words(_parser.parse(pattern.pattern))
            if needed is None:
                always.append((number, place, pattern))
            for word, whole in needed or ():
                (by_word if whole else by_part).setdefault(word, []).append((number, place, pattern))
    return _PatternIndex(by_word, list(by_part.items()), always)


def _find_required_words(parsed: Iterable[Any]) -> list[tuple[str, bool]] | None:
    """Return words of which every match of a pattern has at least one, each with True if it is a whole word.

    The result is None if the pattern has no such words.
    """
    runs: list[str] = [""]
    choices: list[list[tuple[str, bool]]] = []
    for op, argument in parsed:
        name = str(op)
        if name == "LITERAL":
            runs[-1] += chr(argument).lower()
            continue
        if name == "AT":
            runs[-1] += "\0"  # the start or a boundary, so an adjacent word is whole
            continue
        inside: list[tuple[str, bool]] | None = None
        if name == "SUBPATTERN":
            inside = _find_required_words(argument[-1])
        elif name == "BRANCH":
            every = [_find_required_words(branch) for branch in argument[1]]
            inside = None if None in every else [one for some in every for one in some or ()]
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] >= 1:
            inside = _find_required_words(argument[2])
        if inside:
            choices.append(inside)
        runs.append("")
    found = [(word, whole) for run in runs for word, whole in _split_literal_words(run)]
    if found:
        choices.append([max(found, key=lambda one: (one[1] and len(one[0]) > 3, len(one[0])))])
    good = [choice for choice in choices if all(len(word) > 2 for word, _ in choice)]
    return min(
        good,
        key=lambda choice: (not all(whole for _, whole in choice), len(choice), -min(len(word) for word, _ in choice)),
        default=None,
    )


def _split_literal_words(run: str) -> Iterator[tuple[str, bool]]:
    for found in _WORD.finditer(run):
        yield found[0], found.start() > 0 and found.end() < len(run)


def find_best(text: str) -> tuple[Signature, dict[str, str]] | None:
    """Return the most specific signature for a text, with its named groups; a cause precedes a consequence."""
    text = _OTHER_DEVICES.sub(r"CUDA\1", text[:LONGEST])
    index, lower = _build_pattern_index(), text.lower()
    candidates = list(index.always)
    for word in set(_WORD.findall(lower)):
        if word in index.by_word:
            candidates += index.by_word[word]
    for part, patterns in index.by_part:
        if part in lower:
            candidates += patterns
    if not candidates:
        return None
    best: Signature | None = None
    groups: dict[str, str] = {}
    known, of_peers = load_signatures(), COMMUNICATION.search(text) is not None
    for number, _, pattern in sorted(candidates, key=lambda candidate: candidate[:2]):
        signature = known[number]
        if of_peers and signature.id in _ELSEWHERE:
            continue
        if (
            best is not None
            and signature is not best
            and compute_signature_rank(signature) >= compute_signature_rank(best)
        ):
            continue
        if (signature is best and not pattern.groups) or (found := pattern.search(text)) is None:
            continue
        if signature is not best:  # groups of the signature's other patterns are added later
            best, groups = signature, {}
        groups = {**{name: value for name, value in found.groupdict().items() if value is not None}, **groups}
    return None if best is None else (best, groups)


_ROLES = {"cause": 0, "symptom": 3, "effect": 4, "note": 5}


def compute_signature_rank(signature: Signature) -> int:
    """Return the rank of a signature; a lower rank explains a failure better."""
    if signature.role != "cause":
        return _ROLES[signature.role]
    if signature.ambiguous:
        return 2
    return 1 if signature.yields else 0
