"""Variables that Hugging Face Accelerate reads, in place of `accelerate launch` and its configuration file.

`accelerate launch` is torchrun and these variables. Source: accelerate/utils/launch.py (prepare_multi_gpu_env),
accelerate/utils/dataclasses.py and accelerate/parallelism_config.py, read at accelerate 1.15.
"""

from __future__ import annotations

from dtctl.plan.frameworks import FrameworkSettings
from dtctl.train.mesh import Degrees

PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


def build_accelerate_variables(settings: FrameworkSettings) -> dict[str, str]:
    """Return name -> value.

    Raises:
        PlanError: a key of `train:` has no counterpart.
    """
    env: dict[str, str] = {}
    name, degrees = settings.mesh()
    if precision := settings.pop_setting("precision"):
        env["ACCELERATE_MIXED_PRECISION"] = PRECISION[precision]
    if steps := settings.pop_setting("accumulate"):
        env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(steps)
    if backend := settings.pop_setting("compile"):
        env["ACCELERATE_DYNAMO_BACKEND"] = "INDUCTOR" if backend is True else backend.upper()
    if name == "zero1":
        env |= _build_deepspeed_variables(settings)
    elif degrees.pp > 1:
        raise settings.refused("strategy", "Accelerate has no pipelines")
    else:
        env |= _build_fsdp_variables(settings, degrees)
    settings.refuse_unread_keys()
    return env


def _build_deepspeed_variables(settings: FrameworkSettings) -> dict[str, str]:
    """Return the variables of ZeRO 1, for which Accelerate uses DeepSpeed; only there it clips gradients itself."""
    env = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}
    if clip := settings.pop_setting("clip_norm"):
        env["ACCELERATE_GRADIENT_CLIPPING"] = str(clip)
    return env


def _build_fsdp_variables(settings: FrameworkSettings, degrees: Degrees) -> dict[str, str]:
    """Return the variables of FSDP2 and a mesh; none for data parallelism, the default of Accelerate."""
    env: dict[str, str] = {}
    if degrees.fsdp > 1:
        part = settings.take_part("fsdp", "reshard_after_forward", "cpu_offload")
        env |= {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_RESHARD_AFTER_FORWARD": _format_boolean(part.get("reshard_after_forward", True)),
            "FSDP_OFFLOAD_PARAMS": _format_boolean(part.get("cpu_offload", False)),
            # Wrap the classes that a Hugging Face model names itself; FSDP_TRANSFORMER_CLS_TO_WRAP names others.
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        }
        checkpointing = settings.pop_setting("checkpointing")
        if checkpointing not in (None, "none", "full"):
            raise settings.refused("checkpointing", f"Accelerate cannot checkpoint activations as in {checkpointing!r}")
        env["FSDP_ACTIVATION_CHECKPOINTING"] = _format_boolean(checkpointing == "full")
    if degrees.tp > 1 or degrees.cp > 1 or (degrees.fsdp > 1 and degrees.dp > 1):
        env |= {
            "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(degrees.dp),
            "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(degrees.fsdp),
            "PARALLELISM_CONFIG_CP_SIZE": str(degrees.cp),
            "PARALLELISM_CONFIG_TP_SIZE": str(degrees.tp),
        }
    return env


def _format_boolean(value: bool) -> str:
    return "true" if value else "false"
