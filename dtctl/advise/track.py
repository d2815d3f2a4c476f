"""Memory of a training by torch's own tracker: `python -m dtctl.advise.track SETTINGS`, under the job's Python.

Two steps with tensors that have shapes and no memory, in one process that simulates the first of several workers, so
it needs neither memory nor GPUs. Prints one JSON object: the peak in bytes, or in `error` the reason why torch cannot
follow.

The tracker sees what goes through torch's dispatcher. DDP's reducer does not, so ddp is the model without it: its
buckets are the gradients themselves.
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

from dtctl.advise.trial import build_model, compute_token_loss
from dtctl.runtime import Worker, load
from dtctl.runtime.distributed.device_mesh import build_device_mesh
from dtctl.runtime.optim import build_optimizer
from dtctl.runtime.strategies import blocks, sharded
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees

STEPS = 2
"""Number of steps; the optimizer creates its state in the first one."""


def track_peak_memory(settings: dict[str, Any]) -> int:
    """Return bytes at the peak of the first worker; errors of torch where it cannot follow are passed on."""
    workers, config = settings["workers"], load(settings["train"], argv=[], environ={})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workers)
    try:
        mesh = build_device_mesh(Degrees(fsdp=workers), "cpu")  # the mesh needs real tensors
        with FakeTensorMode():
            return _train_with_tracker(settings, config, mesh)
    finally:
        dist.destroy_process_group()


def _train_with_tracker(settings: dict[str, Any], config: TrainConfig, mesh: DeviceMesh) -> int:
    model = build_model(settings)
    sharding = config.strategy == "fsdp" and mesh.size() > 1
    if sharding:
        _shard_tracked_model(model, config, mesh)
    trained = build_optimizer(config, model)
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
            loss = compute_token_loss(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            for shard, parameter in shards:
                shard.grad = parameter.grad.to_local()
            trained.step()
            trained.zero_grad()
            model.zero_grad()
            del loss
    kinds = tracker.get_tracker_snapshot("peak")
    return int(max(of["Total"] for of in kinds.values()))


def _shard_tracked_model(model: nn.Module, config: TrainConfig, mesh: DeviceMesh) -> None:
    """Shard a model as the runtime does."""
    sharded.silence_torch_warnings()
    workers, cpu = mesh.size(), torch.device("cpu")
    first = Worker(
        rank=0, local_rank=0, world_size=workers, local_world_size=workers, node_rank=0, device=cpu, backend="fake"
    )
    block_list = blocks.find_repeated_blocks(model, config.blocks)
    sharded.shard_blocks(model, block_list.modules if block_list else [], config, first, mesh)


def _onto_shards(trained: torch.optim.Optimizer) -> list[tuple[torch.Tensor, Any]]:
    """Let an optimizer step on each worker's own part, and return the parts with their parameters.

    Otherwise DTensor tries the operation on fake tensors of whole parameters, which the tracker counts as real ones
    (torch 2.13), since both use the same mode for fake tensors.
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
    """Print the peak, or the reason why there is none."""
    try:
        result: dict[str, Any] = {"peak": track_peak_memory(settings)}
    except Exception as exc:
        result = {"error": f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"}
    print(json.dumps(result))  # noqa: T201 - this is the answer
    return 0


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[1])))
