"""Time of a step, for one layout of a training. Pure arithmetic; seconds.

A block's time is that of its matrix products, of its attention, and of what is between them, which reads and writes
memory. Constants are fitted to one half of the published trainings of benchmarks/data, and scored on the other half
(docs/guides/advise.md); what a kind of GPU reaches is in hardware.yaml.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtctl.advise.hardware import Hardware
from dtctl.estimate.memory import RUNTIME, FrameworkMemory, ParallelLayout
from dtctl.estimate.model import ModelProfile

SMALL = 320
"""Width of a matrix at which products reach half of their speed with wide matrices."""
EXPERTS = 0.5
"""Factor between the width of an expert's products and their effective width, as each expert has few tokens."""
ROUTING = 6e-3
"""Least seconds of a block of experts, forward and backward, since routing waits for the processor."""
SENT = 0.5
"""Share of the exchange between experts that does not overlap with computation."""
PASSES = 7.8
"""Number of times that the activations of a block go to or from memory in a step, in eager mode."""
FUSED = 4
"""Number of times as in `PASSES`, compiled or with fused kernels."""
FP8 = 1.7
"""Speed of products in fp8 over that in 16 bits."""
FIRST = 0.56
"""Speed of FlashAttention's first version relative to the second (https://arxiv.org/abs/2307.08691)."""
FEW = 200
"""Tokens per GPU and pass at which products reach half of their speed with many tokens."""
ODD = 0.71
"""Share of the speed that a matrix product keeps if a width is not a multiple of 64: kernels compute whole tiles."""
SQUARE = 39
"""Bytes to or from memory for each score of an attention that keeps them all."""
WIRE = 0.9
"""Share of a link's bandwidth that a collective reaches."""
LATENCY = 20e-6
"""Seconds until a collective begins to send."""
HOP = 5e-6
"""Further seconds of a collective for each member."""
RING = 0.09
"""Factor by which attention takes longer each time context parallelism halves its pieces."""
TP_WAIT = 75e-6
"""Least seconds of an exchange of tensor parallel workers between two products that wait for it."""
TP_HIDDEN = 0.59
"""Share of tensor parallel exchange that overlaps with products, where the framework does that."""
UNEVEN = 0.53
"""Share of the output's time by which the last stage of a pipeline delays the others."""
STRAGGLER = 0.0096
"""Factor by which a step takes longer each time the number of nodes doubles: all wait for the slowest."""
LAUNCH = 0.0004
"""Seconds in which a processor starts the kernels of a block's forward and backward pass, in eager mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """Time of a step, and of its parts."""

    step_s: float
    compute_s: float
    exchange_s: float
    """Seconds of the exchange of gradients and weights, also where it overlaps with computation."""
    exposed_s: float
    """Seconds of exchange that does not overlap with computation, that of tensor parallelism included."""
    bubble_s: float
    """Seconds in which a pipeline waits."""
    update_s: float
    """Seconds of the optimizer's step."""
    tokens_per_s_per_gpu: float


