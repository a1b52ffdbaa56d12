"""How vocabularies spell bytes: byte-level (GPT-2), SentencePiece's marks, WordPiece; and which of these one uses."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tokenizers

from ..core.errors import BadCheckpoint

SPACE_MARK = "▁"


def _gpt2_alphabet() -> dict[str, int]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


ALPHABET = _gpt2_alphabet()


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes([ALPHABET[char] for char in text])
    except KeyError:
        return text.encode()


def _marked_bytes(text: str) -> bytes:
    """SentencePiece's spelling: '▁' is a space, '<0x0A>' is a byte."""
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(SPACE_MARK, " ").encode()


def _word_piece_bytes(text: str) -> bytes:
    """WordPiece's spelling: '##' goes on with a word, and anything else begins one."""
    return (text[2:] if text.startswith("##") else " " + text).encode()


def find_byte_decoder(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool]:
    """(which of the spellings the vocabulary uses, whether a text's first space is not part of it), from the decoder's
    description."""
    state = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = [state, *state.get("decoders", [])]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level_bytes, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _marked_bytes, any(map(_drops_first_space, steps))
    if "WordPiece" in kinds:
        return _word_piece_bytes, True
    raise BadCheckpoint(
        f"The tokenizer's decoder ({', '.join(str(kind) for kind in kinds)}) is not supported; "
        "byte-level, SentencePiece-style and WordPiece vocabularies are."
    )


def _drops_first_space(step: dict[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("prepend_scheme", "always") != "never"
    return step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0
