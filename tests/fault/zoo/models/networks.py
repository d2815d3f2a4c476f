"""Networks, and layers with a state that a pass changes: in buffers, in attributes, in generators of their own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.fault.zoo.models.parts import WIDTH


class Block(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.act, self.drop = getattr(nn, options["activation"])(), nn.Dropout(options["dropout"])

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return stream + self.drop(self.down(self.act(self.up(self.norm(stream)))))


class Net(nn.Module):
    """Blocks with dropout; `extra` is called with the stream between them."""

    def __init__(self, options: Mapping[str, Any], blocks: int = 2, extra: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block(options) for _ in range(blocks))
        self.extra = extra or nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stream = self.extra(self.first(inputs))
        for block in self.blocks:
            stream = block(stream)
        out: torch.Tensor = self.last(stream)
        return out


class Conv(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), getattr(nn, options["activation"])(), nn.Dropout(options["dropout"])
        )
        self.last = nn.Linear(4 * (WIDTH - 2), 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.body(inputs[:, None]).flatten(1))
        return out


class Lstm(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(12, WIDTH),
            nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=options["dropout"]),
        )
        self.last = nn.Linear(WIDTH, 12)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.lstm(self.embed(inputs))[0])
        return out


class Tied(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed, self.drop, self.mix = (
            nn.Embedding(12, WIDTH),
            nn.Dropout(options["dropout"]),
            nn.Linear(WIDTH, WIDTH),
        )
        self.last = nn.Linear(WIDTH, 12, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.drop(torch.tanh(self.mix(self.embed(inputs)))))
        return out


class Lora(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.base = Net({**options, "dropout": 0.0})
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.drop = nn.Dropout(options["dropout"])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(inputs + self.up(self.down(self.drop(inputs))))
        return out


class Shadow(nn.Module):
    """A moving average of the stream that it moves, in a buffer."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=persistent)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(stream.detach().float().mean(0), 0.1)
        return stream - 0.5 * self.mean.clone()


class Counter(nn.Module):
    """Counts passes and does more with every one of them: in a buffer, or in an attribute."""

    def __init__(self, *, buffer: bool, persistent: bool = True) -> None:
        super().__init__()
        self.passes: Any = 0
        if buffer:
            del self.passes
            self.register_buffer("passes", torch.zeros((), dtype=torch.int64), persistent=persistent)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
        return stream * (1 + 0.02 * (float(self.passes) if torch.is_tensor(self.passes) else self.passes))

    # What the Trainer is told of an attribute, where it is.
    def counted(self) -> Counted:
        return Counted(self)


class Counted:
    """The state of a counter as an object with a state."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self._counter.passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counter.passes = int(state["passes"])


class Queue(nn.Module):
    """Keys of earlier batches, and a place in them, as MoCo has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(16, WIDTH))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        against = stream @ self.queue.clone().to(stream.dtype).T
        if self.training:
            place, count = int(self.place), len(stream)
            rows = torch.arange(place, place + count) % len(self.queue)
            self.queue[rows] = stream.detach().float()
            self.place[0] = (place + count) % len(self.queue)
        return stream + 0.01 * against.mean(1, keepdim=True)


class Target(nn.Module):
    """A student and the moving average of its weights, which it is compared with; the user's own, in buffers."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.student = Net(options)
        for name, value in self.student.named_parameters():
            self.register_buffer(f"average_{name.replace('.', '_')}", value.detach().clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for name, value in self.student.named_parameters():
                    self.get_buffer(f"average_{name.replace('.', '_')}").lerp_(value, 0.1)
        out: torch.Tensor = self.student(inputs) * (1 + 0.1 * self.average_last_weight.mean())
        return out


class Routed(nn.Module):
    """Experts, one for each sample."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.experts = nn.ModuleList(Block(options) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        stream = self.first(inputs)
        kinds = (inputs[:, 0] * 3).long().remainder(3)
        out = stream.clone()
        for number, expert in enumerate(self.experts):
            rows = (kinds == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_copy(0, rows, expert(stream[rows]))
        found: torch.Tensor = self.last(out)
        return found


class Optional(nn.Module):
    """A part that only every other pass uses, and one that none does."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.net, self.side, self.never = Net(options), nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(inputs)
        return out + self.side(inputs) if float(inputs[0, 0]) > 0 else out


class Noisy(nn.Module):
    """Noise from a generator of the user's own."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.__dict__["generator"] = generator

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return stream
        return stream + 0.1 * torch.randn(stream.shape, generator=self.__dict__["generator"])


class Pair(nn.Module):
    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.one, self.two = Net(options), Net(options)
        self.one.last, self.two.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.one(inputs), self.two(inputs * 0.9), self.temperature.exp()


class Unfreezing(nn.Module):
    """The first layer is trained from the sixth pass on."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.net, self.passes = Net(options), 0
        self.net.first.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        if self.passes == 6:
            self.net.first.requires_grad_(True)
        out: torch.Tensor = self.net(inputs)
        return out


def spectral(options: Mapping[str, Any]) -> nn.Module:
    """Power iterations in buffers (spectral norm), and lengths apart from directions (weight norm)."""
    net = Net(options)
    net.first = nn.utils.parametrizations.spectral_norm(net.first)
    net.last = nn.utils.parametrizations.weight_norm(net.last)
    return net


def gpt(options: Mapping[str, Any]) -> nn.Module:
    """The GPT of the examples."""
    name = "example_gpt_model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[4] / "examples" / "gpt" / "model.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    module = sys.modules[name]
    config = module.GPTConfig(layers=2, heads=2, embed=16, context=8, dropout=options["dropout"])
    made: nn.Module = module.GPT(config)
    return made
