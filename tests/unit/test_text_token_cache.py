"""Text cut between words: the pieces have the tokens of the text, for every word splitter, and are remembered."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from array import array
from functools import cache
from sys import getsizeof
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import DEFINED, MERGES, SPECIAL, byte_metadata
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from scripted import InlineSandbox, make_text_model
from tokenmill.api.call import Call
from tokenmill.api.encoder import KNOWN_CHARS, Encoder
from tokenmill.api.sandbox import Caller
from tokenmill.core.request import SamplingParams
from tokenmill.core.tenant import Tenant
from tokenmill.text import token_cache as segments
from tokenmill.text import tokenizer
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.pretokenizers import ALPHABET, SCHEMES
from tokenmill.text.token_cache import KEPT_BYTES, TokenCache, can_cut, cut_text
from tokenmill.text.tokenizer import Tokenizer

NAMES = sorted({scheme: name for name, scheme in SCHEMES.items()}.values())
ACROSS = ["d Ġ", "dĠ w", "o Ġ", "oĠ h", "e Ġ", "Ġ h"]
"""Merges over a border: wrong tokens wherever a splitter does not end a word there."""

WORDS = [
    "hello",
    " world",
    " wo",
    "rld",
    " ",
    "  ",
    "\n",
    "\n\n ",
    "'s",
    "'LL",
    "!!",
    "12",
    " 345",
    "é",
    "ß",
    " e\u0301",
]
WORDS += [
    "世界",
    "かな",
    "\u00a0",
    "\u200b",
    "_",
    "-",
    " (",
    ") ",
    "\t",
    "x y",
    "a b c",
    "The",
    " HTTP",
    SPECIAL,
    DEFINED,
]
WORDS += ["def f(x): return x", "\ud800", "🙂", "ｗ ｈ", " \u0301"]


@cache
def scheme_tokenizer(name: str) -> Tokenizer:
    merges = [*ACROSS, *MERGES]
    tokens = [*ALPHABET, *dict.fromkeys(merge.replace(" ", "") for merge in merges), SPECIAL, DEFINED]
    metadata = byte_metadata(pre=name, add_bos_token=True)
    metadata |= {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 4],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
    }
    return tokenizer_from_gguf(metadata)


@pytest.mark.parametrize("name", NAMES)
@given(parts=st.lists(st.sampled_from(WORDS), max_size=40), add_special=st.booleans())
@settings(max_examples=120)
def test_pieces_have_the_tokens_of_the_text(name: str, parts: list[str], add_special: bool) -> None:
    subject, text = scheme_tokenizer(name), "".join(parts)
    assert can_cut(subject._backend)
    whole = subject._encode_whole(text, subject._backend, add_special)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "PIECE_CHARS", 3)
        patch.setattr(tokenizer, "PIECE_CHARS", 0)
        for _ in range(2):  # the second time from memory
            assert subject.encode(text, add_special=add_special) == whole


def test_pieces_depend_on_nothing_that_comes_later() -> None:
    text = "one two three " * 400
    pieces = cut_text(text)
    assert "".join(pieces) == text and len(pieces) == 6
    assert all(len(piece) >= 1000 for piece in pieces[:-1])
    assert cut_text(text[:4000] + "and quite another end " * 90)[:3] == pieces[:3]
    assert cut_text("世界" * 4000) == ["世界" * 4000]


def test_what_is_known_is_not_encoded_again() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [len(text)]

    subject = TokenCache(encode)
    text = " ".join(a + b + c for a in "abcdefghij" for b in "abcdefghij" for c in "abcdefghij")
    assert subject.num_unknown_chars(text) == len(text)
    first = subject.encode(text)
    assert asked == cut_text(text) and len(asked) == 4
    assert subject.num_unknown_chars(text) == len(cut_text(text)[-1])
    asked.clear()
    assert subject.encode(text) == first
    assert asked == cut_text(text)[-1:]


def test_what_is_known_of_one_salt_is_not_known_of_another() -> None:
    """Nor of none; what is kept of all together stays within the bound."""
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [len(text)]

    subject = TokenCache(encode)
    text = "one two three " * 200
    for salt in ("", "a", "b"):
        assert subject.num_unknown_chars(text, salt) == len(text)
        subject.encode(text, salt)
        assert subject.num_unknown_chars(text, salt) == len(cut_text(text)[-1])
    assert asked == cut_text(text) * 3
    for number in range(20_000):
        subject.encode(text, f"salt {number}")
    assert subject._num_bytes == sum(segments._num_bytes(*each) for each in subject._kept.items()) <= KEPT_BYTES


def test_the_longest_unused_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts and tokens up to so many bytes, of one text no more than a quarter of them."""
    texts = [f"{name} word" * 200 for name in "abcde"]
    num_bytes = getsizeof(cut_text(texts[0])[0]) + getsizeof(array("i", [1]))
    monkeypatch.setattr(segments, "KEPT_BYTES", 4 * num_bytes + 100)
    subject = TokenCache(lambda text: [1])
    for text in (*texts[:4], texts[0], texts[4]):
        subject.encode(text)
    assert [subject.num_unknown_chars(text) < 1000 for text in texts] == [True, False, True, True, True]
    subject.encode(
        " ".join(f"{one}{other} word" for one in "abcdefghijklmnop" for other in "abcdefghijklmnopqrstuvwxyz")
    )
    assert sum(subject.num_unknown_chars(text) < 1000 for text in texts) == 3
    huge = "世" * 5000 + "a b"
    subject.encode(huge)
    assert subject.num_unknown_chars(huge) == len(huge), "one piece that would push out all others is not kept"


