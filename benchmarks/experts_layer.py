"""Layers of experts with the same weights, in one process or several, for benchmarks/experts.py; answers in JSON.

    experts_layer.py SHAPE ROUNDS STEPS [--torchtitan DIR]      under torchrun: the experts divided over its workers

All programs are in the same processes and take turns, and begin with a comparison: outputs and gradients are the same.
What is timed is a forward and a backward pass in fp32, of tokens that are the same for all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtctl.runtime import MoE
from dtctl.runtime.moe import divide

TOP_K = 2
SAMPLES = 8


@dataclass(frozen=True)
class Shape:
    """The size of a layer, and how many tokens each worker has."""

    width: int
    hidden: int
    experts: int
    tokens: int


SHAPES = {"small": Shape(128, 168, 8, 512), "large": Shape(512, 1024, 8, 2048)}


class ByHand(nn.Module):
    """What one writes: expert by expert, the tokens that chose it; as the blocks of Mixtral in Transformers 4."""

    def __init__(self, like: MoE) -> None:
        super().__init__()
        self.router = nn.Linear(like.width, like.num_experts, bias=False)
        self.router.weight = nn.Parameter(like.router.weight.detach().clone())
        own = like.experts
        self.gate, self.up, self.down = (
            nn.ParameterList(part.detach().clone() for part in whole) for whole in (own.gate, own.up, own.down)
        )

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        """[samples, tokens, width] as before."""
        linear = nn.functional.linear
        flat = stream.reshape(-1, stream.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(TOP_K, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(flat)
        for number, (gate, up, down) in enumerate(zip(self.gate, self.up, self.down, strict=True)):
            token, place = torch.where(chosen == number)
            rows = flat[token]
            outputs = linear(nn.functional.silu(linear(rows, gate)) * linear(rows, up), down)
            result.index_add_(0, token, outputs * weights[token, place, None])
        return result.view_as(stream)


def torchtitan(like: MoE, source: Path, mesh: DeviceMesh | None) -> nn.Module:
    """The layer of torchtitan, its loop over experts and its `ExpertParallel`, from a checkout of v0.2.2.

    Its modules are read as they are. What CPUs do not have is replaced by the quickest that they have:
    the kernel in triton by torchtitan's own for CPUs, and `torch.histc` for integers by `torch.bincount`.
    """
    _packages(source)
    from torchtitan.distributed.expert_parallel import ExpertParallel
    from torchtitan.models.moe import moe, utils

    fill = utils.generate_permute_indices
    utils.generate_permute_indices = lambda *args: fill(*args, use_cpu=True)
    torch.histc = lambda values, bins, **_: torch.bincount(values, minlength=bins)  # type: ignore[assignment]
    args = moe.MoEArgs(
        num_experts=like.num_experts, num_shared_experts=0, score_func="softmax", route_norm=True, top_k=TOP_K,
        use_grouped_mm=False, score_before_experts=False, load_balance_coeff=None,
    )  # fmt: skip
    layer: nn.Module = moe.MoE(args, dim=like.width, hidden_dim=like.experts.gate.shape[1])
    with torch.no_grad():
        layer.router.gate.weight.copy_(like.router.weight)
        for own, other in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            getattr(layer.experts, own).copy_(getattr(like.experts, other))
    if mesh is not None:
        ExpertParallel()._apply(layer.experts, mesh["ep"])
    return layer


def _packages(source: Path) -> None:
    """Let modules of torchtitan be imported without its trainer, and without triton."""
    for name in ("", ".models", ".models.moe", ".tools", ".distributed"):
        package = types.ModuleType(f"torchtitan{name}")
        package.__path__ = [str(source / f"torchtitan{name}".replace(".", "/"))]
        sys.modules[package.__name__] = package
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")
    triton.__dict__.update(jit=lambda function: function, language=language)
    language.__dict__.update(constexpr=int)
    models, tools = types.ModuleType("torchtitan.models.utils"), types.ModuleType("torchtitan.tools.utils")
    models.__dict__.update(trunc_normal_=nn.init.trunc_normal_)
    tools.__dict__.update(_round_up=lambda value, step: -(-value // step) * step)
    sys.modules |= {module.__name__: module for module in (triton, language, models, tools)}


def programs(shape: Shape, source: Path | None, mesh: DeviceMesh | None) -> dict[str, nn.Module]:
    """The layers that are timed, with the same weights."""
    torch.manual_seed(0)
    ours = MoE(width=shape.width, hidden=shape.hidden, experts=shape.experts, top_k=TOP_K)
    layers: dict[str, nn.Module] = {"dtctl": ours}
    if source is not None:
        layers["torchtitan"] = torchtitan(ours, source, mesh)
    if mesh is None:
        layers["written by hand"] = ByHand(ours)
    else:
        divide.divide_experts(ours, mesh)
    return layers


def passes(layer: nn.Module, stream: torch.Tensor, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward and a backward pass; the output, and the gradient of the stream."""
    own = stream.clone().requires_grad_()
    result = layer(own)
    result.backward(upstream)
    layer.zero_grad()
    assert own.grad is not None  # for the type checker
    return result.detach(), own.grad


def main() -> None:
    """Time the programs in turn and print nanoseconds per token of this worker, a list of rounds each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("rounds", type=int)
    parser.add_argument("steps", type=int)
    parser.add_argument("--torchtitan", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    workers, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if workers > 1:
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, workers), mesh_dim_names=("fsdp", "ep")) if workers > 1 else None
    shape = SHAPES[options.shape]
    layers = programs(shape, options.torchtitan, mesh)
    torch.manual_seed(1 + rank)
    stream, upstream = torch.randn(2, SAMPLES, shape.tokens // SAMPLES, shape.width)
    (expected, *others) = [passes(layer, stream, upstream) for layer in layers.values()]
    for other in others:
        torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-5)
    took: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(options.rounds):
        for name, layer in layers.items():
            if mesh is not None:
                dist.barrier()
            marks = [time.perf_counter_ns()]
            for _ in range(options.steps):
                passes(layer, stream, upstream)
                marks.append(time.perf_counter_ns())
            steps = [after - before for before, after in itertools.pairwise(marks)]
            took[name].append(statistics.median(steps) / shape.tokens)
    if rank == 0:
        print("\n" + json.dumps(took), flush=True)
    if mesh is not None:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
