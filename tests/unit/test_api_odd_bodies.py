"""Whatever stands in a field of Ollama's or llama-server's bodies: a call comes of it, or a complaint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from scripted import make_text_model
from tokenmill.api.endpoints import ENDPOINTS
from tokenmill.api.rules import Rules
from tokenmill.core.errors import InvalidRequest
from tokenmill.text.chat_format import ChatFormat
from tokenmill.text.fim import FimTokens

RULES = Rules(
    make_text_model().tokenizer.vocab_size,
    fim=FimTokens("<|im_start|>", "<|im_end|>", "<|endoftext|>"),
    chat_format=ChatFormat("hermes", True, "think"),
)
ODD: list[Any] = [
    None, True, False, 0, -1, 2, 1.5, -(2**70), 2**70, "", "x", [], [[]], [0], [-1], ["x"], [None], [{}],
    [[0, 1]], [["x", None]], {}, {"x": 1}, {"type": "object"}, {"type": 5}, {"a": {"b": []}}, [1, "x", 2.5],
]  # fmt: skip
MESSAGE = {
    "role": "assistant",
    "content": "hi",
    "thinking": "hm",
    "images": [],
    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": {"x": 1}}}],
}
USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "tool_name": "f", "content": "r"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
OPTIONS = {
    "num_predict": 5, "num_ctx": 9, "temperature": 1, "top_k": 1, "top_p": 1, "seed": 1, "stop": ["x"], "mirostat": 0,
    "repeat_penalty": 1, "repeat_last_n": -1,
}  # fmt: skip
_OLLAMA = {
    "model": "m", "stream": True, "options": OPTIONS, "format": "json", "think": True, "logprobs": True,
    "top_logprobs": 1, "keep_alive": "5m", "truncate": True,
}  # fmt: skip
_LLAMA = {
    "n_predict": 5, "n_cmpl": 1, "n_probs": 1, "logit_bias": [[1, 2]], "seed": 1, "samplers": ["top_k"],
    "return_tokens": True, "response_fields": ["content"], "timings_per_token": True, "stream": True, "stop": ["x"],
    "json_schema": {"type": "object", "properties": {}}, "temperature": 1, "lora": [], "id_slot": 0,
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "ollama_chat": _OLLAMA | {"tools": [TOOL], "messages": [USER, MESSAGE, RESULT, USER]},
    "ollama_generate": _OLLAMA | {"prompt": "x", "system": "y", "raw": False, "context": [1], "images": []},
    "ollama_embed": {"model": "m", "input": ["x"], "truncate": True, "dimensions": 4, "options": OPTIONS},
    "ollama_embeddings": {"model": "m", "prompt": "x", "options": OPTIONS},
    "llama_completion": _LLAMA | {"prompt": [1, "x", 2]},
    "llama_infill": _LLAMA
    | {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "c", "text": "d"}], "prompt": "e"},
    "llama_embedding": {"content": "x", "embd_normalize": 2},
    "tokenize": {"content": "x", "add_special": True, "parse_special": True, "with_pieces": True},
}


def changed(value: Any) -> Iterator[Any]:
    """`value` with one place in it made odd, or left out."""
    yield from ODD
    if isinstance(value, dict):
        for key, inner in value.items():
            rest = {name: kept for name, kept in value.items() if name != key}
            yield rest
            for odd in changed(inner):
                yield {**rest, key: odd}
    if isinstance(value, list):
        for place, inner in enumerate(value):
            for odd in changed(inner):
                yield [*value[:place], odd, *value[place + 1 :]]


@pytest.mark.parametrize("endpoint", BODIES)
def test_odd_bodies_are_read_or_refused(endpoint: str) -> None:
    parse, body = ENDPOINTS[endpoint][0], BODIES[endpoint]
    taken = refused = 0
    for odd in itertools.chain([body], (each for each in changed(body) if isinstance(each, dict))):
        try:
            parse(odd, RULES)
            taken += 1
        except InvalidRequest as error:
            assert error.message.endswith(".") and error.param, (odd, error.message)
            refused += 1
    assert taken > 5 and refused > 5
