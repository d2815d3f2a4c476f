"""Decisions that all workers must take at the same step, made without waiting for each other.

A worker sends its requests as one small all-reduce and continues. It reads the result a step later, when the exchange
has long been complete. All workers send and read at the same steps, so all get the same result at the same step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from dtctl.runtime.distributed.worker import Worker

INTERVAL_S: Final = 0.05
"""Target time between two exchanges: too short to be noticed, and long compared with the 30 us of an exchange."""
MAX_STEPS: Final = 1000


@dataclass(frozen=True, slots=True)
class StepDecision:
    """Decision of all workers at the end of this step."""

    stop: bool
    save: bool


NOTHING: Final = StepDecision(stop=False, save=False)


class DecisionExchange:
    """Exchange of requests among the workers of one run."""

    def __init__(self, worker: Worker, *, step: int) -> None:
        """Prepare the first exchange.

        Args:
            worker: this worker.
            step: number of steps done, the same on all workers.
        """
        self._alone, self._group = worker.backend is None, worker.group
        self._message = torch.zeros(3, dtype=torch.int64)  # stop, save, -(steps until the next exchange)
        self._posted: dist.Work | None = None
        self.restart(step)

    def restart(self, step: int) -> None:
        """Restart at a step, which may be an earlier one; it must be the same on all workers."""
        self.close()
        self._asked_at = step
        self._ask_at = step + 1
        self._clock_s = time.monotonic()

    def exchange_wishes(self, step: int, *, stop: bool, save: bool) -> StepDecision:
        """Send this worker's requests after a step, and return the decision of all workers.

        A request must be repeated at every step until it is granted.
        """
        if self._alone:
            return StepDecision(stop, save) if stop or save else NOTHING
        decision = NOTHING
        if self._posted is not None:
            self._posted.wait()
            self._posted = None
            wish_stop, wish_save, interval = self._message.tolist()
            self._ask_at = self._asked_at - interval
            decision = StepDecision(stop=bool(wish_stop), save=bool(wish_save))
        if step >= self._ask_at and not decision.stop:
            self._start_request_exchange(step, stop=stop, save=save and not decision.save)
        return decision

    def _start_request_exchange(self, step: int, *, stop: bool, save: bool) -> None:
        now_s = time.monotonic()
        step_s = max(1e-6, (now_s - self._clock_s) / max(1, step - self._asked_at))
        interval = min(MAX_STEPS, max(1, int(INTERVAL_S / step_s)))
        self._clock_s, self._asked_at = now_s, step
        # The maximum of each: a request of any worker counts, and so does the smallest interval.
        self._message = torch.tensor([stop, save, -interval], dtype=torch.int64)
        self._posted = dist.all_reduce(self._message, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def drop_pending_answer(self) -> None:
        """Discard the pending exchange, since the group has ended."""
        self._posted = None

    def close(self) -> None:
        """Wait for the pending exchange, so that no data is in transfer when the group is left."""
        if self._posted is not None:
            self._posted.wait()
            self._posted = None
