"""Memory of a GPU by part, for one layout of a training. Pure arithmetic; all results in bytes.

Sources: ZeRO (https://arxiv.org/abs/1910.02054) for states; Korthikanti et al. (https://arxiv.org/abs/2205.05198) for
activations; torch's FSDP2, DDP and autocast as dtctl.runtime uses them for what is temporary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtctl.estimate.model import Model
from dtctl.train.mesh import Degrees

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp16"]

GIB = 2**30
CONTEXT = 0.7 * GIB
"""CUDA's own, measured on NVIDIA GPUs (https://github.com/stas00/ml-engineering)."""
EXCHANGE = 1.0 * GIB
"""Buffers of NCCL."""
FRAGMENTS = 0.15
"""Share that torch's allocator reserves and cannot use."""
BUDGET = 0.95
"""Share of a GPU's memory that may be planned for; what is advertised is not all there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a framework holds a model; the defaults are dtctl.runtime's."""

    autocast: bool = True
    """Weights stay fp32 and are cast for every product; the casts live until the backward pass. False: FSDP2's own
    mixed precision, which gathers half precision."""
    loss_parallel: bool = False
    """Logits stay split over tensor parallel workers."""
    sequence_parallel: bool = False
    """What is between the matrices is split over tensor parallel workers too."""
    kept_products: float = 1.0
    """Share of matrix products that selective recomputation keeps."""
    gradient_bytes: int = 4
    """Bytes of a gradient's number."""
    optimizer_bytes: int = 8
    """Bytes of the optimizer's state for a parameter: AdamW's two moments."""
    average_bytes: int = 0
    """Bytes for a parameter of an average that is kept beside the weights."""
    reshard: bool = True
    """Sharded blocks are given up between forward and backward pass."""
    context: float = CONTEXT
    """Bytes that a worker needs before it has a tensor."""
    exchange: float = EXCHANGE
    """Bytes of the buffers that it exchanges with others through."""


