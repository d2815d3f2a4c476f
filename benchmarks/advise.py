"""What `dtctl advise` says beside what is published: memory, speed and mesh of 375 trainings; three minutes.

    python benchmarks/advise.py --half learn
    python benchmarks/advise.py --half held --round 2
    python benchmarks/advise.py --half both --eleuther calc_transformer_mem.py

The trainings are those of data/advise_published.json. The formulas were fitted to the half `learn`; `held` scores them.
The file that is kept has every case, and every miss by name.

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
from typing import Any

from machine import HERE, keep
from published import Case as Published
from published import cases as published

from dtctl.advise.advice import choose_best_layouts, describe_layout
from dtctl.advise.model import build_decoder_model
from dtctl.advise.search import SIMPLER, PlanningTask, evaluate_layout
from dtctl.errors import UsageError
from dtctl.estimate.memory import CONTEXT, EXCHANGE, GIB, TORCHTITAN, ParallelLayout, estimate_layout_memory
from dtctl.estimate.model import ModelProfile

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
    layout: ParallelLayout
    gib: float


SELECTIVE = {"micro_batch": 2, "recompute": "selective"}
CASES = (
    Case(name="8B, fsdp 8", shape=LLAMA_8B, layout=ParallelLayout(fsdp=8, **SELECTIVE), gib=82.4),
    Case(name="8B, fsdp 128", shape=LLAMA_8B, layout=ParallelLayout(fsdp=128, **SELECTIVE), gib=67.0),
    Case(
        name="8B, fsdp 8, 32k tokens", shape={**LLAMA_8B, "seq": 32768},
        layout=ParallelLayout(fsdp=8, recompute="full"), gib=83.9,
    ),
    Case(
        name="70B, fsdp 32 x tp 8", shape=LLAMA_70B,
        layout=ParallelLayout(fsdp=32, tp=8, micro_batch=16, recompute="full"), gib=71.9,
    ),
)  # fmt: skip


def ours(case: Case, model: ModelProfile) -> float:
    """GiB, without the context and NCCL's buffers, which torch does not reserve."""
    return (estimate_layout_memory(model, case.layout, TORCHTITAN).total - CONTEXT - EXCHANGE) / GIB


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


def deepspeed(case: Case, model: ModelProfile, python: Path) -> float | None:
    """GiB of states alone, with the largest layer gathered; tensor parallelism divides the parameters."""
    if not python.exists():
        return None
    largest = case.shape["vocab"] * case.shape["hidden"]
    numbers = json.dumps([int(model.params / case.layout.tp), largest, case.layout.fsdp])
    done = subprocess.run([str(python), "-c", DEEPSPEED, numbers], capture_output=True, text=True, check=False)
    found = re.search(r"FOUND (\d+)", done.stdout)
    return int(found[1]) / GIB if found else None


BARS = {"memory": ((0.15, 0.85), (0.25, 1.0)), "speed": ((0.30, 0.80),)}
"""Figure -> how far it may be off, and in which share of the cases."""


def compared(case: Published) -> dict[str, Any]:
    """What is said of one training."""
    entry = case.entry
    row: dict[str, Any] = {"source": entry["source"], "name": entry["name"]}
    if "memory_gib" in entry:
        row["memory"] = figures(entry["memory_gib"], case.memory_gib()) | {"counts": entry["counts"]}
    if "tokens_per_s_per_gpu" in entry:
        row["speed"] = figures(entry["tokens_per_s_per_gpu"], case.tokens())
    layout = case.layout
    task = PlanningTask(
        model=case.model, hardware=case.hardware, recipe=case.recipe, precision=layout.precision,
        beyond=layout.ep > 1 or layout.cp > 1 < layout.pp,
        global_batch=layout.micro_batch * layout.accumulate * layout.data,
        compiled=entry.get("compiled", False), fp8=entry.get("fp8", False),
    )  # fmt: skip
    try:
        best = choose_best_layouts(task).best
    except UsageError:  # a pipeline with fewer micro batches than stages, which dtctl never advises
        return row
    theirs = evaluate_layout(task, layout)
    same = all(getattr(best.layout, axis) == getattr(layout, axis) for axis in ("dp", "fsdp", "tp", "pp", "cp"))
    ratio = best.speed.tokens_per_s_per_gpu / theirs.speed.tokens_per_s_per_gpu
    row["mesh"] = {
        "published": describe_layout(theirs.layout), "recommended": describe_layout(best.layout),
        "fits": best.fits, "same": same,
        "speed_ratio": round(ratio, 4), "right": best.fits and (same or ratio >= 1 - SIMPLER),
    }  # fmt: skip
    return row


