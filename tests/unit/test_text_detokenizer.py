"""Incremental detokenising: pieces add up to the whole, and no piece holds half a character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from test_text_tokenizer import sentencepiece_metadata
from tiny_tokenizer import SPECIAL, byte_tokenizer

from tokenmill.text.detokenizer import Detokenizer
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf

TOKENIZER = byte_tokenizer()
IDS = st.lists(st.integers(0, TOKENIZER.vocab_size + 2), max_size=40)


def pieces_of(ids: list[int], skip_special: bool, sizes: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER, skip_special=skip_special)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*pieces, detokenizer.push(ids[start:]), detokenizer.flush()]


@given(IDS, st.booleans(), st.lists(st.integers(0, 4), max_size=40))
def test_pieces_add_up_to_the_whole(ids: list[int], skip_special: bool, sizes: list[int]) -> None:
    """Any bytes, valid UTF-8 or not, cut anywhere, decode as if decoded at once."""
    assert "".join(pieces_of(ids, skip_special, sizes)) == TOKENIZER.decode(ids, skip_special=skip_special)


@given(st.text(max_size=20))
def test_valid_text_never_shows_a_replacement(text: str) -> None:
    """One byte a token: each piece ends at a character's end, and every character comes out with its last byte."""
    ids = [TOKENIZER.encode_byte(byte) for byte in text.encode("utf-8", "replace")]
    pieces = pieces_of(ids, True, [1] * len(ids))
    expected = text.encode("utf-8", "replace").decode()
    assert "".join(pieces) == expected
    assert [len(piece) for piece in pieces if piece] == [1] * len(expected)


@given(st.binary(max_size=12))
def test_invalid_bytes_decode_as_python_decodes_them(data: bytes) -> None:
    ids = [TOKENIZER.encode_byte(byte) for byte in data]
    assert "".join(pieces_of(ids, True, [1] * len(ids))) == data.decode("utf-8", "replace")


def test_special_tokens_are_skipped_or_named() -> None:
    end = TOKENIZER.token_id(SPECIAL)
    ids = [*TOKENIZER.encode("a"), end, *TOKENIZER.encode("b")]
    assert pieces_of(ids, True, [1, 1, 1]) == ["a", "", "b", "", ""]
    assert pieces_of(ids, False, [1, 1, 1]) == ["a", SPECIAL, "b", "", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    ids = [TOKENIZER.encode_byte(byte) for byte in "é".encode()[:1]]
    assert pieces_of(ids, True, [1]) == ["", "", "\ufffd"]


def test_a_stream_keeps_the_space_that_a_whole_text_drops() -> None:
    """What SentencePiece puts before a text stands between a prompt and what goes on with it."""
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    ids = tokenizer.encode("abc a", add_special=False)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) + detokenizer.flush() == " abc a" and tokenizer.decode(ids) == "abc a"
