"""Several models and optimizers of a session, each by its name, as one model and one optimizer for its snapshots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from dtctl.errors import PlanError

WHERE: Final = "dtctl.runtime.session"
Models = nn.Module | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]


def list_models(model: Models) -> dict[str, nn.Module]:
    """Return the models by name; a single one has no name."""
    return dict(model) if isinstance(model, Mapping) else {"": model}


def join_models(modules: Mapping[str, nn.Module]) -> nn.Module:
    """Return one module with all of these; a single one itself."""
    return modules[""] if "" in modules else nn.ModuleDict(modules)


def join_optimizers(optimizer: Optimizers) -> torch.optim.Optimizer:
    """Return one optimizer that stands for all of these; a single one itself.

    Raises:
        PlanError: one of several has a `state_dict` of its own, or two have the same parameter.
    """
    if not isinstance(optimizer, Mapping):
        return optimizer
    for name, each in optimizer.items():
        if type(each).state_dict is not torch.optim.Optimizer.state_dict:
            raise PlanError(
                f"the optimizer {name} ({type(each).__qualname__}) has a state_dict of its own, which a session keeps "
                "only of a single optimizer",
                where=WHERE,
                hint="give that optimizer in `extra_state`",
            )
    kinds = ", ".join(f"{name}: {type(each).__qualname__}" for name, each in optimizer.items())
    # The class is compared when a snapshot is loaded.
    joined: type[JoinedOptimizers] = type(f"JoinedOptimizers({kinds})", (JoinedOptimizers,), {})
    return joined(list(optimizer.values()))


class JoinedOptimizers(torch.optim.Optimizer):
    """Optimizers as one: their groups one after another, and the state of all their parameters.

    Attributes:
        optimizers: those that are joined.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Join optimizers, which stay usable on their own.

        Raises:
            PlanError: two have the same parameter.
        """
        self.optimizers = list(optimizers)
        self.defaults: dict[str, Any] = {}
        owners: dict[Any, torch.optim.Optimizer] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if owners.setdefault(parameter, optimizer) is not optimizer:
                        raise PlanError(
                            "two optimizers of the session have the same parameter",
                            where=WHERE,
                            hint="give each parameter to one optimizer",
                        )
        self.state = _JoinedState(self.optimizers, owners)  # type: ignore[assignment]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the groups of all optimizers; the dicts are theirs."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make a step of each optimizer."""
        for optimizer in self.optimizers:
            optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class _JoinedState(MutableMapping[Any, Any]):
    """State of the parameters of several optimizers; what belongs to no parameter is that of the first."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], owners: Mapping[Any, torch.optim.Optimizer]
    ) -> None:
        self._optimizers, self._owners = optimizers, owners

    def _of(self, key: Any) -> Any:
        return self._owners.get(key, self._optimizers[0]).state

    def __getitem__(self, key: Any) -> Any:
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __iter__(self) -> Iterator[Any]:
        for optimizer in self._optimizers:
            yield from optimizer.state

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)
