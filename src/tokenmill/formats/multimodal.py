"""The language model inside a folder whose model also sees.

Such a folder's config.json describes the language model under `text_config` (older ones: beside the rest), sparsely:
what equals the default of its class is left out, which is something else than a null (config_keys.py). Its tensors
stand under a prefix beside those of the image tower. What is returned reads as a folder of the language model alone
would. Only models whose text is read as that model alone reads it are listed: one whose text attends in both directions
would run almost right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..core.errors import BadCheckpoint
from .config_keys import ARCHITECTURES, model_type_of
from .tensor import Tensor

_INSIDE = {
    **{kind: kind for kind in ("gemma3_text", "granite", "llama", "mistral", "ministral3", "qwen2", "qwen3")},
    **{kind: kind for kind in ("qwen3_vl_text", "qwen3_vl_moe_text", "glm4v_moe_text", "gpt_oss", "qwen3_moe")},
    **{kind: kind for kind in ("gemma4_text", "gemma4_unified_text", "llama4_text", "lfm2")},
    **{kind: kind for kind in ("qwen3_5_text", "qwen3_5_moe_text")},
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_vl_text": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_5_vl_text": "qwen2_5_vl_text",
}
"""`model_type` of a language model that may stand inside -> the type whose keys it has."""

WRAPPERS = {
    "Gemma3ForConditionalGeneration": "Gemma 3 with images",
    "Gemma4ForConditionalGeneration": "Gemma 4 with images and sound",
    "Gemma4UnifiedForConditionalGeneration": "Gemma 4 Unified",
    "Glm4vMoeForConditionalGeneration": "GLM-4.5V",
    "Idefics3ForConditionalGeneration": "Idefics 3",
    "InternVLForConditionalGeneration": "InternVL",
    "Lfm2VlForConditionalGeneration": "LFM2-VL",
    "Llama4ForConditionalGeneration": "Llama 4",
    "LlavaForConditionalGeneration": "LLaVA",
    "LlavaNextForConditionalGeneration": "LLaVA-NeXT",
    "Mistral3ForConditionalGeneration": "Mistral Small 3.1 and later, Ministral 3",
    "Qwen2VLForConditionalGeneration": "Qwen2-VL",
    "Qwen2_5_VLForConditionalGeneration": "Qwen2.5-VL",
    "Qwen3VLForConditionalGeneration": "Qwen3-VL",
    "Qwen3_5ForConditionalGeneration": "Qwen3.5",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3.5-MoE",
    "Qwen3VLMoeForConditionalGeneration": "Qwen3-VL-MoE",
    "SmolVLMForConditionalGeneration": "SmolVLM",
}
"""Architecture -> what people call it."""

_TIED = {
    "Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration",
    "InternVLForConditionalGeneration", "Lfm2VlForConditionalGeneration", "Mistral3ForConditionalGeneration",
}  # fmt: skip
"""Those whose head is their embeddings where the file does not say."""

_PREFIXES = (("model.language_model.", "model."), ("model.text_model.", "model."), ("language_model.", ""))
_BODY, _EMBEDDINGS = "model.", "embed_tokens.weight"
_LANGUAGE = (
    "model.layers.", "model.embed_tokens.", "model.embed_tokens_per_layer.", "model.per_layer_", "model.norm.",
    "model.embedding_norm.", "lm_head.",
)  # fmt: skip

Tensors = dict[str, Tensor]


def language_part(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Tensors, str]:
    """(config, tensors, what was left out in words, or "") of the language model; a folder that holds nothing else is
    returned as it is. Raises BadCheckpoint."""
    names = config.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    if architecture not in WRAPPERS:
        return config, _with_prefix(config, tensors), ""
    inner = config.get("text_config") or config
    if not isinstance(inner, Mapping):
        raise BadCheckpoint(f"text_config of {architecture} is not an object.")
    kind = str(inner.get("model_type"))
    if kind not in _INSIDE:
        raise BadCheckpoint(
            f"{architecture} around a language model of type {kind!r} is not supported (supported:"
            f" {', '.join(_INSIDE)})."
        )
    kept: Tensors = {}
    for name, tensor in tensors.items():
        own = _own_name(name)
        if own.startswith(_LANGUAGE):
            kept[own] = replace(tensor, name=own)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
    said = "tie_embedding" if "tie_embedding" in config else "tie_word_embeddings"  # the former is LFM2's own
    tied = config.get(said, architecture in _TIED) or inner.get("tie_word_embeddings")
    own = _INSIDE[kind]
    whole = {**inner, **ends, "model_type": own, "architectures": [ARCHITECTURES[own]]}
    whole["tie_word_embeddings"] = bool(tied)
    whole.pop("tie_embedding", None)
    left = len(tensors) - len(kept)
    return whole, kept, f"{WRAPPERS[architecture]}: the language model only, without {left} tensors that read images"


def _with_prefix(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """Of a decoder saved as a body alone, whatever its config calls it, the names that it has inside a whole model."""
    if model_type_of(config) not in ARCHITECTURES or f"{_BODY}{_EMBEDDINGS}" in tensors or _EMBEDDINGS not in tensors:
        return tensors
    named = {name if name.startswith(_LANGUAGE) else _BODY + name: tensor for name, tensor in tensors.items()}
    return {name: replace(tensor, name=name) for name, tensor in named.items()}


def _own_name(name: str) -> str:
    for prefix, instead in _PREFIXES:
        if name.startswith(prefix):
            return instead + name.removeprefix(prefix)
    return name
