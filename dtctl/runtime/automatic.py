"""`strategy: auto`: the simplest strategy whose memory fits, by the formulas of `dtctl advise`.

Rank 0 decides for all workers, by the smallest memory that a worker has. The tensors that the forward pass keeps are
measured in a copy of the process, where tensors have shapes and no memory, so random numbers and the data set are not
affected. A run that resumes from a snapshot with the same number of workers keeps its choice, and with it its bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dtctl.errors import DtctlError, PlanError, WorkerFailed
from dtctl.estimate import choice, look
from dtctl.estimate.memory import BUDGET, GIB, RUNTIME, Recipe, Recompute
from dtctl.estimate.model import Model, from_inspection
from dtctl.runtime.console import say
from dtctl.runtime.data_loading import datasets
from dtctl.runtime.data_loading.reading import Reader
from dtctl.runtime.data_loading.shares import shares_of_all
from dtctl.runtime.distributed import capacity
from dtctl.runtime.distributed.run_forked import apart
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import read
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.json_collectives import gathered_json, spread_json
from dtctl.runtime.snapshot.storage.place import Place, Remote
from dtctl.runtime.strategies import blocks
from dtctl.train.batch import Batch, batch
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees, resolve

SEEN: Final = 4
"""Samples of the pass that is looked at; what is kept grows with their number."""
LIMIT_S: Final = 60.0
"""Seconds that looking may take."""
PROCESS: Final = 0.35 * GIB
"""Bytes of a worker without a GPU before it has a tensor, measured with torch 2.13."""
GLOO: Final = 0.05 * GIB
"""And for exchange."""
NOTHING: Final = dict.fromkeys(
    ("params", "looked_up", "block_params", "kept_bytes", "layers", "seq", "hidden", "vocab"), 0
)
"""Figures of an unknown model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A strategy with a name."""

    config: TrainConfig
    """Configuration with the chosen name in the place of auto."""
    degrees: Degrees
    kept: dict[str, Any] | None
    """Record of the choice for a snapshot, JSON; None if there was none."""
    shares: list[int]
    """Share of each rank, if they differ; see `train.shares`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """Model, loss and data to train."""

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    samples: datasets.Samples | datasets.Batches | datasets.SampleStream


def settle(config: TrainConfig, worker: Worker, subject: Subject, folder: Place) -> Settled:
    """Return the strategy that auto means here, or the one that the configuration names; collective over all workers.

    Args:
        config: of the training.
        worker: this worker.
        subject: what is to be trained.
        folder: of the snapshots.

    Raises:
        PlanError: nothing fits the memory, or the strategy is not possible with these workers.
    """
    shares = shares_of_all(config, worker)
    named = resolve(config.strategy, workers=worker.world_size, per_node=worker.local_world_size)
    if config.strategy != "auto" or config.exact == "elastic":
        return Settled(config=config, degrees=named, kept=None, shares=shares)
    sizes = batch(config, worker.world_size, shares=tuple(shares))
    if shares:  # memory is that of the worker that takes most
        sizes = Batch(micro=sizes.micro * max(shares), accumulate=sizes.accumulate, world_size=worker.world_size)
    request = _asked(config, worker, sizes)
    looks = worker.is_first if isinstance(folder, Remote) else worker.local_rank == 0
    mine = {
        "budget": config.memory_gib * GIB if config.memory_gib else capacity.of_worker(worker) * BUDGET,
        "slots": worker.local_world_size,
        "before": _before(folder) if looks else None,
    }
    facts = gathered_json(mine, worker)
    answer = spread_json(
        _decide(config, worker, subject, sizes, facts, request) if worker.is_first else None, worker, 0
    )
    if answer["error"]:
        raise PlanError(answer["error"], where=answer["where"], hint=answer["hint"])
    if worker.is_first and answer["line"]:
        say(answer["line"])
    if worker.world_size == 1:
        return Settled(config=config, degrees=named, kept=None, shares=shares)
    return Settled(
        config=dataclasses.replace(config, strategy=answer["strategy"]),
        degrees=Degrees(**answer["mesh"]),
        kept={"strategy": answer["strategy"], "mesh": answer["mesh"], "asked": request},
        shares=shares,
    )


def _asked(config: TrainConfig, worker: Worker, sizes: Batch) -> dict[str, Any]:
    """Return what a choice is made for, JSON: while it is the same, the choice stands."""
    return {
        "workers": worker.world_size,
        "micro_batch": sizes.micro,
        "accumulate": sizes.accumulate,
        "precision": config.precision,
        "memory_gib": config.memory_gib,
        "device": torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu",
    }


def _before(folder: Place) -> dict[str, Any] | None:
    """Return the step of the newest snapshot that lies on this node, and what its run had chosen."""
    try:
        for step, path in layout.listing(folder):
            manifest = read.record(path).manifest
            if manifest is not None:
                return {"step": step, "chosen": manifest.facts.get("chosen")}
    except (DtctlError, OSError):
        pass  # the resume from this snapshot reports the error
    return None


