"""The families of mixtures of experts that the oracle tests run; see families.py.

transformers is asked for few and small experts, of widths that are no multiple of 32 in one case.
"""

from __future__ import annotations

from families import LLAMA3, LONGROPE, SLIDING, Case, rope

_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GLM = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 16,
    "num_nextn_predict_layers": 0,
}
_DOTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_SOLAR = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16}
_GRANITE = {
    "num_local_experts": 5,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
_GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16, "max_position_embeddings": 8192}
_HUNYUAN = {"num_experts": 6, "moe_topk": 2, "head_dim": 32}
_EXAONE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_shared_experts": 2,
}
_AFMOE = _EXAONE | {"head_dim": 16, "num_dense_layers": 1, "route_scale": 2.5}
_ERNIE = {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32}

_LLAMA4 = {
    "head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4, "attention_chunk_size": 16, "floor_scale": 8,
    "attn_scale": 0.4,
}  # fmt: skip
MOE_CASES = (
    Case("Llama 4", "Llama4", {**_LLAMA4, "num_hidden_layers": 5}),
    Case(
        "Llama 4, every second layer dense, no norms of heads, no chunks, llama3 RoPE",
        "Llama4",
        {
            **_LLAMA4,
            "interleave_moe_layer_step": 2,
            "use_qk_norm": False,
            "attention_chunk_size": None,
            "rope_parameters": LLAMA3,
            "attn_temperature_tuning": False,
            "no_rope_layers": [1, 0, 1, 1],
        },
    ),
    Case(
        "Gemma 4, experts",
        "Gemma4",
        {
            "sliding_window": 8,
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    Case("Mixtral", "Mixtral", {"num_local_experts": 4}),
    Case("Mixtral, sliding window", "Mixtral", SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 1}),
    Case(
        "Qwen2-MoE (a gate on shared experts)",
        "Qwen2Moe",
        _QWEN | {"shared_expert_intermediate_size": 64, "mlp_only_layers": [1]},
    ),
    Case(
        "Qwen2-MoE, every other layer, no biases, weights of sum 1",
        "Qwen2Moe",
        _QWEN
        | {
            "shared_expert_intermediate_size": 40,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    Case("Qwen3-MoE", "Qwen3Moe", _QWEN | {"norm_topk_prob": True, "head_dim": 32}),
    Case(
        "Qwen3-MoE, dense layers, sliding window",
        "Qwen3Moe",
        SLIDING | _QWEN | {"use_sliding_window": True, "mlp_only_layers": [0, 3]},
    ),
    Case("OLMoE", "Olmoe", {"num_experts": 8, "num_experts_per_tok": 4, "num_key_value_heads": 4}),
    Case("Granite 3 MoE", "GraniteMoe", _GRANITE),
    Case("Granite MoE with shared experts", "GraniteMoeShared", _GRANITE | {"shared_intermediate_size": 48}),
    Case("Granite MoE, shared width 0", "GraniteMoeShared", _GRANITE | {"num_experts_per_tok": 5}),
    Case("GLM-4.5-Air", "Glm4Moe", _GLM | {"attention_bias": True}),
    Case(
        "GLM-4.5 (norms of heads, groups)",
        "Glm4Moe",
        _GLM
        | {
            "use_qk_norm": True,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 2,
            "n_shared_experts": 2,
        },
    ),
    Case("GLM-4.5, weights as they are", "Glm4Moe", _GLM | {"norm_topk_prob": False}),
    Case("dots.llm1", "Dots1", _DOTS | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True}),
    Case(
        "dots.llm1, sliding window, weights as they are",
        "Dots1",
        _DOTS | SLIDING | {"max_window_layers": 2, "attention_bias": True, "routed_scaling_factor": 2.5},
    ),
    Case("Solar Open", "SolarOpen", _SOLAR),
    Case(
        "Phi-3.5-MoE",
        "Phimoe",
        SLIDING | {"num_local_experts": 6, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True},
    ),
    Case(
        "Phi-3.5-MoE (longrope, short), no biases",
        "Phimoe",
        {"num_local_experts": 6, "rope_parameters": {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.2}},
    ),
    Case(
        "MiniMax-M2", "MiniMaxM2", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 32, "rotary_dim": 16}
    ),
    Case("FlexOlmo", "FlexOlmo", {"num_experts": 5, "num_experts_per_tok": 2}),
    Case("FlexOlmo, weights of sum 1", "FlexOlmo", {"norm_topk_prob": True, "attention_bias": True}),
    Case("Hunyuan MoE", "HunYuanMoEV1", _HUNYUAN),
    Case(
        "Hunyuan-A13B (a base stretched by alpha)",
        "HunYuanMoEV1",
        _HUNYUAN
        | rope(rope_type="dynamic", alpha=50.0, factor=1.0)
        | {"moe_topk": [3] * 4, "num_key_value_heads": 1, "attention_bias": True},
    ),
    Case("K-EXAONE", "ExaoneMoe", SLIDING | _EXAONE | {"n_group": 4, "topk_group": 2}),
    Case(
        "K-EXAONE, listed layers, weights as they are",
        "ExaoneMoe",
        SLIDING
        | _EXAONE
        | {
            "mlp_layer_types": ["sparse", "dense"] * 2,
            "norm_topk_prob": False,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    Case("AFMoE (Trinity)", "Afmoe", SLIDING | _AFMOE | {"mup_enabled": True}),
    Case(
        "AFMoE, experts everywhere, biases, every other layer with a window",
        "Afmoe",
        SLIDING | _AFMOE | {"num_dense_layers": 0, "attention_bias": True, "global_attn_every_n_layers": 2},
    ),
    Case("GPT-OSS", "GptOss", SLIDING | _GPT_OSS),
    Case(
        "GPT-OSS, tight limits, no YaRN, no biases, other windows",
        "GptOss",
        SLIDING
        | _GPT_OSS
        | rope(rope_type="default")
        | {
            "attention_bias": False,
            "swiglu_limit": 0.1,
            "swiglu_alpha": 1.2,
            "intermediate_size": 40,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
        },
    ),
    Case("ERNIE 4.5 MoE", "Ernie4_5_Moe", _ERNIE),
    Case(
        "ERNIE 4.5 MoE, some layers",
        "Ernie4_5_Moe",
        _ERNIE | {"moe_layer_start_index": 1, "moe_layer_end_index": 2, "head_dim": 32},
    ),
    Case("ERNIE 4.5 MoE, no shared experts", "Ernie4_5_Moe", _ERNIE | {"moe_num_shared_experts": 0}),
)
