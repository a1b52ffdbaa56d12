"""The keys of config.json that decide what a model computes, by `model_type`, and what each means where it is missing.

A key that is left out and a key that is null say different things: the first means the default of the type's class in
transformers, the second is a value, which only some keys take ("no window", "follows from the others"). A key that a
type does not list is not read for it, whatever a file says there: Llama has no windows. Keys that decide nothing
(dropout, how weights were drawn, caches) are in no list here; models/unsupported_keys.py knows them.

How RoPE settings are spelled inside `rope_parameters` or `rope_scaling` is told in models/config_json.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..plugins.groups import FAMILIES
from ..plugins.load import load_plugin
from .config_key import COMMON, DECODER, DERIVED, REQUIRED, WINDOW, Keys, OrNull, ends, keys, sizes
from .encoder_keys import ENCODER_KEYS, ENCODER_TYPES, NOMIC_OWN_KEYS
from .hybrid_keys import HYBRID_ARCHITECTURES, HYBRID_KEYS
from .moe_keys import LATENT_ARCHITECTURES, LATENT_KEYS, MOE_ARCHITECTURES, MOE_KEYS

_QWEN_WINDOWS = {
    "use_sliding_window": False, "sliding_window": WINDOW, "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_GEMMA = {
    **COMMON, **ends(2, 1), "head_dim": 256, "rms_norm_eps": 1e-6, "attention_bias": False,
    "tie_word_embeddings": True,
}  # fmt: skip
_GEMMA2 = {
    **_GEMMA, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": WINDOW,
    "layer_types": None,
}  # fmt: skip
_GEMMA4 = {
    **sizes(262_144, 2304, 9216, 30, 8, 4, 131_072), **ends(2, 1), "head_dim": 256, "rms_norm_eps": 1e-6,
    "attention_bias": False, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "rope_parameters": None, "sliding_window": 512, "layer_types": None, "final_logit_softcapping": None,
    "num_kv_shared_layers": 0, "attention_k_eq_v": False, "use_double_wide_mlp": False, "global_head_dim": 512,
    "num_global_key_value_heads": None, "per_layer_config": None,
}  # fmt: skip
_COHERE = {
    **COMMON, **sizes(256_000, 8192, 22_528, 40, 64, None, 8192), **ends(5, 255_001), "hidden_act": "silu",
    "head_dim": DERIVED, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "attention_bias": False,
    "tie_word_embeddings": True,
}  # fmt: skip
_QWEN2_VL = {
    **COMMON, **sizes(152_064, 8192, 29_568, 80, 64, OrNull(8), 32_768), **ends(151_643, 151_645),
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1e6, "use_sliding_window": OrNull(False),
    "sliding_window": WINDOW, "max_window_layers": 80, "layer_types": None,
}  # fmt: skip

CONFIG_KEYS: Mapping[str, Keys] = {
    **MOE_KEYS,
    "llama": keys(
        **DECODER | sizes(32_000, 4096, 11_008, 32, 32, None, 2048) | ends(1, 2) | {"head_dim": None},
        attention_bias=False,
        mlp_bias=False,
    ),
    "mistral": keys(
        **DECODER | sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072) | ends(1, 2) | {"head_dim": None},
        sliding_window=WINDOW,
    ),
    "ministral": keys(
        **DECODER | sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072) | ends(1, 2) | {"head_dim": REQUIRED},
        sliding_window=WINDOW,
        layer_types=None,
    ),
    "ministral3": keys(
        **DECODER | sizes(131_072, 4096, 14_336, 34, 32, 8, 262_144) | ends(1, 2)
        | {"head_dim": 128, "rms_norm_eps": 1e-5},
        sliding_window=None,
    ),
    "qwen2": keys(
        **DECODER | sizes(151_936, 4096, 22_016, 32, 32, OrNull(32), 32_768) | ends(None, None) | _QWEN_WINDOWS
    ),
    "qwen3": keys(
        **DECODER | sizes(151_936, 4096, 22_016, 32, 32, OrNull(32), 32_768) | ends(None, None) | _QWEN_WINDOWS
        | {"head_dim": 128},
        attention_bias=False,
    ),
    "smollm3": keys(
        **DECODER | sizes(128_256, 2048, 11_008, 36, 16, OrNull(4), 32_768) | ends(128_000, 128_001)
        | {"tie_word_embeddings": True, "rope_theta": 2e6},
        use_sliding_window=False,
        sliding_window=None,
        layer_types=None,
        no_rope_layers=None,
        no_rope_layer_interval=4,
        attention_bias=False,
        mlp_bias=False,
    ),
    "gemma": keys(**_GEMMA | sizes(256_000, 3072, 24_576, 28, 16, 16, 8192), hidden_act="gelu_pytorch_tanh"),
    "gemma2": keys(
        **_GEMMA2 | sizes(256_000, 2304, 9216, 26, 8, 4, 8192),
        final_logit_softcapping=OrNull(30.0),
        attn_logit_softcapping=OrNull(50.0),
    ),
    "gemma3_text": keys(
        **_GEMMA2 | sizes(262_208, 2304, 9216, 26, 8, 4, 131_072) | {"rope_theta": 1e6},
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
        final_logit_softcapping=None,
    ),
    "gemma4_text": keys(
        **_GEMMA4,
        hidden_size_per_layer_input=256,
        vocab_size_per_layer_input=262_144,
        enable_moe_block=False,
        num_experts=None,
        top_k_experts=None,
        moe_intermediate_size=None,
    ),
    "gemma4_unified_text": keys(**_GEMMA4 | {"max_position_embeddings": 262_144, "sliding_window": 1024}),
    "phi3": keys(
        **DECODER | sizes(32_064, 3072, 8192, 32, 32, None, 4096) | ends(1, 32_000)
        | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        partial_rotary_factor=1.0,
        sliding_window=None,
    ),
    "olmo": keys(
        **COMMON | sizes(50_304, 4096, 11_008, 32, 32, None, 2048) | ends(None, 50_279),
        head_dim=DERIVED,
        hidden_act="silu",
        attention_bias=False,
    ),
    "olmo2": keys(
        **DECODER | sizes(50_304, 4096, 11_008, 32, 32, None, 2048) | ends(None, 50_279) | {"rms_norm_eps": 1e-5},
        attention_bias=False,
    ),
    "olmo3": keys(
        **DECODER | sizes(50_304, 4096, 11_008, 32, 32, None, 2048) | ends(None, 50_279)
        | {"rms_norm_eps": 1e-5, "rope_theta": 5e5},
        attention_bias=False,
        sliding_window=WINDOW,
        layer_types=None,
    ),
    "granite": keys(
        **DECODER | sizes(32_000, 4096, 11_008, 32, 32, None, 2048) | ends(1, 2),
        attention_bias=False,
        mlp_bias=False,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        attention_multiplier=1.0,
    ),
    "starcoder2": keys(
        **COMMON | sizes(49_152, 3072, 12_288, 30, 24, 2, 4096) | ends(50_256, 50_256)
        | {"tie_word_embeddings": True},
        head_dim=None,
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-5,
        sliding_window=None,
        use_bias=True,
    ),
    "stablelm": keys(
        **COMMON | sizes(50_304, 2560, 6912, 32, 32, 32, 4096) | ends(0, 0),
        hidden_act="silu",
        layer_norm_eps=1e-5,
        partial_rotary_factor=0.25,
        use_qkv_bias=False,
        qk_layernorm=False,
        use_parallel_residual=False,
    ),
    "cohere": keys(**_COHERE | {"rope_theta": 500_000.0}, use_qk_norm=False),
    "cohere2": keys(
        **_COHERE,
        sliding_window=4096,
        sliding_window_pattern=4,
        layer_types=None,
    ),
    "helium": keys(
        **DECODER | sizes(48_000, 2560, 7040, 24, 20, 20, 4096) | ends(1, 2)
        | {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
        attention_bias=False,
        mlp_bias=False,
    ),
    "glm": keys(
        **DECODER | sizes(151_552, 4096, 13_696, 40, 32, 2, 131_072) | {"head_dim": 128, "rms_norm_eps": 1.5625e-7},
        attention_bias=True,
        partial_rotary_factor=0.5,
        bos_token_id=None,
        eos_token_id=OrNull([151_329, 151_336, 151_338]),
    ),
    "glm4": keys(
        **DECODER | sizes(151_552, 4096, 13_696, 40, 32, 2, 131_072) | {"head_dim": 128, "rms_norm_eps": 1.5625e-7},
        attention_bias=True,
        partial_rotary_factor=0.5,
        bos_token_id=None,
        eos_token_id=OrNull([151_329, 151_336, 151_338]),
    ),
    "exaone4": keys(
        **DECODER | sizes(102_400, 4096, 16_384, 32, 32, 32, 2048) | ends(0, 2) | {"rms_norm_eps": 1e-5},
        sliding_window=WINDOW,
        sliding_window_pattern=OrNull(4),
        layer_types=None,
    ),
    "seed_oss": keys(
        **DECODER | sizes(155_136, 4096, 27_648, 64, 80, OrNull(8), 524_288) | ends(0, 2)
        | {"head_dim": OrNull(128)},
        attention_bias=True,
        attention_out_bias=False,
        mlp_bias=False,
    ),
    "ernie4_5": keys(
        **DECODER | sizes(103_424, 1024, 3072, 18, 16, OrNull(2), 131_072) | ends(1, 2)
        | {"head_dim": OrNull(128), "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True},
        use_bias=False,
    ),
    "internlm3": keys(
        **DECODER | sizes(128_512, 4096, 10_240, 48, 32, OrNull(2), 32_768) | ends(1, 2)
        | {"head_dim": OrNull(128), "rms_norm_eps": 1e-5},
        attention_bias=False,
        mlp_bias=False,
        qkv_bias=DERIVED,
        bias=DERIVED,
    ),
    "exaone": keys(
        **DECODER | sizes(102_400, 4096, 14_336, 32, 32, OrNull(8), 4096) | ends(1, 361)
        | {"head_dim": None, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
        attention_bias=False,
        mlp_bias=False,
        num_layers=DERIVED,
        layer_norm_epsilon=DERIVED,
        activation_function=DERIVED,
    ),
    "hunyuan_v1_dense": keys(
        **DECODER | sizes(290_943, 4096, 11_008, 32, 32, None, 2048) | ends(1, 2)
        | {"head_dim": REQUIRED, "rms_norm_eps": 1e-5},
        attention_bias=False,
    ),
    "phi": keys(
        **COMMON | sizes(51_200, 2048, 8192, 24, 32, None, 2048) | ends(1, 2),
        head_dim=DERIVED,
        hidden_act="gelu_new",
        layer_norm_eps=1e-5,
        partial_rotary_factor=0.5,
        qk_layernorm=False,
    ),
    "gpt_neox": keys(
        **{key: default for key, default in COMMON.items() if key != "rope_theta"} | ends(0, 2),
        vocab_size=50_432,
        hidden_size=6144,
        intermediate_size=24_576,
        num_hidden_layers=44,
        num_attention_heads=64,
        max_position_embeddings=2048,
        hidden_act="gelu",
        layer_norm_eps=1e-5,
        use_parallel_residual=True,
        attention_bias=True,
        rotary_emb_base=10_000,
        rotary_pct=0.25,
    ),
    "falcon": keys(
        **COMMON | ends(11, 11) | {"tie_word_embeddings": True},
        vocab_size=65_024,
        hidden_size=4544,
        ffn_hidden_size=None,
        num_hidden_layers=32,
        num_attention_heads=71,
        num_kv_heads=None,
        max_position_embeddings=2048,
        activation="gelu",
        layer_norm_epsilon=1e-5,
        new_decoder_architecture=False,
        multi_query=True,
        parallel_attn=True,
        num_ln_in_parallel_attn=None,
        bias=False,
    ),
    "arcee": keys(
        **DECODER | sizes(32_000, 2560, 18_432, 32, 32, None, 4096) | ends(128_000, 128_001)
        | {"head_dim": None, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
        attention_bias=False,
        mlp_bias=False,
    ),
    "nemotron": keys(
        **COMMON | sizes(256_000, 6144, 24_576, 32, 48, REQUIRED, 4096) | ends(2, 3),
        head_dim=None,
        hidden_act="relu2",
        norm_eps=1e-5,
        partial_rotary_factor=0.5,
        attention_bias=False,
        mlp_bias=False,
    ),
    "minicpm": keys(
        **DECODER | sizes(32_000, 4096, 11_008, 32, 32, None, 2048) | ends(1, 2) | {"tie_word_embeddings": True},
        attention_bias=False,
        scale_emb=1,
        scale_depth=1,
        dim_model_base=1,
    ),
    "cwm": keys(
        **DECODER | sizes(128_256, 6144, 21_504, 64, 48, 8, 131_072)
        | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        bos_token_id=128_000,
        eos_token_id=OrNull([128_001, 128_008, 128_009]),
        mlp_bias=False,
        sliding_window=8192,
        layer_types=None,
    ),
    "qwen2_vl_text": keys(**_QWEN2_VL),
    "qwen2_5_vl_text": keys(**_QWEN2_VL),
    "qwen3_vl_text": keys(
        **DECODER | sizes(151_936, 4096, 22_016, 32, 32, OrNull(32), 128_000) | ends(None, None)
        | {"head_dim": 128, "rope_theta": 5e5},
        attention_bias=False,
        layer_types=DERIVED,
    ),
    **HYBRID_KEYS,
    **LATENT_KEYS,
    **ENCODER_KEYS,
}  # fmt: skip

ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "helium": "HeliumForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "phi": "PhiForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "falcon": "FalconForCausalLM",
    "arcee": "ArceeForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "cwm": "CwmForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
    **HYBRID_ARCHITECTURES,
    **LATENT_ARCHITECTURES,
    **MOE_ARCHITECTURES,
}
"""`model_type` of a decoder -> the architecture it is read as. The first that names an architecture is its own type."""

_OTHER_NAMES = {"ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM", "PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""What files called an architecture before transformers did."""
_RUN_AS_LLAMA = ("internlm3", "exaone")
"""Types that transformers has no class for but Llama's, which files that it wrote name."""

