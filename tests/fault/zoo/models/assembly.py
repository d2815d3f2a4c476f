"""Trainings put together of networks, losses, data and optimizers, and what users add to them."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from dtctl.runtime import TrainConfig, Worker
from tests.fault.zoo.models.data import regression
from tests.fault.zoo.models.losses import score, squares
from tests.fault.zoo.models.networks import Counter, Net, Noisy, Unfreezing
from tests.fault.zoo.models.parts import Parts


def simple(model: Callable[..., nn.Module], loss: Any = squares, data: Any = regression, **more: Any) -> Any:
    """Parts of a model that is made of options alone."""
    return lambda options, *_: Parts(model(options), loss, data(options), **more)


def with_layer(make: Callable[[], nn.Module]) -> Any:
    return lambda options, *_: Parts(Net(options, extra=make()), squares, regression(options))


def chosen(options: Mapping[str, Any], config: TrainConfig) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """An optimizer of torch, as the options have it."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
        kind = getattr(torch.optim, options["optimizer"])
        found: torch.optim.Optimizer = kind(wanted, lr=config.lr, weight_decay=options["decay"], foreach=True)
        return found

    return made


def using(kind: Any) -> Callable[..., Parts]:
    """A net with an optimizer of the user's own."""

    def make(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
        wanted = lambda model: kind([p for p in model.parameters() if p.requires_grad], lr=config.lr)  # noqa: E731
        return Parts(Net(options), squares, regression(options), {"optimizer": wanted})

    return make


def torched(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    return Parts(Net(options), squares, regression(options), {"optimizer": chosen(options, config)})


def attribute(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    counter = Counter(buffer=False)
    more = {"extra_state": {"counter": counter.counted()}} if options["declared"] else {}
    return Parts(Net(options, extra=counter), squares, regression(options), more)


def generator(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    own = torch.Generator().manual_seed(1)
    python, numbers = random.Random(1), np.random.default_rng(1)
    kept = {"own": own, "python": python, "numbers": numbers}

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return squares(model, batch) * (1 + 0.1 * python.random() + 0.1 * float(numbers.random()))

    more = {"extra_state": kept} if options["declared"] else {}
    return Parts(Net(options, extra=Noisy(own)), loss, regression(options), more, kept)


def rated(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """A rate of the user's own."""
    return Parts(Net(options), squares, regression(options), {"rate": lambda step: config.lr / (1 + step % 4)})


def scheduled(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """A scheduler of torch, with a state, that decides by what it is told."""
    stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=config.lr)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(stand_in, factor=0.7, patience=1)
    seen: list[float] = []

    class Both:
        def state_dict(self) -> dict[str, Any]:
            return {"plateau": plateau.state_dict(), "lr": stand_in.param_groups[0]["lr"], "seen": list(seen)}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            plateau.load_state_dict(dict(state["plateau"]))
            stand_in.param_groups[0]["lr"] = state["lr"]
            seen[:] = state["seen"]

    both = Both()

    def rate(step: int) -> float:
        plateau.step(abs(math.sin(step)))
        seen.append(step)
        return float(stand_in.param_groups[0]["lr"]) / (1 + len(seen) % 3)

    more: dict[str, Any] = {"rate": rate}
    if options["declared"]:
        more["extra_state"] = {"schedule": both}
    return Parts(Net(options), squares, regression(options), more, {"schedule": both})


def evaluated(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    return Parts(
        Net(options),
        squares,
        regression(options),
        {"validation": regression(options | {"samples": 13}), "score": score},
    )


def curriculum(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """A loss function that counts in its closure."""
    seen = 0

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        nonlocal seen
        seen += 1
        return squares(model, batch) / (1 + 0.05 * seen)

    return Parts(Net(options), loss, regression(options))


def unfreezing(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    optimizer = lambda model: torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)  # noqa: E731
    return Parts(Unfreezing(options), squares, regression(options), {"optimizer": optimizer})


def hooked(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """Noise on gradients, and a list that a hook fills."""
    net, seen = Net(options), []  # type: ignore[var-annotated]

    def watch(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.append(float(out.detach().mean()))
        return out + 0.01 * sum(seen[-3:])

    net.first.register_forward_hook(watch)
    net.first.weight.register_hook(lambda gradient: gradient + 0.01 * torch.randn_like(gradient))
    return Parts(net, squares, regression(options))


def averaged(options: Mapping[str, Any], config: TrainConfig, worker: Worker) -> Parts:
    """torch's own moving average of a model, updated by the loss function, which compares with it."""
    net = Net(options)
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        average.update_parameters(net)
        with torch.no_grad():
            wanted = average(batch[0])
        return squares(model, batch) + 0.1 * nn.functional.mse_loss(model(batch[0]), wanted)

    more = {"extra_state": {"average": average}} if options["declared"] else {}
    return Parts(net, loss, regression(options), more, {"average": average})
