"""What transformers makes of a config.json, as facts that decide a model's answers, and what we make of it.

Facts are read from the modules that transformers builds (on the meta device, so that none has weights), not from its
config: shapes of all tensors, windows, frequencies, scales, activations, epsilons. A key is put into a small config as
present, null and absent, in contexts where it matters.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from families import LLAMA3, LONGROPE, SCALED_QUERIES, SHAPE, YARN
from transformers.core_model_loading import revert_weight_conversion

from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.formats.config_keys import ARCHITECTURES, CONFIG_KEYS
from tokenmill.formats.moe_keys import MOE_KEYS
from tokenmill.models.config import LayerConfig, ModelConfig, config_from_checkpoint
from tokenmill.models.family import SEQUENTIAL
from tokenmill.models.roles import expected_shapes
from tokenmill.models.rope import rope_frequencies

LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}  # fmt: skip
_DSA = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2}
LINEAR = "linear_attention"
_DELTA = {
    "head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GEMMA4 = {"head_dim": 16, "global_head_dim": 32, "layer_types": [_SLIDING, _FULL] * 2}
BASE: dict[str, dict[str, Any]] = {
    "ministral": {"head_dim": 16},
    "helium": {"head_dim": 16},
    "mixtral": {"num_local_experts": 4, "head_dim": 16},
    **{kind: {"num_local_experts": 4} for kind in ("granitemoe", "granitemoeshared")},
    **{kind: {"num_experts": 8, "num_experts_per_tok": 3} for kind in ("qwen2_moe", "qwen3_moe", "olmoe")},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "phimoe": {"num_local_experts": 4},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
    "flex_olmo": {"num_experts_per_tok": 3},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 3, "head_dim": 16},
    "exaone_moe": {"num_experts": 8, "num_experts_per_tok": 3},
    "afmoe": {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
    **{kind: {"n_routed_experts": 8, "num_experts_per_tok": 2} for kind in ("glm4_moe", "glm4v_moe_text")},
    "ernie4_5_moe": {"moe_num_experts": 8},
    "deepseek_v2": LATENT | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": LATENT
    | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    **{kind: LATENT | _DSA for kind in ("deepseek_v32", "glm_moe_dsa")},
    "minicpm3": LATENT,
    "youtu": LATENT,
    "cwm": {"hidden_size": 96, "head_dim": 16},
    "glm4_moe_lite": LATENT | {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen3_vl_moe_text": {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 16},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32},
    "lfm2": {"full_attn_idxs": [1]},
    "qwen3_5_text": _DELTA,
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_experts": 8, "num_experts_per_tok": 3}
    | {"num_dense_layers": 1, "moe_intermediate_size": 32},
    **{kind: _DELTA | {"num_experts": 8, "num_experts_per_tok": 3} for kind in ("qwen3_next", "qwen3_5_moe_text")},
    "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 80, "num_local_experts": 4, "attention_chunk_size": 8},
    "gemma4_text": _GEMMA4 | {"hidden_size_per_layer_input": 16},
    "gemma4_unified_text": _GEMMA4,
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 16},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_state": 16, "num_local_experts": 4}
    | {"layer_types": [LINEAR, "full_attention", LINEAR, LINEAR], "shared_intermediate_size": 48},
    "falcon_h1": {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_state": 16},
    "jamba": {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1},
    **{kind: {"time_step_rank": 8, "intermediate_size": 128} for kind in ("mamba", "falcon_mamba")},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
    "nemotron_h": {"layers_block_type": [LINEAR, "moe", "full_attention", "mlp"], "n_routed_experts": 8, "head_dim": 32}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 24}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "solar_open": {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
}
WITHOUT_A_CLASS = ("kimi_k2", "step3_text", "bailing_moe", "bailing_moe_v2", "minicpm", "new")
"""Types that transformers has no class for; their tests are in test_latent_keys.py, test_ling.py and
test_config_logits.py."""
WITH_EXPERTS = (
    *MOE_KEYS, "granitemoehybrid", "jamba", "lfm2_moe", "nemotron_h", "qwen3_next", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite",
)  # fmt: skip
TYPES = tuple(kind for kind in ARCHITECTURES if kind not in WITHOUT_A_CLASS)
RENAMED = (*WITH_EXPERTS, "exaone", "gpt_neox")
"""Types whose tensors transformers calls otherwise than their files do."""
INSIDE = tuple(kind for kind in TYPES if kind.endswith("_text") and not kind.startswith(("gemma", "llama")))
"""Types of language models that transformers has no head for."""
WITHOUT_ROPE = ("falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h")
"""Types none of whose layers has positions."""
OWN_ROPE = ("llama", "phi3", "gemma3_text", "gemma4_text", "olmo3", "glm4", "qwen2_vl_text", "hunyuan_v1_moe", "phimoe")
"""Types that read RoPE settings each in their way; the others do as Llama does."""
_NESTED = {_FULL: {"rope_type": "linear", "factor": 4.0}, _SLIDING: {"rope_theta": 77.0}}
_OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_DROPPED = ("rope_theta", "partial_rotary_factor")

CONTEXTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "mscales": {
        "rope_scaling": {key: value for key, value in LONGROPE.items() if key not in _DROPPED}
        | {"short_mscale": 1.2, "long_mscale": 1.2}
    },
    "alpha": {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    "yarn": {"rope_parameters": {key: value for key, value in YARN.items() if key != "rope_theta"}},
    "old yarn": {"rope_scaling": _OLD_YARN, "rope_theta": 5000.0},
    "llama3": {"rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"}},
    "longrope": {"rope_scaling": {key: value for key, value in LONGROPE.items() if key not in _DROPPED}},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    "by layer type": {"rope_parameters": _NESTED},
    "scaled queries": {"rope_parameters": SCALED_QUERIES},
}

PRESENT: dict[str, list[Any]] = {
    "vocab_size": [128],
    "hidden_size": [32],
    "intermediate_size": [40],
    "num_hidden_layers": [3],
    "num_attention_heads": [2],
    "num_key_value_heads": [1, 4],
    "head_dim": [32],
    "hidden_act": ["silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"],
    "hidden_activation": ["silu", "gelu", "gelu_pytorch_tanh", "relu"],
    "max_position_embeddings": [99],
    "rms_norm_eps": [0.1],
    "layer_norm_eps": [0.1],
    "norm_epsilon": [0.1],
    "layer_norm_epsilon": [0.1],
    "rotary_emb_base": [777.0],
    "rotary_pct": [0.5, 1.0],
    "ffn_hidden_size": [40],
    "num_kv_heads": [1, 2],
    "num_ln_in_parallel_attn": [1, 2],
    "activation": ["gelu", "gelu_new", "relu"],
    "query_pre_attn_scalar": [7],
    "attn_logit_softcapping": [5.0],
    "final_logit_softcapping": [5.0],
    "attention_multiplier": [0.5, 0.0],
    "embedding_multiplier": [0.5],
    "residual_multiplier": [0.5],
    "logits_scaling": [0.5],
    "logit_scale": [0.5],
    "num_layers": [3],
    "activation_function": ["gelu", "relu"],
    **{
        key: [True, False]
        for key in (
            "tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qkv_bias",
            "qk_layernorm", "use_parallel_residual", "is_causal", "qkv_bias",
            "norm_topk_prob", "use_qk_norm", "attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block",
            "bias", "new_decoder_architecture", "multi_query", "parallel_attn",
        )
    },
    "use_bidirectional_attention": [True, False, "vision", "all"],
    "hidden_size_per_layer_input": [0, 8],
    "vocab_size_per_layer_input": [100, 200],
    "num_kv_shared_layers": [0, 1, 2, 3, 4, 5],
    "global_head_dim": [16, 64],
    "top_k_experts": [2],
    "intermediate_size_mlp": [40],
    "interleave_moe_layer_step": [2, 3],
    "moe_layers": [[], [1, 3], [9]],
    "attention_chunk_size": [16],
    "attn_temperature_tuning": [True, False],
    "floor_scale": [4],
    "attn_scale": [0.5],
    "num_global_key_value_heads": [1],
    "per_layer_config": [
        {}, {"1": {"head_dim": 64}, "3": {"head_dim": 64, "num_key_value_heads": 1}}, {"1": {"head_dim": 64}},
        {"0": {"head_dim": 64}, "2": {"head_dim": 64}}, {"1": {"intermediate_size": 32}}, {"9": {"head_dim": 64}},
    ],
    **{key: [4, 8] for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")},
    **{key: [1, 3, 99] for key in ("num_experts_per_tok", "moe_k", "moe_topk")},
    **{key: [40] for key in ("moe_intermediate_size", "shared_expert_intermediate_size")},
    **{key: [0, 3] for key in ("moe_num_shared_experts", "moe_layer_start_index")},
    "n_shared_experts": [2],
    "num_shared_experts": [2],
    "num_dense_layers": [0, 2],
    "route_scale": [2.5],
    "rotary_dim": [8],
    "lm_head_bias": [True, False],
    "mup_enabled": [True, False],
    "global_attn_every_n_layers": [2, 0],
    "mlp_layer_types": [["dense", "sparse"] * 2, ["sparse"] * 4],
    "shared_intermediate_size": [0, 40],
    "n_group": [2, 3, 4],
    "topk_group": [2],
    "routed_scaling_factor": [2.5],
    "moe_norm_min": [0.1],
    "first_k_dense_replace": [0, 2],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[], [1], [0, 2]],
    "moe_layer_end_index": [-1, 1],
    "moe_layer_interval": [2],
    "num_mtp_layers": [0, 2],
    "num_nextn_predict_layers": [0, 2],
    "clip_qkv": [8.0],
    "kv_lora_rank": [16],
    "q_lora_rank": [16],
    "qk_nope_head_dim": [8],
    "qk_rope_head_dim": [4],
    "v_head_dim": [8],
    "rope_interleave": [True, False],
    "topk_method": ["greedy", "group_limited_greedy", "noaux_tc", "unheard"],
    "scoring_func": ["softmax", "sigmoid"],
    "scale_emb": [3, 0.5],
    "scale_depth": [0.7],
    "dim_model_base": [32],
    "index_topk": [16],
    "swiglu_limit": [5.0, 0.0],
    "swiglu_alpha": [1.5],
    "experts_per_token": [3, 9],
    **{key: [True, False] for key in ("use_expert_bias", "tie_embedding")},
    **{key: [True, False] for key in ("conv_bias", "mamba_conv_bias", "mamba_proj_bias", "block_auto_adjust_ff_dim")},
    **{key: [2, 5] for key in ("conv_L_cache", "linear_conv_kernel_dim", "mamba_d_conv")},
    "block_multiple_of": [32],
    "block_ffn_dim_multiplier": [1.5],
    "block_ff_dim": [80],
    "full_attn_idxs": [[0, 3], []],
    "attn_layer_indices": [[0, 3], []],
    "full_attention_interval": [2, 3],
    "linear_key_head_dim": [8],
    "linear_value_head_dim": [32],
    "linear_num_key_heads": [1, 3],
    "linear_num_value_heads": [2],
    "mamba_n_heads": [4, 7],
    "mamba_n_groups": [2],
    "mamba_d_state": [8],
    "mamba_d_head": ["auto", 16, 32],
    "mamba_expand": [1, 3],
    "time_step_limit": [[0.0, 0.5], [0.1]],
    "position_embedding_type": ["rope", "unheard"],
    "mlp_hidden_act": ["relu2", "silu", "gelu_new"],
    "mamba_hidden_act": ["silu", "gelu"],
    "use_conv_bias": [True, False],
    "mamba_num_heads": [2],
    "num_heads": [4],
    "mamba_d_ssm": [48],
    "mamba_rms_norm": [True, False],
    "mamba_norm_before_gate": [True, False],
    "projectors_bias": [True, False],
    "lm_head_multiplier": [0.5],
    "key_multiplier": [0.5],
    **{f"{name}_multiplier": [0.7] for name in ("attention_in", "attention_out", "ssm_in", "ssm_out")},
    "mlp_multipliers": [[0.5, 2.0], [1.0]],
    "ssm_multipliers": [[0.5, 2.0, 1.0, 3.0, 0.1], [1.0]],
    "mamba_dt_rank": [12],
    "time_step_rank": [12, "auto"],
    "mixer_rms_eps": [0.1],
    "attn_layer_period": [2],
    "attn_layer_offset": [0],
    "expert_layer_period": [3],
    "expert_layer_offset": [0],
    "state_size": [8],
    "expand": [3],
    "mamba_head_dim": [32],
    "ssm_state_size": [8],
    "n_groups": [1],
    "conv_kernel": [2, 5],
    "time_step_min": [0.1],
    "moe_shared_expert_intermediate_size": [40],
    "moe_latent_size": [16],
}  # fmt: skip
NEMOTRON_KEYS: dict[str, list[Any]] = {
    "layers_block_type": [["mlp", LINEAR, "full_attention"], ["moe", "attention", "mamba"], [], ["unheard"]],
    "hybrid_override_pattern": ["M*-E", "MM*", "M?"],
}
WINDOW_KEYS: dict[str, list[Any]] = {
    "sliding_window": [5, 0],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 2, 9],
    "layer_types": [
        [_FULL, _SLIDING, _FULL, _SLIDING],
        [_FULL] * 4,
        [_SLIDING] * 4,
        [_FULL] * 3,
        ["linear"] * 4,
        ["mamba", "mamba", "attention", "mamba"],
    ],
    "sliding_window_pattern": [2, 3, 0, "LLLG"],
    "no_rope_layers": [[1, 0, 1, 1], [1, 1, 1, 1], [1]],
    "no_rope_layer_interval": [2, 0],
}
ROPE_KEYS: dict[str, list[Any]] = {
    "rope_theta": [777.0],
    "rope_local_base_freq": [777.0],
    "partial_rotary_factor": [0.5, 1.0],
    "original_max_position_embeddings": [32],
    "rope_parameters": [{}, {"rope_type": "default", "rope_theta": 55.0}, YARN, LLAMA3, LONGROPE, _NESTED],
    "rope_scaling": [{}, {"type": "linear", "factor": 2.0}, _OLD_YARN, {"rope_type": "su", "factor": 2.0}],
}
INNER_KEYS: dict[str, list[Any]] = {
    "rope_type": ["default", "yarn", "unheard"],
    "rope_theta": [99.0],
    "factor": [2.0],
    "attention_factor": [0.7],
    "beta_fast": [20.0, 0],
    "beta_slow": [2.0],
    "mscale": [0.7],
    "mscale_all_dim": [0.5],
    "truncate": [False],
    "low_freq_factor": [1.5],
    "high_freq_factor": [3.0],
    "original_max_position_embeddings": [16],
    "partial_rotary_factor": [0.5],
    "llama_4_scaling_beta": [0.3],
    "max_position_embeddings": [64],
    "alpha": [20.0, 0.0],
    "short_mscale": [1.2, 1.5],
    "long_mscale": [1.2],
}

ABSENT = object()
"""In place of a value: the key is left out."""


def cases(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, config.json) of every key of a type, present, null and absent. Shapes are small where they are not the
    key in question."""
    base = {"model_type": kind, "architectures": [ARCHITECTURES[kind]], **SHAPE, **BASE.get(kind, {})}
    others = WINDOW_KEYS | ROPE_KEYS | ({} if kind == "nemotron_h" else NEMOTRON_KEYS)
    keys = {key: (PRESENT | NEMOTRON_KEYS).get(key, []) for key in (*PRESENT, *CONFIG_KEYS[kind]) if key not in others}
    yield from _states(base, "plain", keys | WINDOW_KEYS | ({} if kind in WITHOUT_ROPE else ROPE_KEYS))
    yield from _states(base, "windows", WINDOW_KEYS)
    if kind in WITHOUT_ROPE:
        return
    yarn = "scaled queries" if kind == "ministral3" else "old yarn"
    for context in CONTEXTS.keys() - {"plain", "windows"} if kind in OWN_ROPE else (yarn,):
        yield from _states(base, context, ROPE_KEYS)
        yield from _inner_states(base, context)


