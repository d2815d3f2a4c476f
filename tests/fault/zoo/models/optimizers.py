"""Optimizers of users, with a state in many places: in groups, in attributes, in tensors of a group."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.fault.zoo.models.ending import local


class Free(torch.optim.Optimizer):
    """Schedule-free SGD: what it counts is in its groups (Defazio et al. 2024)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "k": 0, "weight_sum": 0.0, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            weight = group["lr"] ** 2 * group["k"]
            group["weight_sum"] += weight
            share = weight / group["weight_sum"] if group["weight_sum"] else 0.0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.detach().clone())
                z.sub_(parameter.grad, alpha=group["lr"])
                parameter.lerp_(z, share * (1 - group["beta"]) + 0.1 / group["k"])


class Prodigal(torch.optim.Optimizer):
    """A step size that is estimated on the way, a float in the group (as in D-Adaptation and Prodigy)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "d": 0.1, "d_numerator": 0.0, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            grown = 0.0
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                begun = state.setdefault("begun", parameter.detach().clone())
                grown += float(local((parameter.grad * (begun - parameter)).sum()))
                parameter.sub_(parameter.grad, alpha=group["lr"] * group["d"])
            group["k"] += 1
            group["d_numerator"] = 0.9 * group["d_numerator"] + abs(grown)
            group["d"] *= 1 + 0.1 * math.tanh(group["d_numerator"] + 0.1)


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(mean.lerp(parameter.grad, 1 - one).sign(), alpha=group["lr"] * 0.1)
                mean.lerp_(parameter.grad, 1 - two)


class Ahead(torch.optim.SGD):
    """Slow weights that are moved every third step (Lookahead); counts in an attribute of itself."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr, momentum=0.9)
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.taken += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter].setdefault("slow", parameter.detach().clone())
                if self.taken % 3 == 0:
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "taken": self.taken}

    def load_state_dict(self, state: Any) -> None:
        self.taken = state.get("taken", self.taken)
        super().load_state_dict({key: value for key, value in state.items() if key != "taken"})


class Grouped(torch.optim.Optimizer):
    """A tensor in the group: a running scale of all gradients of it."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "scale": torch.ones(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    size = local(parameter.grad).abs().mean()
                    group["scale"] = group["scale"] * 0.95 + size * 0.05
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (0.1 + float(group["scale"])))


class Sharp(torch.optim.SGD):
    """Goes uphill first and back with the next gradient (a SAM without a closure, of two steps)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for group in self.param_groups:
            group["up"] = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if group["up"]:
                    self.state[parameter]["was"] = parameter.detach().clone()
                    parameter.add_(parameter.grad, alpha=0.01)
                elif "was" in self.state[parameter]:
                    parameter.copy_(self.state[parameter].pop("was"))
                    parameter.sub_(parameter.grad, alpha=group["lr"])
            group["up"] = not group["up"]
