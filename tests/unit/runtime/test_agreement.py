"""A worker without peers agrees with itself at once; several are tested as real processes."""

from __future__ import annotations

from dtctl.runtime import Worker
from dtctl.runtime.distributed.agreement import NOTHING, DecisionExchange, StepDecision


def test_alone_a_wish_is_a_decision(worker: Worker) -> None:
    agreement = DecisionExchange(worker, step=0)
    assert agreement.exchange_wishes(1, stop=False, save=False) is NOTHING
    assert agreement.exchange_wishes(2, stop=False, save=True) == StepDecision(stop=False, save=True)
    assert agreement.exchange_wishes(3, stop=True, save=False) == StepDecision(stop=True, save=False)
    agreement.close()
