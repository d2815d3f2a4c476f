"""A worker without peers agrees with itself at once; several are tested as real processes."""

from __future__ import annotations

from dtctl.runtime import Worker
from dtctl.runtime.distributed.agreement import NOTHING, Agreement, Decision


def test_alone_a_wish_is_a_decision(worker: Worker) -> None:
    agreement = Agreement(worker, step=0)
    assert agreement.after(1, stop=False, save=False) is NOTHING
    assert agreement.after(2, stop=False, save=True) == Decision(stop=False, save=True)
    assert agreement.after(3, stop=True, save=False) == Decision(stop=True, save=False)
    agreement.close()
