"""DeepSpeed's configuration and variables, in place of its launcher.

Source: deepspeed/launcher/launch.py (what a worker is given) and deepspeed/runtime/config.py (what may be configured,
and that a configuration may be given as base64 instead of a file), read at DeepSpeed 0.19.8.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from dtctl.plan.frameworks import FrameworkSettings
from dtctl.train.config import TrainConfig
from dtctl.train.mesh import Degrees

CONFIG_ARGUMENT = "--deepspeed_config"
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def build_deepspeed_config(settings: FrameworkSettings) -> dict[str, Any]:
    """Return the configuration made of `train:`, with the keys of `job.deepspeed`; empty when both are.

    Raises:
        PlanError: a key of `train:` has no counterpart.
    """
    generated = _from_settings(settings) if settings.remaining else {}
    for key, value in settings.spec.job.deepspeed.items():
        nested = isinstance(value, dict) and isinstance(generated.get(key), dict)
        generated[key] = {**generated[key], **value} if nested else value
    return generated


def _from_settings(settings: FrameworkSettings) -> dict[str, Any]:
    name, degrees = settings.mesh()
    generated: dict[str, Any] = {"zero_optimization": _build_zero_section(settings, name, degrees)}
    micro, total, steps = settings.batch(settings.workers)
    if not micro and not total and not settings.spec.job.deepspeed.keys() & BATCH:
        raise settings.refused("micro_batch", "DeepSpeed needs train.micro_batch or train.global_batch")
    generated |= {key: value for key, value in zip(BATCH, (total, micro, steps), strict=True) if value}
    precision = settings.pop_setting("precision") or "fp32"
    if precision != "fp32":
        generated[precision] = {"enabled": True}
    if clip := settings.pop_setting("clip_norm"):
        generated["gradient_clipping"] = clip
    if optimizer := settings.pop_setting("optimizer"):
        generated["optimizer"] = _build_optimizer_section(settings, optimizer)
    if log_every := settings.pop_setting("log_every"):
        generated["steps_per_print"] = log_every
    settings.refuse_unread_keys()
    return generated


def format_config_argument(config: dict[str, Any]) -> str:
    """Return a configuration as one word, which DeepSpeed accepts in place of a file; no file stays on a node."""
    return base64.urlsafe_b64encode(format_config_text(config).encode()).decode()


def format_config_text(config: dict[str, Any]) -> str:
    """Return a configuration as JSON on one line."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def _build_zero_section(settings: FrameworkSettings, name: str, degrees: Degrees) -> dict[str, Any]:
    if name == "zero1":
        return {"stage": 1}
    if degrees.fsdp == settings.workers > 1:
        part = settings.take_part("fsdp", "reshard_after_forward", "cpu_offload")
        # DeepSpeed's stage 2 keeps parameters from the forward to the backward pass; others call this ZeRO 2.
        stage = 3 if part.get("reshard_after_forward", True) else 2
        zero: dict[str, Any] = {"stage": stage}
        if part.get("cpu_offload"):
            zero["offload_optimizer"] = {"device": "cpu"}
            if stage == 3:
                zero["offload_param"] = {"device": "cpu"}
        return zero
    if degrees.dp == settings.workers:
        return {"stage": 0}
    raise settings.refused(
        "strategy",
        "DeepSpeed's configuration knows ddp, zero1 and fsdp; its pipelines and its tensor parallelism are in programs",
    )


def _build_optimizer_section(settings: FrameworkSettings, name: str) -> dict[str, Any]:
    if name == "muon":
        raise settings.refused("optimizer", "DeepSpeed's Muon gets its parameters from the program")
    keys = ("lr", "weight_decay", "momentum" if name == "sgd" else "eps")
    parameters = {key: value for key in keys if (value := settings.pop_setting(key)) is not None}
    if name == "sgd":
        return {"type": "SGD", "params": parameters}
    # These are dtctl's own defaults, so that a spec has the same effect as with dtctl.runtime.
    betas = [
        getattr(TrainConfig(), key) if (value := settings.pop_setting(key)) is None else value
        for key in ("beta1", "beta2")
    ]
    return {"type": "AdamW", "params": {**parameters, "betas": betas}}
