"""Memory of a GPU by part, for one layout of a training. Pure arithmetic; all results in bytes.

Sources: ZeRO (https://arxiv.org/abs/1910.02054) for states; Korthikanti et al. (https://arxiv.org/abs/2205.05198) for
activations; torch's FSDP2, DDP and autocast as dtctl.runtime uses them for what is temporary. What other frameworks
hold is in frameworks.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from dtctl.estimate.model import ModelProfile
from dtctl.train.mesh import Degrees

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "bf16", "fp16"]
Stage = Literal[0, 1, 2]

GIB = 2**30
CONTEXT = 0.7 * GIB
"""CUDA's own, measured on NVIDIA GPUs (https://github.com/stas00/ml-engineering)."""
EXCHANGE = 1.0 * GIB
"""Bytes of NCCL's buffers on each GPU."""
FRAGMENTS = 0.2
"""Share of the temporary memory that torch's allocator reserves and cannot use."""
SETTLED = 0.05
"""Share of the memory that is used in all steps that torch's allocator reserves and cannot use."""
COMPILED = 0.8
"""Share of activations that compiled or fused blocks keep: what is between products is computed again."""
QUARTER = 0.75
"""Part of the kept bytes that products in fp8 keep."""
RESERVE = 0.1
"""Share of a GPU's memory that is held in reserve: less is usable than is advertised, and nine of ten published
trainings need less than a tenth more than the formulas give (docs/guides/advise.md)."""
BUDGET = 1 - RESERVE
"""Share of a GPU's memory that may be planned for."""


