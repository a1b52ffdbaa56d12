"""Reads SentencePiece's tokenizer.model, a protocol buffer, into the keys that a GGUF file holds of the same model.

    ModelProto      1 piece (repeated) | 2 trainer | 3 normaliser
    piece           1 text | 2 score, f32 | 3 type, as GGUF numbers them; 1 where it does not say
    trainer         3 kind: 1 unigrams, 2 BPE | 41 id of BOS | 42 of EOS
    normaliser      2 table of characters | 3 a space before the text | 4 no spaces more than one

A field is a key, `number << 3 | form`, and a value: form 0 an integer of 7 bits a byte, the lowest first, 1 eight
bytes, 2 a length and so many bytes, 5 four bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..core.errors import BadCheckpoint

_KINDS = {1: "t5", 2: "llama"}
_FIXED_BYTES = {1: 8, 5: 4}


def read_sentencepiece(data: bytes, path: Path) -> dict[str, Any]:
    """`tokenizer.ggml.*` of the model. Raises BadCheckpoint, naming `path`, for bytes that are none, and for one of
    words or characters."""
    tokens, scores, types = [], [], []
    trainer: dict[int, Any] = {}
    normaliser: dict[int, Any] = {}
    try:
        for number, value in _fields(data):
            if number == 1:
                piece = dict(_fields(value))
                tokens.append(bytes(piece[1]).decode())
                scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
                types.append(piece.get(3, 1))
            elif number in (2, 3):
                (trainer if number == 2 else normaliser).update(_fields(value))
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise BadCheckpoint(f"{path} is no model of SentencePiece that can be read: {error}.") from error
    kind = trainer.get(3, 1)
    if kind not in _KINDS or not tokens:
        raise BadCheckpoint(f"{path}: a SentencePiece model of kind {kind} is not supported (unigrams and BPE are).")
    ids = {"bos": trainer.get(41, 1), "eos": trainer.get(42, 2)}
    return {
        "tokenizer.ggml.model": _KINDS[kind],
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": bool(normaliser.get(3, 1)),
        "tokenizer.ggml.remove_extra_whitespaces": bool(normaliser.get(4, 1)),
        "tokenizer.ggml.precompiled_charsmap": bytes(normaliser.get(2, b"")),
        **{f"tokenizer.ggml.{role}_token_id": -1 if i >= len(tokens) else i for role, i in ids.items()},
    }


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, an integer or bytes) of each field of a message. Raises IndexError and ValueError."""
    at = 0
    while at < len(data):
        key, at = _integer(data, at)
        form = key & 7
        if form == 0:
            value, at = _integer(data, at)
            yield key >> 3, value
            continue
        if form == 2:
            size, at = _integer(data, at)
        elif form in _FIXED_BYTES:
            size = _FIXED_BYTES[form]
        else:
            raise ValueError(f"a field of form {form}")
        if at + size > len(data):
            raise ValueError("it is cut short")
        yield key >> 3, data[at : at + size]
        at += size


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """-> (value, where it ends)."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")
