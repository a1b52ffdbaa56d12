"""The keys of config.json of mixtures of experts with ordinary attention; see config_keys.py.

Where a type has two names for one thing (its class gives one the value of the other), both are listed; the one without
a default is the other name.
"""

from __future__ import annotations

from collections.abc import Mapping

from .config_key import DECODER, DERIVED, REQUIRED, WINDOW, Keys, OrNull, ends, keys, sizes

_GRANITE = {
    **DECODER, **sizes(32_000, 4096, 11_008, 32, 32, None, 2048), **ends(1, 2), "attention_bias": False,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
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
    "granitemoe": keys(**_GRANITE),
    "granitemoeshared": keys(**_GRANITE, shared_intermediate_size=0),
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
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe_text": "Qwen3VLMoeForConditionalGeneration",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "solar_open": "SolarOpenForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
}
