"""The keys of config.json of mixtures of experts, of models with latent attention among them, and of Step-3; see
config_keys.py.

Where a type has two names for one thing (its class gives one the value of the other), both are listed; the one without
a default is the other name. The keys of Kimi-K2 are DeepSeek-V3's. Of Step-3 and Ling 2, which transformers has no
classes for, the keys and what missing ones mean are those of the published configuration classes; `moe_layers_enum`
must be there, as implementations differ in what its absence means.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config_key import DECODER, DERIVED, REQUIRED, WINDOW, Keys, OrNull, ends, keys, sizes

GRANITE = {
    **DECODER, **sizes(32_000, 4096, 11_008, 32, 32, None, 2048), **ends(1, 2), "attention_bias": False,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
_LING = {
    **DECODER, **sizes(157_184, 2048, 5120, 20, 16, 4, 32_768), **ends(None, 156_892), "head_dim": OrNull(128),
    "rope_theta": 6e5, "partial_rotary_factor": 1.0, "use_qk_norm": True, "use_bias": False, "use_qkv_bias": False,
    "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 512,
    "first_k_dense_replace": 1, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
MOE_KEYS: Mapping[str, Keys] = {
    "mixtral": keys(
        **DECODER | sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072) | ends(1, 2)
        | {"head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        sliding_window=None,
        num_local_experts=8,
        num_experts=DERIVED,
        num_experts_per_tok=2,
    ),
    "phimoe": keys(
        **DECODER | sizes(32_064, 4096, 6400, 32, 32, 8, 131_072) | ends(1, 2)
        | {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        attention_bias=False,
        lm_head_bias=False,
        sliding_window=None,
        num_local_experts=16,
        num_experts_per_tok=2,
        router_jitter_noise=0.01,
    ),
    "minimax_m2": keys(
        **DECODER | sizes(200_064, 3072, 1536, 62, 48, 8, 196_608) | ends(200_034, 200_020)
        | {"head_dim": 128, "rope_theta": 5e6},
        partial_rotary_factor=1.0,
        rotary_dim=None,
        num_local_experts=256,
        num_experts=DERIVED,
        num_experts_per_tok=8,
        num_mtp_modules=0,
    ),
    "llama4_text": keys(
        **DECODER | sizes(202_048, 5120, 8192, 48, 40, 8, 131_072) | ends(1, 2)
        | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
        intermediate_size_mlp=16_384,
        attention_bias=False,
        use_qk_norm=True,
        num_experts_per_tok=1,
        num_local_experts=16,
        moe_layers=None,
        interleave_moe_layer_step=1,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        attention_chunk_size=OrNull(8192),
        layer_types=None,
        attn_temperature_tuning=True,
        floor_scale=8192,
        attn_scale=0.1,
    ),
    "qwen2_moe": keys(
        **DECODER | sizes(151_936, 2048, 5632, 24, 16, 16, 32_768) | ends(None, None),
        use_sliding_window=False,
        sliding_window=WINDOW,
        max_window_layers=28,
        layer_types=None,
        qkv_bias=True,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    "qwen3_moe": keys(
        **DECODER | sizes(151_936, 2048, 6144, 24, 32, 4, 32_768) | ends(None, None),
        attention_bias=False,
        use_sliding_window=False,
        sliding_window=WINDOW,
        num_experts=128,
        num_local_experts=DERIVED,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    "qwen3_vl_moe_text": keys(
        **DECODER | sizes(151_936, 2048, 5632, 24, 16, 16, 128_000) | ends(None, None)
        | {"head_dim": None, "rope_theta": 5e5, "tie_word_embeddings": True},
        attention_bias=False,
        num_experts=60,
        num_local_experts=DERIVED,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        norm_topk_prob=OrNull(True),
        layer_types=DERIVED,
        decoder_sparse_step=1,
        mlp_only_layers=None,
    ),
    "olmoe": keys(
        **DECODER | sizes(50_304, 2048, 2048, 16, 16, None, 4096) | ends(None, 50_279) | {"rms_norm_eps": 1e-5},
        attention_bias=False,
        num_experts=64,
        num_local_experts=DERIVED,
        num_experts_per_tok=8,
        norm_topk_prob=False,
    ),
    "flex_olmo": keys(
        **DECODER | sizes(100_352, 4096, 11_008, 32, 32, None, 4096) | ends(None, 100_257) | {"rope_theta": 5e5},
        attention_bias=False,
        num_experts=7,
        num_local_experts=DERIVED,
        num_experts_per_tok=5,
        norm_topk_prob=False,
    ),
    "granitemoe": keys(**GRANITE),
    "granitemoeshared": keys(**GRANITE, shared_intermediate_size=0),
    "glm4_moe": keys(
        **DECODER | sizes(151_552, 4096, 10_944, 46, 96, 8, 131_072) | ends(None, None) | {"rms_norm_eps": 1e-5},
        attention_bias=False,
        partial_rotary_factor=0.5,
        use_qk_norm=False,
        n_routed_experts=128,
        num_local_experts=DERIVED,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=1408,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
        num_mtp_layers=1,
        num_nextn_predict_layers=DERIVED,
    ),
    "glm4v_moe_text": keys(
        **DECODER | sizes(151_424, 4096, 10_944, 46, 96, 8, 65_536) | ends(None, None) | {"rms_norm_eps": 1e-5},
        attention_bias=True,
        partial_rotary_factor=0.5,
        n_routed_experts=128,
        num_local_experts=DERIVED,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=1408,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        first_k_dense_replace=1,
    ),
    "dots1": keys(
        **DECODER | sizes(152_064, 4608, 10_944, 62, 32, OrNull(32), 2048) | ends(None, None),
        attention_bias=False,
        sliding_window=WINDOW,
        max_window_layers=62,
        layer_types=None,
        n_routed_experts=None,
        num_local_experts=DERIVED,
        num_experts_per_tok=None,
        n_shared_experts=REQUIRED,
        moe_intermediate_size=1408,
        n_group=1,
        topk_group=1,
        norm_topk_prob=OrNull(False),
        routed_scaling_factor=1.0,
        first_k_dense_replace=OrNull(0),
    ),
    "solar_open": keys(
        **DECODER | sizes(196_608, 4096, 10_240, 48, 64, 8, 131_072) | ends(None, None)
        | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        attention_bias=False,
        n_routed_experts=128,
        num_local_experts=DERIVED,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=1280,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
    ),
    "hunyuan_v1_moe": keys(
        **DECODER | sizes(290_943, 4096, 11_008, 32, 32, None, 2048) | ends(1, 2)
        | {"head_dim": REQUIRED, "rms_norm_eps": 1e-5},
        attention_bias=False,
        num_experts=1,
        num_local_experts=DERIVED,
        moe_topk=1,
        num_experts_per_tok=DERIVED,
    ),
    "bailing_moe": keys(**_LING),
    "bailing_moe_v2": keys(**_LING),
    "exaone_moe": keys(
        **DECODER | sizes(102_400, 4096, 16_384, 32, 32, 32, 2048) | ends(1, 53) | {"rms_norm_eps": 1e-5},
        sliding_window=4096,
        sliding_window_pattern=OrNull(4),
        layer_types=None,
        mlp_layer_types=None,
        first_k_dense_replace=1,
        num_experts=64,
        num_experts_per_tok=8,
        num_shared_experts=1,
        moe_intermediate_size=1024,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    "afmoe": keys(
        **DECODER | sizes(200_192, 2048, 6144, 32, 16, None, 16_384) | ends(None, None)
        | {"head_dim": 128, "rms_norm_eps": 1e-5},
        attention_bias=False,
        sliding_window=1024,
        global_attn_every_n_layers=4,
        layer_types=None,
        mup_enabled=OrNull(False),
        num_dense_layers=1,
        num_experts=64,
        num_experts_per_tok=6,
        num_shared_experts=2,
        moe_intermediate_size=1408,
        route_scale=1.0,
    ),
    "gpt_oss": keys(
        **DECODER | sizes(201_088, 2880, 2880, 36, 64, 8, 131_072) | ends(None, None)
        | {"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0},
        attention_bias=True,
        sliding_window=OrNull(128),
        layer_types=None,
        num_local_experts=128,
        num_experts=DERIVED,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    ),
    "ernie4_5_moe": keys(
        **DECODER | sizes(103_424, 2560, 12_288, 28, 20, 4, 131_072) | ends(1, 2)
        | {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
        moe_num_experts=64,
        num_experts=DERIVED,
        moe_k=6,
        num_experts_per_tok=DERIVED,
        moe_num_shared_experts=2,
        moe_intermediate_size=1536,
        moe_norm_min=1e-12,
        moe_layer_start_index=1,
        moe_layer_end_index=-1,
        moe_layer_interval=1,
    ),
}  # fmt: skip

MOE_ARCHITECTURES: dict[str, str] = {
    "mixtral": "MixtralForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "olmoe": "OlmoeForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4v_moe_text": "Glm4vMoeForConditionalGeneration",
    "dots1": "Dots1ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "bailing_moe": "BailingMoeV2ForCausalLM",
    "bailing_moe_v2": "BailingMoeV2ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "afmoe": "AfmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}


_LATENT = {**DECODER, "head_dim": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "attention_bias": False}
_V3 = {
    **_LATENT, "head_dim": DERIVED, **sizes(129_280, 7168, 18_432, 61, 128, OrNull(128), 4096), **ends(0, 1),
    "q_lora_rank": OrNull(1536), "kv_lora_rank": 512, "v_head_dim": 128, "rope_interleave": OrNull(True),
    "n_routed_experts": 256, "num_local_experts": DERIVED, "num_mtp_layers": 1, "num_nextn_predict_layers": DERIVED,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "moe_layer_freq": OrNull(1), "norm_topk_prob": OrNull(True), "first_k_dense_replace": 3,
}  # fmt: skip

_V32 = {
    **{key: meaning for key, meaning in _V3.items() if key != "rope_interleave"},
    "num_key_value_heads": 128, "max_position_embeddings": 163_840, "q_lora_rank": 1536, "norm_topk_prob": True,
    "num_experts": DERIVED, "mlp_layer_types": None, "layer_types": None, "index_topk": 2048, "mlp_bias": False,
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
    "deepseek_v32": keys(**_V32),
    "glm_moe_dsa": keys(
        **_V32 | sizes(154_880, 6144, 12_288, 78, 64, 64, 202_752)
        | {"rms_norm_eps": 1e-5, "q_lora_rank": 2048, "v_head_dim": 256, "qk_nope_head_dim": 192}
        | {"n_group": 1, "topk_group": 1},
    ),
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
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "step3_text": "Step3TextForCausalLM",
}
