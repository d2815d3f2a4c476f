"""Time of a step, for one layout of a training. Pure arithmetic; seconds.

Shares are fitted to the published figures of torchtitan (tests/unit/advise/test_published.py), measured on H100.
"""

from __future__ import annotations

from dataclasses import dataclass

from dtctl.advise.hardware import Hardware
from dtctl.estimate.memory import RUNTIME, Layout, Recipe
from dtctl.estimate.model import Model

PRODUCTS = 0.38
"""Share of a GPU's peak that matrix products get, with all that is between them, in eager mode."""
COMPILED = 0.44
FP8 = 1.28
"""How much faster products in fp8 are, of whole trainings."""
ATTENTION = 0.30
"""Share of the peak that attention gets."""
WIRE = 0.80
"""Share of a link's bandwidth that a collective gets."""
RING = 0.25
"""What attention takes longer each time context parallelism halves its pieces."""
HIDDEN = 0.80
"""Share of the computation time that exchange can overlap with."""
THIN = 0.98
"""What products keep of their speed each time tensor parallelism halves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One step."""

    step_s: float
    compute_s: float
    exchange_s: float
    """All exchange of gradients and weights, hidden or not."""
    exposed_s: float
    """Of exchange, what computation does not hide, tensor parallelism's included."""
    bubble_s: float
    """In which a pipeline waits."""
    tokens_per_s_per_gpu: float


def speed(
    model: Model,
    layout: Layout,
    hardware: Hardware,
    recipe: Recipe = RUNTIME,
    *,
    compiled: bool = False,
    fp8: bool = False,
) -> Speed:
    """Time of a step and its parts."""
    samples = layout.micro_batch * layout.accumulate
    tokens = samples * model.seq / layout.cp
    compute = _compute(model, layout, hardware, compiled=compiled, fp8=fp8) * tokens
    bubble = compute * (layout.pp - 1) / max(1, layout.accumulate) if layout.pp > 1 else 0.0
    exchange = _exchange(model, layout, hardware, recipe)
    exposed_bytes = _tensor_parallel(model, layout, hardware) * tokens + _context(model, layout, hardware) * tokens
    exposed = max(0.0, exchange - HIDDEN * compute) + exposed_bytes
    offload = 0.0
    if layout.offload:  # gradients out, the optimizer on the host, weights in: 4 + 4 bytes over the bus, 28 in memory
        shard_params = model.params / (layout.fsdp * layout.tp * layout.pp * layout.cp)
        offload = (
            shard_params * 8 / (hardware.gpu.host * 1e9)
            + shard_params * 28 * min(hardware.per_node, layout.workers) / 200e9
        )
    step = compute + bubble + exposed + offload
    tokens_per_step = samples * model.seq * layout.data
    return Speed(
        step_s=step,
        compute_s=compute,
        exchange_s=exchange + exposed_bytes,
        exposed_s=exposed + offload,
        bubble_s=bubble,
        tokens_per_s_per_gpu=tokens_per_step / step / layout.workers,
    )


def _compute(model: Model, layout: Layout, hardware: Hardware, *, compiled: bool, fp8: bool) -> float:
    """Seconds of computation for a token on a GPU."""
    peak = (hardware.gpu.single if layout.precision == "fp32" else hardware.gpu.half) * 1e12
    share = (COMPILED if compiled else PRODUCTS) * (FP8 if fp8 else 1.0)
    thin = THIN ** (layout.tp - 1).bit_length()
    again = {"none": 1.0, "selective": 7 / 6, "full": 4 / 3}[layout.recompute]
    products = 6 * model.active_params * again / (peak * share * thin)
    attention = 6 * model.layers * model.hidden * model.seq * (again if layout.recompute == "full" else 1.0)
    ring = 1 + RING * (layout.cp - 1).bit_length()
    return (products + ring * attention / (peak * ATTENTION)) / (layout.tp * layout.pp)


def _exchange(model: Model, layout: Layout, hardware: Hardware, recipe: Recipe) -> float:
    """Seconds in which gradients and weights are exchanged over dp and fsdp in a step."""
    replica_params = model.params / (layout.tp * layout.pp)
    inner = layout.tp * layout.cp
    seconds = 0.0
    shards = layout.shards
    if shards > 1:
        weight = 4 if recipe.autocast or layout.precision == "fp32" else 2
        bandwidth = _bandwidth(hardware, shards, inner)
        passes = 1 if layout.pp > 1 else 2 * layout.accumulate
        moved = (passes * weight + recipe.gradient_bytes) * replica_params * (shards - 1) / shards
        seconds += moved / bandwidth
    if layout.dp > 1:
        shard_size = replica_params / shards
        # Replicas of shards: each GPU of a replica has one in every other, and all of them use the network at once.
        bandwidth = _bandwidth(hardware, layout.dp, inner * layout.fsdp)
        seconds += 2 * (layout.dp - 1) / layout.dp * recipe.gradient_bytes * shard_size / bandwidth
    return seconds


def _bandwidth(hardware: Hardware, members: int, stride: int) -> float:
    """Bytes in a second that each GPU of a ring gets, whose members lie `stride` GPUs apart."""
    if members * stride <= hardware.per_node:
        return hardware.gpu.link * WIRE * 1e9
    # A ring that has several members on a node crosses the network once for all of them.
    sharing_link = max(1, hardware.per_node // stride)
    across = hardware.network_per_gpu * min(sharing_link, members)
    return min(hardware.gpu.link, across) * WIRE * 1e9


def _tensor_parallel(model: Model, layout: Layout, hardware: Hardware) -> float:
    """Seconds for a token in which the parts of matrices are put together: nothing hides them."""
    if layout.tp == 1:
        return 0.0
    blocks = model.layers / layout.pp
    # Forward and backward pass 4 gathers or scatters of a token's width each; once more when all is computed again.
    times = 12 if layout.recompute == "full" else 8
    moved = times * model.block_input * blocks * (layout.tp - 1) / layout.tp
    fast = layout.tp <= hardware.per_node
    bandwidth = (hardware.gpu.link if fast else hardware.network_per_gpu) * WIRE * 1e9
    return moved / bandwidth


def _context(model: Model, layout: Layout, hardware: Hardware) -> float:
    """Seconds for a token in which keys and values go round."""
    if layout.cp == 1:
        return 0.0
    moved = 3 * 2 * model.block_input * model.kv_heads / model.heads * model.layers / layout.pp * (layout.cp - 1)
    fast = layout.cp * layout.tp <= hardware.per_node
    return moved / ((hardware.gpu.link if fast else hardware.network_per_gpu) * WIRE * 1e9) * 0.3
