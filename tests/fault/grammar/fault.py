# ruff: noqa: E501 - scripts stand as they are typed
"""A fault, what a good examiner says of it, and the collection that faults are added to."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NODES = ("node1", "node2", "node3")
ALL = NODES
PRELUDE = """
set -e
conf() { { printf '%s\\n' "$1"; grep -v "^${1%% *} " "$SELF/ssh/sshd_config"; } >/tmp/sshd_config; again; }
again() { kill $(pgrep -x sshd); while pgrep -x sshd >/dev/null; do sleep 0.05; done; /usr/sbin/sshd -f /tmp/sshd_config; }
shell_of() { sed "s#^\\(root:.*:\\)[^:]*\\$#\\1$1#" /etc/passwd >/tmp/passwd; mount --bind /tmp/passwd /etc/passwd; }
rc() { shell_of /bin/bash; printf '%s\\n' "$1" >"$LOGIN/.bashrc"; }
hosts() { sed "$1" /etc/hosts >/tmp/hosts; mount --bind /tmp/hosts /etc/hosts; }
group() { mkdir -p /sys/fs/cgroup/$1/$GROUP; echo "$3" >/sys/fs/cgroup/$1/$GROUP/$2;
          for p in $(pgrep -x sshd); do echo $p >/sys/fs/cgroup/$1/$GROUP/cgroup.procs || true; done; }
limit() { for p in $(pgrep -x sshd); do prlimit --pid $p "$1" || true; done; }
later() { (sleep $1; shift; "$@") >/dev/null 2>&1 </dev/null & }
"""
"""Beside it a script has P1, P2, P3 (addresses), HERE, SELF (the host's own files), LOGIN (home), PY, and GROUP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a good examiner says of a fault."""

    checks: tuple[str, ...]
    """Any of these, as the primary finding."""
    nodes: tuple[str, ...]
    """The machines to act on; with `pair` the two ends, either of which may be named with the other as its peer."""
    fix: str
    """A usable fix has this (a regular expression, any case)."""
    pair: bool = False
    fatal: bool = True
    """A launch dies or hangs: `can train` is never right. Else a warning is as good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault, or what only looks like one."""

    name: str
    layer: str
    do: tuple[tuple[str, str], ...] = ()
    """(host, script of its administrator)"""
    spec: Mapping[str, Any] = field(default_factory=dict)
    """Dotted key of the spec -> value."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Beside the job's script."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Of the doctor's own process, as a scheduler sets it."""
    during: tuple[tuple[str, str, str], ...] = ()
    """(words of the progress, host, what happens to it then: `kill`, `freeze` or `cut`)"""
    expected: tuple[Expected, ...] = ()

    @property
    def is_held(self) -> bool:
        """Whether it is only scored, never developed on."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 1

    @property
    def order(self) -> str:
        """A sample is taken from the front of this order."""
        return hashlib.sha256(f"order {self.name}".encode()).hexdigest()


class Collection:
    """The faults of a grammar, in the order in which they were added."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self._turn = itertools.count()

    def host(self) -> str:
        """Each host in its turn, so that a fault is not always where the last one was."""
        return NODES[next(self._turn) % 3]

    def two(self) -> tuple[str, str]:
        """Two hosts, in their turn."""
        one = next(self._turn) % 3
        return NODES[one], NODES[(one + 1 + one % 2) % 3]

    def add(
        self,
        name: str,
        layer: str,
        checks: str,
        nodes: Sequence[str],
        fix: str,
        *do: tuple[str, str],
        pair: bool = False,
        fatal: bool = True,
        **more: Any,
    ) -> None:
        """Add a fault and what is expected of an examiner; `checks` are names with blanks between them."""
        wanted = Expected(checks=tuple(checks.split()), nodes=tuple(nodes), fix=fix, pair=pair, fatal=fatal)
        self.faults.append(Fault(name=name, layer=layer, do=do, expected=(wanted,), **more))


def address_of(node: str) -> str:
    """The variable that a script has it in."""
    return f"$P{node[-1]}"


def nodes_with(node: str, **keys: Any) -> dict[str, Any]:
    """Keys of the spec that give one node keys of its own."""
    return {"cluster.nodes": [{"name": one, **keys} if one == node else one for one in NODES]}
