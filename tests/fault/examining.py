"""`dtctl doctor` on virtual hosts with a fault, and what is to come of it; for the tests of its layers."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dtctl.sandbox import control, faults
from dtctl.sandbox.layout import Sandbox

SPEC = {
    "cluster": {"transport": "sandbox", "nodes": ["node1", "node2", "node3"], "slots": 1, "connect_timeout_s": 3.0},
    "job": {"name": "t", "script": "train.py", "kind": "direct"},
}


def examine(
    project: Any, changes: dict[str, Any] | None = None, *options: str, full: bool = False
) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of `dtctl doctor` with a spec; torch takes seconds to load, so only `full` ones load it."""
    spec: dict[str, Any] = json.loads(json.dumps(SPEC))
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        place = spec
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    project.write("dtctl.yaml", json.dumps(spec))
    project.write("train.py", "print(1)\n")
    done = project.run("doctor", "--json", *options, *(() if full else ("--skip", "collective")))
    assert done.out, done.err
    return done.code, json.loads(done.out)


watching: list[Callable[[dict[str, Any]], None]] = []
"""Told each answer while the fault is there; benchmarks/doctor_faults.py asks others about the same fault then."""


def bad(said: dict[str, Any]) -> list[dict[str, Any]]:
    """What is wrong, by this answer."""
    for tell in watching:
        tell(said)
    return [one for one in said["findings"] if one["status"] in ("fail", "warn")]


def expect(
    result: tuple[int, dict[str, Any]],
    check: str,
    nodes: Sequence[str],
    *,
    peers: Sequence[str] | None = None,
    status: str = "fail",
    said: str = "",
) -> None:
    """The primary finding is this one, nothing else is wrong that does not follow from it, and there is a fix."""
    code, answer = result
    found = bad(answer)
    told = json.dumps(found, indent=1)
    assert found, "nothing was found"
    first = found[0]
    assert (first["check"], first["status"], first["primary"]) == (check, status, True), told
    assert sorted(first["nodes"]) == sorted(nodes), told
    if peers is not None:
        assert sorted(first["peers"]) == sorted(peers), told
    assert said in first["summary"] + first["fix"] + " ".join(first["evidence"]), told
    assert first["fix"]
    assert first["evidence"]
    assert [one["check"] for one in found[1:] if not one["follows"]] == [], told
    # What follows from a warning can be a failure: how slow a link that loses 2% gets is chance.
    failed = any(one["status"] == "fail" for one in found)
    assert (code, answer["ok"]) == ((9, False) if failed else (0, True)), told


def on(sandbox: Sandbox, node: str, *argv: str, root: bool = True) -> str:
    """Run something on a host with all rights there."""
    host = sandbox.node(node)
    prefix = faults._build_nsenter_argv(sandbox, host) if root else control.enter_argv(sandbox, host, [])
    return subprocess.run([*prefix, *argv], check=True, capture_output=True, text=True).stdout


def placed(sandbox: Sandbox, node: str, name: str, text: str) -> str:
    """Path of a new file on a host, written there: the host's /tmp is not the one in which this test's files lie."""
    path = f"/tmp/{secrets.token_hex(4)}/{name}"
    write = 'mkdir -p "${1%/*}" && chmod 755 "${1%/*}" && printf %s "$2" >"$1" && chmod 755 "$1"'
    on(sandbox, node, "sh", "-c", write, "sh", path, text, root=False)
    return path


def note(sandbox: Sandbox) -> None:
    """Have the sandbox healed when the test is over."""
    faults.write_recorded_faults(sandbox, [*faults.read_recorded_faults(sandbox), "by a test"])


def wrapper(sandbox: Sandbox, node: str, body: str) -> str:
    """A program on a host that stands for its Python."""
    return placed(sandbox, node, "python", f"#!/bin/sh\n{body}\n")


def with_python(node: str, python: str) -> dict[str, Any]:
    names = ["node1", "node2", "node3"]
    return {"cluster.nodes": [{"name": name, "python": python} if name == node else name for name in names]}


def over_ssh(sandbox: Sandbox, project: Any, **changes: Any) -> dict[str, Any]:
    """The sandbox's hosts as an ordinary cluster."""
    return {
        "cluster": {
            "transport": "ssh",
            "nodes": [{"name": node.name, "address": node.address} for node in sandbox.nodes],
            "user": sandbox.user,
            "identity_file": str(sandbox.identity_file),
            "known_hosts": str(sandbox.known_hosts),
            "ssh_config": "none",
            "python": sys.executable,
            "connect_timeout_s": 3.0,
            "slots": 1,
            **changes,
        }
    }


needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="an ordinary user's sandbox is reached through its keeper only"
)
