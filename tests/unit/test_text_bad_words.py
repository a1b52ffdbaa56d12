"""Words as token sequences, as vLLM makes them."""

from __future__ import annotations

import pytest
from tiny_tokenizer import byte_tokenizer

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.request import SamplingParams
from tokenmill.text.calls import bad_word_ids, breaker_ids


def test_words_at_the_beginning_and_behind_a_space() -> None:
    """A second spelling counts where it has as many tokens and another first one; leading spaces do not matter."""
    tokenizer = byte_tokenizer()

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special=False))

    assert bad_word_ids(tokenizer, ["hello"]) == (ids("hello"),)  # " hello" has one token more
    assert bad_word_ids(tokenizer, ["wo", " wo"]) == (ids("wo"),)  # one token fewer: " wo" is one
    assert bad_word_ids(tokenizer, ["w "]) == (ids("w "), ids(" w "))
    assert bad_word_ids(tokenizer, ["hello world", "12"]) == (ids("hello world"), ids("12"))
    assert bad_word_ids(tokenizer, []) == ()


@pytest.mark.parametrize("word", ["", "  "])
def test_what_is_no_word_is_refused(word: str) -> None:
    """It would forbid anything or nothing."""
    with pytest.raises(InvalidRequest, match="no word"):
        bad_word_ids(byte_tokenizer(), [word])


def test_breakers_are_the_last_tokens_of_their_texts() -> None:
    """Each once, in rising order, and none where DRY is off."""
    tokenizer = byte_tokenizer()
    last = {tokenizer.encode(text, add_special=False)[-1] for text in ("a\n", "a:", "ano")}
    params = SamplingParams(dry_multiplier=1, dry_sequence_breakers=(":", "\n", "no", ":"))
    assert breaker_ids(tokenizer, params) == tuple(sorted(last))
    assert breaker_ids(tokenizer, SamplingParams()) == ()