def _states(base: dict[str, Any], context: str, keys: dict[str, list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, values in keys.items():
        for value in (ABSENT, None, *values):
            config = copy.deepcopy(base | CONTEXTS[context])
            config.pop(key, None)
            if value is not ABSENT:
                config[key] = copy.deepcopy(value)
            yield f"{context}: {key} {'absent' if value is ABSENT else value}", config


def _inner_states(base: dict[str, Any], context: str) -> Iterator[tuple[str, dict[str, Any]]]:
    outer = next(key for key in ("rope_parameters", "rope_scaling") if key in CONTEXTS[context])
    for key, values in INNER_KEYS.items():
        for value in (ABSENT, None, *values):
            config = copy.deepcopy(base | CONTEXTS[context])
            inner = config[outer].get(_FULL, config[outer])
            inner.pop(key, None)
            if value is not ABSENT:
                inner[key] = value
            yield f"{context}: {outer}.{key} {'absent' if value is ABSENT else value}", config


def ours(config: dict[str, Any]) -> dict[str, Any]:
    """Raises BadCheckpoint."""
    model = config_from_checkpoint(Checkpoint("hf", Path("config.json"), copy.deepcopy(config), {}))
    shapes = {name.removeprefix("model."): shape for name, shape in expected_shapes("hf", model).items()}
    if config["model_type"] in INSIDE:
        shapes.pop("lm_head.weight", None)
    layers = range(model.num_layers)
    return {
        "shapes": shapes,
        "windows": [layer.window for layer in model.layers],
        "ropes": [_our_rope(model, layer) for layer in range(model.num_layers)],
        "queries": [_our_query_scale(layer) for layer in model.layers],
        "bare norms": [model.family.bare_qk_norm and model.qk_norm != "" and model.turns(layer) for layer in layers],
        "activation": model.activation,
        "is_parallel": model.residual != SEQUENTIAL,
        "scaling": model.attention_scale if any(layer.attends for layer in model.layers) else None,
        "eps": model.norm_eps,
        "caps": (model.attention_cap, model.logit_cap),
        "multipliers": (
            1.0 if model.family.scaled_embeddings else model.embed_scale, model.residual_scale, 1 / model.logit_scale,
        ),
        "context": model.max_context,
        "branches": _our_branches(model),
        "experts": [_our_experts(model) if layer.is_moe else None for layer in model.layers],
    }  # fmt: skip


def _our_experts(model: ModelConfig) -> Any:
    assert model.moe is not None
    how = model.moe.routing
    acts = model.moe.activation
    return (
        *(how.num_experts, how.top_k, how.normalise, how.scale, how.num_groups, how.top_groups),
        *(acts.kind == "swiglu", acts.limit, acts.alpha),
    )


def _our_branches(model: ModelConfig) -> Any:
    """What is done with the parts of a mixer and beside it, of types that have settings for it."""
    mixer = model.mixer
    if model.family.mixer_beside and mixer is not None:
        return (*dataclasses.astuple(model.branches), *(mixer.scales or (1.0,) * 5), mixer.normed, mixer.eps)
    return mixer.eps if mixer is not None and mixer.step_norms == "plain" else None


def _their_branches(layer: Any, made: Any) -> Any:
    mixer = getattr(layer, "mamba", getattr(layer, "mixer", None))
    if hasattr(mixer, "mup_vector"):
        ffn = layer.feed_forward
        scales = (layer.attention_in_multiplier, layer.attn_out_multiplier, mixer.ssm_in_multiplier)
        scales += (layer.ssm_out_multiplier, ffn.gate_multiplier, ffn.down_multiplier, *made.ssm_multipliers)
        order = "plain" if mixer.mamba_rms_norm and mixer.norm.norm_before_gate else "gated"
        return (*scales, order if mixer.mamba_rms_norm else "", mixer.layer_norm_epsilon)
    return getattr(mixer, "rms_eps", None)


def _our_rope(model: ModelConfig, layer: int) -> Any:
    found = model.rope_of(layer)
    return None if found is None or not found[0].share else (rope_frequencies(*found[:2], 1), found[0].cos_scale)


def _our_query_scale(layer: LayerConfig) -> Any:
    return (
        None
        if layer.rope is None or not layer.rope.query_beta
        else (layer.rope.query_beta, layer.rope.original_context)
    )


def theirs(config: dict[str, Any]) -> dict[str, Any]:
    """Raises what transformers raises, and ValueError for what it could not run."""
    kind = config["model_type"]
    given = {key: value for key, value in copy.deepcopy(config).items() if key != "model_type"}
    if kind == "minicpm3":
        given.pop("logits_scaling", None)  # a property there, which no file can set
    made = transformers.AutoConfig.for_model(kind, **given)
    made._attn_implementation = "eager"
    inside = kind in INSIDE
    name = type(made).__name__.removesuffix("Config") + "Model" if inside else ARCHITECTURES[kind]
    with torch.device("meta"):
        model = getattr(transformers, name, transformers.LlamaForCausalLM)(made)
    body = model if inside else model.model if kind == "llama4_text" else model.base_model
    layers = body.h if kind == "falcon" else body.layers
    layer = next((each for each in layers if _attention_of(each) is not None), layers[0])
    attention = _attention_of(layer)
    if not getattr(made, "is_causal", True) or not getattr(attention, "is_causal", True):
        raise NotImplementedError("not causal")
    state = model.state_dict() if kind not in RENAMED else revert_weight_conversion(model, model.state_dict())
    shapes = {
        key.removeprefix("model."): tuple(value.shape)[-1:] if key.endswith("correction_bias") else tuple(value.shape)
        for key, value in state.items()
        if ".indexer." not in key
    }
    shapes = _taken_apart(shapes) if kind == "gpt_oss" else shapes
    if kind == "llama4_text":  # inputs come first
        shapes = {key: (shape[0], *shape[:0:-1]) if ".experts." in key else shape for key, shape in shapes.items()}
    shapes = (
        _split(shapes) if kind in ("llama4_text", "qwen3_vl_moe_text", "glm4v_moe_text", "qwen3_5_moe_text") else shapes
    )
    if not inside and made.tie_word_embeddings:
        shapes.pop("embed_out.weight" if kind == "gpt_neox" else "lm_head.weight")
    norm = next(getattr(body, name) for name in _NORMS if hasattr(body, name))
    listed = "layer_types" in type(made).__dataclass_fields__
    kinds = made.layer_types if listed else [_SLIDING if getattr(made, "sliding_window", None) else _FULL] * len(layers)
    indexed = "index_topk" in type(made).__dataclass_fields__
    windowed = "sliding_window" in type(made).__dataclass_fields__
    if windowed and _SLIDING in kinds and not made.sliding_window:
        raise ValueError("layers with a window need one")
    blocks = [_ffn_of(kind, each) for each in layers]
    mlp = next((getattr(block, "experts", block) for block in blocks if block is not None), None)
    names = ("act_fn", "activation_fn", "act")
    activation = next(
        (getattr(mlp, name) for name in names if hasattr(mlp, name)),
        transformers.activations.ACT2FN[made.mlp_hidden_act if kind == "nemotron_h" else "silu"],
    )
    name_of_activation = getattr(activation, "__name__", type(activation).__name__)
    eps = next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), 1e-5)
    return {
        "shapes": shapes,
        "windows": [made.sliding_window if windowed and each == _SLIDING else 0 for each in kinds]
        if kind != "llama4_text"
        else [made.attention_chunk_size if each == "chunked_attention" else 0 for each in kinds],
        "bare norms": [_has_bare_norm(each) for each in layers],
        "ropes": _their_ropes(made, body, layers, kinds),
        "queries": [_their_query_scale(made, each) for each in layers],
        "activation": _ACTIVATIONS.get(name_of_activation, name_of_activation),
        "is_parallel": getattr(layer, "use_parallel_residual", _is_parallel(made)),
        "scaling": _their_scaling(kind, attention),
        "eps": eps,
        "caps": tuple(
            (getattr(made, key) or 0.0) if key in CONFIG_KEYS[kind] else 0.0
            for key in ("attn_logit_softcapping", "final_logit_softcapping")
        ),
        "multipliers": (
            _their_embed_scale(kind, made, body),
            getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0)),
            made.logits_scaling if made.model_type.startswith(("granite", "minicpm3"))
            else 1 / made.logit_scale
            if kind in ("cohere", "cohere2")
            else 1 / getattr(body, "lm_head_multiplier", 1.0),
        ),
        "branches": _their_branches(layer, made),
        "context": min(_their_context(kind, made), made.index_topk if indexed else _their_context(kind, made)),
        "experts": [_their_experts(kind, block) for block in blocks],
    }  # fmt: skip


