"""Transfer of the furthest state of all workers to those that are behind: one message each, from memory to memory.

A survivor can be a step ahead of another: its sum of gradients was complete when a peer was lost. It has taken its
step, so the others take over its state; the step is not undone. If the state is divided (hsdp, ep), each worker gets
its part from one with the same part in another replica.

There a step ends with an exchange among all workers, which each enters with its gradients exchanged, clipped and
judged. So when a worker is lost in a step, there are two cases:

- No worker has completed that exchange, and so none has changed its state: all begin the step again.
- At least one has, and has taken the step. Then all survivors had entered the exchange. Those that have not completed
  it have kept their gradients, and take the step with the result that the others have received.

Either way all survivors have the same step, and its whole state if each part has one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from dtctl.runtime import resume
from dtctl.runtime.live.training import Training
from dtctl.runtime.snapshot.json_collectives import filled, gathered_json, receive, send, skeleton, spread_json
from dtctl.runtime.snapshot.state import load_model, load_optimizer, optimizer_tree, raw
from dtctl.runtime.step import StepResult

CHUNK: int = 64 << 20
"""Bytes of a message, so that a tensor on a GPU needs no copy of its size on the host."""


class IncompleteState(Exception):
    """The furthest workers that are left do not have the whole state between them; on every worker."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Position of a worker that joins the others; without arguments, that of one without a state."""

    step: int = -1
    """Steps taken."""
    is_ready: bool = False
    """True if it lacks nothing for the next one but the result of its last exchange, in which it was interrupted."""
    owes: bool = False
    """True if what is due after its newest step has not been done."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan by which all workers get the same state. Lists of ranks."""

    step: int
    """Step from which all workers continue."""
    ahead: list[int]
    """Ranks that have taken it."""
    catching_up: list[int]
    """Ranks that take it by themselves."""
    behind: list[int]
    """Ranks that are given their part of the state."""
    sources: dict[int, int]
    """Part of the state: by whom it is given."""


def decide(everyone: Sequence[Standing], parts: int) -> Plan:
    """Return the plan of the transfer: a step that one worker has taken is taken by all.

    Args:
        everyone: by rank. Ranks count through the parts of a replica first.
        parts: of the state.

    Raises:
        IncompleteState: no worker is left that has some part of the state.
    """
    step = max(each.step for each in everyone)
    ahead = [rank for rank, each in enumerate(everyone) if each.step == step]
    catching_up = [rank for rank, each in enumerate(everyone) if each.is_ready and each.step == step - 1]
    sources = {rank % parts: rank for rank in reversed([*ahead, *catching_up])}
    if len(sources) < parts:
        raise IncompleteState(f"part {min(set(range(parts)) - set(sources))} of {parts} of the state after step {step}")
    behind = [rank for rank in range(len(everyone)) if rank not in {*ahead, *catching_up}]
    return Plan(step=step, ahead=ahead, catching_up=catching_up, behind=behind, sources=sources)


def bring_level(trainer: Training, *, is_newcomer: bool) -> bool:
    """Give every worker the furthest state; collective over all workers, at least one of which has a state.

    This worker's state does not change before all of the new state has arrived.

    Returns:
        Whether this worker had begun a step that it does again.

    Raises:
        IncompleteState: no worker is left that has some part of the state.
    """
    worker, parts = trainer.worker, trainer.place.degrees.shards
    mine = Standing(trainer.step, is_ready=trainer.ready is not None, owes=trainer.is_owed)
    everyone = [Standing(**each) for each in gathered_json(asdict(Standing() if is_newcomer else mine), worker)]
    plan = decide(everyone, parts)
    # What is due after a step is due on all workers: an exchange in it was complete on none or only some of them.
    # The end is due until all have completed it: the last snapshot may have been under way on a worker that was lost.
    owed = any(everyone[rank].owes for rank in plan.ahead) or plan.step == trainer.steps
    facts = spread_json(_facts(trainer) if worker.rank == plan.ahead[0] else None, worker, plan.ahead[0])
    if worker.rank in plan.catching_up:
        trainer.conclude(facts["unused"])
        _take_facts(trainer, facts)
    else:
        trainer.conclude(None)
    source = plan.sources[worker.rank % parts]
    if worker.rank == source:
        for rank in plan.behind:
            if rank % parts == worker.rank % parts:
                _send(_state(trainer), rank)
    elif worker.rank in plan.behind:
        tree = _receive(source, trainer)
        _take_facts(trainer, facts)
        _take(trainer, tree)
        norm = facts["norm"] and torch.tensor(facts["norm"])
        is_taken, is_logged = facts["is_taken"], facts["is_logged"]
        trainer.newest = StepResult(
            None, facts["lr"], norm, facts["use"], facts["mean"], is_taken=is_taken, is_logged=is_logged
        )
    if trainer.step:  # a step that was begun has set its own
        trainer.rate.set(trainer.step - 1)
    trainer.is_owed = owed
    account = trainer.account
    account.checksums, account.irreproducible = facts["checksums"], facts["irreproducible"]
    account.together = worker.world_size
    if not is_newcomer:
        trainer.report.rewind(trainer.step, kept=trainer.step - owed)
    return not is_newcomer and mine.step == plan.step


