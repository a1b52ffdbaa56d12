"""Why a model is not read, in one line: what its type needs that is not done here, where that is known; else what its
config.json says that the nearest of the types that are read does not read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..formats.config_keys import ARCHITECTURES
from .unsupported_keys import unread_by

_ENCODER = "an encoder that is made to decode"
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "an encoder beside the decoder": (
        "bart", "bigbird-pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5",
        "m2m-100", "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus-x", "plbart", "prophetnet",
        "switch-transformers", "t5", "t5gemma", "t5gemma2", "trocr", "umt5",
    ),
    "learned positions": (
        "biogpt", "gpt-bigcode", "gpt-neo", "gpt-sw3", "gpt2", "openai-gpt", "opt", "starcoder",
    ),
    "sinusoidal positions": ("ctrl", "xglm"),
    "biases by distance (ALiBi)": ("bloom", "mpt"),
    "positions that are relative, with biases in buckets": ("cpmant", "mpnet", "xlnet"),
    "disentangled attention": ("deberta", "deberta-v2"),
    "layers that share weights": ("albert",),
    _ENCODER: (
        "bert", "bert-generation", "big-bird", "camembert", "data2vec-text", "ernie", "megatron-bert", "rembert",
        "roberta", "roberta-prelayernorm", "roc-bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
    "the recurrent state of RWKV": ("rwkv", "rwkv6", "rwkv7"),
    "the recurrent state of xLSTM": ("xlstm",),
    "the recurrent state of Griffin (RG-LRU)": ("recurrent-gemma",),
    "attention that layers of Mamba share": ("zamba", "zamba2"),
    "attention by hashes": ("reformer",),
    "patches of bytes in place of tokens": ("blt",),
    "the difference of two attentions": ("diffllama",),
    "layers that see images": ("emu3", "fuyu", "git", "got-ocr2", "mllama"),
    "layers that hear": ("moshi", "musicgen", "musicgen-melody", "whisper"),
}  # fmt: skip
"""What is missing -> types of transformers that need it."""

_NEED_OF = {re.sub("[-_]", "", kind): need for need, kinds in _NEEDS.items() for kind in kinds}
_ENDS = re.compile(r"(LMHead)?Model(WithLMHead)?$|For[A-Z]\w*$|Decoder$")
_MOST_KEYS = 6


def what_is_missing(architecture: str, metadata: Mapping[str, Any]) -> str:
    """Of a config.json whose architecture is not known: "it needs ..." or "nearest is ..."; of a GGUF file, "" where
    that is not known."""
    kinds = (str(metadata.get("model_type", "")), _ENDS.sub("", architecture))
    needs = (_NEED_OF.get(re.sub("[-_]", "", kind).lower()) for kind in kinds)
    need = next(filter(None, needs), "an encoder beside the decoder" if metadata.get("is_encoder_decoder") else "")
    if "general.architecture" in metadata:
        return f"it needs {need}" if need and need != _ENCODER else ""
    if need:
        return f"it needs {need}"
    nearest = min(ARCHITECTURES, key=lambda kind: len(unread_by(kind, metadata)))
    keys = unread_by(nearest, metadata)
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    told = f"does not read {', '.join(keys[:_MOST_KEYS])}{more}" if keys else "reads all that its config.json says"
    return f"nearest is {ARCHITECTURES[nearest]}, which {told}"
