"""Blocks with experts that are compiled: other numbers of tokens for an expert compile nothing anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from dtctl.runtime import MoE
from dtctl.runtime.moe import accounting, divide
from dtctl.runtime.moe.accounting import ExpertLoad
from tests.integration import mixtures


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Experts are divided over a group, if only of one worker."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def chosen(block: nn.Module, layer: nn.Module, stream: torch.Tensor) -> tuple[int, ...]:
    """How often each expert was chosen in a pass forward and backward."""
    load = ExpertLoad({layer})
    with accounting.ForwardPass(weight=1.0, samples=len(stream), load=load):
        block(stream).sum().backward()
    return tuple(load.chosen[layer].tolist())


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch while it compiles
@pytest.mark.parametrize("kind", ["dtctl", "grouped"])
def test_passes_with_other_numbers_of_tokens_compile_nothing_anew(kind: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)  # else two passes may happen to choose alike
    own = kind == "dtctl"
    mixture = MoE(width=mixtures.WIDTH, hidden=4, experts=4, capacity=1.0) if own else mixtures.Grouped()
    block = mixtures.Block(mixture)
    divide.divide_experts(block, init_device_mesh("cpu", (1, 1), mesh_dim_names=("fsdp", "ep")))
    block.compile(backend="eager")
    layer = mixture if isinstance(mixture, MoE) else mixture.experts
    assert isinstance(layer, nn.Module)
    first, *others = torch.randn(4, 3, 16, mixtures.WIDTH)
    loads = {chosen(block, layer, first)}
    compiled = counters["stats"]["unique_graphs"]
    assert compiled > 0
    loads |= {chosen(block, layer, stream) for stream in others}
    assert len(loads) == 4, "experts got other numbers of tokens in each pass"
    assert counters["stats"]["unique_graphs"] == compiled
