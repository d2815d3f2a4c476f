"""Check for parameters that were frozen when the model was divided, and require gradients later.

No strategy exchanges the gradients of such parameters.
"""

from __future__ import annotations

from torch import nn

from dtctl.errors import WorkerFailed
from dtctl.runtime.exactness.stateful import name_some


class FrozenParameters:
    """Frozen parameters of one model, which the strategy does not handle."""

    def __init__(self, model: nn.Module, strategy: str) -> None:
        """Store which parameters are frozen now.

        Args:
            model: the model as this worker has it.
            strategy: name of the strategy, for the error.
        """
        self._model, self._strategy = model, strategy
        self._parameters = [parameter for parameter in model.parameters() if not parameter.requires_grad]

    def require(self, step: int) -> None:
        """Check that the parameters are still frozen.

        Args:
            step: number of steps done.

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
