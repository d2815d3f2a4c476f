"""Folders of runs for tests, written as the launcher writes them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtctl.launch.records.events import Event, parse_event
from dtctl.launch.records.record import RunInfo, RunRecord
from dtctl.launch.records.run_writer import RunWriter
from dtctl.node_facts import start_ticks

BEGAN = 1_795_000_000.0
SPEC = """\
cluster: {transport: ssh, nodes: [a, b]}
job:
  script: train.py
  env: {WANDB_API_KEY: sesame-1, MODE: fast}
train: {steps: 40, lr: LR}
"""
LEDGER = {
    "wall_s": 60.0, "attempts": 2, "goodput": 0.75, "steps_lost": 3, "steps": 40, "phase": "stop",
    "phases_s": {"connect": 1.0, "start": 9.0, "useful": 45.0, "lost": 3.0, "restart": 2.0},
}  # fmt: skip


def row(step: int, **more: Any) -> dict[str, Any]:
    """A line of metrics as dtctl.runtime writes it, one second after the last."""
    return {
        "step": step, "loss": 4.0 / step, "lr": 1e-3, "grad_norm": 1.0, "step_s": 1.0, "samples_per_s": 8.0,
        "tokens_per_s": None, "time": BEGAN + 10 + step, "step_p50_s": 0.9, "step_p95_s": 1.2, "step_max_s": 1.5,
        "rss_gib": 0.5, **more,
    }  # fmt: skip


def append(record: RunRecord, event: Mapping[str, Any]) -> None:
    """Write an event as any version of dtctl, or a broken disk, may have written it."""
    with (record.folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def parsed(told: Iterable[Mapping[str, Any]]) -> list[Event]:
    """The same, as they are read."""
    return [event for one in told if (event := parse_event(json.dumps(one))) is not None]


def events() -> list[dict[str, Any]]:
    """Two nodes; a worker of the one is killed after 30 s, and the run started again."""
    told = [
        (0, "plan", {"nodes": ["a", "b"]}),
        *((1, "node", {"node": node, "state": "connected"}) for node in "ab"),
        (5, "start", {"attempt": 0, "world_size": 2}),
        *((5, "node", {"node": node, "state": "started", "interface": "eth0"}) for node in "ab"),
        *((10, "node", {"node": node, "state": "running"}) for node in "ab"),
        (20, "snapshot", {"step": 10}),
        (30, "exit", {"node": "b", "rank": 1, "exit_code": 137, "signal": 9}),
        (30, "stopping", {"reason": "b failed"}),
        (31, "exit", {"node": "a", "rank": 0, "exit_code": 1, "signal": None}),
        *((31, "node", {"node": node, "state": "stopped"}) for node in "ab"),
        (32, "restart", {"attempt": 1, "of": 3, "reason": "was ended by signal 9 (SIGKILL)", "node": "b", "rank": 1}),
        (33, "start", {"attempt": 1, "world_size": 2}),
        *((33, "node", {"node": node, "state": "running"}) for node in "ab"),
        *((59, "node", {"node": node, "state": "stopped"}) for node in "ab"),
        (60, "done", {"status": "succeeded", "exit_code": 0, "left_behind": 0, "first_failure": None}),
    ]  # fmt: skip
    return [{"event": event, "time": BEGAN + at, **facts} for at, event, facts in told]


def make_run(
    base: Path,
    name: str = "r1",
    *,
    rows: Iterable[Mapping[str, Any]] | None = None,
    happened: Sequence[Mapping[str, Any]] | None = None,
    lr: str = "0.001",
) -> RunRecord:
    """A run that has ended well, unless told otherwise."""
    info = RunInfo(
        run=name, token="t", pid=os.getpid(), started=BEGAN, spec="", command=["dtctl", "launch"], detached=False,
        pid_started=start_ticks(os.getpid()),
    )  # fmt: skip
    record = RunWriter.create(base, info)
    record.write_spec(SPEC.replace("LR", lr))
    env = [
        {"name": "WANDB_API_KEY", "value": "sesame-2", "origin": "job.env_from: WANDB_*"},
        {"name": "MODE", "value": "<fast>", "origin": "job.env"},
    ]
    nodes = [
        {"name": node, "address": f"10.0.0.{n}", "slots": 1, "first_rank": n, "env": env} for n, node in enumerate("ab")
    ]
    plan = {"kind": "torchrun", "transport": "ssh", "world_size": 2, "nodes": nodes, "secrets": ["HF_TOKEN"]}
    (record.folder / "plan.json").write_text(json.dumps(plan))
    (record.folder / "ledger.json").write_text(json.dumps(LEDGER))
    for event in events() if happened is None else happened:
        append(record, event)
    lines = [json.dumps(one) for one in ([row(n) for n in range(1, 41)] if rows is None else rows)]
    if lines:
        (record.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return record
