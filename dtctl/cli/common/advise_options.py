"""Options of `dtctl advise`, each as the type of a parameter."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer


class PrecisionName(str, Enum):
    """Number formats of a computation."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class FrameworkName(str, Enum):
    """Frameworks whose memory for a model is known; those of `dtctl.estimate.frameworks`."""

    runtime = "runtime"
    fsdp = "fsdp"
    megatron = "megatron"
    deepspeed = "deepspeed"
    accelerate = "accelerate"


class OptimizerName(str, Enum):
    """Optimizers whose state is known: those of dtctl.runtime, and Adafactor."""

    adamw = "adamw"
    sgd = "sgd"
    muon = "muon"
    adafactor = "adafactor"


class RecomputeName(str, Enum):
    """Extents of recomputation: the activations that the backward pass computes again."""

    none = "none"
    selective = "selective"
    full = "full"


ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A config.json in Hugging Face's format.")
]
ModelFactory = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODULE:FACTORY", help="Function that makes your model; it is built on the meta device."
    ),
]
Params = Annotated[str | None, typer.Option("--params", metavar="COUNT", help="Parameters: 7B.")]
Layers = Annotated[int | None, typer.Option("--layers", metavar="N", help="Blocks.")]
Hidden = Annotated[int | None, typer.Option("--hidden", metavar="N", help="Width.")]
Heads = Annotated[int | None, typer.Option("--heads", metavar="N", help="Attention heads.")]
KvHeads = Annotated[int | None, typer.Option("--kv-heads", metavar="N", help="Heads of keys and values.")]
Ffn = Annotated[int | None, typer.Option("--ffn", metavar="N", help="Inner width of the feed-forward network.")]
Gated = Annotated[bool, typer.Option("--gated", help="The feed-forward network has a gate (SwiGLU).")]
Vocab = Annotated[int | None, typer.Option("--vocab", metavar="N", help="Size of the vocabulary.")]
Experts = Annotated[
    int | None,
    typer.Option("--experts", metavar="N", help="Experts of a block, two of them used; --ffn is the width of one."),
]
Seq = Annotated[int | None, typer.Option("--seq", metavar="N", help="Tokens of a sample.")]

Gpus = Annotated[int | None, typer.Option("--gpus", metavar="N", help="GPUs of all nodes.")]
PerNode = Annotated[int | None, typer.Option("--gpus-per-node", metavar="N", help="GPUs of a node.")]
GpuName = Annotated[str | None, typer.Option("--gpu", metavar="NAME", help="H100, A100, ...")]
GpuMemory = Annotated[str | None, typer.Option("--gpu-memory", metavar="SIZE", help="80GiB; the GPU's own otherwise.")]
Network = Annotated[
    str | None,
    typer.Option("--network", metavar="NAME", help="Between nodes: ethernet-100, ndr-8, ... or GB/s of a node."),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory", metavar="SIZE", help="Memory of a node, for offloading. Default: twice that of its GPUs."
    ),
]

Precision = Annotated[
    PrecisionName | None,
    typer.Option("--precision", help="Number format. Default: the spec's, else bf16, or fp16 where GPUs lack it."),
]
Optimizer = Annotated[OptimizerName | None, typer.Option("--optimizer", help="Default: the spec's, else adamw.")]
States = Annotated[
    str | None,
    typer.Option("--states", metavar="fp32|bf16", help="bf16: weights, gradients and moments in bf16 alone."),
]
Framework = Annotated[
    FrameworkName | None,
    typer.Option(
        "--framework",
        help="Framework that trains; memory and time depend on it. Default: runtime with a spec, else fsdp, and "
        "megatron where there is tp or pp.",
    ),
]
Compiled = Annotated[bool, typer.Option("--compile", help="Blocks are compiled.")]
Fp8 = Annotated[bool, typer.Option("--fp8", help="Matrix products in fp8.")]

Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="MESH",
        help="Estimate this mesh only: dp=2,fsdp=8,tp=4,cp=1,ep=1,pp=1 (one degree may be -1), or a strategy's name.",
    ),
]
Zero = Annotated[
    int | None,
    typer.Option("--zero", metavar="STAGE", min=0, max=2, help="Stage of ZeRO over dp; stage 3 is the axis fsdp."),
]
MicroBatch = Annotated[int | None, typer.Option("--micro-batch", metavar="N", help="Samples per GPU and pass.")]
Accumulate = Annotated[int | None, typer.Option("--accumulate", metavar="N", help="Passes of a step.")]
Recompute = Annotated[
    RecomputeName | None, typer.Option("--recompute", help="Activations that are recomputed in the backward pass.")
]
Stages = Annotated[
    int | None,
    typer.Option(
        "--stages-per-worker", metavar="N", help="Model chunks per pipeline worker; more than 1: interleaved."
    ),
]
Offload = Annotated[bool | None, typer.Option("--offload/--no-offload", help="Keep the shards in the host's memory.")]

SpecPath = Annotated[Path | None, typer.Argument(metavar="SPEC", help="The spec. Default: ./dtctl.yaml, if it exists.")]
Batch = Annotated[int | None, typer.Option("--batch", metavar="N", help="Samples per step, over all GPUs.")]
Beyond = Annotated[
    bool,
    typer.Option(
        "--beyond",
        help="Also search experts divided over dp, and context parallelism in pipelines; `--write` cannot write them.",
    ),
]
Write = Annotated[bool, typer.Option("--write", help="Write the recommendation into the spec.")]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE.html", help="Write a page with a bar chart of the memory of each choice."),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure", help="Train a few steps on this machine: memory predicted, measured, and by torch's tracker."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
