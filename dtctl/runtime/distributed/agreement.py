"""Decisions that all workers must take at the same step, found without waiting for each other.

A worker posts its wishes as one small all-reduce and continues; it reads the result a step later, when it has long
arrived. Since all workers post and read at the same steps, all see the same result at the same step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker

INTERVAL_S: Final = 0.05
"""Aim for the time between two questions: unnoticed by a person, and long against the 30 us that one costs."""
MAX_STEPS: Final = 1000


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of all workers at the end of this step."""

    stop: bool
    save: bool


NOTHING: Final = Decision(stop=False, save=False)


class Agreement:
    """The running exchange of wishes; one for each training."""

    def __init__(self, worker: Worker, *, step: int) -> None:
        """Begin to ask.

        Args:
            worker: this worker.
            step: steps done, the same on all workers.
        """
        self._alone = worker.backend is None
        self._message = torch.zeros(3, dtype=torch.int64)  # stop, save, -(steps until the next question)
        self._posted: dist.Work | None = None
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begin again, at a step that may be an earlier one; the same on all workers."""
        self.close()
        self._asked_at = step
        self._ask_at = step + 1
        self._clock_s = time.monotonic()

    def after(self, step: int, *, stop: bool, save: bool) -> Decision:
        """Say what this worker wishes after a step, and learn what all do.

        A wish stands until it is granted, so it is repeated at every step until then.
        """
        if self._alone:
            return Decision(stop, save) if stop or save else NOTHING
        decision = NOTHING
        if self._posted is not None:
            self._posted.wait()
            self._posted = None
            wish_stop, wish_save, interval = self._message.tolist()
            self._ask_at = self._asked_at - interval
            decision = Decision(stop=bool(wish_stop), save=bool(wish_save))
        if step >= self._ask_at and not decision.stop:
            self._ask(step, stop=stop, save=save and not decision.save)
        return decision

    def _ask(self, step: int, *, stop: bool, save: bool) -> None:
        now_s = time.monotonic()
        step_s = max(1e-6, (now_s - self._clock_s) / max(1, step - self._asked_at))
        interval = min(MAX_STEPS, max(1, int(INTERVAL_S / step_s)))
        self._clock_s, self._asked_at = now_s, step
        # The largest of each: any wish counts, and the smallest interval.
        self._message = torch.tensor([stop, save, -interval], dtype=torch.int64)
        self._posted = dist.all_reduce(self._message, op=dist.ReduceOp.MAX, async_op=True)

    def forget(self) -> None:
        """Expect no answer any more; the group is left."""
        self._posted = None

    def close(self) -> None:
        """Take in an answer that is still on its way, so that nothing is in flight when the group is left."""
        if self._posted is not None:
            self._posted.wait()
            self._posted = None
