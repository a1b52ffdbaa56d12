"""The families of decoder that can be read, each a small declared difference from the common one.

The common decoder is Llama's: RMS norms before attention and before the FFN, RoPE on whole heads, grouped-query
attention, SwiGLU, no biases. A family names what it has instead; the decoder, the weight loader and the kernels know
only these differences, never a family. `refused` keys are what a file of the family may say that is not supported, so
that no model runs almost right.

What the roles of a layer's tensors are: roles.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..plugins.groups import FAMILIES as PLUGINS
from ..plugins.load import load_plugin
from .families_hybrid import HYBRID_GGUF_FAMILIES, HYBRID_HF_FAMILIES
from .families_moe import (
    LATENT_GGUF_FAMILIES,
    LATENT_HF_FAMILIES,
    MOE_GGUF_FAMILIES,
    MOE_HF_FAMILIES,
    POST_NORM_NAMES,
)
from .family import ONE_NORM, PARALLEL
from .family import Family as Family
from .moe import MoeFamily

_QKV = ("q", "k", "v")
_PROJECTIONS = (*_QKV, "output", "up", "down")
_ATTENTION_BIAS = {"attention_bias": (*_QKV, "output")}
_LLAMA_BIASES = {**_ATTENTION_BIAS, "mlp_bias": ("gate", "up", "down")}
_CLIPPED = (("clip_qkv", "clipped queries, keys and values"),)
_BIDIRECTIONAL = (("use_bidirectional_attention", "tokens that see ahead"),)
_SANDWICH_NAMES = {**POST_NORM_NAMES, "ffn_norm": "model.layers.{}.pre_feedforward_layernorm"}

_SHARED, _EXPERTS = ("shared_gate", "shared_up", "shared_down"), ("expert_gate", "expert_up", "expert_down")
_GEMMA4 = Family(
    "Gemma 4",
    post_norm=True,
    qk_norm="head",
    v_norm=True,
    attention_scale=1.0,
    scaled_embeddings=True,
    layer_scales=True,
    bias_keys=_ATTENTION_BIAS,
    window_every=6,
    full_last=True,
    local_rope=True,
    rope_default={
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    only={
        "use_bidirectional_attention": (None, "vision"),  # tokens of images see ahead, and no others
        "rope_scaling": (),
        "attention_chunk_size": (None,),
    },
    names=_SANDWICH_NAMES,
)
_GEMMA4_EXPERTS = {
    "router": "model.layers.{}.router.proj",
    **{role: f"model.layers.{{}}.mlp.{role.removeprefix('shared_')}_proj" for role in _SHARED},
    **{role: f"model.layers.{{}}.experts.{{e}}.{role.removeprefix('expert_')}_proj" for role in _EXPERTS},
}

HF_FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("Llama 2, 3, 3.x; SmolLM2", bias_keys=_LLAMA_BIASES),
    "MistralForCausalLM": Family("Mistral", window_every=0),
    "MinistralForCausalLM": Family("Ministral", window_every=0),
    "Ministral3ForCausalLM": Family(
        "Ministral 3",
        window_every=0,
        scaled_queries=True,
        rope_default={
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16_384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        rope_names={"default": "default", "yarn": "yarn"},
    ),
    "Qwen2ForCausalLM": Family("Qwen2, Qwen2.5", biases=_QKV, window_every=0),
    "Qwen3ForCausalLM": Family(
        "Qwen3",
        qk_norm="head",
        bias_keys=_ATTENTION_BIAS,
        window_every=0,
    ),
    "SmolLM3ForCausalLM": Family(
        "SmolLM3", bias_keys=_LLAMA_BIASES, window_every=0, window_on_no_rope=True, no_rope_every=4
    ),
    "GemmaForCausalLM": Family(
        "Gemma",
        legacy_gelu=True,
        norm_offset=1.0,
        scaled_embeddings=True,
        bias_keys=_ATTENTION_BIAS,
        refused=_BIDIRECTIONAL,
    ),
    "Gemma2ForCausalLM": Family(
        "Gemma 2",
        norm_offset=1.0,
        post_norm=True,
        scaled_embeddings=True,
        bias_keys=_ATTENTION_BIAS,
        window_every=2,
        refused=_BIDIRECTIONAL,
        names=_SANDWICH_NAMES,
    ),
    "Gemma3ForCausalLM": Family(
        "Gemma 3",
        norm_offset=1.0,
        post_norm=True,
        qk_norm="head",
        scaled_embeddings=True,
        bias_keys=_ATTENTION_BIAS,
        window_every=6,
        local_rope=True,
        sees_ahead_key="use_bidirectional_attention",
        refused=(("attn_logit_softcapping", "caps of attention"),),
        names=_SANDWICH_NAMES,
    ),
    "Gemma4ForCausalLM": replace(
        _GEMMA4,
        moe=MoeFamily(normalise=True, own_norms=True),
        names={**_SANDWICH_NAMES, **_GEMMA4_EXPERTS},
    ),
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-4",
        fused=("qkv", "gate_up"),
        window_every=0,
        rope_names={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    ),
    "OlmoForCausalLM": Family(
        "OLMo",
        norm="layer",
        norm_weight=False,
        norm_bias=False,
        bias_keys=_ATTENTION_BIAS,
        refused=_CLIPPED,
    ),
    "Olmo2ForCausalLM": Family(
        "OLMo 2",
        pre_norm=False,
        post_norm=True,
        qk_norm="width",
        bias_keys=_ATTENTION_BIAS,
        names=POST_NORM_NAMES,
    ),
    "Olmo3ForCausalLM": Family(
        "OLMo 3",
        pre_norm=False,
        post_norm=True,
        qk_norm="width",
        bias_keys=_ATTENTION_BIAS,
        window_every=4,
        local_rope=True,
        names=POST_NORM_NAMES,
    ),
    "GraniteForCausalLM": Family("Granite 3", bias_keys=_LLAMA_BIASES),
    "Starcoder2ForCausalLM": Family(
        "StarCoder2",
        norm="layer",
        gated=False,
        bias_keys={"use_bias": _PROJECTIONS},
        window_every=0,
        names={"up": "model.layers.{}.mlp.c_fc", "down": "model.layers.{}.mlp.c_proj"},
    ),
    "StableLmForCausalLM": Family(
        "StableLM 2",
        norm="layer",
        residual=ONE_NORM,
        residual_key="use_parallel_residual",
        qk_norm="own",
        bias_keys={"use_qkv_bias": _QKV},
        key_names={"use_qk_norm": "qk_layernorm"},
        names={f"{role}_norm": f"model.layers.{{}}.self_attn.{role}_layernorm.norms.{{e}}" for role in ("q", "k")},
    ),
    "CohereForCausalLM": Family(
        "Command R",
        norm="layer",
        norm_bias=False,
        residual=ONE_NORM,
        qk_norm="own",
        interleaved_heads=True,
        bias_keys=_ATTENTION_BIAS,
    ),
    "Cohere2ForCausalLM": Family(
        "Command R7B, Command A",
        norm="layer",
        norm_bias=False,
        residual=ONE_NORM,
        interleaved_heads=True,
        bias_keys=_ATTENTION_BIAS,
        window_every=4,
        no_rope_on_full=True,
    ),
    "HeliumForCausalLM": Family(
        "Helium",
        interleaved_heads=True,
        bias_keys={"attention_bias": _QKV, "mlp_bias": ("gate", "up", "down")},
    ),
    "GlmForCausalLM": Family(
        "GLM-4 (9B, 2024)", fused=("gate_up",), interleaved_heads=True, bias_keys={"attention_bias": _QKV}
    ),
    "Glm4ForCausalLM": Family(
        "GLM-4",
        post_norm=True,
        fused=("gate_up",),
        interleaved_heads=True,
        bias_keys={"attention_bias": _QKV},
        names={
            "attn_post_norm": "model.layers.{}.post_self_attn_layernorm",
            "ffn_post_norm": "model.layers.{}.post_mlp_layernorm",
        },
    ),
    "Exaone4ForCausalLM": Family(
        "EXAONE 4",
        pre_norm=False,
        post_norm=True,
        qk_norm="head",
        window_every=4,
        no_rope_on_full=True,
        names=POST_NORM_NAMES,
    ),
    "SeedOssForCausalLM": Family(
        "Seed-OSS",
        bias_keys={"attention_bias": _QKV, "attention_out_bias": ("output",), "mlp_bias": ("gate", "up", "down")},
    ),
    "Ernie4_5ForCausalLM": Family("ERNIE 4.5", interleaved_heads=True, bias_keys={"use_bias": (*_PROJECTIONS, "gate")}),
    "InternLM3ForCausalLM": Family(
        "InternLM 3", refused=tuple((key, "biases") for key in ("qkv_bias", "bias", "attention_bias", "mlp_bias"))
    ),
    "ExaoneForCausalLM": Family(
        "EXAONE 3, 3.5",
        bias_keys=_LLAMA_BIASES,
        key_names={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
        names={
            "embed": "transformer.wte",
            "final_norm": "transformer.ln_f",
            "attn_norm": "transformer.h.{}.ln_1",
            "q": "transformer.h.{}.attn.attention.q_proj",
            "k": "transformer.h.{}.attn.attention.k_proj",
            "v": "transformer.h.{}.attn.attention.v_proj",
            "output": "transformer.h.{}.attn.attention.out_proj",
            "ffn_norm": "transformer.h.{}.ln_2",
            "gate": "transformer.h.{}.mlp.c_fc_0",
            "up": "transformer.h.{}.mlp.c_fc_1",
            "down": "transformer.h.{}.mlp.c_proj",
        },
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "Hunyuan (dense)",
        qk_norm="head",
        norm_after_rope=True,
        bias_keys=_ATTENTION_BIAS,
        rope_alpha=True,
        names={
            "q_norm": "model.layers.{}.self_attn.query_layernorm",
            "k_norm": "model.layers.{}.self_attn.key_layernorm",
        },
    ),
    "PhiForCausalLM": Family(
        "Phi-1, Phi-1.5, Phi-2",
        norm="layer",
        gated=False,
        residual=ONE_NORM,
        biases=(*_PROJECTIONS, "head"),
        refused=(("qk_layernorm", "norms of each head"),),
        names={
            "final_norm": "model.final_layernorm",
            "output": "model.layers.{}.self_attn.dense",
            "up": "model.layers.{}.mlp.fc1",
            "down": "model.layers.{}.mlp.fc2",
        },
    ),
    "GPTNeoXForCausalLM": Family(
        "GPT-NeoX, Pythia",
        norm="layer",
        gated=False,
        residual=PARALLEL,
        residual_key="use_parallel_residual",
        fused=("qkv",),
        qkv_by_group=True,
        biases=("up", "down"),
        bias_keys={"attention_bias": ("qkv", "output")},
        key_names={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
        names={
            "embed": "gpt_neox.embed_in",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
            "attn_norm": "gpt_neox.layers.{}.input_layernorm",
            "qkv": "gpt_neox.layers.{}.attention.query_key_value",
            "output": "gpt_neox.layers.{}.attention.dense",
            "ffn_norm": "gpt_neox.layers.{}.post_attention_layernorm",
            "up": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
            "down": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
        },
    ),
    "FalconForCausalLM": Family(
        "Falcon",
        norm="layer",
        gated=False,
        fused=("qkv",),
        qkv_by_group=True,
        bias_keys={"bias": ("qkv", "output", "up", "down")},
        key_names={
            "hidden_act": "activation",
            "intermediate_size": "ffn_hidden_size",
            "layer_norm_eps": "layer_norm_epsilon",
            "num_key_value_heads": "num_kv_heads",
        },
        refused=(("alibi", "scores that fall with distance (ALiBi)"),),
        names={
            "embed": "transformer.word_embeddings",
            "final_norm": "transformer.ln_f",
            "attn_norm": "transformer.h.{}.input_layernorm",
            "qkv": "transformer.h.{}.self_attention.query_key_value",
            "output": "transformer.h.{}.self_attention.dense",
            "ffn_norm": "transformer.h.{}.post_attention_layernorm",
            "up": "transformer.h.{}.mlp.dense_h_to_4h",
            "down": "transformer.h.{}.mlp.dense_4h_to_h",
        },
        parallel_names={"attn_norm": "transformer.h.{}.ln_attn", "ffn_norm": "transformer.h.{}.ln_mlp"},
    ),
    "ArceeForCausalLM": Family("Arcee (AFM)", gated=False, bias_keys={**_ATTENTION_BIAS, "mlp_bias": ("up", "down")}),
    "NemotronForCausalLM": Family(
        "Nemotron 3, 4, Minitron",
        norm="layer",
        norm_offset=1.0,
        gated=False,
        bias_keys={**_ATTENTION_BIAS, "mlp_bias": ("up", "down")},
    ),
    "MiniCPMForCausalLM": Family(
        "MiniCPM 1, 2, 4",
        bias_keys=_ATTENTION_BIAS,
        refused=(("num_experts", "experts"), ("sparse_config", "attention to chosen blocks")),
    ),
    "CwmForCausalLM": Family(
        "CWM",
        bias_keys={"mlp_bias": ("gate", "up", "down")},
        window_every=4,
        full_first=True,
        rope_default={
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    **HYBRID_HF_FAMILIES,
    **MOE_HF_FAMILIES,
    **LATENT_HF_FAMILIES,
}
"""By the name in config.json's `architectures`."""

