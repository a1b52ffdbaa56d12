"""The families that are mixtures of experts, those with latent attention among them, and Step-3; see families.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ops.api import SIGMOID, SOFTMAX, SOFTMAX_CHOSEN, SPARSE_MIXER
from .family import LATENT_HEADS, LOW_RANK, Family
from .moe import MERGED, PAIRED, STACKED, MoeFamily

_QKV = ("q", "k", "v")
_ATTENTION_BIAS = {"attention_bias": (*_QKV, "output")}
_BLOCK = "model.layers.{}.block_sparse_moe."
GRANITE_NAMES = {
    "router": f"{_BLOCK}router.layer",
    "expert_gate_up": f"{_BLOCK}input_linear",
    "expert_down": f"{_BLOCK}output_linear",
    "shared_gate_up": "model.layers.{}.shared_mlp.input_linear",
    "shared_down": "model.layers.{}.shared_mlp.output_linear",
}
SHARED_EXPERT_NAMES = {
    role: f"model.layers.{{}}.mlp.shared_expert.{role.removeprefix('shared_')}_proj"
    for role in ("shared_gate", "shared_up", "shared_down")
}
GRANITE_MOE = MoeFamily((SOFTMAX_CHOSEN,), normalise=False, form=MERGED)
DEEPSEEK_MOE = MoeFamily((SIGMOID,), floor=1e-20, choice_bias=True)
"""The router of DeepSeek-V3 (arXiv 2412.19437): scores of a sigmoid each, and a bias in the choice alone."""
POST_NORM_NAMES = {
    "attn_post_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
_MIXTRAL_NAMES = {
    "router": f"{_BLOCK}gate",
    "expert_gate": f"{_BLOCK}experts.{{e}}.w1",
    "expert_up": f"{_BLOCK}experts.{{e}}.w3",
    "expert_down": f"{_BLOCK}experts.{{e}}.w2",
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS_BIASES = ("router", "expert_gate_up", "expert_down")
_CLIPPED = (("clip_qkv", "clipped queries, keys and values"),)

MOE_HF_FAMILIES: Mapping[str, Family] = {
    "Llama4ForCausalLM": Family(
        "Llama 4",
        qk_norm="head",
        norm_after_rope=True,
        bare_qk_norm=True,
        interleaved_heads=True,
        chunks=True,
        no_rope_every=4,
        moe=MoeFamily((SOFTMAX_CHOSEN,), normalise=True, scaled_inputs=True),
        bias_keys=_ATTENTION_BIAS,
        names={
            **{role: f"model.layers.{{}}.feed_forward.{role}_proj" for role in ("gate", "up", "down")},
            "router": "model.layers.{}.feed_forward.router",
            **{
                f"shared_{role}": f"model.layers.{{}}.feed_forward.shared_expert.{role}_proj"
                for role in ("gate", "up", "down")
            },
            **{
                f"expert_{role}": f"model.layers.{{}}.feed_forward.experts.{{e}}.{role}_proj"
                for role in ("gate", "up", "down")
            },
        },
    ),
    "MixtralForCausalLM": Family("Mixtral", moe=MoeFamily(normalise=True), window_every=0, names=_MIXTRAL_NAMES),
    "PhimoeForCausalLM": Family(
        "Phi-3.5-MoE",
        norm="layer",
        moe=MoeFamily((SPARSE_MIXER,), normalise=False),
        bias_keys={**_ATTENTION_BIAS, "lm_head_bias": ("head",)},
        window_every=0,
        rope_mscales=True,
        rope_names={"default": "default", "longrope": "longrope", "su": "longrope"},
        names=_MIXTRAL_NAMES,
    ),
    "MiniMaxM2ForCausalLM": Family(
        "MiniMax-M2",
        qk_norm="width",
        moe=MoeFamily((SIGMOID,), normalise=True, choice_bias=True),
        names={**_MIXTRAL_NAMES, "choice_bias": f"{_BLOCK}e_score_correction_bias"},
    ),
    "Qwen2MoeForCausalLM": Family(
        "Qwen1.5-MoE, Qwen2-MoE",
        moe=MoeFamily(shared_mix=True),
        bias_keys={"qkv_bias": _QKV},
        refused=(("use_sliding_window", "windows"),),
        names=SHARED_EXPERT_NAMES,
    ),
    "Qwen3MoeForCausalLM": Family(
        "Qwen3-MoE",
        qk_norm="head",
        moe=MoeFamily(),
        bias_keys=_ATTENTION_BIAS,
        window_every=0,
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        "Qwen3-VL-MoE",
        qk_norm="head",
        moe=MoeFamily(normalise=True),
        bias_keys=_ATTENTION_BIAS,
    ),
    "OlmoeForCausalLM": Family("OLMoE", qk_norm="width", moe=MoeFamily(), bias_keys=_ATTENTION_BIAS, refused=_CLIPPED),
    "FlexOlmoForCausalLM": Family(
        "FlexOlmo",
        pre_norm=False,
        post_norm=True,
        qk_norm="width",
        moe=MoeFamily(),
        bias_keys=_ATTENTION_BIAS,
        names=POST_NORM_NAMES,
    ),
    "GraniteMoeForCausalLM": Family("Granite 3 MoE", moe=GRANITE_MOE, bias_keys=_ATTENTION_BIAS, names=GRANITE_NAMES),
    "GraniteMoeSharedForCausalLM": Family(
        "Granite MoE with shared experts",
        moe=GRANITE_MOE,
        fused=("shared_gate_up",),
        bias_keys=_ATTENTION_BIAS,
        names=GRANITE_NAMES,
    ),
    "Glm4MoeForCausalLM": Family(
        "GLM-4.5, GLM-4.6",
        qk_norm="head",
        moe=DEEPSEEK_MOE,
        bias_keys={"attention_bias": _QKV},
    ),
    "Glm4vMoeForConditionalGeneration": Family(
        "GLM-4.5V",
        moe=DEEPSEEK_MOE,
        bias_keys={"attention_bias": _QKV},
    ),
    "Dots1ForCausalLM": Family(
        "dots.llm1",
        qk_norm="head",
        moe=DEEPSEEK_MOE,
        bias_keys=_ATTENTION_BIAS,
        window_every=0,
    ),
    "SolarOpenForCausalLM": Family(
        "Solar Open",
        moe=DEEPSEEK_MOE,
        bias_keys={"attention_bias": _QKV},
    ),
    "HunYuanMoEV1ForCausalLM": Family(
        "Hunyuan-A13B",
        qk_norm="head",
        norm_after_rope=True,
        rope_alpha=True,
        moe=MoeFamily(normalise=True, num_shared=1),
        bias_keys=_ATTENTION_BIAS,
        names={
            "q_norm": "model.layers.{}.self_attn.query_layernorm",
            "k_norm": "model.layers.{}.self_attn.key_layernorm",
            "router": "model.layers.{}.mlp.gate.wg",
            "shared_gate": "model.layers.{}.mlp.shared_mlp.gate_proj",
            "shared_up": "model.layers.{}.mlp.shared_mlp.up_proj",
            "shared_down": "model.layers.{}.mlp.shared_mlp.down_proj",
        },
    ),
    "BailingMoeV2ForCausalLM": Family(
        "Ling 2, Ring 2",
        qk_norm="head",
        fused=("qkv",),
        moe=replace(DEEPSEEK_MOE, normalise=True),
        bias_keys={"use_qkv_bias": ("qkv",), "use_bias": ("output",)},
        names={
            "embed": "model.word_embeddings",
            "qkv": "model.layers.{}.attention.query_key_value",
            "q_norm": "model.layers.{}.attention.query_layernorm",
            "k_norm": "model.layers.{}.attention.key_layernorm",
            "output": "model.layers.{}.attention.dense",
            "choice_bias": "model.layers.{}.mlp.gate.expert_bias",
        },
    ),
    "ExaoneMoeForCausalLM": Family(
        "K-EXAONE",
        qk_norm="head",
        moe=DEEPSEEK_MOE,
        window_every=4,
        no_rope_on_full=True,
        unread=("mtp.",),
        names={"choice_bias": "model.layers.{}.mlp.e_score_correction_bias"},
    ),
    "AfmoeForCausalLM": Family(
        "AFMoE (Trinity)",
        post_norm=True,
        qk_norm="head",
        gated_attention=True,
        own_gates=True,
        moe=replace(DEEPSEEK_MOE, normalise=True),
        bias_keys=_ATTENTION_BIAS,
        window_every=4,
        no_rope_on_full=True,
        names={
            "attn_post_norm": "model.layers.{}.post_attention_layernorm",
            "ffn_norm": "model.layers.{}.pre_mlp_layernorm",
            "ffn_post_norm": "model.layers.{}.post_mlp_layernorm",
            "router": "model.layers.{}.mlp.router.gate",
            "choice_bias": "model.layers.{}.mlp.expert_bias",
        },
    ),
    "GptOssForCausalLM": Family(
        "GPT-OSS",
        sinks=True,
        moe=MoeFamily((SOFTMAX_CHOSEN,), normalise=False, form=PAIRED),
        biases=_GPT_OSS_BIASES,
        bias_keys=_ATTENTION_BIAS,
        activation="silu",
        window_every=2,
        rope_default=_GPT_OSS_ROPE,
        names={
            "router": "model.layers.{}.mlp.router",
            "expert_gate_up": "model.layers.{}.mlp.experts.{e}.gate_up_proj",
        },
    ),
    "Ernie4_5_MoeForCausalLM": Family(
        "ERNIE 4.5 MoE",
        moe=MoeFamily(normalise=True, choice_bias=True),
        interleaved_heads=True,
        refused=(("use_bias", "biases"),),
        unread=("model.mtp_",),
        names={"choice_bias": "model.layers.{}.mlp.moe_statics.e_score_correction_bias"},
    ),
}

MOE_GGUF_FAMILIES: Mapping[str, Family] = {
    "qwen2moe": Family("Qwen1.5-MoE, Qwen2-MoE", moe=MoeFamily(normalise=False, shared_mix=True)),
    "qwen3moe": Family("Qwen3-MoE", qk_norm="head", moe=MoeFamily(normalise=True)),
    "olmoe": Family("OLMoE", qk_norm="width", moe=MoeFamily(normalise=False)),
    "granitemoe": Family(
        "Granite MoE, with and without shared experts",
        interleaved_heads=True,
        moe=MoeFamily((SOFTMAX_CHOSEN,), normalise=False),
    ),
    "glm4moe": Family(
        "GLM-4.5, GLM-4.6",
        qk_norm="head",
        may_lack_qk_norm=True,
        moe=DEEPSEEK_MOE,
        names={"ffn_norm": "blk.{}.post_attention_norm"},
    ),
    "gpt-oss": Family(
        "GPT-OSS",
        sinks=True,
        moe=MoeFamily((SOFTMAX_CHOSEN,), normalise=False, swiglu=(7.0, 1.702)),
        window_every=2,
        whole_yarn_pairs=False,
        names={"ffn_norm": "blk.{}.post_attention_norm"},
    ),
    "minimax-m2": Family("MiniMax-M2", qk_norm="width", moe=MoeFamily((SIGMOID,), normalise=True, choice_bias=True)),
    "hunyuan-moe": Family("Hunyuan-A13B", qk_norm="head", norm_after_rope=True, moe=MoeFamily(normalise=True)),
    "bailingmoe2": Family(
        "Ling 2, Ring 2",
        qk_norm="head",
        fused=("qkv",),
        moe=DEEPSEEK_MOE,
    ),
    "exaone-moe": Family(
        "K-EXAONE",
        qk_norm="head",
        moe=DEEPSEEK_MOE,
        window_every=4,
        no_rope_on_full=True,
    ),
    "afmoe": Family(
        "AFMoE (Trinity)",
        post_norm=True,
        qk_norm="head",
        gated_attention=True,
        own_gates=True,
        moe=replace(DEEPSEEK_MOE, normalise=True),
        scaled_embeddings=True,
        window_every=4,
        no_rope_on_full=True,
    ),
    "ernie4_5-moe": Family("ERNIE 4.5 MoE", interleaved_heads=True, moe=MoeFamily(normalise=True, choice_bias=True)),
}


_BIASES = {"attention_bias": ("q_a", "kv_a", "output")}
_FFN_BIASES = {"mlp_bias": ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")}

_DEEPSEEK_V3 = Family(
    "DeepSeek-V3, R1; Kimi-K2",
    attention=LATENT_HEADS,
    moe=DEEPSEEK_MOE,
    interleaved_heads=True,
    bias_keys=_BIASES,
)

LATENT_HF_FAMILIES: Mapping[str, Family] = {
    "DeepseekV2ForCausalLM": Family(
        "DeepSeek-V2",
        attention=LATENT_HEADS,
        moe=MoeFamily(group_score=1),
        interleaved_heads=True,
        bias_keys={**_BIASES, **_FFN_BIASES},
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "DeepseekV32ForCausalLM": replace(_DEEPSEEK_V3, title="DeepSeek-V3.2 (up to 2,048 positions)", indexed=True),
    "GlmMoeDsaForCausalLM": replace(_DEEPSEEK_V3, title="GLM-5 (up to 2,048 positions)", indexed=True),
    "Glm4MoeLiteForCausalLM": Family(
        "GLM-4.7-Flash",
        attention=LATENT_HEADS,
        moe=replace(DEEPSEEK_MOE, num_dense=1),
        interleaved_heads=True,
        bias_keys=_BIASES,
    ),
    "YoutuForCausalLM": Family("Youtu-LLM", attention=LATENT_HEADS, interleaved_heads=True, bias_keys=_BIASES),
    "MiniCPM3ForCausalLM": Family("MiniCPM3", attention=LATENT_HEADS, bias_keys={**_BIASES, **_FFN_BIASES}),
    "Step3TextForCausalLM": Family(
        "Step-3",
        attention=LOW_RANK,
        moe=MoeFamily(form=STACKED),
        names={
            "q_a": "model.layers.{}.self_attn.q_proj",
            "q_a_norm": "model.layers.{}.self_attn.inter_norm",
            "q_b": "model.layers.{}.self_attn.wq",
            "router": "model.layers.{}.moe.gate",
            "expert_gate": "model.layers.{}.moe.gate_proj",
            "expert_up": "model.layers.{}.moe.up_proj",
            "expert_down": "model.layers.{}.moe.down_proj",
            "shared_gate": "model.layers.{}.share_expert.gate_proj",
            "shared_up": "model.layers.{}.share_expert.up_proj",
            "shared_down": "model.layers.{}.share_expert.down_proj",
        },
    ),
}

LATENT_GGUF_FAMILIES: Mapping[str, Family] = {
    "deepseek2": Family(
        "DeepSeek-V2, V3, R1; Kimi-K2",
        attention=LATENT_HEADS,
        moe=MoeFamily((SOFTMAX, SIGMOID), floor=1e-20, choice_bias=True),
        interleaved_heads=True,
        refused=(("deepseek2.attention.temperature_scale", "scores that depend on the position"),),
    ),
    "minicpm3": Family("MiniCPM3", attention=LATENT_HEADS),
}
