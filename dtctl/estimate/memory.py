"""Memory of a GPU by part, for one layout of a training. Pure arithmetic; all results in bytes.

Sources: ZeRO (https://arxiv.org/abs/1910.02054) for states; Korthikanti et al. (https://arxiv.org/abs/2205.05198) for
activations; torch's FSDP2, DDP and autocast as dtctl.runtime uses them for what is temporary. What other frameworks
hold is in frameworks.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtctl.estimate.model import Model
from dtctl.train.mesh import Degrees

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp16"]
Stage = Literal[0, 1, 2]

GIB = 2**30
CONTEXT = 0.7 * GIB
"""CUDA's own, measured on NVIDIA GPUs (https://github.com/stas00/ml-engineering)."""
EXCHANGE = 1.0 * GIB
"""Buffers of NCCL."""
FRAGMENTS = 0.2
"""Share of what comes and goes that torch's allocator reserves and cannot use."""
SETTLED = 0.05
"""The same share of what stays from the first step to the last."""
COMPILED = 0.8
"""Share of activations that compiled or fused blocks keep: what is between products is computed again."""
QUARTER = 0.75
"""What of that products in fp8 keep."""
RESERVE = 0.1
"""Share of a GPU's memory that is not planned for: what is advertised is not all there, and nine of ten published
trainings need less than a tenth more than the formulas say (docs/guides/advise.md)."""
BUDGET = 1 - RESERVE
"""Share of a GPU's memory that may be planned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a framework holds a model; the defaults are dtctl.runtime's. Bytes are for each parameter."""

    autocast: bool = True
    """Weights stay fp32 and are cast for every product; the casts live until the backward pass. False: the framework
    computes with weights in half precision that it holds or gathers."""
    weight_bytes: int = 4
    """Of the weights that lie on a worker between steps."""
    gradient_bytes: int = 4
    master_bytes: int = 0
    """Of an fp32 copy that lies with the optimizer's state and is divided like it."""
    optimizer_bytes: int = 8
    """Of the optimizer's state: AdamW's two moments."""
    average_bytes: int = 0
    """Of an average that is kept beside the weights."""
    step_bytes: int = 0
    """Of what the optimizer's step needs for itself, as torch's foreach kernels do."""
    bucket_bytes: int = 0
    """Of a second copy of the gradients, in the buckets in which ddp exchanges them."""
    gradients_stay: bool = False
    """Gradients have a room of their own from the first step to the last."""
    free: bool = False
    """Axes go together that dtctl.runtime keeps apart: ZeRO with tp and pp, cp with pipelines and compiled blocks."""
    whole_gradients: bool = True
    """Sharded workers add up gradients of several micro batches whole, and exchange them once."""
    loss_parallel: bool = False
    """Logits stay split over tensor parallel workers."""
    fused_loss: bool = False
    """The loss is compiled, and makes no fp32 copy of the logits."""
    loss_parts: int = 1
    """Into how many parts a micro batch is divided for its loss."""
    sequence_parallel: bool = False
    """What is between the matrices is split over tensor parallel workers too."""
    attention: Literal["fused", "first", "square"] = "fused"
    """first: FlashAttention's first version and its likes, half as fast; square: it keeps its scores, the square of the
    sequence, for the backward pass."""
    kept_products: float = 1.0
    """Share of matrix products that selective recomputation keeps."""
    fused: bool = False
    """What is between the matrices is computed by fused kernels, without compiling."""
    collectives: int = 1
    """Into how many exchanges that of a block's weights is divided."""
    overlap: float = 0.6
    """Share of the computation time that exchange of weights and gradients can hide behind."""
    stage_pace: float = 1.0
    """By how much a pipeline is slower than its stages."""
    tp_overlap: bool = False
    """Exchange of tensor parallel workers overlaps with their products."""
    live_params: float = 0.0
    """Parameters whose weights stay gathered besides, at most, where they are sharded."""
    reshard: bool = True
    """Sharded blocks are given up between forward and backward pass."""
    context: float = CONTEXT
    """Bytes that a worker needs before it has a tensor."""
    exchange: float = EXCHANGE
    """Bytes of the buffers that it exchanges with others through."""


