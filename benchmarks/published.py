"""Published trainings (data/advise_published.json) in the terms of the advisor, and what it says about them.

An entry has its source, a name, the model's numbers, the GPUs, the mesh, how it was trained, and the figures that were
published: `memory_gib` with what it counts (`allocated` or `reserved` by torch, `device` as nvidia-smi shows it), and
`tokens_per_s_per_gpu`. `half` is decided by the first hex digit of sha1(source + name): even ones are learned from, odd
ones are scored. `seen` marks those that earlier versions of the formulas were fitted to; they are always learned from.

    python benchmarks/published.py      # writes the table of mixtures into docs/guides/experts.md anew
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtctl.advise.config import parse_model_config
from dtctl.advise.hardware import Hardware, find_gpu_by_name
from dtctl.advise.model import build_decoder_model
from dtctl.advise.speed import estimate_step_speed
from dtctl.estimate.frameworks import FRAMEWORKS, apply_recipe_precision
from dtctl.estimate.memory import GIB, FrameworkMemory, ParallelLayout, estimate_layout_memory
from dtctl.estimate.model import ModelProfile

FILE = Path(__file__).parent / "data" / "advise_published.json"
GUIDE = Path(__file__).parent.parent / "docs" / "guides" / "experts.md"
BEGIN, END = "<!-- mixtures: benchmarks/published.py -->", "<!-- end of mixtures -->"
NETWORK = 400.0
"""GB/s of a node where the training has one node only, or the source is silent."""
# Everything in half precision: `bf16-true` of LitGPT, torchtune's `dtype: bf16`.
_BF16 = replace(
    FRAMEWORKS["runtime"], autocast=False, weight_bytes=2, gradient_bytes=2, optimizer_bytes=4, whole_gradients=False,
    kept_products=0.5, free=True, split_experts=True, shards_copied=True,
)  # fmt: skip
# Ways to hold a model that `dtctl advise` has no word for; their trainings are scored with these.
RECIPES = {
    **FRAMEWORKS,
    "litgpt": _BF16,
    "torchtune": _BF16,
    "pure": _BF16,
    # doc/en/train_performance.md of InternEvo: 30 to 33 bytes for each parameter, buffers of its flat copies included.
    "internevo": replace(
        FRAMEWORKS["megatron"], gradient_bytes=6, step_bytes=12, loss_parallel=False, sequence_parallel=False
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An entry, ready to be computed."""

    entry: dict[str, Any]
    model: ModelProfile
    layout: ParallelLayout
    hardware: Hardware
    recipe: FrameworkMemory

    @property
    def name(self) -> str:
        """Source and name."""
        return f"{self.entry['source']}: {self.entry['name']}"

    def memory_gib(self) -> float:
        """What is computed for what the source counts."""
        options = {key: self.entry.get(key, False) for key in ("compiled", "fp8")}
        found = estimate_layout_memory(self.model, self.layout, self.recipe, **options)
        outside = self.recipe.context + (self.recipe.exchange if self.layout.workers > 1 else 0.0)
        counted = {"allocated": found.tensors, "reserved": found.total - outside, "device": found.total}
        return counted[self.entry["counts"]] / GIB

    def tokens(self) -> float:
        """Tokens per second and GPU."""
        options = {key: self.entry.get(key, False) for key in ("compiled", "fp8")}
        return estimate_step_speed(self.model, self.layout, self.hardware, self.recipe, **options).tokens_per_s_per_gpu


def cases(half: str, turn: int = 0) -> list[Case]:
    """All of one half, or those of it that came in one round."""
    entries = json.loads(FILE.read_text(encoding="utf-8"))
    return [_case(entry) for entry in entries if entry["half"] == half and turn in (0, entry.get("round", 1))]


def _case(entry: dict[str, Any]) -> Case:
    numbers = dict(entry["model"])
    if "model_type" in numbers:
        model = parse_model_config(numbers, source=entry["name"], seq=numbers.pop("seq"), name=entry["name"])
    else:
        model = build_decoder_model(**numbers)
    recompute = entry["recompute"]
    if recompute == "half":  # every other block
        model = replace(model, block_kept=(model.block_kept + model.block_input) / 2)
    framework = entry["framework"]
    recipe = apply_recipe_precision(RECIPES[framework], entry["precision"])
    changes: dict[str, Any] = {
        key: entry[key] for key in ("reshard", "loss_parallel", "loss_copies", "cache") if key in entry
    }
    changes["sequence_parallel"] = entry.get("sequence_parallel", False)
    if "attention" in entry:
        changes["attention"] = entry["attention"]
    if entry.get("compiled_loss"):
        changes["fused_loss"] = True
    if entry.get("chunked_loss"):
        changes["loss_parts"] = 8  # those that do so have fused kernels for the blocks too
        changes["sharded"] = tuple(pair for pair in recipe.sharded if pair[0] != "fused")
    if entry.get("no_sync"):  # gradients of all micro batches are added up whole
        changes |= {"whole_gradients": True, "whole_bytes": 4}
    if entry.get("reduce") == "bf16":
        changes["gradient_bytes"] = 2
    if entry.get("moments") == "bf16":  # Megatron-LM's precision-aware optimizer
        changes["optimizer_bytes"] = 4
    if entry.get("async_tp") or (framework == "megatron" and entry.get("sequence_parallel")):
        changes["tp_overlap"] = True
    zero = entry.get("zero", 0)
    return Case(
        entry=entry,
        model=model,
        layout=ParallelLayout(
            **entry["mesh"],
            ep=entry.get("ep", 1),
            zero=zero if zero < 3 else 0,
            recompute={"attention": "none", "half": "none"}.get(recompute, recompute),
            offload=entry.get("offload", False),
            micro_batch=entry["micro_batch"],
            accumulate=entry["accumulate"],
            chunks=entry.get("chunks", 1),
            precision=entry["precision"],
        ),
        hardware=Hardware(
            gpu=find_gpu_by_name(entry["gpu"]),
            gpus=entry["gpus"],
            per_node=entry["per_node"],
            network=entry["network"] or NETWORK,
        ),
        recipe=replace(recipe, **changes),
    )


def mixtures() -> str:
    """A table of all trainings of mixtures: what is published beside what is computed."""
    found = sorted((case for half in ("learn", "held") for case in cases(half) if case.model.experts), key=_by_model)
    return "\n".join([
        "| training | mesh | GiB, published | computed | tokens/s of a GPU, published | computed |",
        "|---|---|---|---|---|---|",
        *(_row(case) for case in found),
    ])  # fmt: skip


def _by_model(case: Case) -> tuple[float, int, str]:
    return case.model.params, case.layout.workers, case.name


def _row(case: Case) -> str:
    entry = case.entry
    mesh = " x ".join(
        f"{axis} {degree}" for axis in ("dp", "tp", "pp", "ep") if (degree := getattr(case.layout, axis)) > 1
    )
    cells = [entry["name"].split(",")[0].replace("_", " ") + (" (fp8)" if entry.get("fp8") else ""), mesh]
    for key, compute in (("memory_gib", case.memory_gib), ("tokens_per_s_per_gpu", case.tokens)):
        published = entry.get(key)
        cells += [f"{published:g}", _beside(compute(), published)] if published else ["", ""]
    return f"| {' | '.join(cells)} |"


def _beside(computed: float, published: float) -> str:
    return f"{computed:.0f} ({computed / published - 1:+.0%})"


def with_mixtures(text: str) -> str:
    """The guide with its table as it is now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{mixtures()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    GUIDE.write_text(with_mixtures(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