def figures(wanted: float, said: float) -> dict[str, float]:
    """The two figures, and how far the one that is said is off."""
    return {"published": wanted, "said": round(said, 2), "off": round(said / wanted - 1, 4)}


def scored(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of the cases within each bar, and all that are outside of one."""
    score: dict[str, Any] = {"cases": len(rows)}
    for figure, bars in BARS.items():
        off = [abs(row[figure]["off"]) for row in rows if figure in row]
        score[figure] = {"cases": len(off), "median_off": sorted(off)[len(off) // 2]}
        score[figure] |= {f"within_{bar:.0%}": round(sum(one <= bar for one in off) / len(off), 3) for bar, _ in bars}
        score[figure]["misses"] = [
            f"{row['source']}: {row['name']}: {row[figure]['published']:g}, said {row[figure]['said']:g} "
            f"({row[figure]['off']:+.0%})"
            for row in rows if figure in row and abs(row[figure]["off"]) > bars[0][0]
        ]  # fmt: skip
    rows = [row for row in rows if "mesh" in row]
    right = [row["mesh"]["right"] for row in rows]
    score["mesh"] = {
        "right": round(sum(right) / len(right), 3),
        "strictly": round(sum(row["mesh"]["same"] or row["mesh"]["speed_ratio"] >= 1 for row in rows) / len(rows), 3),
        "same": sum(row["mesh"]["same"] for row in rows),
    }
    score["mesh"]["misses"] = [
        f"{row['source']}: {row['name']}: {row['mesh']['published']}; recommended {row['mesh']['recommended']}"
        f"{'' if row['mesh']['fits'] else ', which does not fit'} ({row['mesh']['speed_ratio']} of its speed)"
        for row in rows if not row["mesh"]["right"]
    ]  # fmt: skip
    return score


def halves(names: tuple[str, ...], turn: int) -> dict[str, Any]:
    """Each half, scored, and told."""
    found = {}
    for name in names:
        rows = [compared(case) for case in published(name, turn)]
        score = scored(rows)
        found[name] = {"score": score, "cases": rows}
        for figure, bars in BARS.items():
            shares = ", ".join(
                f"{score[figure][f'within_{bar:.0%}']:.0%} within {bar:.0%} (bar {share:.0%})" for bar, share in bars
            )
            print(f"{name}: {figure} of {score[figure]['cases']} trainings: {shares}")
            for miss in score[figure]["misses"]:
                print(f"    {miss}")
        share = score["mesh"]["right"]
        print(f"{name}: mesh of {len(rows)}: {share:.0%} the published one, or no slower (to {SIMPLER:.0%})")
        for miss in score["mesh"]["misses"]:
            print(f"    {miss}")
    return found


def main() -> None:
    """Compare and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=["learn", "held", "both"], default="both")
    parser.add_argument("--round", type=int, default=0, help="only the trainings that came in this round")
    parser.add_argument("--note", default="", help="kept with the result")
    parser.add_argument("--eleuther", type=Path)
    parser.add_argument("--python", type=Path, default=PEERS, help="the one that has deepspeed")
    given = parser.parse_args()
    found = halves(("learn", "held") if given.half == "both" else (given.half,), given.round)
    rows = []
    for case in CASES:
        model = build_decoder_model(**case.shape, gated=True)
        said = {
            "dtctl": ours(case, model),
            "eleuther": eleuther(case, given.eleuther) if given.eleuther else None,
            "deepspeed, states only": deepspeed(case, model, given.python),
        }
        told = {name: round(gib, 1) for name, gib in said.items() if gib is not None}
        rows.append({"case": case.name, "published_gib": case.gib, "said_gib": told})
        off = ", ".join(f"{name} {gib:.1f} ({gib / case.gib - 1:+.0%})" for name, gib in told.items())
        print(f"{case.name}: published {case.gib}; {off}")
    keep("advise", {"date": time.strftime("%Y-%m-%d %H:%M"), "note": given.note, "halves": found, "peers": rows})


if __name__ == "__main__":
    main()
