"""Tokens to text as they come, never splitting a character.

A token is a run of bytes and may end inside a character; those bytes wait for the next token. Bytes that cannot become
UTF-8 turn into U+FFFD exactly as if the whole output had been decoded at once.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from .tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one stream, which goes on with another: the pieces of `push` and the last of `flush` add up to
    `tokenizer.decode` of all ids, with the space that this drops at the beginning of a whole text."""

    __slots__ = ("_decode", "_table")

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> None:
        """`shown`: special tokens that are not skipped."""
        self._table = tokenizer.bytes_table(skip_special=skip_special, shown=shown)
        self._decode = _new_decoder("replace").decode

    def push(self, token_ids: Iterable[int]) -> str:
        """Text completed by these tokens; may be empty."""
        table = self._table
        return self._decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character never became whole, else nothing."""
        return self._decode(b"", True)
