"""Memory of a training by torch's own tracker: `python -m dtctl.advise.track SETTINGS`, under the job's Python.

Two steps with tensors that have shapes and no memory, in one process that stands for the first of several workers, so
it needs neither room nor GPUs. Prints one JSON object: the peak in bytes, or as `error` why torch cannot follow. Its
tracker sees what goes through torch's dispatcher. DDP's reducer does not, so ddp is the model without it: its buckets
are the gradients themselves.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtctl.advise.trial import build_model, loss_of
from dtctl.runtime import Worker, load
from dtctl.runtime.distributed.device_mesh import device_mesh
from dtctl.runtime.optim import optimizer
from dtctl.runtime.strategies import blocks, sharded
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees

STEPS = 2
"""The optimizer's state is there after the first."""


def peak(settings: dict[str, Any]) -> int:
    """Return bytes at the peak of the first worker; whatever torch raises where it cannot follow is passed on."""
    workers, config = settings["workers"], load(settings["train"], argv=[], environ={})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    try:
        mesh = device_mesh(Degrees(fsdp=workers), "cpu")  # of real numbers
        with FakeTensorMode():
            return _trained(settings, config, mesh)
    finally:
        dist.destroy_process_group()


def _trained(settings: dict[str, Any], config: TrainConfig, mesh: DeviceMesh) -> int:
    model = build_model(settings)
    sharding = config.strategy == "fsdp" and mesh.size() > 1
    if sharding:
        _shard(model, config, mesh)
    trained = optimizer(config, model)
    shards = _onto_shards(trained)
    shape = (settings["train"]["micro_batch"], settings["seq"])
    batch = (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))
    tracker: Any
    if sharding:
        tracker = FSDPMemTracker(model, trained)
        tracker.track_inputs(batch)
    else:
        tracker = MemTracker()
        tracker.track_external(model, trained, *batch)
    with tracker:
        for step in range(STEPS):
            if step:
                tracker.reset_mod_stats()
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            for shard, parameter in shards:
                shard.grad = parameter.grad.to_local()
            trained.step()
            trained.zero_grad()
            model.zero_grad()
            del loss
    kinds = tracker.get_tracker_snapshot("peak")
    return int(max(of["Total"] for of in kinds.values()))


def _shard(model: nn.Module, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Shard a model as the runtime does."""
    sharded.hush()
    workers, cpu = mesh.size(), torch.device("cpu")
    first = Worker(
        rank=0, local_rank=0, world_size=workers, local_world_size=workers, node_rank=0, device=cpu, backend="fake"
    )
    block_list = blocks.find(model, config.blocks)
    sharded.shard_blocks(model, block_list.modules if block_list else [], config, first, mesh)


def _onto_shards(trained: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Any]]:
    """Let an optimizer step on each worker's own part, and return the parts with their parameters.

    Else DTensor looks up how it is to be done with tensors of whole parameters, which the tracker takes for real (torch
    2.13), for the mode that makes them up is the one that everything is made up by.
    """
    replaced: list[tuple[torch.Tensor, Any]] = []
    for group in trained.param_groups:
        local = [
            parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter
            for parameter in group["params"]
        ]
        replaced += [pair for pair in zip(local, group["params"], strict=True) if isinstance(pair[1], DTensor)]
        group["params"] = local
    return replaced


def main(settings: dict[str, Any]) -> int:
    """Print the peak, or why there is none."""
    try:
        result: dict[str, Any] = {"peak": peak(settings)}
    except Exception as exc:
        result = {"error": f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"}
    print(json.dumps(result))  # noqa: T201 - this is the answer
    return 0


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