RUNTIME = Recipe()
TORCHTITAN = Recipe(
    autocast=False, loss_parallel=True, sequence_parallel=True, kept_products=0.5, whole_gradients=False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout(Degrees):
    """One layout of a training on GPUs, a worker on each."""

    ep: int = 1
    """Workers that divide the experts; it lies within dp and fsdp."""
    zero: Stage = 0
    """What is divided over dp: with 1 the optimizer's state, with 2 gradients too."""
    recompute: Recompute = "none"
    offload: bool = False
    """Shards lie in the host's memory."""
    micro_batch: int = 1
    accumulate: int = 1
    """Micro batches of a step."""
    chunks: int = 1
    """Stages that each worker of a pipeline has; more than 1 is an interleaved schedule."""
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
    host: float = 0.0
    """In the host's memory, for this GPU; not part of the total."""

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


def memory(
    model: Model, layout: Layout, recipe: Recipe = RUNTIME, *, compiled: bool = False, fp8: bool = False
) -> MemoryEstimate:
    """MemoryEstimate of the fullest GPU: of a pipeline the first stage, which has most under way, or the last one."""
    per_token = _kept(model, layout, recipe, compiled=compiled, fp8=fp8)
    first = _stage(model, layout, recipe, per_token, last=layout.pp == 1, flying=_flying(layout))
    if layout.pp == 1:
        return first
    return max(first, _stage(model, layout, recipe, per_token, last=True, flying=1.0), key=lambda stage: stage.total)


def _flying(layout: Layout) -> float:
    """Micro batches whose activations the first stage holds, in units of all its blocks."""
    if layout.pp == 1:
        return 1.0
    # 1F1B: as many as there are stages; interleaved ones begin some more before the first backward pass.
    more = 1 + (layout.pp - 1) / (layout.pp * layout.chunks) if layout.chunks > 1 else 1.0
    return min(layout.pp * more, layout.accumulate)


def _stage(
    model: Model, layout: Layout, recipe: Recipe, per_token: float, *, last: bool, flying: float
) -> MemoryEstimate:
    # The first stage has the embeddings, the last one the output; each has its copy of a table that is both.
    table_share = 1 if layout.pp == 1 or model.tied else 2
    root = model.root_params / layout.tp / table_share
    blocks = -(-model.layers // layout.pp)
    # Experts are parted over workers that otherwise hold copies (dp) or shards (fsdp) of the same: over dp there are
    # fewer copies, over fsdp nothing less lies on a worker, but less is gathered.
    experts = model.expert_params / (model.layers * model.block_params) if layout.ep > 1 else 0.0
    parted = min(layout.ep, layout.dp * layout.tp) if layout.shards == 1 else 1
    block = model.block_params / layout.tp
    own = block * (1 - experts + experts / parted)
    params = root + blocks * own
    block *= 1 - experts + experts / layout.ep
    trained = params * (1 - model.frozen / model.params if model.params else 1.0)
    activations, working = _activations(model, layout, recipe, per_token, blocks * flying)
    logits = _logits(model, layout, recipe) if last else 0.0
    gradients = trained * recipe.gradient_bytes / layout.shards / (layout.dp if layout.zero > 1 else 1)
    optimizer = trained * (recipe.optimizer_bytes + recipe.master_bytes) / layout.shards
    if layout.zero:  # what is parted already has fewer workers to divide it among
        whole = root + blocks * model.block_params / layout.tp
        optimizer *= whole / params / layout.dp
    kept = (params * recipe.weight_bytes + trained * recipe.average_bytes) / layout.shards
    state, host = kept + gradients + optimizer, 0.0
    temporary = _temporary(layout, recipe, params=params, block=block, root=root)
    if layout.offload:
        state, host = 0.0, state
        temporary += 2 * block * recipe.weight_bytes
    work = activations + max(logits, working)
    # Gradients are made while activations are given back, and given back before the next pass: they share their room,
    # unless those of earlier micro batches are added up, or they never go.
    alone = layout.accumulate == 1 and layout.pp == 1 and not recipe.gradients_stay and not layout.offload
    work -= min(gradients, work) if alone else 0.0
    # The step comes when activations and what was gathered are gone.
    step = trained * recipe.step_bytes / layout.shards / (layout.dp if layout.zero else 1)
    work = max(work, step - temporary)
    exchange = recipe.exchange if layout.workers > 1 else 0.0
    return MemoryEstimate(
        states=state,
        activations=max(0.0, work - logits),
        logits=min(logits, work),
        temporary=temporary,
        overhead=recipe.context + exchange + SETTLED * state + FRAGMENTS * (work + temporary),
        host=host,
    )


def _kept(model: Model, layout: Layout, recipe: Recipe, *, compiled: bool, fp8: bool) -> float:
    """Bytes that a block keeps of a token on a GPU, where nothing is computed again."""
    half = layout.precision != "fp32"
    if compiled or recipe.fused:
        share, extra = COMPILED * (QUARTER if fp8 else 1.0), 0.0
    else:  # norms and rotary embeddings in fp32, step by step
        share, extra = 1.0, model.block_upcast if half else 0.0
    stream = min(4 * model.block_input, model.block_kept)
    # Between the matrices (norms, what enters a block) nothing is split by tensor parallelism alone.
    stream_split = layout.tp if recipe.sequence_parallel else 1
    kept = share * ((stream + extra) / stream_split + (model.block_kept - stream) / layout.tp)
    return kept * (1.0 if half else 2.0)


def _activations(model: Model, layout: Layout, recipe: Recipe, per_token: float, blocks: float) -> tuple[float, float]:
    """Bytes kept for the backward pass by so many blocks, and of the block at work, which needs all of its own."""
    scale = 1.0 if layout.precision != "fp32" else 2.0
    tokens = layout.micro_batch * model.seq / layout.cp
    # Softmax and dropout of the scores: 5 bytes for each of them.
    scores = 5.0 * model.heads * model.seq / layout.tp if recipe.attention == "square" else 0.0
    # Under autocast the stream between blocks stays fp32, as the weights are.
    entering = scale * model.block_input * (2 if recipe.autocast and scale == 1.0 else 1)
    entering /= layout.tp if recipe.sequence_parallel else 1
    per_block = {
        "none": per_token + scores,
        "selective": min(per_token, entering + scale * recipe.kept_products * model.block_products / layout.tp),
        "full": entering,
    }[layout.recompute]
    working = 0.0 if layout.recompute == "none" else (per_token + scores) * tokens
    return per_block * tokens * blocks, working


def _logits(model: Model, layout: Layout, recipe: Recipe) -> float:
    """Bytes of the output over the vocabulary while the loss is computed.

    In half precision once, in fp32 as the loss sees it and as log-softmax keeps it; split over workers, torch's loss
    makes two more.
    """
    tokens = layout.micro_batch * model.seq / layout.cp / recipe.loss_parts
    split = layout.tp if recipe.loss_parallel else 1
    if recipe.fused_loss:
        return 2 * 2 * tokens * model.vocab / split
    copies = 4.5 if recipe.loss_parallel and layout.tp > 1 else 3.0 if layout.precision == "fp32" else 2.5
    return copies * 4 * tokens * model.vocab / split


def _temporary(layout: Layout, recipe: Recipe, *, params: float, block: float, root: float) -> float:
    """Bytes of weights that are gathered or cast, and of gradients on their way."""
    half = layout.precision != "fp32"
    casts = 0.0
    if half and recipe.autocast:
        casts = 2 * (params if layout.recompute == "none" else root + block)
    if layout.dp > 1 and layout.shards == 1:
        casts += params * recipe.bucket_bytes
    if layout.shards == 1:
        return casts
    weight = 2 if half and not recipe.autocast else 4
    if layout.pp > 1:  # weights stay gathered over all micro batches, and gradients are added up whole
        return casts + params * weight + params * 4
    two_blocks = 2 * block + root
    live = max(two_blocks, min(params, recipe.live_params))
    gathered = weight * (live if recipe.reshard else params)
    whole = layout.accumulate > 1 and recipe.whole_gradients
    return casts + gathered + recipe.gradient_bytes * (params if whole else two_blocks)
