"""The families with latent attention that the oracle tests run; see families.py. Step-3 is in step3.py."""

from __future__ import annotations

from families import DIVISORS, YARN, Case

_SHAPE = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
}  # fmt: skip
_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
_V2 = _SHAPE | _EXPERTS | {"topk_method": "greedy", "routed_scaling_factor": 1.5}
_V3 = _SHAPE | _EXPERTS | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0}
_GLM = _SHAPE | {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "q_lora_rank": 24,
}  # fmt: skip
_DSA = _SHAPE | _EXPERTS | {
    "q_lora_rank": 24, "n_group": 4, "topk_group": 2, "index_topk": 64, "index_n_heads": 2, "index_head_dim": 16,
}  # fmt: skip
_V2_YARN = {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}
_V3_YARN = {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": DIVISORS[:4], "long_factor": DIVISORS[4:],
    "original_max_position_embeddings": 256,
}  # fmt: skip

LATENT_CASES = (
    Case("DeepSeek-V2-Lite", "DeepseekV2", _V2 | _V2_YARN | {"q_lora_rank": None}),
    Case(
        "DeepSeek-V2 (groups, low-rank queries)",
        "DeepseekV2",
        _V2 | _V2_YARN | {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    Case(
        "DeepSeek-V2, biases, experts everywhere",
        "DeepseekV2",
        _V2 | {"q_lora_rank": 24, "attention_bias": True, "mlp_bias": True, "first_k_dense_replace": 0},
    ),
    Case("DeepSeek-V3", "DeepseekV3", _V3 | _V3_YARN),
    Case(
        "Kimi-K2 (one group)", "DeepseekV3", _V3 | _V3_YARN | {"n_group": 1, "topk_group": 1, "num_attention_heads": 4}
    ),
    Case(
        "DeepSeek-V3, half-split RoPE, weights as they are",
        "DeepseekV3",
        _V3 | {"q_lora_rank": None, "rope_interleave": False, "norm_topk_prob": False, "rms_norm_eps": 1e-3},
    ),
    Case("DeepSeek-V3.2", "DeepseekV32", _DSA | _V3_YARN),
    Case(
        "GLM-5, listed layers, one indexer for several",
        "GlmMoeDsa",
        {key: value for key, value in _DSA.items() if key != "first_k_dense_replace"}
        | {"mlp_layer_types": ["sparse", "dense"] * 2, "indexer_types": ["full", "shared"] * 2, "n_group": 1}
        | {"topk_group": 1, "routed_scaling_factor": 1.0},
    ),
    Case("GLM-4.7-Flash", "Glm4MoeLite", _GLM),
    Case("GLM-4.7-Flash, listed layers", "Glm4MoeLite", _GLM | {"mlp_layer_types": ["dense", "sparse"] * 2}),
    Case("Youtu-LLM", "Youtu", _SHAPE | {"q_lora_rank": 24, "pad_token_id": None}),
    Case(
        "Youtu-LLM, biases, a head of its own",
        "Youtu",
        _SHAPE | {"q_lora_rank": None, "attention_bias": True, "tie_word_embeddings": False},
    ),
    Case("MiniCPM3", "MiniCPM3", _SHAPE | {"q_lora_rank": 24, "rms_norm_eps": 1e-3, "v_head_dim": None}),
    Case(
        "MiniCPM3, longrope, other scales",
        "MiniCPM3",
        _SHAPE
        | {
            "q_lora_rank": None,
            "rope_parameters": _LONGROPE,
            "scale_emb": 3,
            "scale_depth": None,
            "dim_model_base": None,
            "tie_word_embeddings": False,
        },
    ),
)
