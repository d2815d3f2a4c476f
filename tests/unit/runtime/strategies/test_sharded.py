"""What a sharded model keeps between its passes, and in which format gradients are added up."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from benchmarks.gpu_checks import exchange
from benchmarks.gpu_checks.exchange import fsdp
from benchmarks.gpu_checks.ground import Ground, train
from dtctl.runtime import Worker
from dtctl.runtime.strategies.sharded import build_precision_policy
from dtctl.train.config import FsdpConfig

WIDTH = 64


@pytest.fixture(autouse=True)
def alone(tmp_path: Path) -> Iterator[None]:
    """A group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def kept_weights(options: FsdpConfig) -> tuple[int, nn.Module]:
    """Copies of weights that wait for the backward pass under autocast, and the model after that pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh, mp_policy=build_precision_policy(options))
    kept: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.shape == (WIDTH, WIDTH) and tensor.untyped_storage().nbytes():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    batch = torch.randn(3, WIDTH)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        loss = model(batch).float().sum()
    # What fully_shard has gathered it gives back after a layer's pass, whoever holds on to it.
    held = sum(bool(tensor.untyped_storage().nbytes()) for tensor in kept.values())
    loss.backward()
    return held, model


def test_parameters_gathered_in_bf16_leave_no_casts_behind() -> None:
    casts, _ = kept_weights(FsdpConfig())
    none, model = kept_weights(FsdpConfig(param_dtype="bf16"))
    assert casts >= 7, "one of every layer"
    assert none <= 1, "but for the last layer, which is needed at once"
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.dtype is torch.float32 for gradient in gradients)


class Stream(nn.Module):
    """What transformers have: an embedding, a stream that blocks add to, and a norm that is written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.tokens(tokens)
        for block in self.blocks:
            stream = stream + block(stream * stream.pow(2).mean(-1, keepdim=True).rsqrt() * self.scale)
        return stream


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # nothing is done in place
def test_the_default_format_makes_bf16_mean_the_same_whatever_the_strategy() -> None:
    """Why `fsdp.param_dtype` is fp32 unless set: with bf16 the stream between blocks is rounded, too."""
    tokens, mesh = torch.arange(16)[None], init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    outputs, gradients = [], []
    for options in (None, FsdpConfig(), FsdpConfig(param_dtype="bf16")):
        torch.manual_seed(0)
        model = Stream()
        if options is not None:
            for part in [*model.blocks, model]:
                fully_shard(part, mesh=mesh, mp_policy=build_precision_policy(options))
        with torch.autocast("cpu", torch.bfloat16):
            found = model(tokens)
        found.float().square().mean().backward()
        outputs.append(found)
        weights = model.blocks[0].weight.grad
        assert weights is not None
        gradients.append(weights.to_local() if options is not None else weights)  # type: ignore[operator]
    single, default, gathered = outputs
    assert torch.equal(single, default), "the bits of a single worker"
    assert torch.equal(gradients[0], gradients[1])
    assert (single.dtype, gathered.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "gathered", "added"),
    [
        (FsdpConfig(), None, None),
        (FsdpConfig(reduce_dtype="bf16"), None, torch.bfloat16),
        (FsdpConfig(param_dtype="bf16"), torch.bfloat16, torch.float32),
        (FsdpConfig(param_dtype="bf16", reduce_dtype="bf16"), torch.bfloat16, torch.bfloat16),
    ],
)
def test_formats(options: FsdpConfig, gathered: torch.dtype | None, added: torch.dtype | None) -> None:
    policy = build_precision_policy(options)
    assert (policy.param_dtype, policy.reduce_dtype) == (gathered, added)


def test_gradients_exchanged_in_every_pass_are_the_same_and_never_whole(
    tmp_path: Path, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = Ground(torch.device("cpu"), tmp_path)
    member = dataclasses.replace(worker, backend="gloo")
    real = FSDPModule.set_requires_gradient_sync
    losses = {}
    for every in (False, True):
        called: list[bool] = []

        def note(module: FSDPModule, wanted: bool, called: list[bool] = called) -> None:
            called.append(wanted)
            real(module, wanted)

        monkeypatch.setattr(FSDPModule, "set_requires_gradient_sync", note)
        settings = {"steps": 4, "accumulate": 3, "fsdp": {"exchange_every_pass": every}}
        losses[every], _, _ = train(on, member, f"every-{every}", settings, make=fsdp)
        assert bool(called) is not every, "a pass that keeps whole gradients says so to fully_shard"
    assert losses[True] == pytest.approx(losses[False], rel=1e-6)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "hsdp"])
def test_a_training_that_is_over_gives_its_tensors_back(tmp_path: Path, worker: Worker, strategy: str) -> None:
    make = {"single": None, "ddp": exchange.ddp, "fsdp": exchange.fsdp, "hsdp": exchange.hsdp}[strategy]
    _, trainer, _ = train(Ground(torch.device("cpu"), tmp_path), worker, strategy, {"steps": 2}, make=make)
    kept = [weakref.ref(parameter) for parameter in trainer.model.parameters()]
    kept += [weakref.ref(parameter.grad) for parameter in trainer.model.parameters() if parameter.grad is not None]
    assert kept
    del trainer
    gc.collect()
    assert sum(one() is not None for one in kept) == 0
