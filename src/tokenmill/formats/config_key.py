"""What one key of a config.json means, and the keys that most decoders have: what the tables are written in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Key:
    """default: what a missing key means; None for what follows from other keys, or nothing. nullable: whether a file
    may say null, which means the same as a default of None. required: whether it may not be missing."""

    default: Any
    nullable: bool
    required: bool = False


@dataclass(frozen=True, slots=True)
class OrNull:
    """A default, beside which a file may say null."""

    default: Any


class Missing(Enum):
    """DERIVED: a missing key follows from others, a null is an error; REQUIRED: a missing one is an error too."""

    DERIVED = 0
    REQUIRED = 1


UNBOUNDED_CONTEXT = 1 << 17
"""What a model is taken to be made for whose states know no positions and whose files say nothing."""

DERIVED, REQUIRED = Missing.DERIVED, Missing.REQUIRED
WINDOW = OrNull(4096)

Keys = Mapping[str, Key]


def keys(**meanings: Any) -> Keys:
    """The table of these keys. A plain meaning is the default; None as one may be said too (null)."""
    table = {}
    for name, meaning in meanings.items():
        if isinstance(meaning, Missing):
            table[name] = Key(None, False, meaning is REQUIRED)
        elif isinstance(meaning, OrNull):
            table[name] = Key(meaning.default, True)
        else:
            table[name] = Key(meaning, meaning is None)
    return table


def sizes(
    vocab: int, width: int, ffn: int | None, layers: int, heads: int, kv_heads: Any, context: int
) -> dict[str, Any]:
    """The usual names of a decoder's sizes. ffn: None where all layers are mixtures of experts, which have a key of
    their own."""
    return {
        "vocab_size": vocab,
        "hidden_size": width,
        **({} if ffn is None else {"intermediate_size": ffn}),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
    }


def ends(bos: int | None, eos: int | None) -> dict[str, Any]:
    """The tokens that begin and end a text."""
    return {"bos_token_id": OrNull(bos), "eos_token_id": OrNull(eos)}


COMMON: dict[str, Any] = {
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": DERIVED,
}
DECODER = {**COMMON, "head_dim": DERIVED, "hidden_act": "silu", "rms_norm_eps": 1e-6}
