"""Checks of the plan for settings that workers with dtctl.runtime would refuse at their start."""

from __future__ import annotations

from dataclasses import replace

from dtctl.errors import PlanError
from dtctl.spec.model import Spec
from dtctl.train import settings
from dtctl.train.batch import compute_batch_sizes, derive_batch_sizes
from dtctl.train.compatibility import require
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import resolve_degrees

SIZES = ("micro_batch", "global_batch", "accumulate")


def check_training(spec: Spec, *, workers: int, per_node: int, nodes: int) -> list[str]:
    """Notes about the training of a spec on these workers.

    What the spec leaves open, the job's script may set: only settings that no script can make right are refused.

    Args:
        spec: with a `train:` section.
        workers: in the whole job.
        per_node: workers of every node; 0 if nodes differ.
        nodes: how many there are.

    Raises:
        PlanError: the workers would refuse the mesh, the sizes of a batch, or settings that do not go together.
        SpecError: an argument of the job that begins with `--train.` is wrong.
    """
    arguments = settings.parse_argv_settings(spec.job.args)
    settings.build(TrainConfig, arguments, at="train", where="the job's arguments")
    values = settings.merge_settings(spec.settings, arguments)
    if spec.cluster.transport == "slurm" and values.get("snapshot", {}).get("memory") is not None:
        raise PlanError(
            "snapshots in memory do not work in a job of Slurm",
            where=spec.written_at("train.snapshot.memory"),
            hint="leave it out, or reach the nodes over SSH",
        )
    notes = []
    snapshot = values.get("snapshot", {})
    wanted = {"replicas": snapshot.get("replicas", 0), "memory.copies": (snapshot.get("memory") or {}).get("copies", 1)}
    for key, copies in wanted.items():
        if isinstance(copies, int) and 1 < nodes <= copies:
            notes.append(f"train.snapshot.{key} is {copies}, and {nodes - 1} are kept: one on each other node")
    if "strategy" not in values:
        return notes
    config = settings.build(TrainConfig, values, at="train", where="the spec")
    try:
        degrees = resolve_degrees(config.strategy, workers=workers, per_node=per_node)
        accumulate = config.accumulate or config.pipeline.micro_batches
        if config.shares:  # the GPUs of the nodes are not known yet
            pass
        elif sum(key in values for key in SIZES) > 1:
            accumulate = compute_batch_sizes(config, degrees.data, stages=degrees.pp).accumulate
        else:
            derive_batch_sizes(None, config.global_batch, None, workers=degrees.data)
        # The script may choose a schedule with another number of stages.
        if "schedule" not in values.get("pipeline", {}):
            config = replace(config, pipeline=replace(config.pipeline, stages_per_worker=None))
        require(config, degrees, accumulate=accumulate)
    except PlanError as exc:
        raise PlanError(exc.message, where=spec.written_at(exc.where or "train"), hint=exc.hint) from None
    if per_node and degrees.tp > per_node:
        notes.append(
            f"tp {degrees.tp} spans nodes of {per_node} workers: every layer of every step would wait for the network "
            f"between them; a tp of at most {per_node} stays inside a node"
        )
    return notes