def _their_context(kind: str, made: Any) -> int:
    return made.max_position_embeddings if "max_position_embeddings" in CONFIG_KEYS[kind] else 0


def _their_embed_scale(kind: str, made: Any, body: Any) -> float:
    if kind == "afmoe":
        return made.hidden_size**0.5 if made.mup_enabled else 1.0
    return made.scale_emb if kind == "minicpm3" else getattr(body, "embedding_multiplier", 1.0)


_ACTIVATIONS = {
    "SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu", "NewGELUActivation": "gelu",
    "ReLUSquaredActivation": "relu2", "GELUActivation": "gelu_erf",
}  # fmt: skip
_NORMS = ("norm", "embedding_norm", "final_layernorm", "final_layer_norm", "norm_f", "ln_f")


def _their_scaling(kind: str, attention: Any) -> Any:
    scaling = getattr(attention, "inv_norm_factor" if kind == "falcon" else "scaling", None)
    return scaling if kind != "falcon_h1" else scaling * attention.key_multiplier


def _attention_of(layer: Any) -> Any:
    """None for a layer without."""
    if hasattr(layer, "mixer"):
        return layer.mixer if getattr(layer, "block_type", "") == "full_attention" else None
    names = ("self_attn", "attention", "self_attention")
    return next((each for each in (getattr(layer, name, None) for name in names) if each is not None), None)


