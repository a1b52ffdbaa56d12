"""Tokens of text that has been seen before: prompts that begin alike are encoded once.

A text is cut between words, where no token of byte-level BPE can reach across, so that the tokens of the pieces, one
after the other, are those of the text. What decides is this: between two ASCII letters with one space between them,
before that space, each of the word splitters known to `pretokenizers` ends a word; none looks back; and no word goes on
over a space. A tokenizer whose words are split in some other way, or that rewrites text first, is not cut at all.

Where the next cut lies depends on nothing but the text since the last. So texts that begin alike have the same pieces
up to where they part, and a conversation has those of its earlier turns.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections.abc import Callable
from functools import cache
from sys import getsizeof
from typing import Any

import tokenizers
from tokenizers import models, normalizers

from .pretokenizers import SCHEMES

PIECE_CHARS = 1000
"""A piece ends at the first border after so many."""

MAX_PIECE_CHARS = 4 * PIECE_CHARS
KEPT_BYTES = 1 << 23
"""Of texts and tokens that are kept; of a text not more than a quarter, so that none drives all others out."""

_Key = str | tuple[str, str]
"""A piece, or its salt and it."""

_BORDER = re.compile("[A-Za-z](?= [A-Za-z])")
_OVER_BORDER = re.compile("[A-Za-z] ")


def can_cut(backend: tokenizers.Tokenizer) -> bool:
    """Whether the tokens of `cut_text`'s pieces are those of the text."""
    if not isinstance(backend.model, models.BPE) or backend.model.dropout:
        return False
    if backend.normalizer is not None and not isinstance(backend.normalizer, normalizers.NFC):
        return False
    if backend.pre_tokenizer is None or _words(backend.pre_tokenizer) not in _known_words():
        return False
    return not any(
        token.lstrip or token.rstrip or token.single_word or _OVER_BORDER.search(token.content)
        for token in backend.get_added_tokens_decoder().values()
    )


def cut_text(text: str) -> list[str]:
    pieces = []
    begin = 0
    while (border := _BORDER.search(text, begin + PIECE_CHARS)) is not None:
        pieces.append(text[begin : border.end()])
        begin = border.end()
    pieces.append(text[begin:])
    return pieces


class TokenCache:
    """`encode` gives the tokens of a text, or of a piece, without anything around. What is known of one salt is not
    known of another. Threads may share it."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._kept: dict[_Key, array[int]] = {}  # the longest unused one first
        self._num_bytes = 0
        self._lock = threading.Lock()

    def encode(self, text: str, salt: str = "") -> list[int]:
        *pieces, rest = cut_text(text)
        tokens: list[int] = []
        added = 0
        for piece in pieces:
            key = (salt, piece) if salt else piece
            with self._lock:
                known = self._kept.pop(key, None)
                if known is not None:
                    self._kept[key] = known
            if known is None:
                known = array("i", self._encode(piece))
                added += _num_bytes(key, known)
                if added <= KEPT_BYTES // 4 and len(piece) <= MAX_PIECE_CHARS:
                    self._keep(key, known)
            tokens.extend(known)
        tokens.extend(self._encode(rest))
        return tokens

    def num_unknown_chars(self, text: str, salt: str = "") -> int:
        """How much of `text` is still to be encoded."""
        *pieces, rest = cut_text(text)
        return len(rest) + sum(len(piece) for piece in pieces if ((salt, piece) if salt else piece) not in self._kept)

    def _keep(self, key: _Key, tokens: array[int]) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = tokens
                self._num_bytes += _num_bytes(key, tokens)
            while self._num_bytes > KEPT_BYTES:
                oldest = next(iter(self._kept))
                self._num_bytes -= _num_bytes(oldest, self._kept.pop(oldest))


def _num_bytes(key: _Key, tokens: array[int]) -> int:
    size = getsizeof(key) if isinstance(key, str) else getsizeof(key) + getsizeof(key[1])
    return size + getsizeof(tokens)


def _words(pre_tokenizer: Any) -> str:
    """How words are made. Offsets do not matter here, nor what is taken out of words afterwards."""
    state = json.loads(pre_tokenizer.__getstate__())
    steps = state.get("pretokenizers", [state])
    if steps[-1].get("behavior") == "Removed":
        del steps[-1]
    for step in steps:
        step.pop("trim_offsets", None)
    return json.dumps(steps, sort_keys=True)


@cache
def _known_words() -> frozenset[str]:
    return frozenset(_words(scheme.build()) for scheme in set(SCHEMES.values()))
