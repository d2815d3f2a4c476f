"""The search beside one that leaves nothing out, and what it takes from the spec, the GPU and the host."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from dtctl.advise.advice import ABSURD, build_choice_json, build_train_settings, choose_best_layouts
from dtctl.advise.gather import AdviseOptions, build_advise_task, estimate_spec_memory
from dtctl.advise.hardware import Hardware, find_gpu_by_name, read_gpu_table
from dtctl.advise.model import build_decoder_model
from dtctl.advise.published_models import FAMILIES, build_usual_model
from dtctl.advise.search import COPIES, LONG, PlanningTask, list_runnable_choices
from dtctl.errors import UsageError
from dtctl.estimate.frameworks import FRAMEWORKS
from dtctl.estimate.memory import BUDGET, GIB, RUNTIME, ParallelLayout, estimate_layout_memory
from dtctl.spec.load import parse_spec
from dtctl.spec.model import Spec
from dtctl.train.mesh import resolve_degrees
from tests.command_line import dtctl
from tests.facts import raises


def cluster(count: int, *, kind: str = "H100", per_node: int = 8, **more: float) -> Hardware:
    return Hardware(gpu=find_gpu_by_name(kind), gpus=count, per_node=min(per_node, count), network=400, **more)


def everything(asked: PlanningTask) -> list[ParallelLayout]:
    """All layouts that dtctl.runtime can run, from nothing but its rules: every product, every divisor."""
    model, count, batch = asked.model, asked.hardware.gpus, asked.global_batch
    assert batch is not None
    numbers = [number for number in range(1, count + 1) if count % number == 0]
    found = []
    for dp, fsdp, tp, pp, cp in itertools.product(numbers, repeat=5):
        mesh = ParallelLayout(dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, precision=asked.precision)
        if mesh.workers != count or tp > asked.hardware.per_node or model.kv_heads % tp or model.heads % tp:
            continue
        if pp > model.layers or (cp > 1 and (pp > 1 or model.seq % (2 * cp) or asked.compiled)):
            continue
        if cp > 1 and model.seq < LONG and batch >= count:
            continue
        for micro in range(1, batch + 1):
            if batch % (micro * dp * fsdp) or batch // (micro * dp * fsdp) < pp:
                continue
            sized = replace(mesh, micro_batch=micro, accumulate=batch // (micro * dp * fsdp))
            for recompute, offload, zero in itertools.product(("none", "selective", "full"), (False, True), (0, 1)):
                if (offload and (fsdp == 1 or pp > 1)) or (zero and dp != count):
                    continue
                found.append(replace(sized, recompute=recompute, offload=offload, zero=zero))
    return found


def fits(asked: PlanningTask, layout: ParallelLayout) -> bool:
    need = estimate_layout_memory(asked.model, layout, asked.recipe, compiled=asked.compiled)
    host = asked.hardware.host_per_gpu * 0.8 * GIB
    return need.total <= asked.hardware.gpu.memory * GIB * BUDGET and need.host <= host


@pytest.mark.parametrize("seed", range(40))
def test_fits_and_nothing_fits_are_what_a_search_that_leaves_nothing_out_says(seed: int) -> None:
    chance = random.Random(seed)
    heads = chance.choice([8, 12, 16, 40])
    model = build_decoder_model(
        layers=chance.choice([6, 24, 48]), hidden=128 * heads, heads=heads, kv_heads=chance.choice([heads, heads // 4]),
        vocab=32000, seq=chance.choice([1024, 4096, 16384]), gated=chance.random() < 0.5,
    )  # fmt: skip
    asked = PlanningTask(
        model=model,
        hardware=cluster(
            chance.choice([1, 2, 4, 6, 8, 12, 16]), kind=chance.choice(["T4", "V100-16", "A100-40", "H100"]),
            per_node=chance.choice([1, 2, 4]) if seed % 2 else 8, host_memory=chance.choice([32.0, 256.0]),
        ),
        global_batch=chance.choice([4, 8, 12, 48]),
        precision="fp16" if chance.random() < 0.5 else "fp32",
        compiled=chance.random() < 0.3,
    )  # fmt: skip
    if asked.hardware.gpus % asked.hardware.per_node:
        asked = replace(asked, hardware=replace(asked.hardware, per_node=1))
    possible = everything(asked)
    fitting = [layout for layout in possible if fits(asked, layout)]
    if not possible:
        with pytest.raises(UsageError):
            choose_best_layouts(asked)
        return
    found = choose_best_layouts(asked)
    assert found.best.fits == bool(fitting), f"{len(fitting)} of {len(possible)} fit"
    assert found.best.fits == ("nothing fits" not in found.reasons[0])
    for one in [found.best, *found.alternatives]:
        assert one.fits == fits(asked, one.layout)


def test_both_answers_are_among_those_that_were_checked() -> None:
    small = build_decoder_model(layers=6, hidden=1024, heads=8, vocab=32000, seq=1024)
    large = build_decoder_model(layers=48, hidden=5120, heads=40, vocab=32000, seq=1024)
    for model, expected in ((small, True), (large, False)):
        asked = PlanningTask(
            model=model, hardware=cluster(1, kind="T4", host_memory=32.0), global_batch=4, precision="fp16"
        )
        assert any(fits(asked, layout) for layout in everything(asked)) is expected


def test_a_pipeline_never_has_fewer_micro_batches_than_stages() -> None:
    for one in list_runnable_choices(
        PlanningTask(model=build_usual_model(7e9, seq=2048, name="7B"), hardware=cluster(16), global_batch=16)
    ):
        assert one.layout.accumulate >= one.layout.pp


@pytest.mark.parametrize(
    ("params", "layers", "hidden", "heads", "kv_heads"),
    [
        ("7B", 32, 4096, 32, 32),
        ("8B", 32, 4096, 32, 8),
        ("13B", 40, 5120, 40, 40),
        ("70B", 80, 8192, 64, 8),
        ("405B", 126, 16384, 128, 8),
        ("175B", 96, 12288, 96, 96),
        ("124M", 12, 768, 12, 12),
    ],
)
def test_a_number_of_parameters_has_the_shape_of_the_published_family(
    params: str, layers: int, hidden: int, heads: int, kv_heads: int
) -> None:
    asked = build_advise_task(AdviseOptions(params=params, gpus=8), None)
    model = asked.model
    assert (model.layers, model.hidden, model.heads, model.kv_heads) == (layers, hidden, heads, kv_heads)
    assert {one.layout.tp for one in list_runnable_choices(asked)} >= {1, 2, 4}
    assert "the shape of" in model.assumed


def test_published_families_have_the_parameters_of_their_names() -> None:
    from dtctl.advise.shape import build_model_profile

    known = {"Llama 2 7B": 6.74e9, "Llama 3.1 8B": 8.03e9, "Llama 3.1 70B": 70.55e9, "Llama 3.1 405B": 405.85e9,
             "Qwen2.5-32B": 32.76e9, "Qwen2.5-72B": 72.7e9, "GPT-NeoX-20B": 20.3e9, "TinyLlama": 1.1e9,
             "Yi-34B": 34.39e9, "Mistral Large": 122.6e9, "Llama 3.2 1B": 1.236e9}  # fmt: skip
    found = {shape.name: build_model_profile(shape).params for shape in FAMILIES}
    for name, params in known.items():
        assert found[name] == pytest.approx(params, rel=0.02), name


@pytest.mark.parametrize("params", [3e5, 5e6, 5e10, 2.3e11, 4e12])
def test_between_the_families_there_are_heads_that_gpus_can_divide(params: float) -> None:
    model = build_usual_model(params, seq=2048, name="between")
    assert model.params == params
    assert model.hidden < 4096 or model.heads % 8 == 0


def spec(train: str) -> Spec:
    text = f"cluster: {{transport: local, slots: 8}}\njob: {{script: t.py}}\ntrain: {{{train}}}\n"
    return parse_spec(text, source="dtctl.yaml", base_dir=Path())


def test_the_specs_precision_and_optimizer_are_honoured_and_never_written() -> None:
    numbers = AdviseOptions(params="1B", gpu="V100")
    asked = build_advise_task(numbers, spec("precision: fp16, optimizer: sgd, compile: true"))
    assert (asked.precision, asked.recipe.optimizer_bytes, asked.compiled) == ("fp16", 4, True)
    written = build_train_settings(asked, choose_best_layouts(asked).best)
    assert not {"precision", "optimizer", "compile"} & set(written)
    assert build_advise_task(numbers, spec("precision: fp32")).precision == "fp32"
    assert build_advise_task(numbers, spec("optimizer: sgd, momentum: 0.0")).recipe.optimizer_bytes == 0
    unset = build_advise_task(numbers, spec("lr: 1.0e-3"))
    assert (unset.precision, unset.recipe) == ("fp16", RUNTIME)
    assert build_train_settings(unset, choose_best_layouts(unset).best)["precision"] == "fp16"
    assert build_advise_task(replace(numbers, gpu="A100"), spec("lr: 1.0e-3")).precision == "bf16"


@pytest.mark.parametrize("kind", ["V100", "V100-16", "T4"])
def test_bf16_is_refused_where_the_gpu_has_none(kind: str) -> None:
    with raises(UsageError, "bf16") as refused:
        build_advise_task(AdviseOptions(params="1B", gpus=8, gpu=kind, precision="bf16"), None)
    assert refused.value.where == "--precision"
    with pytest.raises(UsageError) as refused:
        build_advise_task(AdviseOptions(params="1B", gpu=kind), spec("precision: bf16"))
    assert refused.value.where == "train.precision"


def test_gpus_without_bf16_are_those_before_ampere() -> None:
    assert {name for name, one in read_gpu_table().items() if not one.bf16} == {"V100", "V100-16", "T4"}
    with raises(UsageError, "fp8"):
        build_advise_task(AdviseOptions(params="1B", gpus=8, gpu="A100", fp8=True), None)


def test_offloading_counts_the_memory_of_the_host() -> None:
    model = build_usual_model(13e9, seq=2048, name="13B")
    roomy, cramped = (
        PlanningTask(model=model, hardware=cluster(2, kind="A100-40", host_memory=gib), global_batch=2)
        for gib in (512.0, 64.0)
    )
    found = choose_best_layouts(roomy).best
    assert found.fits
    assert found.layout.offload
    assert found.memory.host == pytest.approx(16 * 13e9 / 2)
    assert any(
        "of the host's memory" in reason or "in the host's memory" in reason
        for reason in choose_best_layouts(roomy).reasons
    )
    assert not choose_best_layouts(cramped).best.fits
    assert (
        "of the host's memory" in " ".join(choose_best_layouts(cramped).reasons)
        or choose_best_layouts(cramped).best.missing_bytes > 0
    )
    assert build_choice_json(found)["host_gib"] > 90


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(dp=16),
        ParallelLayout(dp=16, zero=1),
        ParallelLayout(fsdp=16),
        ParallelLayout(dp=2, fsdp=8),
        ParallelLayout(fsdp=4, tp=2, pp=2),
    ],
)
def test_snapshots_in_memory_are_counted_by_the_host(layout: ParallelLayout) -> None:
    without, with_one_copy = (
        build_advise_task(AdviseOptions(params="1B", gpus=16, per_node=8), spec(text))
        for text in ("seed: 1", "snapshot: {memory: {}}")
    )
    model = without.model
    assert estimate_layout_memory(model, layout, without.recipe).host == 0
    # Two that are kept and one that is written, each twice: weights and two moments in fp32, divided over 16 workers.
    expected = 6 * 12 * model.params / 16
    assert estimate_layout_memory(model, layout, with_one_copy.recipe).host == pytest.approx(expected, rel=0.05)
    roomy, cramped = (
        choose_best_layouts(replace(with_one_copy, hardware=cluster(16, host_memory=gib))) for gib in (1024.0, 4.0)
    )
    assert roomy.best.fits
    assert "(snapshots)" in " ".join(roomy.reasons)
    assert not cramped.best.fits


def test_experts_are_divided_where_gathering_them_takes_longer_than_sending_tokens() -> None:
    """A mixture of many experts on nodes with a slow network between them: 36B parameters, 3B at work."""
    mixture = build_decoder_model(
        layers=24, hidden=2048, heads=16, ffn=1408 * 4, experts=64, experts_used=4, vocab=32000, seq=4096
    )
    slow = Hardware(gpu=find_gpu_by_name("H100"), gpus=64, per_node=8, network=100.0)
    asked = PlanningTask(model=mixture, hardware=slow, global_batch=256)
    best = choose_best_layouts(asked).best
    assert best.layout.ep > 1
    written = build_train_settings(asked, best)["strategy"]
    assert resolve_degrees(written, workers=64, per_node=8).ep == best.layout.ep, (
        "the product of its degrees is that of the GPUs"
    )
    assert build_choice_json(best)["mesh"]["ep"] == written["ep"]
    whole = replace(best.layout, ep=1)
    parted, gathered = estimate_layout_memory(mixture, best.layout), estimate_layout_memory(mixture, whole)
    assert parted.states == pytest.approx(gathered.states), "sharded alike"
    assert parted.temporary < gathered.temporary, "and less of it is gathered"


def test_a_mesh_with_ep_is_priced_as_it_is_written() -> None:
    options = AdviseOptions(
        layers=32, hidden=4096, experts=8, gpus=64, seq=4096, batch=256, mesh="ep=8,fsdp=8", framework="fsdp"
    )
    best = choose_best_layouts(build_advise_task(options, None)).best
    assert (best.layout.fsdp, best.layout.ep, best.layout.workers, best.layout.data) == (64, 8, 64, 64)
    assert build_choice_json(best)["mesh"] == {"dp": 1, "fsdp": 8, "tp": 1, "pp": 1, "cp": 1, "ep": 8}


def test_a_mesh_that_is_named_is_priced_alone() -> None:
    options = AdviseOptions(params="70B", gpus=64, seq=8192, batch=128, mesh="fsdp=8,tp=8", framework="fsdp")
    found = choose_best_layouts(build_advise_task(options, None))
    assert {(one.layout.fsdp, one.layout.tp) for one in [found.best, *found.alternatives]} == {(8, 8)}
    exact = replace(options, mesh="dp=-1,tp=4,pp=4", framework="megatron", zero=1, micro_batch=1, chunks=5,
                    recompute="none", fp8=True)  # fmt: skip
    layout = choose_best_layouts(build_advise_task(exact, None)).best.layout
    assert layout == ParallelLayout(dp=4, tp=4, pp=4, zero=1, micro_batch=1, accumulate=32, chunks=5)
    for mesh, text in (("fsdp=7", "64"), ("sp=8,dp=8", "no axis sp"), ("fsdp=8,what", "what"), ("zig", "no strategy")):
        with pytest.raises(UsageError, match=text):
            build_advise_task(replace(options, mesh=mesh), None)
    with raises(UsageError, "64 replicas"):
        choose_best_layouts(build_advise_task(replace(options, mesh="fsdp", batch=7), None))


def test_what_the_spec_describes_now_is_priced_beside_the_advice() -> None:
    asked = build_advise_task(AdviseOptions(params="7B"), spec("strategy: ddp, micro_batch: 1, precision: bf16"))
    found = choose_best_layouts(asked)
    assert found.written is not None
    assert (found.written.strategy, found.written.fits) == ("ddp", False)
    assert "the spec's own dp 8, micro batch 1 needs" in found.reasons[-1]
    assert choose_best_layouts(build_advise_task(AdviseOptions(params="7B"), spec("strategy: auto"))).written is None


def test_context_parallelism_is_searched_for_long_sequences_and_in_the_help(tmp_path: Path) -> None:
    long = PlanningTask(model=build_usual_model(8e9, seq=131072, name="8B"), hardware=cluster(16), global_batch=4)
    assert {one.layout.cp for one in list_runnable_choices(long)} >= {1, 2, 4, 8}
    assert not any(one.layout.cp > 1 < one.layout.pp for one in list_runnable_choices(long))
    best = choose_best_layouts(long).best
    assert best.layout.cp > 1
    assert build_train_settings(long, best)["strategy"]["cp"] == best.layout.cp
    done = dtctl("advise", "--help", cwd=tmp_path)
    assert "context parallelism" in " ".join(done.stdout.split())


def test_memory_is_never_planned_to_the_brim_and_copies_give_way_to_shards_that_are_as_fast() -> None:
    for params in (3e8, 1e9, 3e9, 7e9):
        asked = PlanningTask(model=build_usual_model(params, seq=2048, name="x"), hardware=cluster(8), global_batch=64)
        best = choose_best_layouts(asked).best
        assert best.memory.total <= BUDGET * 80 * GIB < 0.95 * 80 * GIB
        if best.strategy == "ddp":
            shards = [one for one in list_runnable_choices(asked) if one.strategy == "fsdp" and one.fits]
            fastest = max(one.speed.tokens_per_s_per_gpu for one in shards)
            assert best.memory.states <= COPIES * best.budget or best.speed.tokens_per_s_per_gpu > fastest


def test_absurd_answers_are_called_absurd() -> None:
    asked = PlanningTask(
        model=build_usual_model(70e9, seq=2048, name="70B"), hardware=replace(cluster(64, per_node=1), network=0.125)
    )
    found = choose_best_layouts(asked)
    assert found.best.peak_share < ABSURD
    assert found.reasons[0].startswith("absurdly slow")
    assert build_choice_json(found.best)["absurd"] is True
    sensible = choose_best_layouts(
        PlanningTask(model=build_usual_model(70e9, seq=2048, name="70B"), hardware=cluster(256), global_batch=1024)
    )
    assert not build_choice_json(sensible.best)["absurd"]
    assert "absurd" not in " ".join(sensible.reasons)


def test_frameworks_of_the_command_line_are_those_that_are_known() -> None:
    from dtctl.cli.common.advise_options import FrameworkName

    assert [one.value for one in FrameworkName] == list(FRAMEWORKS)


def test_states_in_bf16_alone_need_half_of_mixed_ones() -> None:
    whole, half = (
        build_advise_task(AdviseOptions(params="7B", gpus=8, states=states), None).recipe for states in ("fp32", "bf16")
    )
    layout = ParallelLayout(fsdp=8)
    model = build_usual_model(7e9, seq=2048, name="7B")
    assert estimate_layout_memory(model, layout, half).states == pytest.approx(
        estimate_layout_memory(model, layout, whole).states / 2
    )
    with raises(UsageError, "fp32 bf16"):
        build_advise_task(AdviseOptions(params="7B", gpus=8, states="fp8"), None)


def test_the_command_prices_a_mesh_in_json(tmp_path: Path) -> None:
    argv = ["--params", "8B", "--gpus", "8", "--seq", "8192", "--framework", "fsdp", "--mesh", "fsdp",
            "--micro-batch", "2", "--recompute", "selective", "--compile", "--json"]  # fmt: skip
    done = dtctl("advise", *argv, cwd=tmp_path)
    found = json.loads(done.stdout)["recommendation"]
    assert (found["mesh"]["fsdp"], found["micro_batch"], found["recompute"]) == (8, 2, "selective")


def test_validate_estimates_the_memory_of_what_the_spec_describes() -> None:
    model = "model: {layers: 12, heads: 12, embed: 768, context: 1024}"
    found = estimate_spec_memory(
        spec(f"{model}, strategy: fsdp, precision: bf16, micro_batch: 2, optimizer: sgd, checkpointing: full")
    )
    assert found is not None
    layout, need = found
    assert layout == ParallelLayout(fsdp=8, micro_batch=2, recompute="full", precision="bf16")
    whole = estimate_spec_memory(spec(f"{model}, strategy: ddp, micro_batch: 2"))
    assert whole is not None
    assert whole[0].precision == "fp32"
    assert whole[1].states == pytest.approx(16 / 12 * 8 * need.states)
    assert estimate_spec_memory(spec(f"{model}, strategy: auto")) is None
    assert estimate_spec_memory(spec("strategy: fsdp")) is None


def test_without_a_spec_meshes_are_held_as_the_field_holds_them_and_with_one_as_the_spec_says() -> None:
    asked = build_advise_task(AdviseOptions(params="7B", gpus=16), None)
    plain, parallel = asked.recipe_of(ParallelLayout(fsdp=16)), asked.recipe_of(ParallelLayout(dp=2, tp=8))
    assert (plain.weight_bytes, plain.autocast, plain.whole_gradients) == (4, False, False)
    assert (parallel.weight_bytes, parallel.master_bytes, parallel.loss_parallel) == (2, 4, True)
    assert build_advise_task(AdviseOptions(params="7B", gpus=16, framework="runtime"), None).recipe == RUNTIME
    assert (
        build_advise_task(AdviseOptions(params="7B"), spec("lr: 1.0e-3, precision: bf16")).recipe_of(
            ParallelLayout(tp=8)
        )
        == RUNTIME
    )