def estimate_step_speed(
    model: ModelProfile,
    layout: ParallelLayout,
    hardware: Hardware,
    recipe: FrameworkMemory = RUNTIME,
    *,
    compiled: bool = False,
    fp8: bool = False,
) -> SpeedEstimate:
    """Time of a step and its parts."""
    recipe = recipe.adapt_to_layout(layout)
    block, output = _compute_block_seconds(model, layout, hardware, recipe, compiled=compiled, fp8=fp8)
    blocks = -(-model.layers // layout.pp)
    even = (model.layers * block + output) / layout.pp
    # The slowest stage sets the pace; the last stage computes the output layer in addition to its blocks.
    stage = max(even, blocks * block + UNEVEN * output) if layout.pp > 1 else even
    compute = stage * layout.accumulate
    bubble = even * (layout.pp - 1) / layout.chunks
    inside = _compute_model_parallel_seconds(model, layout, hardware, recipe) * layout.accumulate
    each, last = _compute_data_parallel_seconds(model, layout, hardware, recipe)
    exposed = layout.accumulate * max(0.0, each - recipe.overlap * (stage + inside / layout.accumulate))
    exposed += max(0.0, last - recipe.overlap * stage * 2 / 3)
    update = _compute_optimizer_seconds(model, layout, hardware, recipe)
    spread = 1 + STRAGGLER * math.log2(max(1, hardware.nodes))
    pace = recipe.stage_pace if layout.pp > 1 else 1.0
    step = ((compute + bubble + inside) * pace + exposed) * spread + update
    samples = layout.micro_batch * layout.accumulate
    return SpeedEstimate(
        step_s=step,
        compute_s=compute,
        exchange_s=each * layout.accumulate + last + inside,
        exposed_s=exposed + inside,
        bubble_s=bubble,
        update_s=update,
        tokens_per_s_per_gpu=samples * model.seq * layout.data / step / layout.workers,
    )


def _compute_block_seconds(
    model: ModelProfile,
    layout: ParallelLayout,
    hardware: Hardware,
    recipe: FrameworkMemory,
    *,
    compiled: bool,
    fp8: bool,
) -> tuple[float, float]:
    """Return the seconds of a block, forward and backward, and of the output, for a micro batch on a GPU."""
    gpu, half = hardware.gpu, layout.precision != "fp32"
    tokens = layout.micro_batch * model.seq / layout.cp
    peak = (gpu.half * gpu.products if half else gpu.single * max(gpu.products, 0.7)) * 1e12
    faster = FP8 if fp8 and half else 1.0
    expert_split = recipe.expert_split(layout)
    # The narrower side limits the speed of a matrix product, and experts are narrow.
    width = model.hidden / layout.tp**0.5
    if model.expert_width:
        width = min(width, model.expert_width * EXPERTS / (layout.tp**0.5 if recipe.split_experts else 1.0))
    peak *= width / (width + SMALL)
    peak *= tokens / (tokens + FEW)
    if model.hidden % (64 * layout.tp):
        peak *= ODD
    logits = float(model.vocab * model.hidden)
    inner = max(0.0, model.active_params - logits - model.expert_params_used) / model.layers / layout.tp
    inner += model.expert_params_used / model.layers / expert_split
    again = {"none": 1.0, "selective": 1.0 + 0.5 / 3, "full": 4 / 3}[layout.recompute]
    products = 6 * inner * again * tokens / (peak * faster)
    # Causal attention computes half of the scores; fused kernels compute them again in the backward pass.
    again_attention = {"none": 1.0, "selective": 1.0, "full": 9 / 7}[layout.recompute]
    scores = model.seq * tokens / layout.tp
    if recipe.attention == "square":
        rescore = 4 / 3 if layout.recompute != "none" else 1.0
        attention = 12 * model.hidden * scores * rescore / peak
        attention += SQUARE * model.heads * scores * rescore / (gpu.hbm * 1e9)
    else:
        ring = 1 + RING * math.log2(layout.cp)
        share = gpu.attention * (FIRST if recipe.attention == "first" else 1.0)
        attention = 7 * model.hidden * scores * again_attention * ring / (gpu.half * share * 1e12)
    split = layout.tp if recipe.sequence_parallel else 1
    stream = min(4 * model.block_input, model.block_kept)
    eager = not (compiled or recipe.fused)
    kept = (stream + (model.block_upcast if eager and half else 0.0)) / split
    kept += (model.block_kept - stream - model.expert_kept) / layout.tp + model.expert_kept / expert_split
    passes = PASSES if eager else FUSED
    between = passes * again * (1.0 if half else 2.0) * kept * tokens / (gpu.hbm * 1e9)
    total = products + attention + between
    if eager:
        total = max(total, LAUNCH * again)
    if model.experts_used:
        total = max(total, ROUTING * again)
    split_logits = layout.tp if recipe.loss_parallel else 1
    output = 6 * logits * tokens / layout.tp / (peak * faster) + 24 * model.vocab * tokens / split_logits / (
        gpu.hbm * 1e9
    )
    return total, output


def _compute_data_parallel_seconds(
    model: ModelProfile, layout: ParallelLayout, hardware: Hardware, recipe: FrameworkMemory
) -> tuple[float, float]:
    """Return the seconds of exchange over dp and fsdp: in each micro batch, and in the last."""
    experts = model.expert_params / (recipe.expert_split(layout) * layout.pp)
    replica = (model.params - model.expert_params) / (layout.tp * layout.pp) + experts
    blocks = -(-model.layers // layout.pp)
    inner = layout.tp * layout.cp
    each = last = 0.0
    shards = layout.shards
    if shards > 1:
        half = layout.precision != "fp32"
        weight = 2 if half and not recipe.autocast else 4
        bandwidth, wait = _compute_ring_bandwidth(hardware, shards, layout.tp)
        moved = (replica - experts) * (shards - 1) / shards / bandwidth
        # The shards of an expert are gathered from the workers that hold the same experts; their ranks are ep apart.
        same = max(1, shards // layout.ep)
        moved += (
            experts / layout.ep * (same - 1) / same / _compute_ring_bandwidth(hardware, same, layout.tp * layout.ep)[0]
        )
        wait *= blocks * recipe.collectives
        gathers = 1 if not recipe.reshard else 2
        reduce = recipe.gradient_bytes * moved + wait
        if layout.pp > 1:
            last += weight * moved + wait + reduce
        else:
            each += gathers * (weight * moved + wait)
            if recipe.whole_gradients:
                last += reduce
            else:
                each += reduce
    if layout.dp > 1:
        bandwidth, wait = _compute_ring_bandwidth(hardware, layout.dp, inner * layout.fsdp)
        # This is an all-reduce, or a reduce-scatter of gradients and an all-gather of the updated weights.
        gathered = recipe.weight_bytes if layout.zero else recipe.gradient_bytes
        moved = (layout.dp - 1) / layout.dp * replica / shards / bandwidth
        if layout.zero > 1:  # divided gradients cannot be added up before they are exchanged
            each += recipe.gradient_bytes * moved + wait * blocks
            last += gathered * moved
        else:
            last += (recipe.gradient_bytes + gathered) * moved + wait * blocks
    return each, last


def _compute_ring_bandwidth(hardware: Hardware, members: int, stride: int) -> tuple[float, float]:
    """Return bytes per second for each GPU of a ring with members `stride` GPUs apart, and seconds to begin."""
    wait = LATENCY + HOP * members
    if members * stride <= hardware.per_node:
        return hardware.gpu.link * WIRE * 1e9, wait
    # A ring with several members on a node crosses the network once for all of them.
    sharing_link = max(1, hardware.per_node // stride)
    across = hardware.network_per_gpu * min(sharing_link, members)
    return min(hardware.gpu.link, across) * WIRE * 1e9, wait


def _compute_model_parallel_seconds(
    model: ModelProfile, layout: ParallelLayout, hardware: Hardware, recipe: FrameworkMemory
) -> float:
    """Return the seconds per micro batch for exchange of tensor and context parallelism and between stages."""
    tokens = layout.micro_batch * model.seq / layout.cp
    blocks = -(-model.layers // layout.pp)
    seconds = 0.0
    if layout.tp > 1:
        # The forward and the backward pass make 4 gathers or scatters each, one token wide; a full recomputation makes
        # 4 more.
        times = 12 if layout.recompute == "full" else 8
        link = hardware.gpu.link if layout.tp <= hardware.per_node else hardware.network_per_gpu
        moved = model.block_input * tokens * (layout.tp - 1) / layout.tp / (link * WIRE * 1e9)
        shown = 1 - TP_HIDDEN if recipe.tp_overlap else 1.0
        seconds += times * blocks * (moved * shown + TP_WAIT)
    if layout.ep > 1:
        # Tokens are sent to their experts and back, in the forward and in the backward pass.
        near = min(1.0, hardware.per_node / (layout.ep * layout.tp))
        link = hardware.gpu.link * near + hardware.network_per_gpu * (1 - near)
        members = layout.ep if recipe.split_experts else layout.ep * layout.tp
        rows = model.block_input * model.experts_used * tokens
        moved = 4 * rows / layout.tp * (members - 1) / members
        seconds += SENT * blocks * (moved / (link * WIRE * 1e9) + 4 * LATENCY)
        if layout.tp > 1 and not recipe.split_experts:
            # Tensor parallel workers have the same rows; each sends a part of them, so the results are gathered
            # afterwards.
            moved = 2 * rows * (layout.tp - 1) / layout.tp
            seconds += blocks * (moved / (hardware.gpu.link * WIRE * 1e9) + 2 * LATENCY)
    if layout.cp > 1:
        inside = layout.cp * layout.tp <= hardware.per_node
        link = (hardware.gpu.link if inside else hardware.network_per_gpu) * WIRE * 1e9
        keys = 3 * 2 * model.block_input * model.kv_heads / model.heads / layout.tp
        seconds += 0.3 * keys * tokens * (layout.cp - 1) * blocks / link
    if layout.pp > 1:
        link = min(hardware.network_per_gpu, hardware.gpu.link) * WIRE * 1e9
        seconds += 2 * layout.chunks * model.block_input * tokens / layout.tp / link
    return seconds


def _compute_optimizer_seconds(
    model: ModelProfile, layout: ParallelLayout, hardware: Hardware, recipe: FrameworkMemory
) -> float:
    """Return the seconds of the optimizer's step: states go through memory once, on the GPU or on the host."""
    params = (model.params - model.expert_params) / layout.tp + model.expert_params / recipe.expert_split(layout)
    params /= layout.shards * layout.pp
    # Gradients to the host, weights back: 4 + 4 bytes over the bus; the optimizer moves 28 bytes in memory.
    if layout.offload:
        per_node = min(hardware.per_node, layout.workers)
        return params * 8 / (hardware.gpu.host * 1e9) + params * 28 * per_node / 200e9
    params /= layout.dp if layout.zero else 1
    moved = 2 * (recipe.weight_bytes + recipe.master_bytes + recipe.optimizer_bytes) + recipe.gradient_bytes
    return params * moved / (0.7 * hardware.gpu.hbm * 1e9)