def test_other_tokenizers_are_not_cut() -> None:
    def backend(name: str = "gpt-2"):  # type: ignore[no-untyped-def]
        return tokenizer_from_gguf(byte_metadata(pre=name))._backend

    subject = backend()
    assert can_cut(subject)
    subject.normalizer = normalizers.NFC()
    assert can_cut(subject)
    subject.normalizer = normalizers.Replace(" ", "_")
    assert not can_cut(subject)
    for splitter in (
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ):
        subject = backend()
        subject.pre_tokenizer = splitter
        assert not can_cut(subject), splitter
    for token in (AddedToken("a b"), AddedToken("x", lstrip=True), AddedToken("x", rstrip=True)):
        subject = backend()
        subject.add_tokens([token])
        assert not can_cut(subject), token


def test_a_long_prompt_needs_a_thread_only_where_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    text = make_text_model()
    known = set[str]()
    monkeypatch.setattr(text.tokenizer, "num_unknown_chars", lambda text, salt: 0 if text in known else len(text))
    threads: list[int] = []
    encode = text.tokenizer.encode

    def note(prompt: str, **how: Any) -> list[int]:
        threads.append(threading.get_ident())
        return encode(prompt, **how)

    monkeypatch.setattr(text.tokenizer, "encode", note)
    prompt, longest = "one two " * 1000, "one two " * (KNOWN_CHARS // 8 + 1)

    async def run() -> None:
        encoder = Encoder(text, InlineSandbox(text))
        for prompts in ((), (prompt, longest)):
            known.update(prompts)
            for each in (prompt, longest):
                assert (await encoder.encode(each, add_special=False, shared=True)).text == each

    asyncio.run(run())
    assert [thread == threading.get_ident() for thread in threads] == [False, True], "the longest is the sandbox's"


def test_a_salted_call_neither_uses_nor_leaves_what_is_known() -> None:
    """Else the time it takes would tell what others sent, or theirs what was sent here."""
    subject = Tokenizer(scheme_tokenizer("gpt-2")._backend)
    text = dataclasses.replace(make_text_model(), tokenizer=subject)
    encoder = Encoder(text, InlineSandbox(text))
    prompt = "hello world " * 1000
    call = Call(model=None, sampling=SamplingParams(), prompts=(prompt,))

    def encode(given: Call) -> tuple[int, ...]:
        return asyncio.run(encoder.encode_call(given, 100_000))[0].tokens

    secret = encode(dataclasses.replace(call, cache_salt="mine"))
    assert subject.num_unknown_chars(prompt) == len(prompt), "it left nothing"
    assert encode(call) == secret
    assert subject.num_unknown_chars(prompt) < 1100
    ours = Caller(tenant=Tenant("t", salt="s"))
    assert asyncio.run(encoder.encode_call(call, 100_000, caller=ours))[0].tokens == secret
    assert subject.num_unknown_chars(prompt, "s") < 1100, "a tenant's own are known to it"
    assert subject.num_unknown_chars(prompt, "x") == len(prompt)
    assert subject._token_cache is not None
    subject._token_cache._kept = dict.fromkeys(subject._token_cache._kept, array("i", [0]))
    assert encode(call) != secret, "what is known is used"
    assert encode(dataclasses.replace(call, cache_salt="mine")) == secret
