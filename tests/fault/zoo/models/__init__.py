"""Models and loops of many kinds, for the zoo: small, but with state of every kind that a training may have.

Each kind is made of options (the file options.json, which nobody but the script reads) and of the configuration. What a
training ends with is written as digests by part, this worker's share of each, so that the part that differs is known.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from dtctl.runtime import Outcome, TrainConfig, Trainer, Worker, run
from tests.fault.zoo.models.ending import leave, tick
from tests.fault.zoo.models.kinds import KINDS, Kind
from tests.fault.zoo.models.parts import DEFAULTS, OPTIONS, Altered

__all__ = ["DEFAULTS", "KINDS", "Kind", "main"]


def main(name: str, altered: Altered) -> int:
    """Train one kind in the current folder; the exit code."""
    options = OPTIONS | json.loads(Path("options.json").read_text())
    kind = KINDS[name]
    if kind.own is not None:
        return kind.own(options, altered)

    def train(config: TrainConfig, worker: Worker) -> Outcome:
        assert kind.make
        parts = kind.make(options, config, worker)

        def loss(model: nn.Module, batch: Any) -> Any:
            tick(worker.rank)
            found = parts.loss(model, batch)
            return (altered(found[0]), found[1]) if isinstance(found, tuple) else altered(found)

        trainer = Trainer(config, worker, parts.model, loss, parts.data, **parts.more)
        outcome = trainer.run()
        if outcome is Outcome.FINISHED:
            ema = trainer.training.trained.ema
            leave(worker.rank, parts.model, trainer.optimizer, {**parts.kept, "ema": ema and ema.state()})
        return outcome

    return run(train, defaults={**DEFAULTS, **kind.settings})
