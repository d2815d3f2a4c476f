"""Memory of a GPU as published beside what `dtctl advise` and two calculators say; seconds.

    python benchmarks/advise.py --eleuther calc_transformer_mem.py

The cases are torchtitan's (Llama 3 on H100, tables 1 to 4 of its benchmarks, memory reserved by torch). EleutherAI's is
calc/calc_transformer_mem.py of https://github.com/EleutherAI/cookbook, which the caller has. DeepSpeed's estimators are
taken from benchmarks/.venv-peers; they count states only. Context parallel cases are left out: the peers have no word
for it. One that is not there is left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from machine import HERE, keep

from dtctl.advise.model import transformer
from dtctl.estimate.memory import CONTEXT, EXCHANGE, GIB, TORCHTITAN, Layout, memory
from dtctl.estimate.model import Model

PEERS = HERE / ".venv-peers" / "bin" / "python"
LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 8192}
LLAMA_70B = {**LLAMA_8B, "layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}
DEEPSPEED = """\
import json, sys
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as estimate
params, largest, gpus = json.loads(sys.argv[1])
print("FOUND", estimate(params, largest, gpus, 1, cpu_offload=False, cpu_offload_params=False, zero_init=True)[1])
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published figure."""

    name: str
    shape: dict[str, int]
    layout: Layout
    gib: float


SELECTIVE = {"micro_batch": 2, "recompute": "selective"}
CASES = (
    Case(name="8B, fsdp 8", shape=LLAMA_8B, layout=Layout(fsdp=8, **SELECTIVE), gib=82.4),
    Case(name="8B, fsdp 128", shape=LLAMA_8B, layout=Layout(fsdp=128, **SELECTIVE), gib=67.0),
    Case(
        name="8B, fsdp 8, 32k tokens", shape={**LLAMA_8B, "seq": 32768}, layout=Layout(fsdp=8, recompute="full"),
        gib=83.9,
    ),
    Case(
        name="70B, fsdp 32 x tp 8", shape=LLAMA_70B, layout=Layout(fsdp=32, tp=8, micro_batch=16, recompute="full"),
        gib=71.9,
    ),
)  # fmt: skip


def ours(case: Case, model: Model) -> float:
    """GiB, without the context and NCCL's buffers, which torch does not reserve."""
    return (memory(model, case.layout, TORCHTITAN).total - CONTEXT - EXCHANGE) / GIB


def eleuther(case: Case, path: Path) -> float | None:
    """GiB, less the 5 that it adds for what is unknown; it has one kind of recomputation."""
    shape, layout = case.shape, case.layout
    options = {
        "num-layers": shape["layers"], "hidden-size": shape["hidden"], "num-attention-heads": shape["heads"],
        "kv-size-ratio": shape["kv_heads"] / shape["heads"], "ffn-expansion-factor": shape["ffn"] / shape["hidden"],
        "num-mlp-linears": 3, "vocab-size": shape["vocab"], "sequence-length": shape["seq"], "num-gpus": layout.workers,
        "batch-size-per-gpu": layout.micro_batch, "tensor-parallel-size": layout.tp, "zero-stage": 3,
        "misc-mem-gib": 0,
    }  # fmt: skip
    split = ["--partition-activations"] if layout.tp > 1 else []
    argv = [sys.executable, str(path), "--checkpoint-activations", *split, *(f"--{k}={v}" for k, v in options.items())]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = re.search(r"Per-GPU Memory Required for Training: ([\d.]+) GiB", done.stdout)
    if found is None:
        print(done.stderr[-500:], file=sys.stderr)
    return float(found[1]) if found else None


def deepspeed(case: Case, model: Model, python: Path) -> float | None:
    """GiB of states alone, with the largest layer gathered; tensor parallelism divides the parameters."""
    if not python.exists():
        return None
    largest = case.shape["vocab"] * case.shape["hidden"]
    numbers = json.dumps([int(model.params / case.layout.tp), largest, case.layout.fsdp])
    done = subprocess.run([str(python), "-c", DEEPSPEED, numbers], capture_output=True, text=True, check=False)
    found = re.search(r"FOUND (\d+)", done.stdout)
    return int(found[1]) / GIB if found else None


def main() -> None:
    """Compare and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eleuther", type=Path)
    parser.add_argument("--python", type=Path, default=PEERS, help="the one that has deepspeed")
    given = parser.parse_args()
    rows = []
    for case in CASES:
        model = transformer(**case.shape, gated=True)
        said = {
            "dtctl": ours(case, model),
            "eleuther": eleuther(case, given.eleuther) if given.eleuther else None,
            "deepspeed, states only": deepspeed(case, model, given.python),
        }
        told = {name: round(gib, 1) for name, gib in said.items() if gib is not None}
        rows.append({"case": case.name, "published_gib": case.gib, "said_gib": told})
        off = ", ".join(f"{name} {gib:.1f} ({gib / case.gib - 1:+.0%})" for name, gib in told.items())
        print(f"{case.name}: published {case.gib}; {off}")
    keep("advise", {"date": time.strftime("%Y-%m-%d %H:%M"), "cases": rows})


if __name__ == "__main__":
    main()
