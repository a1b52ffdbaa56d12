"""The families of decoder that can be read, each a small declared difference from the common one.

The common decoder is Llama's: RMS norms before attention and before the FFN, RoPE on whole heads, grouped-query
attention, SwiGLU, no biases. A family names what it has instead; the decoder, the weight loader and the kernels know
only these differences, never a family. `refused` keys are what a file of the family may say that is not supported, so
that no model runs almost right.

Roles of a layer's tensors: attn_norm, q, k, v (or qkv), q_norm, k_norm, output, attn_post_norm, ffn_norm, gate, up (or
gate_up), down, ffn_post_norm. A role's tensors are `<name>.weight` and, where biased, `<name>.bias`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

GLOBAL_NAMES = {
    "gguf": {"embed": "token_embd", "final_norm": "output_norm", "head": "output"},
    "hf": {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
}
LAYER_NAMES = {
    "gguf": {
        "attn_norm": "blk.{}.attn_norm",
        "q": "blk.{}.attn_q",
        "k": "blk.{}.attn_k",
        "v": "blk.{}.attn_v",
        "qkv": "blk.{}.attn_qkv",
        "q_norm": "blk.{}.attn_q_norm",
        "k_norm": "blk.{}.attn_k_norm",
        "output": "blk.{}.attn_output",
        "attn_post_norm": "blk.{}.post_attention_norm",
        "ffn_norm": "blk.{}.ffn_norm",
        "gate": "blk.{}.ffn_gate",
        "up": "blk.{}.ffn_up",
        "gate_up": "blk.{}.ffn_up",
        "down": "blk.{}.ffn_down",
        "ffn_post_norm": "blk.{}.post_ffw_norm",
    },
    "hf": {
        "attn_norm": "model.layers.{}.input_layernorm",
        "q": "model.layers.{}.self_attn.q_proj",
        "k": "model.layers.{}.self_attn.k_proj",
        "v": "model.layers.{}.self_attn.v_proj",
        "qkv": "model.layers.{}.self_attn.qkv_proj",
        "q_norm": "model.layers.{}.self_attn.q_norm",
        "k_norm": "model.layers.{}.self_attn.k_norm",
        "output": "model.layers.{}.self_attn.o_proj",
        "ffn_norm": "model.layers.{}.post_attention_layernorm",
        "gate": "model.layers.{}.mlp.gate_proj",
        "up": "model.layers.{}.mlp.up_proj",
        "gate_up": "model.layers.{}.mlp.gate_up_proj",
        "down": "model.layers.{}.mlp.down_proj",
    },
}

_QKV = ("q", "k", "v")
_PROJECTIONS = (*_QKV, "output", "up", "down")


@dataclass(frozen=True, slots=True)
class Family:
    """title              what people call it
    norm               "rms" or "layer" (with a bias)
    norm_offset        added to norm weights at load, where a file stores them less one
    pre_norm           norms before attention and FFN
    post_norm          norms on what attention and FFN give, before it is added
    qk_norm            "" none, "head" over each head, "width" over all heads together
    activation         "silu" or "gelu"; None: the file says
    legacy_gelu        the file says "gelu" where the tanh form is meant
    gated              whether the FFN multiplies activation(gate) by up
    fused              roles stored as one matrix: "qkv", "gate_up"
    biases             roles that always have a bias
    bias_keys          file key -> roles that have a bias where it is true
    window_every       None: no windows; 0: every layer, where the file names a window; n: every layer but each n-th.
                       A file's own list of layer types overrules it
    window_on_no_rope  layers without positions have the window, and no others
    no_rope_every      n: each n-th layer is without positions; 0: none. config.json may say another n, or list them
    no_rope_on_full    layers without a window are without positions, in a file that has windows
    scaled_embeddings  embeddings are multiplied by sqrt(width)
    interleaved_heads  rows of q and k are ordered for RoPE pairs (2i, 2i + 1)
    local_rope         windowed layers have RoPE settings of their own
    rope_names         what names of RoPE scalings in config.json mean, where that is not what they say; others are
                       then refused
    refused            (key, what it would mean) that must be absent or falsy
    defaults           what a key of a GGUF file means where it is missing; of config.json formats/config_keys.py knows
    names              role -> name pattern, where it is not the common one
    """

    title: str
    norm: str = "rms"
    norm_offset: float = 0.0
    pre_norm: bool = True
    post_norm: bool = False
    qk_norm: str = ""
    activation: str | None = None
    legacy_gelu: bool = False
    gated: bool = True
    fused: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    bias_keys: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    window_every: int | None = None
    window_on_no_rope: bool = False
    no_rope_every: int = 0
    no_rope_on_full: bool = False
    scaled_embeddings: bool = False
    interleaved_heads: bool = False
    local_rope: bool = False
    rope_names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    refused: tuple[tuple[str, str], ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def has_window(self, layer: int) -> bool:
        """Whether a layer has the file's window, where the file does not list them."""
        every = self.window_every
        return every is not None and (every == 0 or (layer + 1) % every != 0)

    def layer_roles(self) -> tuple[str, ...]:
        """Roles that every layer has a weight for."""
        roles: tuple[str, ...] = ("qkv",) if "qkv" in self.fused else _QKV
        roles += ("output",)
        roles += ("gate_up",) if "gate_up" in self.fused else ("gate", "up") if self.gated else ("up",)
        roles += ("down",)
        roles += ("attn_norm", "ffn_norm") if self.pre_norm else ()
        roles += ("attn_post_norm", "ffn_post_norm") if self.post_norm else ()
        return roles + (("q_norm", "k_norm") if self.qk_norm else ())