def _facts(trainer: Training) -> dict[str, Any]:
    """Return what goes with the state; JSON."""
    newest = trainer.newest
    norm = None if newest is None or newest.norm is None else float(newest.norm)
    counters = {name: value for name, value in trainer.counters().items() if name != "circumstances"}
    return {
        **counters,
        "step": trainer.step,
        "lr": 0.0 if newest is None else newest.lr,
        "norm": norm,
        "use": {} if newest is None else dict(newest.use),
        "is_taken": newest is None or newest.is_taken,
        "is_logged": newest is not None and newest.is_logged,
        "mean": None if newest is None else newest.mean,
        "unused": list(trainer.unused),
        "checksums": trainer.account.checksums,
        "irreproducible": trainer.account.irreproducible,
    }


def _state(trainer: Training) -> dict[str, Any]:
    """Tensors, not copied."""
    tree: dict[str, Any] = {
        "model": dict(trainer.model.state_dict()),
        "optimizer": optimizer_tree(trainer.model, trainer.optimizer, trainer.configured),
    }
    return tree if trainer.ema is None else {**tree, "ema": trainer.ema.state()}


def _take_facts(trainer: Training, facts: dict[str, Any]) -> None:
    """Count as another worker does."""
    trainer.unused, trainer.recorder.losses.lineage = facts["unused"], facts["lineage"]
    trainer.step, trainer.position = facts["step"], facts["position"]
    sizes, trainer.rate.factor = resume.batch(trainer.config, trainer.asked, facts)
    trainer.use(sizes)
    if trainer.loss_scale is not None and facts["loss_scale"]:
        trainer.loss_scale.load(facts["loss_scale"])
    if trainer.best is not None:
        trainer.best.load(facts["best"])


def _take(trainer: Training, tree: dict[str, Any]) -> None:
    """Have the state of another worker."""
    load_model(trainer.model, tree["model"])
    load_optimizer(trainer.model, trainer.optimizer, tree["optimizer"], configured=trainer.configured)
    if trainer.ema is not None:
        trainer.ema.load(tree["ema"])


def _send(tree: dict[str, Any], rank: int) -> None:
    tensors: list[torch.Tensor] = []
    shape = skeleton(tree, tensors)
    meshes = _meshes(tree["model"].values())
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in own]
    send(
        json.dumps(
            {"skeleton": shape, "tensors": kinds, "whole": [_layout(tensor, meshes) for tensor in tensors]}
        ).encode(),
        rank,
    )
    for tensor in own:
        for chunk in _chunks(tensor):
            dist.send(chunk, dst=rank)


def _receive(rank: int, trainer: Training) -> dict[str, Any]:
    header = json.loads(receive(rank))
    tensors = [torch.empty(shape, dtype=getattr(torch, kind)) for kind, shape in header["tensors"]]
    for tensor in tensors:
        for chunk in _chunks(tensor):
            dist.recv(chunk, src=rank)
    meshes = _meshes(trainer.model.state_dict().values())
    parts = [_divided(part, whole, meshes) for part, whole in zip(tensors, header["whole"], strict=True)]
    found: dict[str, Any] = filled(header["skeleton"], parts)
    return found


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the bytes of a tensor, message by message; views where that is possible."""
    return torch.split(raw(tensor), CHUNK) if tensor.numel() else ()


def _meshes(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Over which a model is divided, each once; in the same order on all workers."""
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")))


def _layout(tensor: torch.Tensor, meshes: Sequence[Any]) -> list[Any] | None:
    """Return the layout of a divided tensor: whole shape, strides, mesh, and the dim that each axis divides."""
    if not hasattr(tensor, "placements"):
        return None
    dims = [placement.dim if placement.is_shard() else None for placement in cast(Any, tensor).placements]
    return [list(tensor.shape), list(tensor.stride()), meshes.index(cast(Any, tensor).device_mesh), dims]


def _divided(part: torch.Tensor, whole: list[Any] | None, meshes: Sequence[Any]) -> torch.Tensor:
    """Return a tensor as `_layout` has described it, of this worker's part."""
    if whole is None:
        return part
    from torch.distributed.tensor import DTensor, Replicate, Shard  # half a second that ddp need not wait for

    shape, stride, number, dims = whole
    mesh = meshes[number]
    return DTensor.from_local(
        part.to(mesh.device_type),
        mesh,
        [Replicate() if dim is None else Shard(dim) for dim in dims],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )
