"""States of an attempt: what ends each, after which time at the latest, and what may follow.

`Attempt` looks at the clock by this table alone, and a test lets the time of every state pass: none may last for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

START_LIMIT_S: Final = 30.0
"""Seconds that a node may take from the start message to its answer."""
STOP_MARGIN_S: Final = 5.0
"""Seconds that a node has on top of the grace of its workers: for strays, and the way there and back."""
CLOSE_SILENCE_S: Final = 120.0
"""Seconds without output after which nodes whose workers have all ended are stopped."""


class State(Enum):
    """State of an attempt."""

    STARTING = "starting"
    RUNNING = "running"
    HEALING = "healing"
    ENDING = "ending"
    CLOSING = "closing"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRule:
    """How a state is left. In each, a node that is silent for `cluster.link_timeout_s` is lost, too."""

    ended_by: str
    limit: str
    """Name or formula of the longest time in it."""
    check: str
    """Method of `Attempt` that looks at that time."""
    next: tuple[State, ...]


STATES: Final[Mapping[State, StateRule]] = {
    State.STARTING: StateRule(
        ended_by="the answer of the last node to its start message",
        limit=f"{START_LIMIT_S:g} s",
        check="check_start",
        next=(State.RUNNING, State.STOPPING, State.OVER),
    ),
    State.RUNNING: StateRule(
        ended_by="the end of a worker, or its loss",
        limit="job.hang_s without a step, where the job tells its steps; job.time_s",
        check="check_progress",
        next=(State.HEALING, State.ENDING, State.CLOSING, State.STOPPING),
    ),
    State.HEALING: StateRule(
        ended_by="the news that all workers have joined, or that one has ended: it cannot join any more",
        limit="job.heal_s",
        check="check_healing",
        next=(State.RUNNING, State.STOPPING),
    ),
    State.ENDING: StateRule(
        ended_by="the end of the last worker",
        limit="job.hang_s without a step, where the job tells its steps; job.time_s",
        check="check_progress",
        next=(State.CLOSING, State.STOPPING),
    ),
    State.CLOSING: StateRule(
        ended_by="the report of the last node",
        limit=f"{CLOSE_SILENCE_S:g} s without output",
        check="check_close",
        next=(State.OVER, State.STOPPING),
    ),
    State.STOPPING: StateRule(
        ended_by="the report of the last node",
        limit=f"job.grace_s + {STOP_MARGIN_S:g} s",
        check="check_stop",
        next=(State.OVER,),
    ),
}
"""All states but the last one, which has no end."""