def _is_parallel(made: Any) -> bool:
    if made.model_type == "falcon":
        return bool(made.new_decoder_architecture or made.parallel_attn)
    return made.model_type in ("cohere", "cohere2", "phi")


def _ffn_of(kind: str, layer: Any) -> Any:
    if hasattr(layer, "mixer"):
        return layer.mixer if getattr(layer, "block_type", "") in ("mlp", "moe") else None
    if kind.startswith("granitemoe"):
        return layer.shared_mlp if layer.block_sparse_moe is None else layer.block_sparse_moe
    return layer.feed_forward if hasattr(layer, "feed_forward") else layer.mlp


def _taken_apart(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """With matrices [inputs, outputs] and biases of each expert, where all have one tensor."""
    apart = {}
    for name, shape in shapes.items():
        module, found, matrix = name.partition(".experts.")
        for expert in range(shape[0]) if found else ():
            kind = "bias" if matrix.endswith("_bias") else "weight"
            apart[f"{module}.experts.{expert}.{matrix.removesuffix('_bias')}.{kind}"] = shape[:0:-1]
        if not found:
            apart[name] = shape
    return apart


def _split(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """With gates, ups and downs [outputs, inputs] of each expert, where all have one tensor."""
    split = {}
    for name, shape in shapes.items():
        module, found, matrix = name.partition(".experts.")
        roles = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        for expert in range(shape[0]) if found else ():
            for role in roles:
                split[f"{module}.experts.{expert}.{role}.weight"] = (shape[1] // len(roles), shape[2])
        if not found:
            split[name] = shape
    return split


_UNNORMALISED = ("granite", "deepseek_v2", "gpt_oss", "jamba", "phimoe")


def _their_experts(kind: str, block: Any) -> Any:
    if not hasattr(block, "experts"):
        return None
    router = block.router if hasattr(block, "router") else block.gate
    method = getattr(router, "topk_method", "")
    if method not in ("", "greedy", "group_limited_greedy"):
        raise ValueError("it chooses no experts")
    groups = (1, 1) if method == "greedy" else (getattr(router, "num_group", 1), getattr(router, "topk_group", 1))
    return (
        router.num_experts,
        router.top_k,
        bool(getattr(router, "norm_topk_prob", not kind.startswith(_UNNORMALISED))),
        getattr(router, "routed_scaling_factor", getattr(router, "route_scale", 1.0)),
        *groups,
        hasattr(block.experts, "limit"),
        getattr(block.experts, "limit", 0.0),
        getattr(block.experts, "alpha", 0.0),
    )


def _their_ropes(made: Any, body: Any, layers: Any, kinds: list[str]) -> list[Any]:
    rotary = getattr(body, "pos_emb", None) or getattr(body, "rotary_emb", None)
    if rotary is None:
        return [None] * len(kinds)
    rotary = type(rotary)(made)
    ropes = []
    for kind, layer in zip(kinds, layers, strict=True):
        prefix = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""
        attention = _attention_of(layer)
        if attention is None:
            ropes.append(None)
            continue
        turns = bool(getattr(attention, "use_rope", True))
        if made.model_type in ("exaone4", "exaone_moe"):
            turns = attention.sliding_window is None or attention.is_sliding
        if made.model_type == "afmoe":
            turns = attention.is_local_attention
        if made.model_type == "cohere2":
            turns = attention.sliding_window is not None
        frequencies = getattr(rotary, f"{prefix}inv_freq").numpy().astype(np.float64)
        scale = getattr(rotary, f"{prefix}attention_scaling")
        if made.model_type == "phimoe" and rotary.rope_type != "default":
            scale = made.rope_parameters["short_mscale"]
        whole = 2 * len(frequencies) == getattr(attention, "qk_rope_head_dim", getattr(attention, "head_dim", 0))
        if not whole and made.model_type not in (
            "phi3",
            "stablelm",
            "phi",
            "nemotron",
            "gpt_neox",
            "glm",
            "glm4",
            "glm4_moe",
            "glm4v_moe_text",
            "solar_open",
            "qwen3_5_text",
            "qwen3_5_moe_text",
            "qwen3_next",
            "bamba",
            "minimax_m2",
        ):
            raise ValueError("heads that turn in part")
        ropes.append((frequencies, scale) if turns else None)
    return ropes


def _has_bare_norm(layer: Any) -> bool:
    return type(getattr(getattr(layer, "self_attn", None), "qk_norm", None)).__name__ == "Llama4TextL2Norm"


def _their_query_scale(made: Any, layer: Any) -> Any:
    if made.model_type == "llama4_text":
        attention = layer.self_attn
        is_scaled = attention.attn_temperature_tuning and not attention.use_rope
        return (attention.attn_scale, attention.floor_scale) if is_scaled else None
    if made.model_type != "ministral3":
        return None
    keys = ("llama_4_scaling_beta", "original_max_position_embeddings")
    beta, original = (made.rope_parameters.get(key) for key in keys)
    if beta is None or not original:
        raise ValueError("queries that it cannot scale")
    return beta, original


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The facts in which two differ. The longest context is ours to say where RoPE is scaled."""
    found = [key for key in a if key not in ("ropes", "context") and a[key] != b[key] and not _close(a[key], b[key])]
    for mine, other in zip(a["ropes"], b["ropes"], strict=len(a["windows"]) == len(b["windows"])):
        if (mine is None) != (other is None):
            return [*found, "ropes"]
        if mine is not None and (
            len(mine[0]) != len(other[0])
            or not np.allclose(mine[0], other[0], rtol=1e-5)
            or not np.isclose(mine[1], other[1])
        ):
            return [*found, "ropes"]
    if a["context"] < b["context"]:
        found.append("context")
    return found


def _close(a: Any, b: Any) -> bool:
    return isinstance(a, float) and isinstance(b, (int, float)) and bool(np.isclose(a, b, rtol=1e-6))