_TYPES = {architecture: kind for kind, architecture in reversed(ARCHITECTURES.items())} | {
    name + suffix: kind
    for name, kind in ENCODER_TYPES.items()
    for suffix in ("Model", "ForMaskedLM", "ForSequenceClassification")
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """What `architectures` names first, else what `model_type` stands for; "" where neither says anything known."""
    named, kind = named_architecture(config), str(config.get("model_type"))
    if named == "LlamaForCausalLM" and kind in _RUN_AS_LLAMA:
        named = ""
    return named or ARCHITECTURES.get(kind, "")


def named_architecture(config: Mapping[str, Any]) -> str:
    """What `architectures` names first; "" for nothing."""
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    return _OTHER_NAMES.get(name, name)


def model_type_of(config: Mapping[str, Any]) -> str:
    """The `model_type` whose keys the file has: what it says, else that of its architecture."""
    kind = str(config.get("model_type"))
    return kind if kind in CONFIG_KEYS else _TYPES.get(architecture_of(config), "")


def keys_of(config: Mapping[str, Any]) -> Keys:
    """The keys that the file's type reads, in the file's own spelling; none where its type is known neither to us nor
    to a plug-in. Raises ConfigError for a plug-in that cannot be used."""
    kind = model_type_of(config)
    if kind not in CONFIG_KEYS:
        keys: Keys | None = getattr(load_plugin(FAMILIES, architecture_of(config), object), "keys", None)
        return keys or {}
    return NOMIC_OWN_KEYS if kind == "nomic_bert" and "n_embd" in config else CONFIG_KEYS[kind]


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """What a file says or, by leaving it out, means by `key`; None where its type is not known."""
    known = keys_of(config).get(key)
    return config.get(key, None if known is None else known.default)
