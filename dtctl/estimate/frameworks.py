"""Memory layouts of frameworks, as far as memory and time depend on them.

The figures are from the documentation that is named with each framework; benchmarks/advise.py compares them with
published
trainings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from dtctl.estimate.memory import RUNTIME, TORCHTITAN, FrameworkMemory

_MIXED: Final = replace(
    RUNTIME,
    autocast=False,
    weight_bytes=2,
    master_bytes=4,
    gradients_stay=True,
    whole_gradients=False,
    free=True,
    split_experts=True,
)
"""Weights in half precision, with an fp32 copy in the optimizer."""

FRAMEWORKS: Final[Mapping[str, FrameworkMemory]] = {
    "runtime": RUNTIME,
    # FSDP and FSDP2 with a mixed precision policy: shards in fp32, gathered in half precision.
    "fsdp": replace(TORCHTITAN, loss_parallel=False, sequence_parallel=False, free=True, shards_copied=True),
    # docs/source/api-guide/dist_optimizer.md: 18 bytes, or 6 + 12/d with the distributed optimizer.
    "megatron": replace(_MIXED, gradient_bytes=4, loss_parallel=True, sequence_parallel=True, fused=True),
    # The ZeRO paper (https://arxiv.org/abs/1910.02054) counts 2 + 2 + 12 bytes. Gradients and weights also have flat
    # fp32 copies: BLOOM's tables (bigscience, train/tr11-176B-ml/chronicles-prequel.md) show 4 + 21/d. Stages 2 and 3
    # have no such copies of gradients: 2 + 2 + 12; models have their own layers and not Megatron's kernels. The
    # defaults of stage3_max_live_parameters and stage3_max_reuse_distance are 1e9 each.
    "deepspeed": replace(
        _MIXED, gradient_bytes=2, master_bytes=13, live_params=2e9, fused=True, loss_parallel=True, collectives=12,
        overlap=0.1, stage_pace=1.15, sharded=(("master_bytes", 4), ("fused", False)),
    ),
    # Trainer of transformers and Accelerate: torch's autocast over fp32 weights, foreach kernels.
    "accelerate": replace(RUNTIME, step_bytes=8, bucket_bytes=4),
}  # fmt: skip


def apply_recipe_precision(recipe: FrameworkMemory, precision: str) -> FrameworkMemory:
    """Return a recipe in a number format: in fp32 there is one copy of the weights, and it is fp32."""
    if precision != "fp32" or recipe.weight_bytes == 4:
        return recipe
    return replace(recipe, weight_bytes=4, gradient_bytes=4, master_bytes=0, optimizer_bytes=8)
