"""What a grammar takes, found out by the library that enforces it, byte by byte."""

from __future__ import annotations

from functools import cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint


@cache
def byte_tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def takes(grammar: str, text: str) -> bool:
    """Whether `text` is a whole answer under `grammar`."""
    matcher = LLMatcher(byte_tokenizer(), grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def schema_takes(schema: Any, text: str) -> bool:
    return takes(to_grammar(Constraint("json_schema", schema, "response_format")), text)
