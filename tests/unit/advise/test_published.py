"""Memory and speed beside published figures.

torchtitan's: https://github.com/pytorch/torchtitan/blob/b5bcd76c/benchmarks/llama3_h100_202412_torchtitan.md (tables
1 to 4) and asyncTP_llama3_h100_2025-06_torchtitan.md beside it; memory is what torch reserves, without the context and
NCCL. ZeRO's table is table 1 of https://arxiv.org/abs/1910.02054. DeepSpeed's estimate is that of its documentation:
https://deepspeed.readthedocs.io/en/latest/memory.html.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.published import RECIPES
from dtctl.advise.config import parse_model_config
from dtctl.advise.hardware import Hardware, find_gpu_by_name
from dtctl.advise.model import build_decoder_model
from dtctl.advise.speed import estimate_step_speed
from dtctl.estimate.frameworks import FRAMEWORKS, apply_recipe_precision
from dtctl.estimate.memory import (
    CONTEXT,
    EXCHANGE,
    GIB,
    TORCHTITAN,
    ParallelLayout,
    compute_state_bytes,
    estimate_layout_memory,
)

LLAMA_8B = build_decoder_model(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192, gated=True
)
LLAMA_70B = build_decoder_model(
    layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256, seq=8192, gated=True
)
SAC_8 = ParallelLayout(fsdp=8, micro_batch=2, recompute="selective")
SAC_128 = ParallelLayout(fsdp=128, micro_batch=2, recompute="selective")
TWO_D = ParallelLayout(fsdp=32, tp=8, micro_batch=16, recompute="full")
SMALL_TP = ParallelLayout(fsdp=8, tp=8, micro_batch=12, recompute="selective")

# name, model, layout, compiled, fp8, GiB, tokens per second and GPU
CASES = [
    ("H1, table 1", LLAMA_8B, SAC_8, False, False, 82.4, 5762),
    ("H1, compiled", LLAMA_8B, SAC_8, True, False, 77.0, 6667),
    ("H1, fp8", LLAMA_8B, SAC_8, True, True, 76.8, 8532),
    ("table 3", LLAMA_8B, SAC_128, False, False, 67.0, 5605),
    ("table 3, compiled", LLAMA_8B, SAC_128, True, False, 62.0, 6514),
    ("table 3, fp8", LLAMA_8B, SAC_128, True, True, 61.8, 8380),
    ("H4, table 4", LLAMA_70B, TWO_D, True, True, 71.9, 829),
    ("async TP's baseline, bf16", LLAMA_70B, TWO_D, True, False, None, 597.3),
    ("async TP's baseline, fp8", LLAMA_70B, TWO_D, True, True, None, 809.8),
    ("async TP's baseline, 8B, bf16", LLAMA_8B, SMALL_TP, True, False, None, 4378),
    ("async TP's baseline, 8B, fp8", LLAMA_8B, SMALL_TP, True, True, None, 5078.1),
    ("table 2, cp 1", replace(LLAMA_8B, seq=32768), ParallelLayout(fsdp=8, recompute="full"), True, True, 83.9, 3890),
    (
        "table 2, cp 2",
        replace(LLAMA_8B, seq=65536),
        ParallelLayout(fsdp=4, cp=2, recompute="full"),
        True,
        True,
        84.2,
        2540,
    ),
    (
        "table 2, cp 4",
        replace(LLAMA_8B, seq=131072),
        ParallelLayout(fsdp=2, cp=4, recompute="full"),
        True,
        True,
        84.0,
        1071,
    ),
    ("table 2, cp 8", replace(LLAMA_8B, seq=262144), ParallelLayout(cp=8, recompute="full"), True, True, 84.5, 548),
]


@pytest.mark.parametrize(
    ("name", "model", "layout", "compiled", "fp8", "gib", "tokens"), CASES, ids=lambda v: str(v)[:30]
)
def test_torchtitan(name, model, layout, compiled, fp8, gib, tokens) -> None:
    if gib is not None:
        reserved = (estimate_layout_memory(model, layout, TORCHTITAN).total - CONTEXT - EXCHANGE) / GIB
        assert reserved == pytest.approx(gib, rel=0.15), name
    hardware = Hardware(gpu=find_gpu_by_name("H100-96"), gpus=layout.workers, per_node=8, network=400)
    found = estimate_step_speed(model, layout, hardware, TORCHTITAN, compiled=compiled, fp8=fp8)
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens, rel=0.30), name


def test_the_models_have_the_parameters_that_are_published() -> None:
    assert LLAMA_8B.params == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA_70B.params == pytest.approx(70.55e9, rel=1e-3)


# Parameters -> shards -> GB with stages 1, 2, 3, as printed there.
ZERO = {
    7.5e9: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30.0"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128e9: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1e12: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}


@pytest.mark.parametrize("params", ZERO)
def test_zeros_table(params: float) -> None:
    """H13: all 54 cells to the digits that are printed; the paper cuts some last digits off instead of rounding."""
    for shards, row in ZERO[params].items():
        for stage, printed in zip((1, 2, 3), row, strict=True):
            gigabytes = compute_state_bytes(params, stage=stage, shards=shards) / 1e9  # type: ignore[arg-type]
            last = 10.0 ** -len(printed.partition(".")[2])
            assert abs(gigabytes - float(printed)) < last, (params, shards, stage)


@pytest.mark.parametrize(("gpus", "gib"), [(1, 47.91), (8, 6.10)])
def test_deepspeeds_estimate_of_t5_3b(gpus: int, gib: float) -> None:
    """H14: 2851M parameters, 32M in the largest layer; DeepSpeed counts gradients in fp32 and one layer gathered."""
    estimate = compute_state_bytes(2851e6, stage=3, shards=gpus, gradient_bytes=4) + 4 * 32e6
    assert estimate / GIB == pytest.approx(gib, rel=0.005)


# KempnerForge: bf16 everywhere, gradients of two or four micro batches added up by FSDP2 without exchange.
SUMMED = replace(RECIPES["pure"], whole_gradients=True, whole_bytes=4, sequence_parallel=True)


@pytest.mark.parametrize(("tp", "fsdp", "gib"), [(2, 2, 45.9), (4, 2, 32.7), (4, 4, 29.4), (4, 8, 27.6)])
def test_gradients_that_are_added_up_without_exchange_are_whole_and_fp32(tp: int, fsdp: int, gib: float) -> None:
    layout = ParallelLayout(fsdp=fsdp, tp=tp, micro_batch=4, accumulate=2, recompute="full")
    model = replace(LLAMA_8B, seq=4096)
    assert estimate_layout_memory(model, layout, SUMMED, compiled=True).tensors / GIB == pytest.approx(gib, rel=0.15)


def test_zero_2_and_3_hold_16_bytes_and_zero_1_copies_of_gradients() -> None:
    model, recipe = replace(LLAMA_8B, seq=4096), FRAMEWORKS["deepspeed"]
    third = estimate_layout_memory(model, ParallelLayout(fsdp=8, recompute="full"), recipe).states
    assert third == pytest.approx(model.params * 16 / 8, rel=0.01)
    first = estimate_layout_memory(model, ParallelLayout(dp=8, zero=1, recompute="full"), recipe).states
    assert first == pytest.approx(model.params * (4 + 21 / 8), rel=0.01)


def test_a_worker_that_offloads_copies_its_shard_where_the_framework_does() -> None:
    layout = ParallelLayout(fsdp=8, offload=True, recompute="full")
    whole = replace(FRAMEWORKS["fsdp"], shards_copied=False)
    saved = (
        estimate_layout_memory(LLAMA_8B, layout, whole).temporary
        - estimate_layout_memory(LLAMA_8B, layout, FRAMEWORKS["fsdp"]).temporary
    )
    assert saved == pytest.approx(2 * LLAMA_8B.block_params * 4 * 7 / 8)


def test_a_loss_of_the_framework_s_own_has_no_more_copies_than_a_whole_one() -> None:
    model, layout = replace(LLAMA_8B, seq=4096), ParallelLayout(tp=4)
    megatron, torch_s = FRAMEWORKS["megatron"], replace(FRAMEWORKS["megatron"], fused=False)
    assert estimate_layout_memory(model, layout, megatron).logits == pytest.approx(2.5 * 4 * 4096 * model.vocab / 4)
    assert estimate_layout_memory(model, layout, torch_s).logits == pytest.approx(4.5 * 4 * 4096 * model.vocab / 4)


LLAMA2_7B = build_decoder_model(
    layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000, seq=4096, gated=True
)
OLD_LOSS = replace(FRAMEWORKS["accelerate"], loss_copies=4.5)


def test_keys_and_values_that_stay_are_two_tensors_of_every_block() -> None:
    layout = ParallelLayout(fsdp=8, micro_batch=4, recompute="full")
    plain = estimate_layout_memory(LLAMA2_7B, layout, OLD_LOSS).activations
    cached = estimate_layout_memory(LLAMA2_7B, layout, replace(OLD_LOSS, cache=True)).activations
    assert cached - plain == 32 * 2 * (4 * 4096) * 4096 * 2  # blocks, keys and values, tokens, width, bytes


def test_a_cache_costs_nothing_where_no_block_is_computed_again() -> None:
    layout = ParallelLayout(fsdp=8, micro_batch=1)
    assert (
        estimate_layout_memory(LLAMA2_7B, layout, replace(OLD_LOSS, cache=True)).total
        == estimate_layout_memory(LLAMA2_7B, layout, OLD_LOSS).total
    )


def test_copies_of_the_logits_are_those_of_the_framework() -> None:
    layout = ParallelLayout(fsdp=8, micro_batch=4, recompute="full")
    logits = estimate_layout_memory(LLAMA2_7B, layout, OLD_LOSS).logits
    assert logits == 4.5 * 4 * (4 * 4096) * 32000
    assert estimate_layout_memory(LLAMA2_7B, layout, FRAMEWORKS["accelerate"]).logits == 2.5 * 4 * (4 * 4096) * 32000


def test_gradients_that_are_divided_are_exchanged_in_each_micro_batch() -> None:
    hardware = Hardware(gpu=find_gpu_by_name("A100"), gpus=8, per_node=8, network=100)

    def exchange(zero: int, accumulate: int) -> float:
        layout = ParallelLayout(dp=8, zero=zero, accumulate=accumulate)
        return estimate_step_speed(LLAMA2_7B, layout, hardware, FRAMEWORKS["deepspeed"]).exchange_s

    assert exchange(1, 8) == exchange(1, 1)
    assert exchange(2, 8) > 3 * exchange(2, 1)


def test_experts_of_a_stage_lie_on_no_more_gpus_than_it_has() -> None:
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 8192, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    }  # fmt: skip
    model = parse_model_config(config, source="", seq=8192, name="Qwen3-30B-A3B")
    recipe = apply_recipe_precision(FRAMEWORKS["megatron"], "bf16")
    of_tp, of_ep = (
        estimate_layout_memory(model, ParallelLayout(dp=dp, tp=tp, pp=2, ep=4, zero=1), recipe).states / GIB
        for dp, tp in ((1, 4), (4, 1))
    )
    # 18 bytes of each parameter on 8 GPUs: no division makes less of it.
    assert of_tp == pytest.approx(18 * model.params / 8 / GIB, rel=0.06)
    assert of_tp <= of_ep
