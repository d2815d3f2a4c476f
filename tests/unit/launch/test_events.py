"""Events: what is written is read again, what is none is left out, and the docs name them all."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from dtctl.launch.records.events import (
    TYPES,
    AttemptRestarting,
    AttemptRunning,
    AttemptStarting,
    Event,
    FirstFailure,
    JobQueued,
    JobSubmitted,
    NodeChanged,
    NodeReplaced,
    NodesAllocated,
    PushProgress,
    RunEnded,
    RunPlanned,
    RunProgress,
    RunStopping,
    parse_event,
)  # fmt: skip

DOCS = Path(__file__).parents[3] / "docs" / "files.md"
SOME = {
    "alert": "no-step",
    "node": "a",
    "state": "ready",
    "job": "7",
    "script": "/x/job.sbatch",
    "nodes": ("a",),
    "status": "failed",
}
"""A value for each field without a default."""


def example(kind: type[Event]) -> Event:
    return kind(
        **{each.name: SOME[each.name] for each in fields(kind) if each.default is each.default_factory is MISSING}
    )


@pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
def test_what_is_written_is_read(kind: type[Event]) -> None:
    event = example(kind)
    assert parse_event(json.dumps(event.to_json())) == event


def test_nested_facts_are_read() -> None:
    pushed = NodeChanged(node="a", state="pushed", push=PushProgress(files=3, path="/x"))
    ended = RunEnded(status="failed", first_failure=FirstFailure(node="a", rank=1, signal=9), lost_output={"a": 5})
    assert [parse_event(json.dumps(event.to_json())) for event in (pushed, ended)] == [pushed, ended]


@pytest.mark.parametrize(
    "line",
    [
        "", "[]", "12", "{}", '{"event": "node"', '{"event": ["node"]}', '{"event": "no such event", "time": 1}',
        '{"event": "node", "node": 3, "state": "ready"}', '{"event": "node", "node": "a"}',
        '{"event": "start", "time": NaN}',
        '{"event": "start", "attempt": true}', '{"event": "note", "text": "\\ud800"}', '{"event": "note", "node": 3}',
        '{"event": "allocated", "nodes": "ab"}', '{"event": "heal", "replaced": [{"node": "a"}]}',
        '{"event": "start", "time": -1}', '{"event": "start", "attempt": "1"}', '{"event": "start", "attempt": 1e400}',
        '{"event": "done", "status": "failed", "lost_output": {"a": "x"}}', "[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_none_is_left_out(line: str) -> None:
    assert parse_event(line) is None


def test_fields_of_another_version_are_not_read() -> None:
    event = parse_event('{"event": "start", "time": 1.0, "attempt": 2, "colour": [1]}')
    assert event == AttemptStarting(attempt=2, time=1.0)


def test_the_docs_name_every_event() -> None:
    table = DOCS.read_text().partition("## Events")[2].partition("\n## ")[0]
    assert {kind for kind in TYPES if f"| `{kind}` |" not in table} == set()


def after(*events: Event) -> RunProgress:
    progress = RunProgress()
    for event in events:
        progress.apply(event)
    return progress


def test_nodes_that_may_still_have_processes_are_unknown() -> None:
    begun = (RunPlanned(nodes=("a", "b")), AttemptStarting())
    assert after(RunPlanned(nodes=("a", "b"))).left_behind == 0, "nothing was started"
    assert after(*begun).left_behind is None
    stopped = [NodeChanged(node=node, state="stopped", left=left) for node, left in (("a", 0), ("b", 2))]
    assert after(*begun, stopped[0]).left_behind is None
    assert after(*begun, *stopped).left_behind == 2
    assert after(*begun, *stopped, AttemptRestarting(), AttemptStarting(attempt=1)).left_behind is None


def test_a_job_of_slurm_waits_and_then_has_nodes() -> None:
    submitted = JobSubmitted(job="7")
    waiting = after(RunPlanned(), submitted, JobQueued(job="7", reason="Priority"))
    assert (waiting.status, waiting.job, waiting.nodes) == ("queued", submitted, {})
    assert waiting.waits is not None
    waiting.apply(NodesAllocated(nodes=("a",)))
    waiting.apply(AttemptRunning(launch_s=3.0))
    assert (waiting.status, waiting.waits, waiting.all_nodes, waiting.launch_s) == ("running", None, {"a"}, 3.0)


def test_a_spare_takes_the_place_of_its_node() -> None:
    progress = after(RunPlanned(nodes=("a", "b")), NodeReplaced(node="a", by="c"), RunStopping(reason="x"))
    assert (set(progress.nodes), progress.all_nodes, progress.status) == ({"b", "c"}, {"a", "b"}, "stopping")
