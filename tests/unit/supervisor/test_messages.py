"""Both ends speak of the same messages: each has a place in one direction, and survives the way."""

from __future__ import annotations

from typing import Any

import pytest

from dtctl.schema import InvalidMessage
from dtctl.supervisor import frames, messages
from dtctl.supervisor.messages import Message

WORKER = messages.WorkerProgress(
    rank=3, pid=9, phase=1, step=8, place=2, first=0, saved=4, until=20, begun_s=6.0, stale_s=1.5, slowest_s=0.1,
    stall_s=0.0, evaluation_s=0.0, state="S",
)  # fmt: skip
SAMPLES: list[Message] = [
    messages.StartAttempt(
        run="r", token="t", attempt=1, script="true\n", workers=[messages.WorkerSpec(rank=-1, env={"A": "b"})],
        split_ranks=True, env={}, peer="10.0.0.1", grace_s=5.0, keep=True, link_timeout_s=10,
    ),
    messages.Attach(run="r", offsets={"-1": 3}),
    messages.Hello(),
    messages.StopAttempt(now=True),
    messages.NodeDescription(gpus=8, address="fe80::1", port=0),
    messages.PushState(state="need", indexes=[0, 2]),
    messages.Pong(workers=[WORKER]),
    messages.WorkerExit(rank=3, code=137, signal=9, why="no memory"),
    messages.AttemptStopped(left=0, exits=[messages.WorkerExit(rank=-1, code=1, signal=None)], gone=True),
    messages.WorkerStack(rank=3, state="S", how="none", text="", flight=""),
]  # fmt: skip


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    ((_, _, payload),) = frames.Parser().feed(frames.pack_json(message))
    kinds = messages.REQUESTS | messages.BEFORE_START | messages.WHILE_RUNNING
    kinds |= {type(message).op: type(message)}  # some names are used in both directions
    assert messages.parse(frames.decode(payload), kinds) == message


def test_every_message_has_a_direction() -> None:
    def below(kind: type[Message]) -> set[type[Message]]:
        return {kind, *(inner for each in kind.__subclasses__() for inner in below(each))}

    lists = [each for name, each in vars(messages).items() if name.isupper() and isinstance(each, dict)]
    known = {kind for each in lists for kind in each.values()}
    own = {kind for kind in below(Message) if kind.__module__ == messages.__name__}
    assert own - {Message} == known


@pytest.mark.parametrize("document", [{}, {"op": None}, {"op": ["hello"]}, {"op": "start"}, {"op": "reformat"}])
def test_what_is_no_message_is_refused(document: dict[str, Any]) -> None:
    for kinds in (messages.REQUESTS, messages.BEFORE_START, messages.WHILE_RUNNING):
        with pytest.raises(InvalidMessage):
            messages.parse(document, kinds)
