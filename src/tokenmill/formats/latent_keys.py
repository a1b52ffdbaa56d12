"""The keys of config.json (see config_keys.py) of models with latent attention, and of Step-3.

Those of Kimi-K2 are DeepSeek-V3's. Of Step-3, which transformers has no class for, the keys and what missing ones mean
are those of the published configuration class; `moe_layers_enum` must be there, as implementations differ in what its
absence means.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config_key import DECODER, DERIVED, REQUIRED, Keys, OrNull, ends, keys, sizes

_LATENT = {**DECODER, "head_dim": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "attention_bias": False}
_V3 = {
    **_LATENT, "head_dim": DERIVED, **sizes(129_280, 7168, 18_432, 61, 128, OrNull(128), 4096), **ends(0, 1),
    "q_lora_rank": OrNull(1536), "kv_lora_rank": 512, "v_head_dim": 128, "rope_interleave": OrNull(True),
    "n_routed_experts": 256, "num_local_experts": DERIVED, "num_mtp_layers": 1, "num_nextn_predict_layers": DERIVED,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "moe_layer_freq": OrNull(1), "norm_topk_prob": OrNull(True), "first_k_dense_replace": 3,
}  # fmt: skip

LATENT_KEYS: Mapping[str, Keys] = {
    "deepseek_v2": keys(
        **_LATENT | sizes(102_400, 4096, 11_008, 32, 32, None, 2048) | ends(1, 2),
        mlp_bias=False,
        q_lora_rank=OrNull(1536),
        kv_lora_rank=512,
        v_head_dim=128,
        n_routed_experts=64,
        num_experts=DERIVED,
        num_experts_per_tok=None,
        n_shared_experts=2,
        moe_intermediate_size=1407,
        routed_scaling_factor=1.0,
        n_group=None,
        topk_group=None,
        topk_method="greedy",
        scoring_func="softmax",
        moe_layer_freq=OrNull(1),
        norm_topk_prob=OrNull(False),
        first_k_dense_replace=0,
    ),
    "deepseek_v3": keys(**_V3),
    "kimi_k2": keys(**_V3),
    "glm4_moe_lite": keys(
        **_V3 | sizes(154_880, 2048, 10_240, 47, 20, 20, 202_752)
        | {"rms_norm_eps": 1e-5, "q_lora_rank": OrNull(768), "v_head_dim": 256, "qk_nope_head_dim": 192}
        | {"n_routed_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "num_mtp_layers": 0}
        | {"n_group": OrNull(1), "topk_group": OrNull(1), "routed_scaling_factor": 1.8, "first_k_dense_replace": 1}
        | {"norm_topk_prob": True, "rope_interleave": True},
        mlp_layer_types=None,
    ),
    "youtu": keys(
        **_LATENT | sizes(128_256, 2048, 6144, 32, 16, 16, 131_072) | ends(128_000, 128_001)
        | {"head_dim": DERIVED, "tie_word_embeddings": True},
        q_lora_rank=OrNull(1536),
        kv_lora_rank=512,
        v_head_dim=128,
        rope_interleave=OrNull(True),
    ),
    "minicpm3": keys(
        **_LATENT | sizes(73_448, 2560, 6400, 62, 40, OrNull(40), 32_768) | ends(1, 2)
        | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
        mlp_bias=False,
        q_lora_rank=OrNull(768),
        kv_lora_rank=256,
        v_head_dim=None,
        scale_emb=12,
        scale_depth=OrNull(1.4),
        dim_model_base=OrNull(256),
    ),
    "step3_text": keys(
        vocab_size=128_815,
        hidden_size=7168,
        intermediate_size=18_432,
        num_hidden_layers=61,
        num_attention_heads=64,
        num_attention_groups=1,
        head_dim=256,
        share_q_dim=OrNull(2048),
        max_position_embedding=65_536,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        tie_word_embeddings=False,
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=500_000.0,
        moe_layers_enum=REQUIRED,
        moe_num_experts=48,
        moe_top_k=3,
        moe_intermediate_size=5120,
        share_expert_dim=5120,
        norm_expert_weight=False,
        bos_token_id=None,
        eos_token_id=None,
    ),
}  # fmt: skip

LATENT_ARCHITECTURES: Mapping[str, str] = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "step3_text": "Step3TextForCausalLM",
}
