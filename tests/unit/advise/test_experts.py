"""Mixtures of experts: what dtctl.runtime divides, and what the advisor says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.advise.advice import build_train_settings, choose_best_layouts
from dtctl.advise.config import parse_model_config
from dtctl.advise.gather import AdviseOptions, build_advise_task
from dtctl.advise.hardware import Hardware, find_gpu_by_name
from dtctl.advise.model import build_decoder_model
from dtctl.advise.search import PlanningTask, list_runnable_choices
from dtctl.advise.speed import estimate_step_speed
from dtctl.errors import UsageError
from dtctl.estimate.frameworks import FRAMEWORKS
from dtctl.estimate.memory import RUNTIME, ParallelLayout, estimate_layout_memory
from dtctl.spec.load import parse_spec
from dtctl.train.mesh import Degrees, resolve_degrees
from tests.facts import raises

MIXTURE = build_decoder_model(
    layers=32, hidden=4096, heads=32, ffn=14336, experts=8, experts_used=2, vocab=32000, seq=4096, gated=True
)
H100 = Hardware(gpu=find_gpu_by_name("H100"), gpus=64, per_node=8, network=400.0)


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(fsdp=8), Degrees(ep=8), Degrees(fsdp=2, ep=4), Degrees(tp=4), Degrees(tp=2, fsdp=4),
        Degrees(ep=2, tp=4), Degrees(fsdp=2, ep=2, tp=2), Degrees(dp=2, ep=2, tp=2), Degrees(cp=2, ep=2, tp=2),
    ],
    ids=str,
)  # fmt: skip
def test_states_are_those_of_the_parameters_that_a_worker_of_the_runtime_has(degrees: Degrees) -> None:
    layout = ParallelLayout(
        dp=degrees.dp, fsdp=degrees.fsdp * degrees.ep, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep, precision="fp32"
    )
    experts = MIXTURE.expert_params / (degrees.expert_parts * degrees.expert_shards)
    others = (MIXTURE.params - MIXTURE.expert_params) / (degrees.tp * degrees.shards)
    assert estimate_layout_memory(MIXTURE, layout).states == pytest.approx(16 * (experts + others), rel=1e-9)


def test_with_tp_alone_every_worker_has_and_computes_all_experts() -> None:
    layout = ParallelLayout(fsdp=8, tp=8, micro_batch=2)
    split = replace(RUNTIME, split_experts=True)
    assert estimate_layout_memory(MIXTURE, layout).states > 5 * estimate_layout_memory(MIXTURE, layout, split).states
    assert (
        estimate_layout_memory(MIXTURE, layout).activations
        > 2 * estimate_layout_memory(MIXTURE, layout, split).activations
    )
    assert (
        estimate_step_speed(MIXTURE, layout, H100).compute_s
        > 3 * estimate_step_speed(MIXTURE, layout, H100, split).compute_s
    )
    divided = replace(layout, fsdp=8, ep=8)
    assert estimate_layout_memory(replace(MIXTURE, experts=64), divided).activations == pytest.approx(
        estimate_layout_memory(MIXTURE, layout, split).activations
    )


@pytest.mark.parametrize("more", [{"accumulate": 4}, {"pp": 2, "accumulate": 4}, {"tp": 2, "accumulate": 4}], ids=str)
def test_of_experts_only_a_workers_own_are_gathered_and_added_up(more: dict[str, int]) -> None:
    """8 experts over 8 workers, in fp32: gathered are two blocks, or all with a pipeline; gradients of all."""
    layout = ParallelLayout(fsdp=8, ep=8, precision="fp32", **more)  # type: ignore[arg-type]
    experts = MIXTURE.expert_params / layout.pp / layout.tp
    saved = estimate_layout_memory(MIXTURE, replace(layout, ep=1), replace(RUNTIME, split_experts=True)).temporary
    saved -= estimate_layout_memory(MIXTURE, layout).temporary
    gathered = 1 if layout.pp > 1 else 2 / MIXTURE.layers
    assert saved == pytest.approx((4 * gathered + 4) * experts * 7 / 8)


def test_meshes_with_ep_and_tp_are_searched_and_can_be_written() -> None:
    asked = PlanningTask(model=MIXTURE, hardware=H100, global_batch=64)
    both = [choice.layout for choice in list_runnable_choices(asked) if choice.layout.ep > 1 and choice.layout.tp > 1]
    assert both
    assert all(8 % (layout.ep * layout.tp) == 0 and layout.fsdp % layout.ep == 0 for layout in both)
    best = choose_best_layouts(asked).best
    assert best.layout.ep > 1
    assert best.layout.tp > 1
    mesh = resolve_degrees(build_train_settings(asked, best)["strategy"], workers=64, per_node=8)
    assert (mesh.ep, mesh.tp, mesh.workers) == (best.layout.ep, best.layout.tp, 64)


def test_no_mesh_is_searched_that_the_runtime_refuses() -> None:
    sequence_parallel = replace(RUNTIME, sequence_parallel=True)
    asked = PlanningTask(model=MIXTURE, hardware=H100, global_batch=64, recipe=sequence_parallel)
    layouts = [choice.layout for choice in list_runnable_choices(asked)]
    assert any(layout.ep > 1 for layout in layouts)
    assert not any(layout.ep > 1 and layout.tp > 1 for layout in layouts)


def test_as_many_parts_as_there_are_experts_are_tried() -> None:
    """8 experts on nodes of 16 GPUs: neither a node nor all GPUs are a number that divides them."""
    wide = Hardware(gpu=find_gpu_by_name("H100"), gpus=32, per_node=16, network=400.0)
    degrees = {
        choice.layout.ep
        for choice in list_runnable_choices(PlanningTask(model=MIXTURE, hardware=wide))
        if choice.layout.tp == 1
    }
    assert 8 in degrees


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"params": "7B", "mesh": "ep=8"}, "ep experts --mesh"),
        ({"layers": 4, "hidden": 512, "experts": 4, "mesh": "ep=8"}, "4 experts 8 --mesh"),
        ({"layers": 4, "hidden": 512, "experts": 4, "mesh": "ep=4,tp=2", "framework": "runtime"}, "4 experts 8 --mesh"),
        ({"params": "47B", "experts": 8}, "47B 8 --experts"),
    ],
)
def test_what_experts_cannot_be_divided_into_is_refused(options: dict[str, object], facts: str) -> None:
    with raises(UsageError, facts):
        build_advise_task(AdviseOptions(gpus=8, **options), None)  # type: ignore[arg-type]


def test_megatron_splits_experts_over_tp() -> None:
    options = AdviseOptions(
        layers=4, hidden=512, experts=4, gpus=8, mesh="ep=4,tp=2", framework="megatron", micro_batch=1
    )
    assert choose_best_layouts(build_advise_task(options, None)).best.layout.ep == 4
    assert FRAMEWORKS["megatron"].expert_split(ParallelLayout(tp=2)) == 2


def test_the_model_of_the_templates_spec_is_a_mixture() -> None:
    shape = {"layers": 4, "heads": 4, "embed": 128, "context": 64, "experts": 8, "top_k": 2, "hidden": 168}
    model = parse_model_config(shape, source="train.model", seq=None)
    assert (model.hidden, model.experts, model.experts_used, model.expert_width) == (128, 8, 2, 168)
    assert model.expert_params == 4 * 8 * 3 * 128 * 168


def test_a_spec_whose_experts_its_workers_cannot_divide_is_not_priced() -> None:
    spec = parse_spec(
        "cluster: {nodes: [a, b], slots: 8}\njob: {script: train.py}\n"
        "train: {strategy: {ep: -1}, model: {layers: 4, embed: 128, experts: 8, hidden: 168, vocab: 256}}\n",
        source="dtctl.yaml",
        base_dir=Path("/nowhere"),
    )
    found = build_advise_task(AdviseOptions(), spec)
    assert found.written is None
    assert any("8 experts" in doubt and "16" in doubt for doubt in found.model.doubts)
