"""Small tokenizers for tests, built from GGUF metadata made here."""

from __future__ import annotations

from typing import Any

from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.pretokenizers import ALPHABET
from tokenmill.text.tokenizer import Tokenizer

SPECIAL = "<|end|>"
DEFINED = "<tool>"
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ġw o", "r l", "rl d", "Ġwo rld", "1 2", "! !"]


def byte_metadata(**changes: Any) -> dict[str, Any]:
    """256 bytes, a few merges, one control and one user-defined token."""
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), SPECIAL, DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
        **{"tokenizer.ggml." + key: value for key, value in changes.items()},
    }


class ByteTokenizer(Tokenizer):
    def encode_byte(self, byte: int) -> int:
        """The token of one byte."""
        text = next(char for char, value in ALPHABET.items() if value == byte)
        token_id = self.token_id(text)
        assert token_id is not None
        return token_id


def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer(tokenizer_from_gguf(byte_metadata())._backend)
