"""Parameters computed from config.json beside those that are published on the models' cards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dtctl.advise.config import FAMILIES, parse_model_config, read_config
from dtctl.advise.sizes import format_short_count
from dtctl.errors import UsageError
from tests.facts import raises

QWEN3_30B = {
    "model_type": "qwen3_moe", "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768, "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "tie_word_embeddings": False,
    "vocab_size": 151936,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128, "vocab_size": 129280,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip

# name, parameters as published, keys
CARDS: list[tuple[str, float, dict[str, Any]]] = [
    ("gpt2", 124.4e6, {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
                       "vocab_size": 50257}),
    ("gpt-j-6b", 6.05e9, {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_inner": None,
                          "vocab_size": 50400, "tie_word_embeddings": False}),
    ("gpt-neox-20b", 20.55e9, {"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576,
                               "num_attention_heads": 64, "num_hidden_layers": 44, "vocab_size": 50432,
                               "tie_word_embeddings": False}),
    ("Llama-3-8B", 8.03e9, {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
                            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
                            "vocab_size": 128256, "tie_word_embeddings": False}),
    ("Llama-3.2-1B", 1.24e9, {"model_type": "llama", "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192,
                              "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
                              "vocab_size": 128256, "tie_word_embeddings": True}),
    ("Mistral-7B-v0.1", 7.24e9, {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
                                 "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
                                 "vocab_size": 32000}),
    ("Mixtral-8x7B", 46.7e9, {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
                              "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
                              "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000}),
    ("Qwen2-0.5B", 494e6, {"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
                           "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
                           "vocab_size": 151936, "tie_word_embeddings": True}),
    ("Qwen1.5-MoE-A2.7B", 14.3e9, {"model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
                                   "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
                                   "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 24,
                                   "num_experts": 60, "num_experts_per_tok": 4, "vocab_size": 151936}),
    ("Qwen3-8B", 8.19e9, {"model_type": "qwen3", "head_dim": 128, "hidden_size": 4096, "intermediate_size": 12288,
                          "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
                          "vocab_size": 151936, "tie_word_embeddings": False}),
    ("Qwen3-30B-A3B", 30.5e9, QWEN3_30B),
    ("gemma-2b", 2.51e9, {"model_type": "gemma", "head_dim": 256, "hidden_size": 2048, "intermediate_size": 16384,
                          "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1,
                          "vocab_size": 256000}),
    ("gemma-2-2b", 2.61e9, {"model_type": "gemma2", "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216,
                            "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
                            "vocab_size": 256000}),
    ("gemma-3-1b", 1.00e9, {"model_type": "gemma3_text", "head_dim": 256, "hidden_size": 1152,
                            "intermediate_size": 6912, "num_attention_heads": 4, "num_hidden_layers": 26,
                            "num_key_value_heads": 1, "vocab_size": 262144}),
    ("gemma-3-4b, its text", 3.88e9, {"model_type": "gemma3", "vision_config": {"hidden_size": 1152},
                                      "text_config": {"model_type": "gemma3_text", "hidden_size": 2560,
                                                      "intermediate_size": 10240, "num_hidden_layers": 34}}),
    ("phi-2", 2.78e9, {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 32,
                       "num_hidden_layers": 32, "num_key_value_heads": None, "vocab_size": 51200,
                       "tie_word_embeddings": False}),
    ("Phi-3-mini", 3.82e9, {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
                            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
                            "vocab_size": 32064, "tie_word_embeddings": False}),
    ("DeepSeek-V2-Lite", 15.7e9, {"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944,
                                  "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_hidden_layers": 27,
                                  "num_key_value_heads": 16, "vocab_size": 102400, "n_routed_experts": 64,
                                  "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
                                  "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
                                  "qk_rope_head_dim": 64, "v_head_dim": 128}),
    ("DeepSeek-V3", 671e9, DEEPSEEK_V3),
    ("falcon-7b", 7.22e9, {"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
                           "num_hidden_layers": 32, "multi_query": True, "new_decoder_architecture": False,
                           "num_kv_heads": 71, "vocab_size": 65024}),
    ("falcon-40b", 41.8e9, {"model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128,
                            "num_hidden_layers": 60, "num_kv_heads": 8, "new_decoder_architecture": True,
                            "vocab_size": 65024}),
    ("opt-1.3b", 1.32e9, {"model_type": "opt", "hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32,
                          "num_hidden_layers": 24, "vocab_size": 50272, "word_embed_proj_dim": 2048,
                          "max_position_embeddings": 2048}),
    ("opt-350m", 331e6, {"model_type": "opt", "hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16,
                         "num_hidden_layers": 24, "vocab_size": 50272, "word_embed_proj_dim": 512,
                         "max_position_embeddings": 2048}),
    ("bloom-7b1", 7.07e9, {"model_type": "bloom", "hidden_size": 4096, "n_head": 32, "n_layer": 30,
                           "vocab_size": 250880}),
    ("bert-base-uncased", 110e6, {"model_type": "bert", "hidden_size": 768, "intermediate_size": 3072,
                                  "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30522,
                                  "max_position_embeddings": 512}),
    ("distilbert-base-uncased", 67e6, {"model_type": "distilbert", "dim": 768, "hidden_dim": 3072, "n_heads": 12,
                                       "n_layers": 6, "vocab_size": 30522, "max_position_embeddings": 512}),
    ("t5-base", 223e6, {"model_type": "t5", "d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12,
                        "num_layers": 12, "num_decoder_layers": 12, "vocab_size": 32128, "n_positions": 512}),
    ("flan-t5-base", 248e6, {"model_type": "t5", "d_model": 768, "d_ff": 2048, "d_kv": 64, "num_heads": 12,
                             "num_layers": 12, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
                             "vocab_size": 32128}),
    ("mt5-small", 300e6, {"model_type": "mt5", "d_model": 512, "d_ff": 1024, "d_kv": 64, "num_heads": 6,
                          "num_layers": 8,
                          "vocab_size": 250112, "tie_word_embeddings": False}),
    ("mbart-large-50", 611e6, {"model_type": "mbart", "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12,
                               "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "vocab_size": 250054,
                               "max_position_embeddings": 1024}),
    ("roberta-large", 355e6, {"model_type": "roberta", "hidden_size": 1024, "intermediate_size": 4096,
                              "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50265,
                              "max_position_embeddings": 514}),
    ("gpt-neo-2.7B", 2.65e9, {"model_type": "gpt_neo", "hidden_size": 2560, "num_layers": 32, "num_heads": 20,
                              "vocab_size": 50257, "max_position_embeddings": 2048}),
    ("OLMo-7B", 6.89e9, {"model_type": "olmo", "hidden_size": 4096, "intermediate_size": 11008,
                         "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 50304}),
    ("OLMo-2-7B", 7.30e9, {"model_type": "olmo2", "hidden_size": 4096, "intermediate_size": 11008,
                           "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 100352}),
    ("DeepSeek-V2", 236e9, {"model_type": "deepseek_v2", "hidden_size": 5120, "intermediate_size": 12288,
                            "moe_intermediate_size": 1536, "num_attention_heads": 128, "num_hidden_layers": 60,
                            "num_key_value_heads": 128, "vocab_size": 102400, "n_routed_experts": 160,
                            "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
                            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
                            "qk_rope_head_dim": 64, "v_head_dim": 128}),
    ("bart-large", 406e6, {"model_type": "bart", "d_model": 1024, "encoder_layers": 12, "decoder_layers": 12,
                           "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "vocab_size": 50265,
                           "num_hidden_layers": 12, "max_position_embeddings": 1024}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "published", "keys"), CARDS, ids=[name for name, _, _ in CARDS])
def test_parameters_are_those_of_the_card(name: str, published: float, keys: dict[str, Any]) -> None:
    model = parse_model_config(keys, source=name, seq=512)
    assert model.params == pytest.approx(published, rel=0.02)
    assert f"{format_short_count(model.params)} parameters" in model.assumed
    assert model.params == pytest.approx(model.layers * model.block_params + model.root_params)


@pytest.mark.parametrize(("keys", "published"), [(QWEN3_30B, 3.3e9), (DEEPSEEK_V3, 37e9)])
def test_parameters_at_work_for_a_token_are_those_of_the_card(keys: dict[str, Any], published: float) -> None:
    """Cards count the embedding, which is looked up and not multiplied with."""
    model = parse_model_config(keys, source="x", seq=512)
    assert model.active_params + keys["vocab_size"] * keys["hidden_size"] == pytest.approx(published, rel=0.025)


def test_experts_may_be_in_some_blocks_only() -> None:
    every = parse_model_config(QWEN3_30B, source="x", seq=512)
    some = parse_model_config({**QWEN3_30B, "decoder_sparse_step": 2, "mlp_only_layers": [1]}, source="x", seq=512)
    assert some.expert_params == pytest.approx(every.expert_params * 23 / 48)


@pytest.mark.parametrize("kind", ["mamba", "vit", "whisper", "vicuna", "Llama"])
def test_a_model_that_the_formulas_do_not_know_is_refused_with_what_to_do(kind: str) -> None:
    keys = {"model_type": kind, "hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 1000}
    with raises(UsageError, f"model_type {kind}") as caught:
        parse_model_config(keys, source="config.json", seq=None)
    assert "--model module:factory" in str(caught.value.hint)


def test_what_is_guessed_or_not_counted_is_told() -> None:
    model = parse_model_config(
        {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32}, source="x", seq=None
    )
    assert [doubt.partition(" ")[0] for doubt in model.doubts] == [
        "num_attention_heads", "intermediate_size", "vocab_size",
    ]  # fmt: skip
    named = {name: keys for name, _, keys in CARDS}
    assert "vision_config" in parse_model_config(named["gemma-3-4b, its text"], source="x", seq=None).doubts[0]
    assert "encoder" in parse_model_config(named["t5-base"], source="x", seq=None).doubts[-1]
    assert parse_model_config(named["Llama-3-8B"], source="x", seq=None).doubts == ()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"hidden_size": float("inf")}, "whole number"),
        ({"hidden_size": "4096"}, "whole number"),
        ({"num_hidden_layers": True}, "whole number"),
        ({"hidden_size": 10**400}, "size"),
        ({"num_hidden_layers": 0}, "1"),
        ({"num_attention_heads": 0}, "1"),
        ({"num_attention_heads": 3}, "3"),
        ({"num_key_value_heads": 5}, "5 kv_heads"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "5 4"),
    ],
)
def test_numbers_that_no_model_has_are_refused(keys: dict[str, Any], text: str) -> None:
    usual = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    with raises(UsageError, text):
        parse_model_config({**usual, **keys}, source="x", seq=None)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CARDS[0][2]), encoding="utf-8-sig")
    assert read_config(tmp_path / "config.json", seq=None).params == pytest.approx(CARDS[0][1], rel=0.02)


def test_every_family_has_a_model_here() -> None:
    assert {keys["model_type"] for _, _, keys in CARDS} == set(FAMILIES)
