"""Words that must not be written, as the token sequences whose last token is then forbidden (vLLM's `bad_words`)."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.errors import InvalidRequest
from .tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the beginning of a text, and, where that is another token sequence of the same
    length, in the middle of one, behind a space. Other ways to spell a word remain. Raises InvalidRequest."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        first, spaced = (tuple(tokenizer.encode(text, add_special=False, shared=False)) for text in (bare, f" {bare}"))
        if not bare or not first:
            raise InvalidRequest(f"bad_words holds {word!r}, which is no word.", param="bad_words")
        found[first] = None
        if len(spaced) == len(first) and spaced[0] != first[0]:
            found[spaced] = None
    return tuple(found)