_ATTENTION_BIAS = {"attention_bias": (*_QKV, "output")}
_LLAMA_BIASES = {**_ATTENTION_BIAS, "mlp_bias": ("gate", "up", "down")}
_BIDIRECTIONAL = (("use_bidirectional_attention", "tokens that see ahead"),)
_POST_NORM_NAMES = {
    "attn_post_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_post_norm": "model.layers.{}.post_feedforward_layernorm",
}
_SANDWICH_NAMES = {**_POST_NORM_NAMES, "ffn_norm": "model.layers.{}.pre_feedforward_layernorm"}

HF_FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("Llama 2, 3, 3.x; SmolLM2", bias_keys=_LLAMA_BIASES),
    "MistralForCausalLM": Family("Mistral", window_every=0),
    "MinistralForCausalLM": Family("Ministral", window_every=0),
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
        refused=(*_BIDIRECTIONAL, ("attn_logit_softcapping", "caps of attention")),
        names=_SANDWICH_NAMES,
    ),
    "Phi3ForCausalLM": Family(
        "Phi-3, Phi-4",
        fused=("qkv", "gate_up"),
        window_every=0,
        rope_names={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    ),
    "Olmo2ForCausalLM": Family(
        "OLMo 2",
        pre_norm=False,
        post_norm=True,
        qk_norm="width",
        bias_keys=_ATTENTION_BIAS,
        names=_POST_NORM_NAMES,
    ),
    "Olmo3ForCausalLM": Family(
        "OLMo 3",
        pre_norm=False,
        post_norm=True,
        qk_norm="width",
        bias_keys=_ATTENTION_BIAS,
        window_every=4,
        local_rope=True,
        names=_POST_NORM_NAMES,
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
        bias_keys={"use_qkv_bias": _QKV},
        refused=(
            ("qk_layernorm", "norms of each head"),
            ("use_parallel_residual", "parallel residuals"),
        ),
    ),
    "HeliumForCausalLM": Family(
        "Helium",
        interleaved_heads=True,
        bias_keys={"attention_bias": _QKV, "mlp_bias": ("gate", "up", "down")},
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
        names=_POST_NORM_NAMES,
    ),
    "SeedOssForCausalLM": Family(
        "Seed-OSS",
        bias_keys={"attention_bias": _QKV, "attention_out_bias": ("output",), "mlp_bias": ("gate", "up", "down")},
    ),
}
"""By the name in config.json's `architectures`."""

GGUF_FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama, SmolLM2, Mistral", interleaved_heads=True, refused=(("llama.expert_count", "experts"),)),
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
    "stablelm": Family("StableLM 2", norm="layer", refused=(("stablelm.use_parallel_residual", "parallel residuals"),)),
    "exaone4": Family("EXAONE 4", pre_norm=False, post_norm=True, qk_norm="head", window_every=4, no_rope_on_full=True),
    "seed_oss": Family("Seed-OSS", biases=_QKV, names={"ffn_norm": "blk.{}.post_attention_norm"}),
}
"""By the value of `general.architecture`. Where a GGUF file may or may not have biases, its tensors tell."""