RUNTIME = Recipe()
TORCHTITAN = Recipe(autocast=False, loss_parallel=True, sequence_parallel=True, kept_products=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Degrees):
    """One layout of a training on GPUs, a worker on each."""

    ep: int = 1
    """Workers that divide the experts; it lies within dp and fsdp."""
    zero1: bool = False
    """Optimizer state is split over dp."""
    recompute: Recompute = "none"
    offload: bool = False
    """Shards lie in the host's memory."""
    micro_batch: int = 1
    accumulate: int = 1
    """Micro batches of a step."""
    precision: Precision = "bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of the fullest GPU."""

    states: float
    """Parameters, gradients, optimizer."""
    activations: float
    """Beyond the room that gradients have, where both are not there at once."""
    logits: float
    temporary: float
    """Weights gathered or cast, gradients on their way."""
    overhead: float
    """The context of the device, buffers of exchange, fragments."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.states + self.activations + self.logits + self.temporary + self.overhead

    @property
    def tensors(self) -> float:
        """What tensors need, without overhead."""
        return self.total - self.overhead


def states(params: float, *, stage: Literal[0, 1, 2, 3], shards: int, gradient_bytes: int = 2) -> float:
    """Bytes of weights, gradients and Adam's state under ZeRO, mixed precision: 2, 2 (or 4) and 12 for a parameter.

    Args:
        params: on a GPU, before they are shared.
        stage: of ZeRO: 0 none, 1 optimizer, 2 gradients too, 3 weights too.
        shards: GPUs that share.
        gradient_bytes: 2 as in the paper; DeepSpeed's own estimators count 4.
    """
    parts = [(2.0, 3), (float(gradient_bytes), 2), (12.0, 1)]
    return params * sum(size / (shards if stage >= first else 1) for size, first in parts)


def memory(model: Model, layout: Layout, recipe: Recipe = RUNTIME) -> MemoryEstimate:
    """MemoryEstimate of the fullest GPU."""
    # The first stage has the embeddings, the last one the output: half of what is outside of blocks, with a pipeline.
    root = model.root_params / layout.tp / (2 if layout.pp > 1 else 1)
    blocks = -(-model.layers // layout.pp)
    experts = model.expert_params / model.params if layout.ep > 1 else 0.0
    params = root + blocks * model.block_params * (1 - experts + experts / layout.ep) / layout.tp
    block = model.block_params / layout.tp
    sharded = layout.shards > 1
    shard_params = params / layout.shards
    activations, working = _activations(model, layout, recipe, blocks)
    logits = _logits(model, layout, recipe)
    trained = shard_params * (1 - model.frozen / model.params if model.params else 1.0)
    state = shard_params * 4 + trained * (recipe.gradient_bytes + recipe.average_bytes)
    state += trained * recipe.optimizer_bytes / (layout.dp if layout.zero1 else 1)
    temporary = _temporary(layout, recipe, params=params, block=block, root=root, sharded=sharded)
    if layout.offload:
        state = 0.0
        temporary += 2 * block * 4
    work = activations + max(logits, working)
    # Gradients are made while activations are given back, and given back before the next pass: they share their room,
    # unless those of earlier micro batches are added up.
    shared_room = min(trained * recipe.gradient_bytes, work) if layout.accumulate == 1 and layout.pp == 1 else 0.0
    work -= shared_room
    dynamic = state + work + temporary
    exchange = recipe.exchange if layout.workers > 1 else 0.0
    return MemoryEstimate(
        states=state,
        activations=max(0.0, work - logits),
        logits=min(logits, work),
        temporary=temporary,
        overhead=recipe.context + exchange + FRAGMENTS * dynamic,
    )


def _activations(model: Model, layout: Layout, recipe: Recipe, blocks: int) -> tuple[float, float]:
    """Bytes kept for the backward pass, and of the block at work, which needs all of its own."""
    scale = 2.0 if layout.precision == "fp32" else 1.0
    tokens = layout.micro_batch * model.seq / layout.cp
    # Between the matrices (norms, what enters a block) nothing is split by tensor parallelism alone.
    block_inputs = 4 * model.block_input if not recipe.sequence_parallel else 0.0
    block_inputs = min(block_inputs, model.block_kept)
    per_token = block_inputs + (model.block_kept - block_inputs) / layout.tp
    entering = model.block_input / (layout.tp if recipe.sequence_parallel else 1)
    per_block = {
        "none": per_token,
        "selective": entering + recipe.kept_products * model.block_products / layout.tp,
        "full": entering,
    }[layout.recompute]
    # 1F1B: the first stage has as many micro batches under way as there are stages.
    flying = min(layout.pp, layout.accumulate) if layout.pp > 1 else 1
    stored = per_block * scale * tokens * blocks * flying
    working = 0.0 if layout.recompute == "none" else per_token * scale * tokens
    return stored, working


def _logits(model: Model, layout: Layout, recipe: Recipe) -> float:
    """Bytes of the output over the vocabulary while the loss is computed.

    In half precision once, in fp32 as the loss sees it and as log-softmax keeps it; split over workers, torch's loss
    makes two more.
    """
    tokens = layout.micro_batch * model.seq / layout.cp
    split = layout.tp if recipe.loss_parallel else 1
    copies = 4.5 if recipe.loss_parallel and layout.tp > 1 else 3.0 if layout.precision == "fp32" else 2.5
    return copies * 4 * tokens * model.vocab / split


def _temporary(layout: Layout, recipe: Recipe, *, params: float, block: float, root: float, sharded: bool) -> float:
    """Bytes of weights that are gathered or cast, and of gradients on their way."""
    half = layout.precision != "fp32"
    casts = 0.0
    if half and recipe.autocast:
        casts = 2 * (params if layout.recompute == "none" else root + block)
    if not sharded:
        return casts
    if layout.pp > 1:  # weights stay gathered over all micro batches, and gradients are added up whole
        return casts + params * (2 if half and not recipe.autocast else 4) + params * 4
    two_blocks = 2 * block + root
    gathered = (2 if half and not recipe.autocast else 4) * (two_blocks if recipe.reshard else params)
    return casts + gathered + recipe.gradient_bytes * two_blocks
