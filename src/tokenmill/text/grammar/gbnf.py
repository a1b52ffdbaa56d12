"""GBNF, llama.cpp's grammars (vLLM's EBNF is the same), as Lark.

The library's own converter does the work. Before it, what it would misread is spelled otherwise: escapes by code point,
names that differ in case or dashes alone, alternatives that go on in the next line, "." (which is any character), what
would be set operators of Rust's patterns, and repetitions of repetitions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ...core.errors import InvalidRequest
from .lexemes import part_lexemes
from .patterns import plain_sets

_TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<comment>\#[^\n]*)"""
    r"""|(?P<name>[A-Za-z_][A-Za-z0-9_-]*)|(?P<bar>\s*\n\s*\|)|(?P<any>\.)|(?P<other>.)""",
    re.DOTALL | re.VERBOSE,
)
_CODE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))|\\.", re.DOTALL)


def is_gbnf(text: str) -> bool:
    return "::=" in text


def to_lark(text: str, param: str) -> str:
    """Raises InvalidRequest that says where `text` is wrong."""
    from llguidance.gbnf_to_lark import GrammarParser, resolve

    try:
        rules = GrammarParser().parse("".join(_spell(text)))
        resolve(rules)
        for rule in rules.values():
            _part_repetitions(rule)
        part_lexemes(rules)
        return "\n".join(["%llguidance {}", *map(str, rules.values()), ""])
    except Exception as error:  # the library raises bare ones
        raise InvalidRequest(f"{param} is no grammar: {error}.", param=param) from None


def _part_repetitions(node: Any) -> None:
    """Of a repetition that is repeated, the converter writes both signs behind each other, which Lark does not take."""
    from llguidance.gbnf_to_lark import RepetitionNode, SequenceNode

    for part in node.children():
        _part_repetitions(part)
    if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
        node.node = SequenceNode([node.node])


def _spell(text: str) -> Iterator[str]:
    """The pieces of `text` as the converter reads them rightly, without comments."""
    names: dict[str, str] = {"root": "root"}
    taken = {"root", "start"}
    for token in _TOKEN.finditer(text):
        kind, piece = token.lastgroup, token[0]
        if kind == "text":
            yield _CODE.sub(_char, piece)
        elif kind == "set":
            yield plain_sets(_CODE.sub(_char, piece))
        elif kind == "name":
            if piece not in names:
                names[piece] = _new_name(piece, taken)
            yield names[piece]
        elif kind == "bar":
            yield " |"
        elif kind == "any":
            yield "[^\\x00]"
        elif kind == "other":
            yield piece


def _new_name(name: str, taken: set[str]) -> str:
    """`name` as long as no other is the same once dashes, case and humps are gone."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower()) or "rule"
    number = 0
    while (found := plain if not number else f"{plain}x{number}") in taken:
        number += 1
    taken.add(found)
    return found


def _char(escape: re.Match[str]) -> str:
    """The character of an escape by code point, or of a bracket; other escapes stay."""
    digits = escape[1] or escape[2] or {r"\[": "5b"}.get(escape[0])
    if not digits:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    if code < 128:
        return f"\\x{code:02x}"
    return chr(code)
