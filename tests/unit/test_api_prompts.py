"""Prompts that are more than one text: ids and texts mixed, a gap to fill, tokens of an earlier conversation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from scripted import InlineSandbox, make_text_model
from tokenmill.api.call import Call
from tokenmill.api.conversations import Conversation
from tokenmill.api.encoder import Encoder
from tokenmill.api.prompts import Mixed
from tokenmill.core.request import SamplingParams
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.gguf_tokenizer import tokenizer_from_gguf
from tokenmill.text.special_tokens import Rendered
from tokenmill.text.text_model import TextModel

SPECIAL = ["<s>", "<|im_start|>"]


def text_model() -> TextModel:
    """Its texts begin with <s>."""
    tokens = [*SPECIAL, *"abcdefghijklmnopqrstuvwxyz<>|_"]
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }
    chat = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", "<s>", "")
    return replace(make_text_model(), tokenizer=tokenizer_from_gguf(metadata), chat=chat, bos_token_id=0)


def encoded(**call: Any) -> list[tuple[int, ...]]:
    text = text_model()
    made = Call(model=None, sampling=SamplingParams(), **call)
    return [each.tokens for each in asyncio.run(Encoder(text, InlineSandbox(text)).encode_call(made, 100))]


def test_ids_and_texts_are_joined_in_their_order() -> None:
    """What a text begins with comes only before one that is first."""
    a, b, c = (text_model().tokenizer.encode(text, add_special=False) for text in "abc")
    assert encoded(prompts=(Mixed(("a", 7, 8, "bc")), Mixed((7, "a")))) == [(0, *a, 7, 8, *b, *c), (7, *a)]


def test_special_tokens_count_in_the_texts_of_a_mixture() -> None:
    assert encoded(prompts=(Mixed((7, "<|im_start|>")),)) == [(7, 1)]


def test_a_gap_has_special_tokens_only_between_its_texts() -> None:
    ((bos, *rest),) = encoded(infill=Rendered(("", "<|im_start|>", "<|im_start|>"), is_split=True))
    assert (bos, rest[0], rest.count(1)) == (0, 1, 1) and len(rest) > 2


def test_a_conversation_follows_an_earlier_one_and_begins_no_second_text() -> None:
    conversation = Conversation(messages=({"role": "user", "content": "a"},))
    (a,) = text_model().tokenizer.encode("a", add_special=False)
    assert encoded(conversation=conversation, prefix=(0, 5), add_special_tokens=False) == [(0, 5, a)]
    assert encoded(conversation=conversation, add_special_tokens=False) == [(0, a)]
