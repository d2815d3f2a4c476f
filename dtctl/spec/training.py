"""The `train:` section. `dtctl.runtime` is the authority on it: defaults and meaning are in runtime/config.py."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from dtctl.spec.section import Count, CountOrZero, Positive, PositiveOrZero, Section

StrategyName = Literal["auto", "single", "ddp", "zero1", "fsdp", "hsdp", "pipeline"]


class Mesh(Section):
    """Degrees of parallelism; their product is the number of workers."""

    dp: Count = 1
    """Data parallel replicas."""
    fsdp: Count = 1
    """Workers that share the parameters of one replica."""
    tp: Count = 1
    """Tensor parallel degree."""
    pp: Count = 1
    """Pipeline stages."""


class Snapshot(Section):
    """When and where the state of training is kept."""

    dir: str | None = None
    """Folder on the nodes. Default: `snapshots` in the run's folder."""
    every_steps: Count | None = None
    """Steps between snapshots."""
    every_s: Positive | None = None
    """Seconds between snapshots."""
    keep: Count = 2
    """How many snapshots are kept."""
    replicas: CountOrZero = 0
    """Copies of each node's part on other nodes."""


class Train(Section):
    """Read by `dtctl.runtime` in the workers; a job that does not use it ignores it."""

    strategy: StrategyName | Mesh | None = None
    """How the model is spread over the workers. auto: ddp with several workers, else single."""
    precision: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of the computation. Default fp32."""
    micro_batch: Count | None = None
    """Samples per worker and forward pass."""
    global_batch: Count | None = None
    """Samples per optimizer step over all workers."""
    accumulate: Count | None = None
    """Forward passes per optimizer step."""
    clip_norm: Positive | None = None
    """Largest norm of the gradient; larger ones are scaled down."""
    lr: Positive | None = None
    """Highest learning rate."""
    min_lr: PositiveOrZero | None = None
    """Learning rate at the end of the schedule."""
    warmup_steps: CountOrZero | None = None
    """Steps over which the learning rate rises to `lr`."""
    schedule: Literal["constant", "linear", "cosine"] | None = None
    """How the learning rate falls after the warm-up."""
    optimizer: Literal["adamw", "sgd"] | None = None
    """Which optimizer."""
    weight_decay: PositiveOrZero | None = None
    """Weight decay of the optimizer."""
    steps: Count | None = None
    """Length of the training in optimizer steps."""
    epochs: Count | None = None
    """Length of the training in passes over the data, instead of steps."""
    seed: CountOrZero | None = None
    """Seed of everything random."""
    log_every: Count | None = None
    """Steps between lines of metrics."""
    eval_every: Count | None = None
    """Steps between evaluations."""
    timeout_s: Positive | None = None
    """Seconds after which a worker that waits for its peers gives up."""
    snapshot: Snapshot | None = None
    """When and where the state is kept."""
    model: dict[str, Any] | None = None
    """Given to the job's own code."""
    data: dict[str, Any] | None = None
    """Given to the job's own code."""

    @model_validator(mode="after")
    def _one_length(self) -> Train:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("steps and epochs are both set; keep one of the two (null unsets the other)")
        return self

    def settings(self) -> dict[str, Any]:
        """What the spec sets, as plain data; keys that it does not mention are left to the runtime."""
        return self.model_dump(exclude_none=True, exclude_unset=True)
