"""DeepSpeed's configuration and variables, in place of its launcher.

Source: deepspeed/launcher/launch.py (what a worker is given) and deepspeed/runtime/config.py (what may be configured,
and that a configuration may be given as base64 instead of a file), read at DeepSpeed 0.19.8.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from dtctl.plan.frameworks import FrameworkSettings
from dtctl.plan.topology import Placement
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees

CONFIG_ARGUMENT = "--deepspeed_config"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
PLACE = ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE")
"""Position of the node, number of nodes, workers on the node."""


def place(placement: Placement, *, nodes: int) -> dict[str, str]:
    """What DeepSpeed's launcher sets beside torch's variables."""
    return dict(zip(PLACE, (str(placement.node_rank), str(nodes), str(placement.slots)), strict=True))


def config(wanted: FrameworkSettings) -> dict[str, Any]:
    """The configuration made of `train:`, with what `job.deepspeed` adds; empty when neither says anything.

    Raises:
        PlanError: a key of `train:` has no counterpart.
    """
    made = _made(wanted) if wanted.left else {}
    for key, value in wanted.spec.job.deepspeed.items():
        both = isinstance(value, dict) and isinstance(made.get(key), dict)
        made[key] = {**made[key], **value} if both else value
    return made


def _made(wanted: FrameworkSettings) -> dict[str, Any]:
    name, degrees = wanted.mesh()
    found: dict[str, Any] = {"zero_optimization": _zero(wanted, name, degrees)}
    micro, total, steps = wanted.batch(wanted.workers)
    if not micro and not total and not wanted.spec.job.deepspeed.keys() & BATCH:
        raise wanted.refused("micro_batch", "DeepSpeed needs train.micro_batch or train.global_batch")
    found |= {key: value for key, value in zip(BATCH, (total, micro, steps), strict=True) if value}
    precision = wanted.take("precision") or "fp32"
    if precision != "fp32":
        found[precision] = {"enabled": True}
    if clip := wanted.take("clip_norm"):
        found["gradient_clipping"] = clip
    if optimizer := wanted.take("optimizer"):
        found["optimizer"] = _optimizer(wanted, optimizer)
    if every := wanted.take("log_every"):
        found["steps_per_print"] = every
    wanted.done()
    return found


def as_argument(found: dict[str, Any]) -> str:
    """A configuration as one word, which DeepSpeed takes in place of a file's name; nothing is left on a node."""
    return base64.urlsafe_b64encode(as_text(found).encode()).decode()


def as_text(found: dict[str, Any]) -> str:
    """A configuration as JSON on one line."""
    return json.dumps(found, sort_keys=True, separators=(",", ":"))


def _zero(wanted: FrameworkSettings, name: str, degrees: Degrees) -> dict[str, Any]:
    if name == "zero1":
        return {"stage": 1}
    if degrees.fsdp == wanted.workers > 1:
        part = wanted.take_part("fsdp", "reshard_after_forward", "cpu_offload")
        # Parameters kept from the forward to the backward pass: what others call ZeRO 2 is DeepSpeed's stage 2.
        stage = 3 if part.get("reshard_after_forward", True) else 2
        found: dict[str, Any] = {"stage": stage}
        if part.get("cpu_offload"):
            found["offload_optimizer"] = {"device": "cpu"}
            if stage == 3:
                found["offload_param"] = {"device": "cpu"}
        return found
    if degrees.dp == wanted.workers:
        return {"stage": 0}
    raise wanted.refused(
        "strategy",
        "DeepSpeed's configuration knows ddp, zero1 and fsdp; its pipelines and its tensor parallelism are in programs",
    )


def _optimizer(wanted: FrameworkSettings, name: str) -> dict[str, Any]:
    keys = ("lr", "weight_decay", "momentum" if name == "sgd" else "eps")
    parameters = {key: value for key in keys if (value := wanted.take(key)) is not None}
    if name == "sgd":
        return {"type": "SGD", "params": parameters}
    # dtctl's own defaults, so that a spec means the same with dtctl.runtime.
    betas = [
        getattr(TrainConfig(), key) if (value := wanted.take(key)) is None else value for key in ("beta1", "beta2")
    ]
    return {"type": "AdamW", "params": {**parameters, "betas": betas}}
