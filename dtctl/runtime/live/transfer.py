"""Transfer of the most advanced state of all workers to those that are behind, from memory to memory.

A survivor can be one step ahead of another, if its sum of gradients was complete when a peer was lost. Its step is not
undone; the other workers take over its state. If the state is divided (hsdp, ep), each worker gets its part from a
worker with the same part in another replica.

With a divided state, a step ends with an exchange among all workers, which each enters after its gradients were
exchanged, clipped and checked. So when a worker is lost in a step, there are two cases:

- No worker has completed that exchange, so none has changed its state. All workers begin the step again.
- At least one worker has completed it, and has taken the step. In this case all survivors had entered the exchange.
Those that
  have not completed it have kept their gradients, and take the step with the result that the others have received.

In both cases all survivors have the same step, and the whole state if one of them has each part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from dtctl.runtime import resume
from dtctl.runtime.snapshot.json_collectives import (
    gather_json,
    merge_tree_tensors,
    receive_bytes_from_rank,
    send_bytes_to_rank,
    split_tree_tensors,
    spread_json,
)
from dtctl.runtime.snapshot.state import load_model, load_optimizer, optimizer_tree, view_tensor_bytes
from dtctl.runtime.step import StepResult
from dtctl.runtime.training import Training

CHUNK: int = 64 << 20
"""Bytes of a message, limited so that sending a tensor on a GPU needs no host copy of its size."""


class IncompleteState(Exception):
    """Error on every worker: the most advanced workers that are left do not have the whole state between them."""


@dataclass(frozen=True, slots=True)
class RejoinPosition:
    """Position of a worker that joins the others; the default is that of a worker without a state."""

    step: int = -1
    """Number of optimizer steps that the worker has taken; -1 without a state."""
    is_ready: bool = False
    """True if the next step lacks only the result of its last exchange, which was interrupted."""
    owes: bool = False
    """True if the actions due after its newest step are not done."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Plan by which all workers get the same state; its lists contain ranks."""

    step: int
    """Step from which all workers continue."""
    ahead: list[int]
    """Ranks that have taken this step."""
    catching_up: list[int]
    """Ranks that can take this step by themselves."""
    behind: list[int]
    """Ranks that receive their part of the state."""
    sources: dict[int, int]
    """Part of the state -> rank that sends it."""


def plan_state_transfer(everyone: Sequence[RejoinPosition], parts: int) -> TransferPlan:
    """Return the plan of the transfer: a step that one worker has taken is taken by all.

    Args:
        everyone: positions by rank. Ranks count the parts of a replica first.
        parts: number of parts of the state.

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
    return TransferPlan(step=step, ahead=ahead, catching_up=catching_up, behind=behind, sources=sources)


def bring_level(training: Training, *, is_newcomer: bool) -> bool:
    """Bring all workers to the most advanced state; collective over all workers. At least one worker must have a state.

    This worker's state changes only after the whole new state has arrived.

    Returns:
        True if this worker had begun a step that it repeats.

    Raises:
        IncompleteState: no worker is left that has some part of the state.
    """
    worker, parts = training.settings.worker, training.settings.place.degrees.shards
    position, transaction = training.position, training.transaction
    mine = RejoinPosition(position.step, is_ready=transaction.ready is not None, owes=transaction.is_owed)
    everyone = [
        RejoinPosition(**each) for each in gather_json(asdict(RejoinPosition() if is_newcomer else mine), worker)
    ]
    plan = plan_state_transfer(everyone, parts)
    # Actions due after a step are due on all workers: an exchange among them was complete on none or only some. After
    # the last step they are due until all workers have completed them, since a lost worker may have been writing the
    # last snapshot.
    owed = any(everyone[rank].owes for rank in plan.ahead) or plan.step == position.steps
    facts = spread_json(
        _collect_transfer_facts(training) if worker.rank == plan.ahead[0] else None, worker, plan.ahead[0]
    )
    if worker.rank in plan.catching_up:
        _finish_interrupted_step(training, facts["unused"])
        _take_facts(training, facts)
    else:
        _finish_interrupted_step(training, None)
    source = plan.sources[worker.rank % parts]
    if worker.rank == source:
        for rank in plan.behind:
            if rank % parts == worker.rank % parts:
                _send_state_tree(_collect_transfer_tensors(training), rank)
    elif worker.rank in plan.behind:
        tree = _receive_state_tree(source, training)
        _take_facts(training, facts)
        _load_received_state(training, tree)
        norm = facts["norm"] and torch.tensor(facts["norm"])
        is_taken, is_logged = facts["is_taken"], facts["is_logged"]
        transaction.newest = StepResult(
            None, facts["lr"], norm, facts["use"], facts["mean"], is_taken=is_taken, is_logged=is_logged
        )
    if position.step:  # an interrupted step has set its own rate
        training.trained.rate.set(position.step - 1)
    transaction.is_owed = owed
    account = training.account
    account.checksums, account.irreproducible = facts["checksums"], facts["irreproducible"]
    account.together = worker.world_size
    if not is_newcomer:
        training.report.rewind(position.step, kept=position.step - owed)
    return not is_newcomer and mine.step == plan.step


def _finish_interrupted_step(training: Training, unused: Sequence[int] | None) -> None:
    """Take the interrupted step if this worker was ready for it and another one has taken it; else discard it.

    Args:
        training: the run, interrupted in a step.
        unused: numbers of the unused parameters, from the workers that have taken the step; None if none has.
    """
    transaction = training.transaction
    if transaction.ready is not None and unused is not None:
        transaction.ready(unused)
    transaction.ready = None
    training.trained.drop_gradients()


def _collect_transfer_facts(training: Training) -> dict[str, Any]:
    """Return the facts that are sent with the state; JSON."""
    newest = training.transaction.newest
    norm = None if newest is None or newest.norm is None else float(newest.norm)
    counters = {name: value for name, value in training.collect_counters().items() if name != "circumstances"}
    return {
        **counters,
        "step": training.position.step,
        "lr": 0.0 if newest is None else newest.lr,
        "norm": norm,
        "use": {} if newest is None else dict(newest.use),
        "is_taken": newest is None or newest.is_taken,
        "is_logged": newest is not None and newest.is_logged,
        "mean": None if newest is None else newest.mean,
        "unused": list(training.transaction.unused),
        "checksums": training.account.checksums,
        "irreproducible": training.account.irreproducible,
    }


def _collect_transfer_tensors(training: Training) -> dict[str, Any]:
    """Return the tensors of the run's state without copying them."""
    trained = training.trained
    tree: dict[str, Any] = {
        "model": dict(trained.model.state_dict()),
        "optimizer": optimizer_tree(trained.model, trained.optimizer, trained.configured),
    }
    return tree if trained.ema is None else {**tree, "ema": trained.ema.state()}


