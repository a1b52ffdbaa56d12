"""GBNF, llama.cpp's grammars (vLLM's EBNF is the same), as Lark."""

from __future__ import annotations

from ...core.errors import InvalidRequest


def is_gbnf(text: str) -> bool:
    return "::=" in text


def to_lark(text: str, param: str) -> str:
    """Raises InvalidRequest that says where `text` is wrong."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the library raises bare ones
        raise InvalidRequest(f"{param} is no grammar: {error}.", param=param) from None
