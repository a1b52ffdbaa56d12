"""The keys of config.json of models that have layers with a state; see config_keys.py."""

from __future__ import annotations

import math
from collections.abc import Mapping

from .config_key import COMMON, DECODER, DERIVED, Keys, OrNull, ends, keys, sizes
from .moe_keys import GRANITE

_DELTA = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "time_step_limit": OrNull((0.0, math.inf)),
}  # fmt: skip

HYBRID_KEYS: Mapping[str, Keys] = {
    "lfm2": keys(
        **COMMON | sizes(65_536, 2560, 12_288, 32, 32, 8, 128_000) | ends(1, 2)
        | {"rope_theta": 1e6, "tie_word_embeddings": True},
        head_dim=DERIVED,
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_ff_dim=DERIVED,
        block_multiple_of=256,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=True,
        full_attn_idxs=None,
        layer_types=None,
    ),
    "qwen3_5_text": keys(
        **DECODER | sizes(248_320, 4096, 12_288, 32, 16, 4, 32_768) | ends(None, None) | {"head_dim": 256},
        attention_bias=False,
        partial_rotary_factor=0.25,
        layer_types=None,
        full_attention_interval=4,
        **_DELTA,
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
}  # fmt: skip

HYBRID_ARCHITECTURES: Mapping[str, str] = {
    "lfm2": "Lfm2ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "bamba": "BambaForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
}
