"""Logs that are cut at random places, or mixed from two failures: nothing false is said with confidence."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtctl.doctor.explain.diagnose import explain_all

LOGS = Path(__file__).parent / "logs"
SEED = 20261129
CUT, MIXED = 200, 200
NOISE = (
    "[rank0]: step {n} | loss: 2.0{n} | lr 1.0e-04\n",
    "n1:991:992 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n",
    "/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py:{n}: FutureWarning: hooks are deprecated\n",
    "INFO: reading shard {n} of the data\n",
    "2026-01-05 10:00:0{n} [INFO] trainer: batch {n} of 9\n",
)
SAME = (
    {"killed", "oom-killer", "job-memory-limit"},
    {"missing-file", "compile-cache", "no-data"},
    {"watchdog-timeout", "rank-behind", "rank-silent", "collective-mismatch", "collective-unfinished"},
    {"no-interface", "nccl-address", "nccl-version-mismatch"},
    {"missing-module", "version-conflict", "removed-api", "import-failed", "undefined-symbol", "part-missing"},
    {"bad-arguments", "local-rank-argument"},
    {"mpi-daemon-lost", "command-missing"},
    {"no-nccl", "driver-too-old"},
    {"offline", "name-resolution"},
    {"sizes-differ", "bad-sample"},
    {"bad-data", "checkpoint-damaged"},
    {"loader-exited", "loader-killed"},
    {"write-failed", "storage-failed", "disk-full"},
    {"build-failed", "gpu-architecture", "missing-header", "cuda-toolkit-missing"},
    {"store-unreachable", "connect-refused", "connect-timeout", "name-resolution", "rendezvous-host"},
    {"agent-signalled", "time-limit", "cancelled", "preempted", "hangup", "stopped", "requeued"},
)
"""Kinds that say the same of a part of a text."""


@cache
def cases() -> list[tuple[set[str], list[str]]]:
    """Return texts of failures that are kept, each with the ids that are true of it."""
    kept: list[dict[str, Any]] = [
        *yaml.safe_load((LOGS / "quoted.yaml").read_text()),
        *yaml.safe_load((LOGS / "kinds.yaml").read_text()),
    ]
    texts = [({case["id"], *case.get("alike", ())}, case["text"]) for case in kept if case["id"]]
    own = yaml.safe_load((LOGS / "expected.yaml").read_text())
    texts += [({case["id"]}, (LOGS / f"own-{name}.log").read_text()) for name, case in own.items()]
    return [(true, text.splitlines(keepends=True)) for true, text in texts]


def drawn(kind: str, number: int) -> tuple[set[str], str]:
    """Return a text and the ids that are true of it."""
    chance = random.Random(f"{SEED} {kind} {number}")
    noise = [line.format(n=n) for n, line in enumerate(chance.choices(NOISE, k=chance.randrange(20)))]
    true, lines = chance.choice(cases())
    if kind == "cut":
        begin = chance.randrange(len(lines))
        lines = lines[begin : chance.randrange(begin, len(lines)) + 1]
        if chance.random() < 0.5:  # in the middle of a line, as a full disk leaves it
            lines[-1] = lines[-1][: chance.randrange(len(lines[-1]) + 1)]
        return true, "".join(noise + lines)
    also, others = chance.choice(cases())
    at = chance.randrange(len(lines) + 1)
    return true | also, "".join(noise + lines[:at] + others + lines[at:])


def alike(true: set[str]) -> set[str]:
    """Return the ids that are true of a text whose established ids these are."""
    return true.union(*(same for same in SAME if same & true))


@pytest.mark.parametrize(("kind", "count"), [("cut", CUT), ("mixed", MIXED)])
def test_nothing_false_is_said_with_confidence(tmp_path: Path, kind: str, count: int) -> None:
    false = []
    for number in range(count):
        true, text = drawn(kind, number)
        (tmp_path / "job.log").write_text(text)
        explained = explain_all([tmp_path / "job.log"])
        first = next((one for one in explained.diagnoses if one.primary), None)
        if first is not None and first.confidence in ("medium", "high") and first.id not in alike(true):
            false.append(f"{number}: {first.id} ({first.confidence}) of {sorted(true)}: {first.cause[:160]}")
    assert not false, "\n".join(false)
