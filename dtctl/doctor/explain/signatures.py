"""The catalogue of texts that failing jobs print, read from signatures.yaml."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module, resources
from typing import Any, Literal

# Python 3.10 has it under its old name, which newer ones warn of.
_parser = import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")

Role = Literal["cause", "symptom", "effect", "note"]
Blames = Literal["self", "group", "all"]


SPOKEN_BY_TOOLS = re.compile(
    r"slurm|open-mpi|man\.openbsd|gnu\.org/software/bash|kubernetes|DeepSpeed/issues/4907|horovod/issues/467|man2/execve|container-toolkit|conda\.io"
)
"""Sources of the signatures of schedulers, shells and SSH: their messages need no mark of an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One cause and the texts that identify it; the head of signatures.yaml documents the fields."""

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
def signatures() -> tuple[Signature, ...]:
    """Return all of them, in the order of the file: of two that fit one line alike, the first wins."""
    return tuple(
        Signature(
            patterns=tuple(re.compile(pattern) for pattern in entry.pop("match")),
            yields=tuple(entry.pop("yields", ())),
            **entry,
        )
        for entry in _entries("signatures.yaml")
    )


@functools.cache
def kinds() -> dict[str, Signature]:
    """Return what an exception can be that no text is known of, by id."""
    return {entry["id"]: Signature(patterns=(), **entry) for entry in _entries("kinds.yaml")}


def kind(id_: str) -> Signature:
    """Return a kind by its id; an exception without its traceback counts as one of the program's."""
    return replace(kinds()[id_], id="exception") if id_ == "not-in-traceback" else kinds()[id_]


def by_id(id_: str) -> Signature:
    """Return the signature of an id."""
    return next(signature for signature in signatures() if signature.id == id_)


def _entries(name: str) -> list[dict[str, Any]]:
    import yaml

    text = resources.files("dtctl.doctor.explain").joinpath(name).read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries: list[dict[str, Any]] = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, either of them
    return entries


_OTHER_DEVICES = re.compile(r"\b(?:HIP|XPU|NPU|HPU|MUSA)( out of memory| error: )")
"""The same words of other makers' devices."""
COMMUNICATION = re.compile(
    r"\bgloo/|ProcessGroup[A-Z]\w+|\bc10d/|NCCL (?:error|WARN)|\bnccl[A-Z]\w+|TCPStore|\b(?:ucp|ucs|uct|ucc)_\w+|"
    r"\bUCX  |\blibfabric\b"
)
"""Names of libraries of collectives: a process prints so what happened between it and another one."""
_ELSEWHERE = frozenset(
    ("storage-failed", "missing-file", "permission", "read-only", "offline", "tls", "hub-missing", "server-error")
)
"""Kinds about files and downloads; such a library uses their words of connections."""
LONGEST = 4000
"""Characters of a text that are searched."""
_WORD = re.compile(r"[a-z]+")


@dataclass(frozen=True, slots=True)
class _Index:
    """Index from words to the patterns that need them: most lines of a log need no second look."""

    by_word: dict[str, list[tuple[int, int, re.Pattern[str]]]]
    by_part: list[tuple[str, list[tuple[int, int, re.Pattern[str]]]]]
    """Parts of words, where a pattern has no whole word."""
    always: list[tuple[int, int, re.Pattern[str]]]


@functools.cache
def _index() -> _Index:
    by_word: dict[str, list[tuple[int, int, re.Pattern[str]]]] = {}
    by_part: dict[str, list[tuple[int, int, re.Pattern[str]]]] = {}
    always: list[tuple[int, int, re.Pattern[str]]] = []
    for number, signature in enumerate(signatures()):
        for place, pattern in enumerate(signature.patterns):
            needed = _needed(_parser.parse(pattern.pattern))
            if needed is None:
                always.append((number, place, pattern))
            for word, whole in needed or ():
                (by_word if whole else by_part).setdefault(word, []).append((number, place, pattern))
    return _Index(by_word, list(by_part.items()), always)


def _needed(parsed: Iterable[Any]) -> list[tuple[str, bool]] | None:
    """Return words such that every match of a pattern has at least one; each with whether it is a whole word there.

    None if the pattern has no such words.
    """
    runs: list[str] = [""]
    choices: list[list[tuple[str, bool]]] = []
    for op, argument in parsed:
        name = str(op)
        if name == "LITERAL":
            runs[-1] += chr(argument).lower()
            continue
        if name == "AT":
            runs[-1] += "\0"  # a boundary, or the beginning: what stands beside it is whole
            continue
        inside: list[tuple[str, bool]] | None = None
        if name == "SUBPATTERN":
            inside = _needed(argument[-1])
        elif name == "BRANCH":
            every = [_needed(branch) for branch in argument[1]]
            inside = None if None in every else [one for some in every for one in some or ()]
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] >= 1:
            inside = _needed(argument[2])
        if inside:
            choices.append(inside)
        runs.append("")
    found = [(word, whole) for run in runs for word, whole in _words(run)]
    if found:
        choices.append([max(found, key=lambda one: (one[1] and len(one[0]) > 3, len(one[0])))])
    good = [choice for choice in choices if all(len(word) > 2 for word, _ in choice)]
    return min(
        good,
        key=lambda choice: (not all(whole for _, whole in choice), len(choice), -min(len(word) for word, _ in choice)),
        default=None,
    )


def _words(run: str) -> Iterator[tuple[str, bool]]:
    for found in _WORD.finditer(run):
        yield found[0], found.start() > 0 and found.end() < len(run)


def find_best(text: str) -> tuple[Signature, dict[str, str]] | None:
    """Return the most specific signature for a text, and its named groups: a cause before a consequence."""
    text = _OTHER_DEVICES.sub(r"CUDA\1", text[:LONGEST])
    index, lower = _index(), text.lower()
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
    known, of_peers = signatures(), COMMUNICATION.search(text) is not None
    for number, _, pattern in sorted(candidates, key=lambda candidate: candidate[:2]):
        signature = known[number]
        if of_peers and signature.id in _ELSEWHERE:
            continue
        if best is not None and signature is not best and worth(signature) >= worth(best):
            continue
        if (signature is best and not pattern.groups) or (found := pattern.search(text)) is None:
            continue
        if signature is not best:  # what its other patterns name is added to it
            best, groups = signature, {}
        groups = {**{name: value for name, value in found.groupdict().items() if value is not None}, **groups}
    return None if best is None else (best, groups)


_ROLES = {"cause": 0, "symptom": 3, "effect": 4, "note": 5}


def worth(signature: Signature) -> int:
    """Return how well a signature explains a failure; less is more."""
    if signature.role != "cause":
        return _ROLES[signature.role]
    return 2 if signature.ambiguous else 1 if signature.yields else 0