def _take_facts(training: Training, facts: dict[str, Any]) -> None:
    """Take over the counters of another worker."""
    position, trained = training.position, training.trained
    training.transaction.unused, training.check.recorder.losses.lineage = facts["unused"], facts["lineage"]
    position.step, position.samples = facts["step"], facts["position"]
    sizes, trained.rate.factor = resume.resolve_resumed_batch(training.settings.config, position.asked, facts)
    training.set_batch_sizes(sizes)
    if trained.loss_scale is not None and facts["loss_scale"]:
        trained.loss_scale.load(facts["loss_scale"])
    if training.snapshots.best is not None:
        training.snapshots.best.load(facts["best"])


def _load_received_state(training: Training, tree: dict[str, Any]) -> None:
    """Take over the state of another worker."""
    trained = training.trained
    load_model(trained.model, tree["model"])
    load_optimizer(trained.model, trained.optimizer, tree["optimizer"], configured=trained.configured)
    trained.rate.accept_loaded_rates()
    if trained.ema is not None:
        trained.ema.load(tree["ema"])


def _send_state_tree(tree: dict[str, Any], rank: int) -> None:
    tensors: list[torch.Tensor] = []
    shape = split_tree_tensors(tree, tensors)
    meshes = _list_device_meshes(tree["model"].values())
    own = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    kinds = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in own]
    send_bytes_to_rank(
        json.dumps(
            {
                "skeleton": shape,
                "tensors": kinds,
                "whole": [_describe_tensor_layout(tensor, meshes) for tensor in tensors],
            }
        ).encode(),
        rank,
    )
    for tensor in own:
        for chunk in _split_tensor_bytes(tensor):
            dist.send(chunk, dst=rank)


def _receive_state_tree(rank: int, training: Training) -> dict[str, Any]:
    header = json.loads(receive_bytes_from_rank(rank))
    tensors = [torch.empty(shape, dtype=getattr(torch, kind)) for kind, shape in header["tensors"]]
    for tensor in tensors:
        for chunk in _split_tensor_bytes(tensor):
            dist.recv(chunk, src=rank)
    meshes = _list_device_meshes(training.trained.model.state_dict().values())
    parts = [
        _build_tensor_from_layout(part, whole, meshes) for part, whole in zip(tensors, header["whole"], strict=True)
    ]
    found: dict[str, Any] = merge_tree_tensors(header["skeleton"], parts)
    return found


def _split_tensor_bytes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the bytes of a tensor in messages, as views where that is possible."""
    return torch.split(view_tensor_bytes(tensor), CHUNK) if tensor.numel() else ()


def _list_device_meshes(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return the meshes over which a model is divided, each once, in the same order on all workers."""
    return list(dict.fromkeys(tensor.device_mesh for tensor in tensors if hasattr(tensor, "device_mesh")))


def _describe_tensor_layout(tensor: torch.Tensor, meshes: Sequence[Any]) -> list[Any] | None:
    """Return the layout of a divided tensor: whole shape, strides, mesh, and the dim that each axis divides."""
    if not hasattr(tensor, "placements"):
        return None
    dims = [placement.dim if placement.is_shard() else None for placement in cast(Any, tensor).placements]
    return [list(tensor.shape), list(tensor.stride()), meshes.index(cast(Any, tensor).device_mesh), dims]


def _build_tensor_from_layout(part: torch.Tensor, whole: list[Any] | None, meshes: Sequence[Any]) -> torch.Tensor:
    """Return a tensor with the layout from `_describe_tensor_layout`, with `part` as this worker's part."""
    if whole is None:
        return part
    # Imported here, since it takes half a second and ddp does not need it.
    from torch.distributed.tensor import DTensor, Replicate, Shard

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
