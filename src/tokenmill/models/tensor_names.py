"""The names that tensors have in checkpoints, by their role; families may have other ones (families.py).

A layer's names have `{}` for its number and `{e}` for an expert's. A role's tensors are `<name>.weight` and, where
biased, `<name>.bias`, but those of WHOLE_NAMES, which are named in full.
"""

from __future__ import annotations

from collections.abc import Mapping

GLOBAL_NAMES = {
    "gguf": {
        "embed": "token_embd",
        "final_norm": "output_norm",
        "head": "output",
        "layer_embed": "per_layer_token_embd",
        "layer_inputs": "per_layer_model_proj",
        "layer_inputs_norm": "per_layer_proj_norm",
    },
    "hf": {
        "embed": "model.embed_tokens",
        "final_norm": "model.norm",
        "head": "lm_head",
        "layer_embed": "model.embed_tokens_per_layer",
        "layer_inputs": "model.per_layer_model_projection",
        "layer_inputs_norm": "model.per_layer_projection_norm",
    },
}

WHOLE_NAMES = frozenset(
    {"choice_bias", "sinks", "dt_bias", "a_log", "skip", "layer_scale", "router_norm", "expert_scales"}
)

LAYER_NAMES = {
    "gguf": {
        "attn_norm": "blk.{}.attn_norm",
        "q": "blk.{}.attn_q",
        "k": "blk.{}.attn_k",
        "v": "blk.{}.attn_v",
        "qkv": "blk.{}.attn_qkv",
        "attn_gate": "blk.{}.attn_gate",
        "q_norm": "blk.{}.attn_q_norm",
        "k_norm": "blk.{}.attn_k_norm",
        "q_a": "blk.{}.attn_q_a",
        "q_a_norm": "blk.{}.attn_q_a_norm",
        "q_b": "blk.{}.attn_q_b",
        "kv_a": "blk.{}.attn_kv_a_mqa",
        "kv_a_norm": "blk.{}.attn_kv_a_norm",
        "kv_b": "blk.{}.attn_kv_b",
        "k_b": "blk.{}.attn_k_b",
        "v_b": "blk.{}.attn_v_b",
        "sinks": "blk.{}.attn_sinks.weight",
        "output": "blk.{}.attn_output",
        "attn_post_norm": "blk.{}.post_attention_norm",
        "ffn_norm": "blk.{}.ffn_norm",
        "gate": "blk.{}.ffn_gate",
        "up": "blk.{}.ffn_up",
        "gate_up": "blk.{}.ffn_up",
        "down": "blk.{}.ffn_down",
        "router": "blk.{}.ffn_gate_inp",
        "choice_bias": "blk.{}.exp_probs_b.bias",
        "expert_gate": "blk.{}.ffn_gate_exps",
        "expert_up": "blk.{}.ffn_up_exps",
        "expert_gate_up": "blk.{}.ffn_gate_up_exps",
        "expert_down": "blk.{}.ffn_down_exps",
        "shared_gate": "blk.{}.ffn_gate_shexp",
        "shared_up": "blk.{}.ffn_up_shexp",
        "shared_down": "blk.{}.ffn_down_shexp",
        "shared_mix": "blk.{}.ffn_gate_inp_shexp",
        "ffn_post_norm": "blk.{}.post_ffw_norm",
        "mixer_in": "blk.{}.ssm_in",
        "mixer_qkvz": "blk.{}.ssm_in",
        "mixer_qkv": "blk.{}.attn_qkv",
        "mixer_z": "blk.{}.attn_gate",
        "mixer_b": "blk.{}.ssm_beta",
        "mixer_a": "blk.{}.ssm_alpha",
        "mixer_ba": "blk.{}.ssm_ba",
        "conv": "blk.{}.ssm_conv1d",
        "dt_bias": "blk.{}.ssm_dt.bias",
        "a_log": "blk.{}.ssm_a",
        "skip": "blk.{}.ssm_d",
        "mixer_norm": "blk.{}.ssm_norm",
        "mixer_out": "blk.{}.ssm_out",
        "input_gate": "blk.{}.inp_gate",
        "input_up": "blk.{}.proj",
        "input_norm": "blk.{}.post_norm",
        "layer_scale": "blk.{}.layer_output_scale.weight",
        "router_norm": "blk.{}.ffn_gate_inp.scale",
        "expert_scales": "blk.{}.ffn_down_exps.scale",
        "experts_norm": "blk.{}.pre_ffw_norm_2",
        "experts_post_norm": "blk.{}.post_ffw_norm_2",
        "shared_post_norm": "blk.{}.post_ffw_norm_1",
    },
    "hf": {
        "attn_norm": "model.layers.{}.input_layernorm",
        "q": "model.layers.{}.self_attn.q_proj",
        "k": "model.layers.{}.self_attn.k_proj",
        "v": "model.layers.{}.self_attn.v_proj",
        "qkv": "model.layers.{}.self_attn.qkv_proj",
        "attn_gate": "model.layers.{}.self_attn.gate_proj",
        "q_norm": "model.layers.{}.self_attn.q_norm",
        "k_norm": "model.layers.{}.self_attn.k_norm",
        "q_a": "model.layers.{}.self_attn.q_a_proj",
        "q_a_norm": "model.layers.{}.self_attn.q_a_layernorm",
        "q_b": "model.layers.{}.self_attn.q_b_proj",
        "kv_a": "model.layers.{}.self_attn.kv_a_proj_with_mqa",
        "kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm",
        "kv_b": "model.layers.{}.self_attn.kv_b_proj",
        "sinks": "model.layers.{}.self_attn.sinks",
        "output": "model.layers.{}.self_attn.o_proj",
        "ffn_norm": "model.layers.{}.post_attention_layernorm",
        "gate": "model.layers.{}.mlp.gate_proj",
        "up": "model.layers.{}.mlp.up_proj",
        "gate_up": "model.layers.{}.mlp.gate_up_proj",
        "down": "model.layers.{}.mlp.down_proj",
        "router": "model.layers.{}.mlp.gate",
        "choice_bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
        "expert_gate": "model.layers.{}.mlp.experts.{e}.gate_proj",
        "expert_up": "model.layers.{}.mlp.experts.{e}.up_proj",
        "expert_down": "model.layers.{}.mlp.experts.{e}.down_proj",
        "shared_gate": "model.layers.{}.mlp.shared_experts.gate_proj",
        "shared_up": "model.layers.{}.mlp.shared_experts.up_proj",
        "shared_down": "model.layers.{}.mlp.shared_experts.down_proj",
        "shared_mix": "model.layers.{}.mlp.shared_expert_gate",
        "input_gate": "model.layers.{}.per_layer_input_gate",
        "input_up": "model.layers.{}.per_layer_projection",
        "input_norm": "model.layers.{}.post_per_layer_input_norm",
        "layer_scale": "model.layers.{}.layer_scalar",
        "router_norm": "model.layers.{}.router.scale",
        "expert_scales": "model.layers.{}.router.per_expert_scale",
        "experts_norm": "model.layers.{}.pre_feedforward_layernorm_2",
        "experts_post_norm": "model.layers.{}.post_feedforward_layernorm_2",
        "shared_post_norm": "model.layers.{}.post_feedforward_layernorm_1",
        "mixer_qkv": "model.layers.{}.linear_attn.in_proj_qkv",
        "mixer_z": "model.layers.{}.linear_attn.in_proj_z",
        "mixer_qkvz": "model.layers.{}.linear_attn.in_proj_qkvz",
        "mixer_ba": "model.layers.{}.linear_attn.in_proj_ba",
        "mixer_b": "model.layers.{}.linear_attn.in_proj_b",
        "mixer_a": "model.layers.{}.linear_attn.in_proj_a",
        "conv": "model.layers.{}.linear_attn.conv1d",
        "dt_bias": "model.layers.{}.linear_attn.dt_bias",
        "a_log": "model.layers.{}.linear_attn.A_log",
        "mixer_norm": "model.layers.{}.linear_attn.norm",
        "mixer_out": "model.layers.{}.linear_attn.out_proj",
    },
}


def global_names(kind: str, names: Mapping[str, str]) -> dict[str, str]:
    """Those of the model's ends. names: what a family calls its tensors by roles."""
    return {role: names.get(role, name) for role, name in GLOBAL_NAMES[kind].items()}


SPLIT_NAMES = {
    "expert_gate": "blk.{}.ffn_gate.{e}",
    "expert_up": "blk.{}.ffn_up.{e}",
    "expert_down": "blk.{}.ffn_down.{e}",
}
"""Of experts in early GGUF files, which have them one by one."""
