"""Hybrid models that the oracle tests run; see families.py."""

from __future__ import annotations

from families import Case

_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2}
_GRANITE = {
    **_MAMBA, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    "shared_intermediate_size": 96,
}  # fmt: skip
_DELTA = {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_QWEN_EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
_LFM2_MOE = {
    "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1, "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_NEMOTRON = {
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "head_dim": 32,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
}  # fmt: skip
_NEMOTRON_EXPERTS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_group": 4, "topk_group": 2,
    "moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5,
}  # fmt: skip
HYBRID_CASES = (
    Case("LFM2", "Lfm2", {"full_attn_idxs": [1], "conv_bias": True, "block_multiple_of": 16}),
    Case(
        "LFM2, a convolution over 4 positions",
        "Lfm2",
        {"full_attn_idxs": [3], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    Case("LFM2-MoE (a bias on the choice)", "Lfm2Moe", _LFM2_MOE),
    Case(
        "LFM2-MoE, no bias, weights as they are",
        "Lfm2Moe",
        {**_LFM2_MOE, "conv_bias": True, "use_expert_bias": False, "norm_topk_prob": False,
         "routed_scaling_factor": 1.5, "tie_word_embeddings": False},
    ),
    Case("Qwen3.5, four heads of values on two of keys", "Qwen3_5", _DELTA),
    Case(
        "Qwen3.5-MoE (a gate on shared experts), six heads of values on two of keys",
        "Qwen3_5Moe",
        {**_DELTA, **_QWEN_EXPERTS, "linear_num_value_heads": 6, "linear_value_head_dim": 16,
         "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    Case(
        "Qwen3-Next (queries, keys, values and gates by head of keys)",
        "Qwen3Next",
        {**_DELTA, **_QWEN_EXPERTS, "mlp_only_layers": [1]},
    ),
    Case(
        "Qwen3-Next, weights as they are, one head of values on each of keys",
        "Qwen3Next",
        {**_DELTA, **_QWEN_EXPERTS, "linear_num_value_heads": 2, "norm_topk_prob": False, "decoder_sparse_step": 2,
         "attention_bias": True},
    ),
    Case("Bamba, two groups", "Bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    Case("Granite 4, dense", "GraniteMoeHybrid", {**_GRANITE, "num_local_experts": 0, "num_experts_per_tok": 0}),
    Case("Granite 4, experts", "GraniteMoeHybrid", {**_GRANITE, **_EXPERTS}),
    Case(
        "Granite 4, experts, RoPE",
        "GraniteMoeHybrid",
        {**_GRANITE, **_EXPERTS, "mamba_n_groups": 1, "position_embedding_type": "rope"},
    ),
    Case(
        "Falcon-H1",
        "FalconH1",
        {
            "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "lm_head_multiplier": 0.5,
            "embedding_multiplier": 3.0, "mlp_multipliers": [0.7, 1.3], "key_multiplier": 0.6,
            "attention_out_multiplier": 0.9, "attention_in_multiplier": 1.2, "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.5, 0.9, 1.2, 1.1, 0.7], "projectors_bias": True,
        },
    ),
    Case(
        "Falcon-H1, a norm before gates, no multipliers",
        "FalconH1",
        {"mamba_d_ssm": None, "mamba_n_heads": 8, "mamba_d_state": 16, "mamba_rms_norm": True},
    ),
    Case(
        "Jamba",
        "Jamba",
        {"num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 8},
    ),
    Case("Jamba, dense", "Jamba", {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1}),
    Case("Mamba", "Mamba", {"use_bias": True, "num_hidden_layers": 2}),
    Case("Falcon Mamba", "FalconMamba", {"time_step_rank": 8, "num_hidden_layers": 2}),
    Case(
        "Mamba-2",
        "Mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "use_bias": True},
    ),
    Case("Nemotron-H", "NemotronH", {**_NEMOTRON, "mlp_bias": True, "use_bias": True}),
    Case("Nemotron 3, experts", "NemotronH", {**_NEMOTRON, **_NEMOTRON_EXPERTS}),
)  # fmt: skip
