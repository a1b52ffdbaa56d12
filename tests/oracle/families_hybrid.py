"""Hybrid models that the oracle tests run; see families.py."""

from __future__ import annotations

from families import Case

_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
_GRANITE = {
    **_MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    "shared_intermediate_size": 96,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
HYBRID_CASES = (
    Case("LFM2", "Lfm2", {"full_attn_idxs": [1], "conv_bias": True, "block_multiple_of": 16}),
    Case(
        "LFM2, a convolution over 4 positions",
        "Lfm2",
        {"full_attn_idxs": [3], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    Case(
        "Qwen3.5, four heads of values on two of keys",
        "Qwen3_5",
        {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4},
    ),
    Case("Bamba, two groups", "Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    Case("Granite 4, dense", "GraniteMoeHybrid", {**_GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0}),
    Case("Granite 4, experts", "GraniteMoeHybrid", {**_GRANITE, **_EXPERTS}),
    Case(
        "Granite 4, experts, RoPE",
        "GraniteMoeHybrid",
        {**_GRANITE, **_EXPERTS, "mamba_n_groups": 1, "position_embedding_type": "rope"},
    ),
)  # fmt: skip
