"""Both ends speak of the same messages: each has a place in one direction, and survives the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtctl.runtime.telemetry.progress import ProgressFile
from dtctl.schema import InvalidMessage
from dtctl.supervisor import frames, progress
from dtctl.supervisor.messages.attempt import (
    RUN_REQUESTS,
    WHILE_RUNNING,
    Attach,
    AttemptStopped,
    Pong,
    StartAttempt,
    StopAttempt,
    WorkerExit,
    WorkerProgress,
    WorkerSpec,
    WorkerStack,
)
from dtctl.supervisor.messages.base import Message, parse_message_document
from dtctl.supervisor.messages.setup import Hello, NodeDescription, PushState
from dtctl.supervisor.requests import ANSWERED_BY
from tests import messages

WORKER = WorkerProgress(
    rank=3, pid=9, phase=1, step=8, place=2, first=0, saved=4, until=20, begun_s=6.0, stale_s=1.5, slowest_s=0.1,
    stall_s=0.0, evaluation_s=0.0, state="S",
)  # fmt: skip
SAMPLES: list[Message] = [
    StartAttempt(
        run="r", token="t", attempt=1, script="true\n", workers=[WorkerSpec(rank=-1, env={"A": "b"})],
        split_ranks=True, env={}, peer="10.0.0.1", grace_s=5.0, keep=True, link_timeout_s=10,
    ),
    Attach(run="r", offsets={"-1": 3}),
    Hello(),
    StopAttempt(now=True),
    NodeDescription(gpus=8, address="fe80::1", port=0),
    PushState(state="need", indexes=[0, 2]),
    Pong(workers=[WORKER]),
    WorkerExit(rank=3, code=137, signal=9, why="no memory"),
    AttemptStopped(left=0, exits=[WorkerExit(rank=-1, code=1, signal=None)], gone=True),
    WorkerStack(rank=3, state="S", how="none", text="", flight=""),
]  # fmt: skip


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    ((_, _, payload),) = frames.FrameParser().feed(frames.pack_json(message))
    assert parse_message_document(frames.decode_message(payload), {message.op: type(message)}) == message


def test_the_table_names_every_request_and_who_answers_it() -> None:
    ops = [op for ops in ANSWERED_BY.values() for op in ops]
    assert len(ops) == len(set(ops))
    for name, family in messages.FAMILIES.items():
        # Those of a run may come once it has started, on the same link.
        assert set(ANSWERED_BY[name]) == family.KINDS.keys() - (RUN_REQUESTS.keys() - set(ANSWERED_BY[name])), name


def test_no_message_is_without_a_direction() -> None:
    kinds = {kind for each in messages.answers() for kind in each.values()}
    assert WHILE_RUNNING.keys() <= {kind.op for kind in kinds}
    assert not kinds & set(messages.REQUESTS.values())


@pytest.mark.parametrize("document", [{}, {"op": None}, {"op": ["hello"]}, {"op": "start"}, {"op": "reformat"}])
def test_what_is_no_message_is_refused(document: dict[str, Any]) -> None:
    for kinds in (messages.REQUESTS, *messages.answers()):
        with pytest.raises(InvalidMessage):
            parse_message_document(document, kinds)


def test_what_a_worker_tells_of_a_resume_is_sent_on_or_left_out(tmp_path: Path) -> None:
    """Whatever the file has, progress itself is sent."""
    worker = ProgressFile(0, folder=str(tmp_path))
    verdict = {"step": 4, "verdict": "exact", "steps": 2, "differs": None, "why": ["seed changed from 1 to 2"]}
    worker.report_resume(resumed={**verdict, "verdict": None, "steps": 0})
    worker.report_resume(confirmed=verdict)
    (report,) = progress.read_worker_progress(str(tmp_path))
    again = WorkerProgress.parse(json.loads(json.dumps(report, default=lambda record: record.to_json())))
    assert again.resumed is not None
    assert again.confirmed is not None
    assert (again.resumed.verdict, again.confirmed.verdict, again.confirmed.why) == (None, "exact", verdict["why"])
    for content in ("", "{", "[]", '{"confirmed": 3}', '{"confirmed": {"step": -1}}', "[" * 10_000, "\x00\xff"):
        (tmp_path / "rank-0.resume").write_text(content)
        (report,) = progress.read_worker_progress(str(tmp_path))
        assert (report.rank, report.confirmed) == (0, None)