GGUF_FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama, SmolLM2, Mistral, Mixtral", interleaved_heads=True, moe=MoeFamily(normalise=True)),
    "mistral3": Family("Mistral Small 3.1 and later, Ministral 3", interleaved_heads=True, scaled_queries=True),
    "qwen2": Family("Qwen2, Qwen2.5", biases=_QKV),
    "qwen3": Family("Qwen3", qk_norm="head"),
    "smollm3": Family("SmolLM3", interleaved_heads=True, no_rope_every=4),
    "gemma": Family("Gemma", activation="gelu", scaled_embeddings=True),
    "gemma2": Family(
        "Gemma 2",
        activation="gelu",
        post_norm=True,
        scaled_embeddings=True,
        window_every=2,
        defaults={
            "gemma2.attn_logit_softcapping": 50.0,
            "gemma2.final_logit_softcapping": 30.0,
            "gemma2.attention.sliding_window": 4096,
        },
    ),
    "gemma3": Family(
        "Gemma 3",
        activation="gelu",
        post_norm=True,
        qk_norm="head",
        scaled_embeddings=True,
        window_every=6,
        local_rope=True,
        defaults={"gemma3.rope.freq_base": 1e6},
    ),
    "phi3": Family("Phi-3, Phi-4", fused=("qkv", "gate_up"), window_every=0),
    "olmo2": Family("OLMo 2, OLMo 3", pre_norm=False, post_norm=True, qk_norm="width", window_every=4, local_rope=True),
    "granite": Family("Granite 3", interleaved_heads=True),
    "starcoder2": Family(
        "StarCoder2", norm="layer", gated=False, activation="gelu", biases=_PROJECTIONS, window_every=0
    ),
    "stablelm": Family("StableLM 2", norm="layer", residual=ONE_NORM, qk_norm="own", may_lack_qk_norm=True),
    "olmo": Family(
        "OLMo",
        norm="layer",
        norm_weight=False,
        norm_bias=False,
        interleaved_heads=True,
        refused=(("olmo.attention.clamp_kqv", "clipped queries, keys and values"),),
    ),
    "command-r": Family(
        "Command R",
        norm="layer",
        norm_bias=False,
        residual=ONE_NORM,
        qk_norm="own",
        may_lack_qk_norm=True,
        interleaved_heads=True,
        logits_multiplied=True,
    ),
    "cohere2": Family(
        "Command R7B, Command A",
        norm="layer",
        norm_bias=False,
        residual=ONE_NORM,
        interleaved_heads=True,
        logits_multiplied=True,
        window_every=4,
        no_rope_on_full=True,
    ),
    "exaone": Family("EXAONE 3, 3.5"),
    "arcee": Family("Arcee (AFM)", gated=False, activation="relu2", interleaved_heads=True),
    "nemotron": Family("Nemotron 3, 4, Minitron", norm="layer", gated=False, activation="relu2"),
    "minicpm": Family("MiniCPM 1, 2, 4", interleaved_heads=True),
    "hunyuan-dense": Family("Hunyuan (dense)", qk_norm="head", norm_after_rope=True),
    "phi2": Family(
        "Phi-1, Phi-1.5, Phi-2",
        norm="layer",
        gated=False,
        activation="gelu",
        residual=ONE_NORM,
        biases=("head",),
    ),
    "gptneox": Family(
        "GPT-NeoX, Pythia",
        norm="layer",
        gated=False,
        activation="gelu_erf",
        residual=PARALLEL,
        residual_key="use_parallel_residual",
        fused=("qkv",),
    ),
    "falcon": Family(
        "Falcon",
        norm="layer",
        gated=False,
        activation="gelu_erf",
        residual=ONE_NORM,
        fused=("qkv",),
        parallel_names={"attn_norm": "blk.{}.attn_norm_2", "ffn_norm": "blk.{}.attn_norm"},
    ),
    "exaone4": Family("EXAONE 4", pre_norm=False, post_norm=True, qk_norm="head", window_every=4, no_rope_on_full=True),
    "seed_oss": Family("Seed-OSS", biases=_QKV, names={"ffn_norm": "blk.{}.post_attention_norm"}),
    **HYBRID_GGUF_FAMILIES,
    **MOE_GGUF_FAMILIES,
    **LATENT_GGUF_FAMILIES,
}
"""By the value of `general.architecture`. Where a GGUF file may or may not have biases, its tensors tell."""


def hf_family(architecture: str) -> Family | None:
    """Ours, or a plug-in's, of this name in a config.json. Raises ConfigError for a plug-in that cannot be used."""
    return HF_FAMILIES.get(architecture) or load_plugin(PLUGINS, architecture, Family)


def gguf_family(architecture: str) -> Family | None:
    """As hf_family, of a GGUF file."""
    return GGUF_FAMILIES.get(architecture) or load_plugin(PLUGINS, architecture, Family)


def declared_elsewhere(architecture: str, family: Family) -> tuple[str, ...]:
    """What a plug-in declares of a family, as part of the identity of what is computed by it; nothing of ours, which
    change with the forward pass alone."""
    return () if architecture in HF_FAMILIES or architecture in GGUF_FAMILIES else (repr(family),)