def _decide(
    config: TrainConfig, worker: Worker, subject: Subject, sizes: Batch, facts: list[Any], request: Mapping[str, Any]
) -> dict[str, Any]:
    """Decide on rank 0: strategy, mesh and a line for the log; errors are values, so that the others get them."""
    answer: dict[str, Any] = {"error": None, "where": "train.strategy", "hint": None, "line": None}
    before = max(
        (rank_facts["before"] for rank_facts in facts if rank_facts["before"]),
        key=lambda rank_facts: rank_facts["step"],
        default=None,
    )
    chosen = before and before["chosen"]
    if chosen and chosen["asked"] == request:
        settled = {"strategy": chosen["strategy"], "mesh": chosen["mesh"]}
        return answer | settled | {"line": f"strategy: {chosen['strategy']}, as the snapshot's run has chosen"}
    slots = {rank_facts["slots"] for rank_facts in facts}
    setting = choice.TrainingSetting(
        workers=worker.world_size,
        per_node=slots.pop() if len(slots) == 1 else 0,
        budget=min(rank_facts["budget"] for rank_facts in facts),
        unit="GPU" if worker.device.type == "cuda" else "worker",
        micro_batch=sizes.micro,
        accumulate=sizes.accumulate,
        precision=config.precision,
        recompute=_recompute(config),
        offload=config.fsdp.cpu_offload and worker.device.type == "cuda",
        halves=config.on_oom == "halve" and worker.device.type == "cuda",
        recipe=_recipe(config, worker),
    )
    try:
        verdict = _verdict(config, subject, setting)
    except DtctlError as exc:
        return answer | {"error": exc.message, "where": exc.where, "hint": exc.hint}
    name, degrees = verdict.candidate.strategy, verdict.candidate.layout
    alone, line = worker.world_size == 1, f"strategy: {name}, {verdict.reason}"
    if not verdict.fits and not alone:
        return answer | {"error": f"no strategy fits the memory: {verdict.reason}", "hint": verdict.hint}
    if alone:
        line = "" if verdict.fits else f"warning: memory may not suffice: {verdict.reason}; {verdict.hint}"
    return answer | {"strategy": name, "mesh": {"dp": degrees.dp, "fsdp": degrees.fsdp}, "line": line}


def _verdict(config: TrainConfig, subject: Subject, setting: choice.TrainingSetting) -> choice.StrategyVerdict:
    """Return the choice, with no closer look at the model than it needs."""
    sizes: dict[str, Any] = {}
    if isinstance(subject.model, nn.Module):
        sizes = _sizes(subject.model, config)
        quick = choice.small(_model(sizes, config), setting)
        if quick is not None:
            return quick
    try:
        sizes = apart(lambda: _seen(subject, config, setting), limit_s=LIMIT_S)
    except WorkerFailed as exc:
        sizes["unseen"] = exc.message
    if "params" not in sizes:
        plain = choice.candidates(from_inspection(NOTHING, name="model"), setting)[0]
        reason = f"since nothing is known about the model ({sizes['unseen']})"
        return choice.StrategyVerdict(candidate=plain, fits=True, reason=reason)
    model = _model(sizes, config)
    setting = dataclasses.replace(
        setting, divisible=sizes["divisible"], precision=setting.precision if sizes["single"] else "fp32"
    )
    return choice.small(model, setting) or choice.choose(model, setting, unseen=sizes.get("unseen"))


def _sizes(model: nn.Module, config: TrainConfig) -> dict[str, Any]:
    """Return what is known of a model that was not run."""
    parts = blocks.find(model, config.blocks)
    figures = look.sizes(model, parts.modules if parts else [model])
    try:
        blocks.require_apart(model, parts.modules if parts else [])
    except PlanError:
        return figures | {"divisible": False, "single": True}
    # Of a model that is in half precision already, nothing is cast.
    return figures | {
        "divisible": True,
        "single": any(parameter.dtype == torch.float32 for parameter in model.parameters()),
    }


def _seen(subject: Subject, config: TrainConfig, setting: choice.TrainingSetting) -> dict[str, Any]:
    """Measure in the copy what a forward pass of the first samples keeps."""
    model = subject.model
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
    figures = _sizes(model, config)
    if choice.small(_model(figures, config), setting) is not None:
        return figures
    parts = blocks.find(model, config.blocks)
    try:
        count = min(setting.micro_batch, datasets.size(subject.samples), SEEN)
        indices = np.arange(count, dtype=np.int64)
        samples = Reader(subject.samples, config.seed)(indices, indices)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _empty(model)
            figures |= look.forward(
                model, parts.modules if parts else [model], lambda: subject.loss(model, samples), samples=count
            )
    except Exception as exc:  # noqa: BLE001  # the user's code, in unusual surroundings
        figures["unseen"] = f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"
    return figures


def _empty(model: nn.Module) -> None:
    """Give a model tensors that a fake tensor mode makes up, on the processor; shared ones stay shared."""
    copies: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is None:
                    continue
                if value not in copies:
                    new = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
                    kind = isinstance(value, nn.Parameter)
                    copies[value] = nn.Parameter(new, requires_grad=value.requires_grad) if kind else new
                tensors[name] = copies[value]  # type: ignore[assignment]


def _model(figures: Mapping[str, Any], config: TrainConfig) -> Model:
    """Return the figures, with what the blocks keep that are computed again."""
    model, every = from_inspection(figures, name="model"), config.checkpointing
    if isinstance(every, int) and every > 1:
        model = dataclasses.replace(model, block_kept=((every - 1) * model.block_kept + model.block_input) / every)
    return model


def _recompute(config: TrainConfig) -> Recompute:
    if isinstance(config.checkpointing, int):
        return "full" if config.checkpointing == 1 else "none"
    return config.checkpointing


def _recipe(config: TrainConfig, worker: Worker) -> Recipe:
    """Return how this training holds a model; an optimizer of the script's own is taken to have the state of AdamW."""
    recipe = dataclasses.replace(
        RUNTIME.with_optimizer(config.optimizer, momentum=bool(config.momentum)),
        average_bytes=4 if config.ema else 0,
        reshard=config.fsdp.reshard_after_forward,
    )
    return recipe if worker.device.type == "cuda" else dataclasses.replace(recipe, context=PROCESS, exchange=GLOO)