OPTIMIZERS: Final[Mapping[str, tuple[int, int, int]]] = {
    "adamw": (8, 8, 8),
    "sgd": (4, 4, 4),
    "muon": (4, 8, 8),  # AdamW for vectors and for tables of embeddings
    "adafactor": (0, 0, 4),  # of a matrix one number for each row and each column
}
"""Bytes of the fp32 state of an optimizer for a parameter: of a matrix; of a table of embeddings or a tensor of more
dimensions; of a vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkMemory:
    """Memory layout of a framework; the defaults are dtctl.runtime's. Bytes are for each parameter."""

    autocast: bool = True
    """Weights stay fp32 and are cast for every product; the casts live until the backward pass. False: the framework
    computes with weights in half precision that it holds or gathers."""
    weight_bytes: int = 4
    """Bytes of the weights that a worker keeps between steps."""
    gradient_bytes: int = 4
    master_bytes: int = 0
    """Bytes of an fp32 copy of the weights that is divided like the optimizer's state."""
    optimizer_bytes: int = 8
    """Bytes of the optimizer's state: AdamW's two moments."""
    table_bytes: int = 0
    """Further bytes of the optimizer's state in tables of embeddings and tensors of three and more dimensions."""
    vector_bytes: int = 0
    """Further bytes of the optimizer's state in tensors of one dimension."""
    average_bytes: int = 0
    """Bytes of an average that is kept in addition to the weights."""
    step_bytes: int = 0
    """Temporary bytes of the optimizer's step, as torch's foreach kernels need them."""
    bucket_bytes: int = 0
    """Bytes of a second copy of the gradients, in the buckets in which ddp exchanges them."""
    sharded: tuple[tuple[str, Any], ...] = ()
    """Fields that differ where gradients or weights are divided over workers too, as in ZeRO's stages 2 and 3."""
    gradients_stay: bool = False
    """True if gradients have their own memory in all steps."""
    free: bool = False
    """True if ZeRO works with tp and pp, and cp with pipelines and compiled blocks; dtctl.runtime supports neither."""
    whole_gradients: bool = True
    """True if sharded workers add up whole gradients of several micro batches, and exchange them once."""
    whole_bytes: int = 0
    """Bytes of a gradient while whole gradients are added up, if they are exchanged with another width. They take no
    additional memory before that. 0: they have the width of the exchange from the start."""
    loss_parallel: bool = False
    """True if logits stay divided over tensor parallel workers."""
    fused_loss: bool = False
    """True if the loss is compiled, and makes no fp32 copy of the logits."""
    loss_parts: int = 1
    """Number of parts into which a micro batch is divided for its loss."""
    loss_copies: float = 2.5
    """The logits in fp32, this many times, while the loss of a micro batch in half precision is computed; 4.5 in
    transformers before 4.45, which shifts a copy and makes it contiguous."""
    cache: bool = False
    """True if keys and values of every block stay in memory in addition to its checkpoint. transformers' `use_cache`
    does this if code other than its `gradient_checkpointing` wraps the blocks."""
    sequence_parallel: bool = False
    """True if everything between the matrices is split over tensor parallel workers too."""
    split_experts: bool = False
    """Tensor parallel workers split every expert. False: they divide experts among them where there is ep, and each has
    and computes all of them where there is none."""
    attention: Literal["fused", "first", "square"] = "fused"
    """first: FlashAttention's first version and its likes, half as fast; square: it keeps its scores, the square of the
    sequence, for the backward pass."""
    kept_products: float = 1.0
    """Share of matrix products that selective recomputation keeps."""
    fused: bool = False
    """True if fused kernels compute everything between the matrices, without compiling."""
    collectives: int = 1
    """Number of exchanges for the weights of a block."""
    overlap: float = 0.6
    """Share of the computation time that can overlap with exchange of weights and gradients."""
    stage_pace: float = 1.0
    """Factor by which a pipeline is slower than its stages."""
    tp_overlap: bool = False
    """True if exchange of tensor parallel workers overlaps with their products."""
    live_params: float = 0.0
    """Largest number of additional parameters whose weights stay gathered, if they are sharded."""
    reshard: bool = True
    """True if gathered blocks are freed between forward and backward pass."""
    snapshots: int = 0
    """Number of copies of a worker's share of a snapshot in the memory of the nodes: those that are kept and the one
    that is written, each with its copies."""
    shards_copied: bool = False
    """True if a worker copies only its shard from the host's memory, and gathers blocks on the GPU."""
    context: float = CONTEXT
    """Bytes that a worker needs before it creates a tensor."""
    exchange: float = EXCHANGE
    """Bytes of the buffers for exchange with other workers."""

    def with_optimizer(self, name: str, *, momentum: bool = True) -> FrameworkMemory:
        """Return the recipe with another optimizer than AdamW.

        Args:
            name: a name in `OPTIMIZERS`.
            momentum: whether SGD has one.
        """
        sizes = OPTIMIZERS[name] if momentum or name != "sgd" else (0, 0, 0)
        matrix, table, vector = (size * self.optimizer_bytes // 8 for size in sizes)
        return replace(self, optimizer_bytes=matrix, table_bytes=table - matrix, vector_bytes=vector - matrix)

    def adapt_to_layout(self, layout: ParallelLayout) -> FrameworkMemory:
        """Return the recipe for a layout."""
        return replace(self, **dict(self.sharded)) if layout.zero > 1 or layout.fsdp > 1 else self

    def expert_split(self, layout: ParallelLayout) -> int:
        """Number of tensor parallel workers over which experts and their rows are divided."""
        return layout.tp if self.split_experts or layout.ep > 1 else 1


RUNTIME = FrameworkMemory()
TORCHTITAN = FrameworkMemory(
    autocast=False, loss_parallel=True, sequence_parallel=True, split_experts=True, kept_products=0.5,
    whole_gradients=False,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout(Degrees):
    """Layout of a training on GPUs, a worker on each."""

    ep: int = 1
    """Workers that divide the experts. As in Megatron-LM, these workers are a part of dp x fsdp, and not an additional
    axis."""
    zero: Stage = 0
    """Stage of division over dp: with 1 the optimizer's state, with 2 gradients too."""
    recompute: Recompute = "none"
    offload: bool = False
    """True if shards are kept in the host's memory."""
    micro_batch: int = 1
    accumulate: int = 1
    """Micro batches of a step."""
    chunks: int = 1
    """Stages that each worker of a pipeline has; more than 1 is an interleaved schedule."""
    precision: Precision = "bf16"

    @property
    def workers(self) -> int:
        """Number of workers of the layout."""
        return self.pp * self.dp * self.fsdp * self.cp * self.tp

    @property
    def data(self) -> int:
        """Number of parts into which a batch is divided."""
        return self.dp * self.fsdp

    @property
    def shards(self) -> int:
        """Number of workers over which parameters are sharded, other than those of experts."""
        return self.fsdp * self.cp

    @property
    def mesh(self) -> dict[str, int]:
        """Degrees as in a spec, where ep is a separate axis; those of this layout if dtctl.runtime has no such mesh."""
        degrees = {axis: getattr(self, axis) for axis in ("dp", "fsdp", "tp", "pp", "cp", "ep")}
        return degrees | ({"fsdp": self.fsdp // self.ep} if self.fsdp % self.ep == 0 else {})


def build_mesh_layout(degrees: Degrees) -> ParallelLayout:
    """Return the layout of a mesh; a layout is returned unchanged."""
    if isinstance(degrees, ParallelLayout):
        return degrees
    fsdp = degrees.fsdp * degrees.ep
    return ParallelLayout(dp=degrees.dp, fsdp=fsdp, tp=degrees.tp, pp=degrees.pp, cp=degrees.cp, ep=degrees.ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes of the fullest GPU."""

    states: float
    """Bytes of parameters, gradients and optimizer state."""
    activations: float
    """Bytes of activations beyond the memory of the gradients, where the two are never kept at the same time."""
    logits: float
    temporary: float
    """Bytes of weights that are gathered or cast, and of gradients that are being exchanged."""
    overhead: float
    """Bytes of the context of the device, buffers of exchange and fragments."""
    host: float = 0.0
    """Bytes in the host's memory, for this GPU; not part of the total."""

    @property
    def total(self) -> float:
        """Sum of all bytes on the GPU."""
        return self.states + self.activations + self.logits + self.temporary + self.overhead

    @property
    def tensors(self) -> float:
        """Return the bytes of tensors, without overhead."""
        return self.total - self.overhead


def compute_state_bytes(params: float, *, stage: Literal[0, 1, 2, 3], shards: int, gradient_bytes: int = 2) -> float:
    """Bytes of weights, gradients and Adam's state under ZeRO, mixed precision: 2, 2 (or 4) and 12 for a parameter.

    Args:
        params: on a GPU, before they are shared.
        stage: of ZeRO: 0 none, 1 optimizer, 2 gradients too, 3 weights too.
        shards: GPUs that share.
        gradient_bytes: 2 as in the paper; DeepSpeed's own estimators count 4.
    """
    parts = [(2.0, 3), (float(gradient_bytes), 2), (12.0, 1)]
    return params * sum(size / (shards if stage >= first else 1) for size, first in parts)


def estimate_layout_memory(
    model: ModelProfile,
    layout: ParallelLayout,
    recipe: FrameworkMemory = RUNTIME,
    *,
    compiled: bool = False,
    fp8: bool = False,
) -> MemoryEstimate:
    """Return the estimate for the fullest GPU; in a pipeline it is in the first or in the last stage."""
    recipe = recipe.adapt_to_layout(layout)
    per_token = _compute_kept_token_bytes(model, layout, recipe, compiled=compiled, fp8=fp8)
    first = _estimate_stage_memory(
        model, layout, recipe, per_token, last=layout.pp == 1, flying=_count_inflight_batches(layout)
    )
    if layout.pp == 1:
        return first
    return max(
        first,
        _estimate_stage_memory(model, layout, recipe, per_token, last=True, flying=1.0),
        key=lambda stage: stage.total,
    )


def _count_inflight_batches(layout: ParallelLayout) -> float:
    """Return the number of micro batches whose activations the first stage holds, in units of all its blocks."""
    if layout.pp == 1:
        return 1.0
    # 1F1B keeps as many micro batches as there are stages; an interleaved schedule starts some more before the first
    # backward pass.
    more = 1 + (layout.pp - 1) / (layout.pp * layout.chunks) if layout.chunks > 1 else 1.0
    return min(layout.pp * more, layout.accumulate)


def _estimate_stage_memory(
    model: ModelProfile, layout: ParallelLayout, recipe: FrameworkMemory, per_token: float, *, last: bool, flying: float
) -> MemoryEstimate:
    # The first stage has the embeddings, the last one the output; each has its copy of a table that is both.
    table_share = 1 if layout.pp == 1 or model.tied else 2
    root = model.root_params / layout.tp / table_share
    blocks = -(-model.layers // layout.pp)
    # Experts are divided over workers that otherwise hold copies (dp) or shards (fsdp) of the same parameters. With dp
    # there are fewer copies; with fsdp each worker holds as much as before, but gathers less. tp divides experts
    # already, so a stage's experts are on at most dp x tp workers, also if ep is larger than dp.
    experts = model.expert_params / model.layers / recipe.expert_split(layout)
    parted = min(layout.ep, layout.dp) if layout.shards == 1 else 1
    dense = model.dense_block_params / layout.tp
    params = root + blocks * (dense + experts / parted)
    whole = root + blocks * (dense + experts)
    block = dense + experts / layout.ep
    trained = params * (1 - model.frozen / model.params if model.params else 1.0)
    activations, working = _compute_activation_bytes(model, layout, recipe, per_token, blocks * flying)
    logits = _compute_logits_bytes(model, layout, recipe) if last else 0.0
    gradients = trained * recipe.gradient_bytes / layout.shards / (layout.dp if layout.zero > 1 else 1)
    if recipe.whole_bytes and _needs_whole_gradients(layout, recipe):
        gradients = 0.0
    optimizer = trained * (recipe.optimizer_bytes + recipe.master_bytes)
    optimizer += trained / params * _state_beside_matrices(model, layout, recipe, blocks, last=last)
    optimizer /= layout.shards
    if layout.zero:  # divided experts have fewer copies, over which the state can be divided
        optimizer *= whole / params / layout.dp
    weight_bytes = (params * recipe.weight_bytes + trained * recipe.average_bytes) / layout.shards
    state, host = weight_bytes + gradients + optimizer, 0.0
    gathered = root + blocks * block if layout.shards > 1 else params  # includes only this worker's experts
    temporary = _compute_temporary_bytes(layout, recipe, params=gathered, block=block, root=root)
    if layout.offload:
        state, host = 0.0, state
        temporary += 2 * block * recipe.weight_bytes / (layout.shards if recipe.shards_copied else 1)
    # Workers with the same state write a part of it each; zero1 has already divided the optimizer's state over dp.
    stored = (weight_bytes + optimizer * (layout.dp if layout.zero else 1)) / layout.dp
    host += recipe.snapshots * stored
    # The output of the model is freed before the gradients of the first block are computed.
    work = activations + max(logits, working + _on_their_way(layout, recipe, block))
    # Gradients are allocated while activations are freed, and freed before the next pass, so they share this memory.
    # The exceptions are gradients of earlier micro batches that are added up, and gradients that are never freed.
    alone = layout.accumulate == 1 and layout.pp == 1 and not recipe.gradients_stay and not layout.offload
    work -= min(gradients, work) if alone else 0.0
    # The optimizer steps when activations and gathered parameters have been freed.
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


def _state_beside_matrices(
    model: ModelProfile, layout: ParallelLayout, recipe: FrameworkMemory, blocks: int, *, last: bool
) -> float:
    """Bytes of the optimizer's state that a stage has for other tensors beyond what matrices of their size would."""
    has_tables = layout.pp == 1 or model.tied or not last
    share = blocks / model.layers
    stacked = share * model.stacked_params + (model.table_params if has_tables else 0.0)
    return (recipe.table_bytes * stacked + recipe.vector_bytes * share * model.vector_params) / layout.tp


def _compute_kept_token_bytes(
    model: ModelProfile, layout: ParallelLayout, recipe: FrameworkMemory, *, compiled: bool, fp8: bool
) -> float:
    """Return the bytes per token that a block keeps on a GPU without recomputation."""
    half = layout.precision != "fp32"
    if compiled or recipe.fused:
        share, extra = COMPILED * (QUARTER if fp8 else 1.0), 0.0
    else:  # norms and rotary embeddings in fp32, step by step
        share, extra = 1.0, model.block_upcast if half else 0.0
    stream = min(4 * model.block_input, model.block_kept)
    # Tensor parallelism alone splits nothing between the matrices (norms, inputs of a block).
    stream_split = layout.tp if recipe.sequence_parallel else 1
    inside = (model.block_kept - stream - model.expert_kept) / layout.tp
    inside += model.expert_kept / recipe.expert_split(layout)
    kept_bytes = share * ((stream + extra) / stream_split + inside)
    return kept_bytes * (1.0 if half else 2.0)


def _compute_activation_bytes(
    model: ModelProfile, layout: ParallelLayout, recipe: FrameworkMemory, per_token: float, blocks: float
) -> tuple[float, float]:
    """Bytes that a number of blocks keep for the backward pass, and those of all activations of one block."""
    scale = 1.0 if layout.precision != "fp32" else 2.0
    tokens = layout.micro_batch * model.seq / layout.cp
    # Softmax and dropout of the scores take 5 bytes for each score.
    scores = 5.0 * model.heads * model.seq / layout.tp if recipe.attention == "square" else 0.0
    # Under autocast the residual stream between blocks stays in fp32, as the weights do.
    entering = scale * model.block_input * (2 if recipe.autocast and scale == 1.0 else 1)
    entering /= layout.tp if recipe.sequence_parallel else 1
    cached = 4 * model.hidden * model.kv_heads / model.heads / layout.tp if recipe.cache else 0.0
    products = (model.block_products - model.expert_products) / layout.tp
    products += model.expert_products / recipe.expert_split(layout)
    per_block = {
        "none": per_token + scores,
        "selective": min(per_token, entering + scale * recipe.kept_products * products),
        "full": entering + scale * cached,
    }[layout.recompute]
    working = 0.0 if layout.recompute == "none" else (per_token + scores) * tokens
    return per_block * tokens * blocks, working


def _compute_logits_bytes(model: ModelProfile, layout: ParallelLayout, recipe: FrameworkMemory) -> float:
    """Return the bytes of the output over the vocabulary while the loss is computed.

    The logits take one copy in half precision and two in fp32, for the loss and for log-softmax. Divided over workers,
    torch's loss makes two more copies; frameworks with their own loss do not.
    """
    tokens = layout.micro_batch * model.seq / layout.cp / recipe.loss_parts
    split = layout.tp if recipe.loss_parallel else 1
    if recipe.fused_loss:
        return 2 * 2 * tokens * model.vocab / split
    copies = max(recipe.loss_copies, 3.0) if layout.precision == "fp32" else recipe.loss_copies
    if recipe.loss_parallel and layout.tp > 1 and not recipe.fused:
        copies = max(copies, 4.5)
    return copies * 4 * tokens * model.vocab / split


def _compute_temporary_bytes(
    layout: ParallelLayout, recipe: FrameworkMemory, *, params: float, block: float, root: float
) -> float:
    """Return the bytes of weights that are gathered or cast, and of gradients that are being exchanged."""
    half = layout.precision != "fp32"
    casts = 0.0
    if half and recipe.autocast:
        casts = 2 * (params if layout.recompute == "none" else root + block)
    if layout.dp > 1 and layout.shards == 1:
        casts += params * recipe.bucket_bytes
    if layout.shards == 1:
        return casts
    weight = 2 if half and not recipe.autocast else 4
    if layout.pp > 1:  # weights stay gathered over all micro batches, and whole gradients are added up
        return casts + params * weight + params * 4
    two_blocks = 2 * block + root
    live = max(two_blocks, min(params, recipe.live_params))
    gathered = weight * (live if recipe.reshard else params)
    if _needs_whole_gradients(layout, recipe):
        return casts + gathered + (recipe.whole_bytes or recipe.gradient_bytes) * params
    return casts + gathered + recipe.gradient_bytes * root


def _on_their_way(layout: ParallelLayout, recipe: FrameworkMemory, block: float) -> float:
    """Return the bytes of the gradients of two blocks, which sharded workers exchange while the next ones are made."""
    if layout.shards == 1 or layout.pp > 1 or _needs_whole_gradients(layout, recipe):
        return 0.0
    return recipe.gradient_bytes * 2 * block


def _needs_whole_gradients(layout: ParallelLayout, recipe: FrameworkMemory) -> bool:
    """Return whether sharded workers add up whole gradients of several micro batches."""
    return layout.accumulate > 1 and recipe.whole_gradients and layout.shards > 1
