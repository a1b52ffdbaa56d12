"""The keys of config.json of models that have layers with a state; see config_keys.py."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .config_key import COMMON, DECODER, DERIVED, REQUIRED, Keys, OrNull, ends, keys, sizes
from .moe_keys import GRANITE

_MAMBA = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": OrNull((0.0, math.inf)),
}  # fmt: skip

_LFM2 = {
    **COMMON, **ends(1, 2), "rope_theta": 1e6, "tie_word_embeddings": True, "tie_embedding": DERIVED,
    "head_dim": DERIVED, "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3,
}  # fmt: skip
_QWEN = {
    **DECODER, **ends(None, None), "head_dim": 256, "attention_bias": False, "partial_rotary_factor": 0.25,
    "layer_types": None, "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_QWEN_EXPERTS = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

_PLAIN_MAMBA = {
    **ends(0, 0), "tie_word_embeddings": True, "vocab_size": 50_280, "hidden_size": 768, "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5, "hidden_act": "silu", "state_size": 16, "expand": 2, "conv_kernel": 4,
    "use_bias": False, "use_conv_bias": True, "time_step_rank": "auto", "intermediate_size": DERIVED,
}  # fmt: skip

HYBRID_KEYS: Mapping[str, Keys] = {
    "lfm2": keys(
        **_LFM2 | sizes(65_536, 2560, 12_288, 32, 32, 8, 128_000),
        block_ff_dim=DERIVED,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
        full_attn_idxs=None,
        layer_types=None,
    ),
    "lfm2_moe": keys(
        **_LFM2 | sizes(65_536, 2048, 7168, 32, 32, 8, 128_000),
        layer_types=REQUIRED,
        moe_intermediate_size=1792,
        num_dense_layers=2,
        num_experts_per_tok=4,
        num_experts=32,
        use_expert_bias=True,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
    ),
    "qwen3_next": keys(
        **_QWEN | _QWEN_EXPERTS | sizes(151_936, 2048, 5632, 48, 16, 2, 32_768),
        decoder_sparse_step=1,
        mlp_only_layers=None,
        num_experts_per_tok=10,
        num_experts=512,
        norm_topk_prob=True,
    ),
    "qwen3_5_text": keys(**_QWEN | sizes(248_320, 4096, 12_288, 32, 16, 4, 32_768)),
    "qwen3_5_moe_text": keys(
        **_QWEN | _QWEN_EXPERTS | sizes(248_320, 2048, None, 40, 16, 2, 32_768),
        num_experts_per_tok=8,
        num_experts=256,
    ),
    "bamba": keys(
        **DECODER | sizes(128_000, 4096, 14_336, 32, 32, OrNull(8), 262_144) | ends(1, 2)
        | {"rms_norm_eps": 1e-5},
        attention_bias=False,
        mlp_bias=False,
        partial_rotary_factor=0.5,
        attn_layer_indices=None,
        **_MAMBA,
    ),
    "granitemoehybrid": keys(
        **GRANITE | _MAMBA,
        shared_intermediate_size=1024,
        position_embedding_type=None,
        layer_types=None,
    ),
    "falcon_h1": keys(
        **DECODER | sizes(128_000, 4096, 14_336, 32, 32, OrNull(8), 8192) | ends(1, 2) | {"rms_norm_eps": 1e-5},
        attention_bias=False,
        mlp_bias=False,
        projectors_bias=False,
        mamba_d_ssm=OrNull(1024),
        mamba_rms_norm=False,
        mamba_norm_before_gate=True,
        lm_head_multiplier=1.0,
        embedding_multiplier=1.0,
        mlp_multipliers=None,
        key_multiplier=1.0,
        attention_out_multiplier=1.0,
        attention_in_multiplier=1.0,
        ssm_multipliers=None,
        ssm_in_multiplier=1.0,
        ssm_out_multiplier=1.0,
        **_MAMBA,
    ),
    "jamba": keys(
        **sizes(65_536, 4096, 14_336, 32, 32, 8, 262_144) | ends(1, 2),
        tie_word_embeddings=False,
        head_dim=DERIVED,
        hidden_act="silu",
        rms_norm_eps=1e-6,
        num_experts=16,
        num_local_experts=DERIVED,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=8,
        attn_layer_offset=4,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank="auto",
        mamba_conv_bias=True,
        mamba_proj_bias=False,
    ),
    "mamba": keys(**_PLAIN_MAMBA),
    "falcon_mamba": keys(**_PLAIN_MAMBA, mixer_rms_eps=1e-6),
    "mamba2": keys(
        **ends(0, 2),
        tie_word_embeddings=False,
        vocab_size=32_768,
        hidden_size=4096,
        num_hidden_layers=64,
        layer_norm_epsilon=1e-5,
        hidden_act="silu",
        num_heads=128,
        head_dim=64,
        state_size=128,
        expand=2,
        conv_kernel=4,
        n_groups=8,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=(0.0, math.inf),
    ),
    "nemotron_h": keys(
        **sizes(131_072, 4096, 21_504, 0, 32, 8, 4096) | ends(1, 2) | {"num_hidden_layers": DERIVED},
        tie_word_embeddings=False,
        layers_block_type=None,
        hybrid_override_pattern=DERIVED,
        head_dim=128,
        layer_norm_epsilon=1e-5,
        mlp_hidden_act="relu2",
        mlp_bias=False,
        use_bias=False,
        mamba_num_heads=128,
        mamba_head_dim=64,
        mamba_hidden_act="silu",
        n_groups=8,
        ssm_state_size=128,
        conv_kernel=4,
        use_conv_bias=True,
        time_step_min=0.001,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=7688,
        moe_shared_expert_intermediate_size=7688,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.0,
        num_nextn_predict_layers=0,
    ),
}  # fmt: skip

HYBRID_ARCHITECTURES: Mapping[str, str] = {
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "bamba": "BambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "jamba": "JambaForCausalLM",
    "mamba": "MambaForCausalLM",
    "falcon_mamba": "FalconMambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
}
