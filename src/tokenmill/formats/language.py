"""The language model inside a folder whose model also sees.

Such a folder's config.json describes the language model under `text_config` (older ones: beside the rest), sparsely:
what equals the default of its class is left out. Its tensors stand under a prefix beside those of the image tower.
What is returned reads as a folder of the language model alone would. Only models whose text is read as that model alone
reads it are listed: one whose text attends in both directions would run almost right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core.errors import BadCheckpoint
from .quantised import QuantisedTensor
from .tensor import Tensor

ARCHITECTURES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""`model_type` -> the architecture of the language model."""

WRAPPERS = {
    "Gemma3ForConditionalGeneration": "Gemma 3 with images",
    "Idefics3ForConditionalGeneration": "Idefics 3",
    "InternVLForConditionalGeneration": "InternVL",
    "LlavaForConditionalGeneration": "LLaVA",
    "LlavaNextForConditionalGeneration": "LLaVA-NeXT",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1 and later",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL",
    "SmolVLMForConditionalGeneration": "SmolVLM",
}
"""Architecture -> what people call it."""

_LLAMA_SIZES = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": {"vocab_size": 262_208, "max_position_embeddings": 131_072},
    "llama": {**_LLAMA_SIZES, "intermediate_size": 11_008, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
    "mistral": {
        **_LLAMA_SIZES, "intermediate_size": 14_336, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072, "sliding_window": 4096,
    },
}  # fmt: skip
"""What a sparse `text_config` leaves out, by model_type: the defaults of transformers' classes."""

_PREFIXES = (("model.language_model.", "model."), ("model.text_model.", "model."), ("language_model.", ""))
_LANGUAGE = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")

Tensors = dict[str, Tensor | QuantisedTensor]


def language_part(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors, str]:
    """(config, tensors, what was left out in words, or "") of the language model; a folder that holds nothing else is
    returned as it is. Raises BadCheckpoint."""
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture not in WRAPPERS:
        return config, tensors, ""
    inner = config.get("text_config") or config
    if not isinstance(inner, Mapping):
        raise BadCheckpoint(f"text_config of {architecture} is not an object.")
    kind = str(inner.get("model_type"))
    if kind not in ARCHITECTURES:
        raise BadCheckpoint(
            f"{architecture} around a language model of type {kind!r} is not supported (supported:"
            f" {', '.join(ARCHITECTURES)})."
        )
    kept: Tensors = {}
    for name, tensor in tensors.items():
        own = _own_name(name)
        if own.startswith(_LANGUAGE):
            kept[own] = replace(tensor, name=own)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
    told = {key: value for key, value in inner.items() if value is not None}
    tied = {"tie_word_embeddings": "lm_head.weight" not in kept}
    whole = {**_DEFAULTS.get(kind, {}), **told, **ends, **tied, "architectures": [ARCHITECTURES[kind]]}
    left = len(tensors) - len(kept)
    return whole, kept, f"{WRAPPERS[architecture]}: the language model only, without {left} tensors that read images"


def _own_name(name: str) -> str:
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name
