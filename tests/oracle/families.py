"""The families and RoPE scalings that the oracle tests run, and how transformers is asked to make each.

A case is a class name of transformers less 'ForCausalLM', its options beyond the small common shape, and the one-line
title under which docs/use/models.md lists it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
SCALED_QUERIES = {
    **YARN,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
DIVISORS = [1.0 + 0.3 * i for i in range(8)]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "short_factor": DIVISORS,
    "long_factor": [2 * divisor for divisor in DIVISORS],
    "original_max_position_embeddings": 128,
}
SLIDING = {"sliding_window": 8}


TEXT_CONFIGS = {
    "Gemma3": "Gemma3Text",
    "Gemma4": "Gemma4Text",
    "Gemma4Unified": "Gemma4UnifiedText",
    "Llama4": "Llama4Text",
    "Qwen3_5": "Qwen3_5Text",
    "Qwen3_5Moe": "Qwen3_5MoeText",
}
"""Class of a model, less 'ForCausalLM' -> of its config, less 'Config', where that is another."""

_GEMMA4 = {
    **SLIDING,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 160,
}


@dataclass(frozen=True)
class Case:
    """max_model_len: what our side is told to serve; it decides length-dependent RoPE."""

    title: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 64


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


CASES = (
    Case("Llama 2", "Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}),
    Case("Llama 3 (grouped queries)", "Llama", {"tie_word_embeddings": False}),
    Case("Llama 3.1, 3.2 (llama3 RoPE)", "Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    Case("Llama, linear RoPE", "Llama", rope(rope_type="linear", factor=4.0)),
    Case("Llama, dynamic NTK RoPE, within its context", "Llama", rope(rope_type="dynamic", factor=4.0)),
    Case("Llama, YaRN", "Llama", {"rope_parameters": YARN}),
    Case("Llama, YaRN with mscale", "Llama", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}),
    Case("Llama, wide heads, biases", "Llama", {"head_dim": 32, "attention_bias": True, "mlp_bias": True}),
    Case("SmolLM2", "Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    Case("SmolLM3 (layers without RoPE)", "SmolLM3"),
    Case(
        "SmolLM3, sliding window",
        "SmolLM3",
        SLIDING | {"use_sliding_window": True, "no_rope_layer_interval": 2},
    ),
    Case("Mistral, sliding window", "Mistral", SLIDING),
    Case("Mistral, no window", "Mistral", {"sliding_window": None}),
    Case(
        "Ministral (windows by layer type)",
        "Ministral",
        SLIDING | {"head_dim": 16, "layer_types": ["full_attention", "sliding_attention"] * 2},
    ),
    Case("Ministral 3", "Ministral3", {"head_dim": 32, "rope_parameters": SCALED_QUERIES}),
    Case(
        "Ministral 3, no YaRN, sliding window",
        "Ministral3",
        SLIDING | {"head_dim": 16, "rope_parameters": {**SCALED_QUERIES, "rope_type": "default"}},
    ),
    Case("Qwen2, Qwen2.5", "Qwen2"),
    Case("Qwen2, sliding window", "Qwen2", SLIDING | {"use_sliding_window": True, "max_window_layers": 2}),
    Case("Qwen2.5 with YaRN", "Qwen2", {"rope_parameters": YARN}),
    Case("Qwen3", "Qwen3", {"head_dim": 32}),
    Case("Gemma", "Gemma", {"head_dim": 32}),
    Case("Gemma with SiLU", "Gemma", {"head_dim": 32, "hidden_act": "silu"}),
    Case("Gemma as first released", "Gemma", {"head_dim": 32, "hidden_act": "gelu"}),
    Case("Gemma 2", "Gemma2", SLIDING | {"head_dim": 32, "query_pre_attn_scalar": 24}),
    Case(
        "Gemma 2, tight caps",
        "Gemma2",
        SLIDING
        | {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 2.0},
    ),
    Case(
        "Gemma 2, no caps, SiLU",
        "Gemma2",
        SLIDING
        | {
            "head_dim": 32,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "silu",
        },
    ),
    Case(
        "Gemma 3, capped logits, SiLU",
        "Gemma3",
        SLIDING | {"head_dim": 32, "num_hidden_layers": 7, "hidden_activation": "silu", "final_logit_softcapping": 2.0},
    ),
    Case("Gemma 3", "Gemma3", SLIDING | {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 7}),
    Case(
        "Gemma 3, long context",
        "Gemma3",
        SLIDING
        | {
            "head_dim": 32,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    Case("Gemma 4", "Gemma4", _GEMMA4 | {"layer_types": ["sliding_attention", "full_attention"] * 2}),
    Case("Gemma 4, one kind of heads", "Gemma4", _GEMMA4 | {"global_head_dim": 16, "attention_bias": True}),
    Case(
        "Gemma 4, shared KV, a wide FFN, capped logits",
        "Gemma4",
        _GEMMA4
        | {
            "num_hidden_layers": 7,
            "layer_types": [*["sliding_attention", "sliding_attention", "full_attention"] * 2, "full_attention"],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 2.0,
        },
    ),
    Case(
        "Gemma 4, keys that are values",
        "Gemma4",
        _GEMMA4
        | {
            "num_hidden_layers": 5,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"],
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "hidden_activation": "silu",
        },
    ),
    Case(
        "Gemma 4 Unified",
        "Gemma4Unified",
        SLIDING
        | {"head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    Case("Phi-3", "Phi3", SLIDING),
    Case(
        "Phi-3 128k (longrope, short)", "Phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 128}
    ),
    Case("Phi-4-mini (partial RoPE)", "Phi3", rope(rope_type="default", partial_rotary_factor=0.75) | {"head_dim": 32}),
    Case("OLMo (layer norms without weights)", "Olmo"),
    Case("OLMo 2", "Olmo2"),
    Case("OLMo 3", "Olmo3", SLIDING),
    Case(
        "Granite 3",
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    ),
    Case("StarCoder2", "Starcoder2", SLIDING),
    Case("StableLM 2", "StableLm", {"use_qkv_bias": True}),
    Case("StableLM 2 12B (norms of heads)", "StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    Case("StableLM 2, parallel residuals", "StableLm", {"use_parallel_residual": True}),
    Case("Command R", "Cohere", {"logit_scale": 0.7}),
    Case("Command R, biases, exact GELU", "Cohere", {"attention_bias": True, "hidden_act": "gelu"}),
    Case("Command R+ (norms of heads)", "Cohere", {"use_qk_norm": True, "logit_scale": 0.7}),
    Case("Command R7B, Command A", "Cohere2", SLIDING | {"logit_scale": 0.7}),
    Case("Helium", "Helium", {"head_dim": 16}),
    Case("Helium, biases", "Helium", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    Case("GLM-4 (9B, 2024)", "Glm", {"head_dim": 16}),
    Case("GLM-4", "Glm4", {"head_dim": 16, "attention_bias": True}),
    Case("EXAONE 4", "Exaone4", SLIDING),
    Case("EXAONE 4, no windows", "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    Case("EXAONE 4, a window that no layer has", "Exaone4", SLIDING | {"layer_types": ["full_attention"] * 4}),
    Case("ERNIE 4.5", "Ernie4_5", {"head_dim": 32}),
    Case("ERNIE 4.5, biases", "Ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False}),
    Case("InternLM 3", "InternLM3", {"head_dim": 32} | rope(rope_type="dynamic", factor=6.0)),
    Case("EXAONE 3, 3.5", "Exaone", {"rope_parameters": LLAMA3}),
    Case("Hunyuan (dense)", "HunYuanDenseV1", {"head_dim": 16}),
    Case(
        "Hunyuan (dense), stretched base",
        "HunYuanDenseV1",
        {"head_dim": 32, "attention_bias": True} | rope(rope_type="dynamic", alpha=50.0, factor=1.0),
    ),
    Case("Phi-1, Phi-1.5, Phi-2", "Phi", {"num_key_value_heads": 4}),
    Case("GPT-NeoX, Pythia", "GPTNeoX", {"attention_bias": True}),
    Case(
        "GPT-NeoX, sequential residuals, no biases",
        "GPTNeoX",
        {"use_parallel_residual": False, "attention_bias": False},
    ),
    Case("Falcon 7B", "Falcon"),
    Case("Falcon 40B", "Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    Case(
        "Falcon, new architecture, one norm",
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "ffn_hidden_size": 96},
    ),
    Case(
        "Falcon, sequential residuals",
        "Falcon",
        {"parallel_attn": False, "multi_query": False, "activation": "gelu_new"},
    ),
    Case("Arcee (AFM)", "Arcee", {"rope_parameters": YARN}),
    Case("Arcee, biases", "Arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    Case("Nemotron 3, 4, Minitron", "Nemotron", {"attention_bias": True}),
    Case("CWM", "Cwm", SLIDING | {"head_dim": 16, "num_hidden_layers": 5}),
    Case("Seed-OSS", "SeedOss", {"head_dim": 16, "attention_bias": True}),
)
