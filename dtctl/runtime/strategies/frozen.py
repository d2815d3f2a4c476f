"""Parameters that were frozen when the model was spread, and need gradients later, which no strategy exchanges."""

from __future__ import annotations

from torch import nn

from dtctl.errors import WorkerFailed
from dtctl.runtime.exactness.stateful import name_some


class Frozen:
    """Frozen parameters of one model that no strategy has taken up."""

    def __init__(self, model: nn.Module, strategy: str) -> None:
        """Note what is frozen now.

        Args:
            model: as this worker has it.
            strategy: its name, for the error.
        """
        self._model, self._strategy = model, strategy
        self._parameters = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    def require(self, step: int) -> None:
        """Check that they are still frozen.

        Args:
            step: steps done.

        Raises:
            WorkerFailed: a parameter requires gradients now.
        """
        if not any(parameter.requires_grad for parameter in self._parameters):
            return
        frozen = {id(parameter) for parameter in self._parameters}
        names = [name for name, p in self._model.named_parameters() if p.requires_grad and id(p) in frozen]
        raise WorkerFailed(
            f"{name_some(names)} was frozen when training began and wants gradients in step {step + 1}",
            where=f"train.strategy ({self._strategy})",
            hint="workers exchange the gradients of what was to be trained at first: unfreeze where the script makes "
            "the model, after a snapshot, or use one worker or `exact: elastic`",
        )
