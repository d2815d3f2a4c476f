"""Where the figures of a task come from: options, a config.json, a module, or the spec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dtctl
from dtctl import children
from dtctl.advise import hardware
from dtctl.advise.config import from_config, read_config
from dtctl.advise.hardware import Hardware
from dtctl.advise.model import transformer
from dtctl.advise.search import Task
from dtctl.advise.sizes import count, gibibytes
from dtctl.errors import UsageError
from dtctl.estimate.memory import Precision
from dtctl.estimate.model import Model, from_inspection
from dtctl.spec.model import Spec
from dtctl.spec.nodes import resolve_nodes

INSPECT_S = 120.0
"""Seconds that building a model on the meta device may take."""

MOST_GPUS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseOptions:
    """What the command line sets; None for the rest."""

    config: Path | None = None
    module: str | None = None
    params: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    gated: bool = False
    experts: int | None = None
    seq: int | None = None
    batch: int | None = None
    gpus: int | None = None
    per_node: int | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    network: str | None = None
    precision: Precision = "bf16"
    compiled: bool = False
    beyond: bool = False


def task(options: AdviseOptions, spec: Spec | None) -> Task:
    """The task that options and spec describe; options win.

    Raises:
        UsageError: something is missing, unknown or not above 0.
    """
    for name in (
        "seq",
        "batch",
        "gpus",
        "per_node",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "experts",
    ):
        value = getattr(options, name)
        if value is not None and value < 1:
            option = "gpus-per-node" if name == "per_node" else name.replace("_", "-")
            raise UsageError(f"--{option} must be at least 1, and is {value}")
    batch = options.batch or (spec.settings.get("global_batch") if spec is not None else None)
    return Task(
        model=_model(options, spec),
        hardware=_hardware(options, spec),
        global_batch=batch,
        precision=options.precision,
        compiled=options.compiled,
        beyond=options.beyond,
    )


def _hardware(options: AdviseOptions, spec: Spec | None) -> Hardware:
    nodes = resolve_nodes(spec) if spec is not None else ()
    slots = [node.slots for node in nodes]
    counts = [slot_count for slot_count in slots if isinstance(slot_count, int)]
    per_node = options.per_node or (max(counts) if counts else None)
    if options.gpus is not None:
        gpus = options.gpus
        per_node = min(per_node or 8, gpus)
    elif nodes:
        per_node = per_node or 8  # `auto` is known on the nodes only
        gpus = sum(slot_count if isinstance(slot_count, int) else per_node for slot_count in slots)
    else:
        raise UsageError("how many GPUs are there?", hint="--gpus 16 --gpus-per-node 8, or a spec")
    if gpus > MOST_GPUS:
        raise UsageError(f"{gpus} GPUs are more than the {MOST_GPUS} that can be searched")
    if gpus % per_node:
        raise UsageError(f"{gpus} GPUs cannot be divided into nodes of {per_node}")
    memory = gibibytes(options.gpu_memory) if options.gpu_memory else None
    gpu = hardware.gpu(options.gpu or "H100", memory)
    default = "ndr-8" if per_node >= 8 else "ethernet-100"
    return Hardware(gpu=gpu, gpus=gpus, per_node=per_node, network=hardware.network(options.network or default))


def _model(options: AdviseOptions, spec: Spec | None) -> Model:
    if options.config is not None:
        return read_config(options.config, seq=options.seq)
    if options.module is not None:
        python = spec.cluster.python if spec is not None and spec.cluster.transport in ("local", "sandbox") else None
        inspection = inspected(options.module, seq=options.seq or 1024, python=python or sys.executable)
        return from_inspection(inspection, name=options.module)
    if options.layers is not None and options.hidden is not None:
        return transformer(
            layers=options.layers,
            hidden=options.hidden,
            heads=options.heads,
            kv_heads=options.kv_heads,
            ffn=options.ffn,
            vocab=options.vocab or 50257,
            seq=options.seq or 2048,
            gated=options.gated,
            experts=options.experts or 1,
            experts_used=min(2, options.experts or 1),
            params=count(options.params) if options.params else None,
            name=options.params or "model",
        )
    if options.params is not None:
        return _usual(count(options.params), options)
    if spec is not None and (config := spec.settings.get("model")):
        return from_config(config, source="train.model", seq=options.seq, name=spec.job.name)
    raise UsageError(
        "which model?", hint="--config config.json, --model module:factory, --params 7B, --layers and --hidden, or "
        "train.model in the spec",
    )  # fmt: skip


def _usual(params: float, options: AdviseOptions) -> Model:
    """A model with so many parameters in the usual proportions: width 128 times the number of blocks, near enough."""
    layers = options.layers or max(1, round((params / (12 * 128**2)) ** (1 / 3)))
    hidden = options.hidden or max(128, round((params / (12 * layers)) ** 0.5 / 128) * 128)
    vocab = options.vocab or min(50257, max(256, int(params / 4 / hidden)))
    return transformer(
        layers=layers, hidden=hidden, vocab=vocab, seq=options.seq or 2048, params=params, tied=True,
        heads=options.heads, kv_heads=options.kv_heads, name=options.params or "model",
    )  # fmt: skip


def inspected(name: str, *, seq: int, python: str) -> dict[str, Any]:
    """What `dtctl.advise.inspect` says about a model, in a process of the job's Python.

    Raises:
        UsageError: the model cannot be built, with what torch says about it.
    """
    root = str(Path(dtctl.__file__).resolve().parent.parent)
    path = os.pathsep.join(entry for entry in (root, os.environ.get("PYTHONPATH")) if entry)
    argv = children.module(python, "dtctl.advise.inspect", name, str(seq), last="")
    try:
        completed = subprocess.run(
            argv, capture_output=True, text=True, timeout=INSPECT_S, check=False, env={**os.environ, "PYTHONPATH": path}
        )
    except OSError as exc:
        raise UsageError(
            f"{python} cannot be run: {exc.strerror}", hint="cluster.python names the job's Python"
        ) from exc
    except subprocess.TimeoutExpired as exc:
        raise UsageError(f"{name} is not built after {INSPECT_S:.0f} s") from exc
    lines = completed.stdout.strip().splitlines()
    try:
        figures: dict[str, Any] = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (completed.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise UsageError(f"{name} cannot be inspected: {last}", hint=f"{python} needs torch") from None
    if "error" in figures:
        raise UsageError(str(figures["error"]))
    return figures
