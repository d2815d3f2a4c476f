"""`strategy: auto`: the simplest strategy whose memory fits, by the formulas of `dtctl advise`.

Rank 0 decides for all workers, by the smallest memory of any worker. The tensors that a forward pass keeps are measured
in a forked process, with tensors that have shapes but no memory, so random numbers and the data set are not affected. A
run that resumes from a snapshot with the same number of workers keeps its strategy, and thus its bits.
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
from dtctl.estimate import choice, model_shapes
from dtctl.estimate.memory import BUDGET, GIB, RUNTIME, FrameworkMemory, Recompute
from dtctl.estimate.model import ModelProfile, build_inspected_model
from dtctl.runtime.console import say
from dtctl.runtime.data_loading import datasets
from dtctl.runtime.data_loading.reading import BatchReader
from dtctl.runtime.data_loading.shares import gather_shares
from dtctl.runtime.distributed import capacity
from dtctl.runtime.distributed.run_forked import run_in_forked_process
from dtctl.runtime.distributed.worker import Worker
from dtctl.runtime.snapshot import read
from dtctl.runtime.snapshot.format import layout
from dtctl.runtime.snapshot.json_collectives import gather_json, spread_json
from dtctl.runtime.snapshot.storage.place import Place, RemotePath
from dtctl.runtime.strategies import blocks
from dtctl.train.batch import BatchSizes, compute_batch_sizes
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees, resolve_degrees

SEEN: Final = 4
"""Samples of the measured pass; the kept tensors grow with their number."""
LIMIT_S: Final = 60.0
"""Seconds that the measurement may take."""
PROCESS: Final = 0.35 * GIB
"""Bytes of a worker without a GPU before it has a tensor, measured with torch 2.13."""
GLOO: Final = 0.05 * GIB
"""Bytes of a worker without a GPU for exchange with gloo."""
NOTHING: Final = dict.fromkeys(
    ("params", "looked_up", "block_params", "kept_bytes", "layers", "seq", "hidden", "vocab"), 0
)
"""Figures for an unknown model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedStrategy:
    """A strategy that is not `auto`."""

    config: TrainConfig
    """Configuration with the chosen name in place of `auto`."""
    degrees: Degrees
    kept: dict[str, Any] | None
    """Record of the choice for a snapshot, JSON; None if nothing was chosen."""
    shares: list[int]
    """Share of each rank, if they differ; see `train.shares`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInputs:
    """Model, loss and data to train."""

    model: nn.Module | Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Any]
    samples: Any
    """A data set of any kind; before `adapt_training_data`, also a DataLoader."""


def resolve_strategy(config: TrainConfig, worker: Worker, subject: TrainingInputs, folder: Place) -> ResolvedStrategy:
    """Return the strategy that `auto` chooses, or the configured one; collective over all workers.

    Args:
        config: settings of the run.
        worker: this worker.
        subject: model, loss and data to train.
        folder: place of the snapshots.

    Raises:
        PlanError: nothing fits the memory, or the strategy is not possible with these workers.
    """
    shares = gather_shares(config, worker)
    named = resolve_degrees(config.strategy, workers=worker.world_size, per_node=worker.local_world_size)
    if config.strategy != "auto" or config.exact == "elastic":
        return ResolvedStrategy(config=config, degrees=named, kept=None, shares=shares)
    sizes = compute_batch_sizes(config, worker.world_size, shares=tuple(shares))
    if shares:  # the worker with the largest share determines the memory
        sizes = BatchSizes(micro=sizes.micro * max(shares), accumulate=sizes.accumulate, world_size=worker.world_size)
    request = _build_choice_request(config, worker, sizes)
    looks = worker.is_first if isinstance(folder, RemotePath) else worker.local_rank == 0
    mine = {
        "budget": config.memory_gib * GIB if config.memory_gib else capacity.compute_worker_capacity(worker) * BUDGET,
        "slots": worker.local_world_size,
        "before": _read_previous_choice(folder) if looks else None,
    }
    facts = gather_json(mine, worker)
    answer = spread_json(
        _decide_strategy(config, worker, subject, sizes, facts, request) if worker.is_first else None, worker, 0
    )
    if answer["error"]:
        raise PlanError(answer["error"], where=answer["where"], hint=answer["hint"])
    if worker.is_first and answer["line"]:
        say(answer["line"])
    if worker.world_size == 1:
        return ResolvedStrategy(config=config, degrees=named, kept=None, shares=shares)
    return ResolvedStrategy(
        config=dataclasses.replace(config, strategy=answer["strategy"]),
        degrees=Degrees(**answer["mesh"]),
        kept={"strategy": answer["strategy"], "mesh": answer["mesh"], "asked": request},
        shares=shares,
    )


def _build_choice_request(config: TrainConfig, worker: Worker, sizes: BatchSizes) -> dict[str, Any]:
    """Return the inputs of a choice, JSON; while they are the same, the choice is kept."""
    return {
        "workers": worker.world_size,
        "micro_batch": sizes.micro,
        "accumulate": sizes.accumulate,
        "precision": config.precision,
        "memory_gib": config.memory_gib,
        "device": torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu",
    }


def _read_previous_choice(folder: Place) -> dict[str, Any] | None:
    """Return the step of the newest snapshot on this node, and the choice of its run."""
    try:
        for step, path in layout.list_step_folders(folder):
            manifest = read.verify_commit_record(path).manifest
            if manifest is not None:
                return {"step": step, "chosen": manifest.facts.get("chosen")}
    except (DtctlError, OSError):
        pass  # the resume from this snapshot reports the error
    return None


def _decide_strategy(
    config: TrainConfig,
    worker: Worker,
    subject: TrainingInputs,
    sizes: BatchSizes,
    facts: list[Any],
    request: Mapping[str, Any],
) -> dict[str, Any]:
    """Decide on rank 0, and return strategy, mesh and a line for the log; errors are returned as well."""
    answer: dict[str, Any] = {"error": None, "where": "train.strategy", "hint": None, "line": None}
    before = max(
        (rank_facts["before"] for rank_facts in facts if rank_facts["before"]),
        key=lambda rank_facts: rank_facts["step"],
        default=None,
    )
    chosen = before and before["chosen"]
    if chosen and chosen["asked"] == request:
        settled = {"strategy": chosen["strategy"], "mesh": chosen["mesh"]}
        return answer | settled | {"line": f"strategy: {chosen['strategy']}, chosen by the run that wrote the snapshot"}
    slots = {rank_facts["slots"] for rank_facts in facts}
    setting = choice.StrategyInputs(
        workers=worker.world_size,
        per_node=slots.pop() if len(slots) == 1 else 0,
        budget=min(rank_facts["budget"] for rank_facts in facts),
        unit="GPU" if worker.device.type == "cuda" else "worker",
        micro_batch=sizes.micro,
        accumulate=sizes.accumulate,
        precision=config.precision,
        recompute=_choose_recompute(config),
        offload=config.fsdp.cpu_offload and worker.device.type == "cuda",
        halves=config.on_oom == "halve" and worker.device.type == "cuda",
        recipe=_build_training_recipe(config, worker),
    )
    try:
        verdict = _compute_strategy_verdict(config, subject, setting)
    except DtctlError as exc:
        return answer | {"error": exc.message, "where": exc.where, "hint": exc.hint}
    name, degrees = verdict.candidate.strategy, verdict.candidate.layout
    alone, line = worker.world_size == 1, f"strategy: {name}, {verdict.reason}"
    if not verdict.fits and not alone:
        return answer | {"error": f"no strategy fits the memory: {verdict.reason}", "hint": verdict.hint}
    if alone:
        line = "" if verdict.fits else f"warning: memory may not suffice: {verdict.reason}; {verdict.hint}"
    return answer | {"strategy": name, "mesh": {"dp": degrees.dp, "fsdp": degrees.fsdp}, "line": line}


def _compute_strategy_verdict(
    config: TrainConfig, subject: TrainingInputs, setting: choice.StrategyInputs
) -> choice.StrategyVerdict:
    """Return the choice, with as few measurements of the model as it needs."""
    sizes: dict[str, Any] = {}
    if isinstance(subject.model, nn.Module):
        sizes = _collect_model_sizes(subject.model, config)
        quick = choice.choose_ddp_if_small(_build_estimate_model(sizes, config), setting)
        if quick is not None:
            return quick
    try:
        sizes = run_in_forked_process(lambda: _measure_kept_activations(subject, config, setting), limit_s=LIMIT_S)
    except WorkerFailed as exc:
        sizes["unseen"] = exc.message
    if "params" not in sizes:
        plain = choice.list_strategy_candidates(build_inspected_model(NOTHING, name="model"), setting)[0]
        reason = f"since nothing is known about the model ({sizes['unseen']})"
        return choice.StrategyVerdict(candidate=plain, fits=True, reason=reason)
    model = _build_estimate_model(sizes, config)
    setting = dataclasses.replace(
        setting, divisible=sizes["divisible"], precision=setting.precision if sizes["single"] else "fp32"
    )
    return choice.choose_ddp_if_small(model, setting) or choice.choose_fitting_strategy(
        model, setting, unseen=sizes.get("unseen")
    )


def _collect_model_sizes(model: nn.Module, config: TrainConfig) -> dict[str, Any]:
    """Return the figures of a model that are known without running it."""
    parts = blocks.find_repeated_blocks(model, config.blocks)
    figures = model_shapes.collect_static_figures(model, parts.modules if parts else [model])
    try:
        blocks.require_apart(model, parts.modules if parts else [])
    except PlanError:
        return figures | {"divisible": False, "single": True}
    # A model that is in half precision already is not cast.
    return figures | {
        "divisible": True,
        "single": any(parameter.dtype == torch.float32 for parameter in model.parameters()),
    }


def _measure_kept_activations(
    subject: TrainingInputs, config: TrainConfig, setting: choice.StrategyInputs
) -> dict[str, Any]:
    """Measure, in the forked process, the tensors that a forward pass of the first samples keeps."""
    model = subject.model
    if not isinstance(model, nn.Module):
        with torch.device("meta"):
            model = model()
    figures = _collect_model_sizes(model, config)
    if choice.choose_ddp_if_small(_build_estimate_model(figures, config), setting) is not None:
        return figures
    parts = blocks.find_repeated_blocks(model, config.blocks)
    try:
        count = min(setting.micro_batch, datasets.count_samples(subject.samples), SEEN)
        indices = np.arange(count, dtype=np.int64)
        samples = BatchReader(subject.samples, config.seed)(indices, indices)
        with FakeTensorMode(allow_non_fake_inputs=True):
            _replace_with_empty_tensors(model)
            figures |= model_shapes.measure_forward_pass(
                model, parts.modules if parts else [model], lambda: subject.loss(model, samples), samples=count
            )
    except Exception as exc:  # noqa: BLE001  # the user's code, in unusual surroundings
        figures["unseen"] = f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0]}"
    return figures


def _replace_with_empty_tensors(model: nn.Module) -> None:
    """Replace a model's tensors by new ones in a fake tensor mode, on the CPU; shared tensors stay shared."""
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


def _build_estimate_model(figures: Mapping[str, Any], config: TrainConfig) -> ModelProfile:
    """Return the profile of the model, with the tensors that checkpointed blocks keep."""
    model, every = build_inspected_model(figures, name="model"), config.checkpointing
    if isinstance(every, int) and every > 1:
        model = dataclasses.replace(model, block_kept=((every - 1) * model.block_kept + model.block_input) / every)
    return model


def _choose_recompute(config: TrainConfig) -> Recompute:
    if isinstance(config.checkpointing, int):
        return "full" if config.checkpointing == 1 else "none"
    return config.checkpointing


def _build_training_recipe(config: TrainConfig, worker: Worker) -> FrameworkMemory:
    """Return the memory use per parameter of this run; a custom optimizer is assumed to have the state of AdamW."""
    recipe = dataclasses.replace(
        RUNTIME.with_optimizer(config.optimizer, momentum=bool(config.momentum)),
        average_bytes=4 if config.ema else 0,
        reshard=config.fsdp.reshard_after_forward,
    )
    return recipe if worker.device.type == "cuda" else dataclasses.replace(recipe, context=PROCESS, exchange=GLOO)
