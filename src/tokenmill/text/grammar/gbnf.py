"""GBNF, llama.cpp's grammars (vLLM's EBNF is the same), as Lark.

The library's own converter does the work. Before it, what it would misread is spelled otherwise: escapes by code point,
names that differ in case or dashes alone, alternatives that go on in the next line, "." (which is any character), what
would be set operators of Rust's patterns, and repetitions of repetitions.

The library may read some rules as one lexeme each, which is matched as far as it goes. That is quick, but wrong where
the lexeme could go on into what comes after it: with `num ::= [0-9]+ ws` before a line break, white space would swallow
that, and the answer could never end. Such rules are left to the parser, character by character: slower, by a
millisecond or so a token, and right. (Texts in quotes stay lexemes: of "a" | "ab" before "b", the answer "ab" is not
taken.) Characters are followed by samples: all of Latin, and some of what lies beyond.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from ...core.errors import InvalidRequest
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


_SAMPLES = frozenset([*map(chr, range(0x180)), "\u0416", "\u05d0", "\u2028", "\u4e00", "\U0001f600"])
_NOTHING: frozenset[str] = frozenset()
_ESCAPE = re.compile(r"\\x([0-9a-fA-F]{2})|\\(.)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}


@dataclass(frozen=True, slots=True)
class Reach:
    """Of part of a grammar: whether it may be empty, the characters it may begin with, those that may come after a
    whole word of it within a longer one, and all of them."""

    is_empty: bool = True
    first: frozenset[str] = _NOTHING
    more: frozenset[str] = _NOTHING
    chars: frozenset[str] = _NOTHING


def part_lexemes(rules: dict[str, Any]) -> None:
    """Makes rules that cannot be lexemes plain ones, in the converter's own resolved rules."""
    while True:
        wrong = _Analysis(rules).wrong()
        if not wrong:
            return
        for rule in rules.values():
            if rule.rule_is_terminal and (rule.name in wrong or _mentions(rule, wrong)):
                rule.rule_is_terminal = False
        for rule in rules.values():
            if not rule.rule_is_terminal:
                rule.name = rule.name.lower()


def _mentions(node: Any, names: set[str]) -> bool:
    target = getattr(node, "target", None)
    if target is not None:
        return target.name in names or _mentions(target, names)
    return any(_mentions(part, names) for part in node.children())


class _Analysis:
    def __init__(self, rules: dict[str, Any]) -> None:
        self._rules = list(rules.values())
        self._reach = {id(rule): Reach(is_empty=False) for rule in self._rules}
        self._follow: dict[int, frozenset[str]] = {id(rule): _NOTHING for rule in self._rules}
        self._wrong: set[str] = set()
        self._settle()

    def wrong(self) -> set[str]:
        """Names of lexemes that could go on into what follows them."""
        return self._wrong

    def _settle(self) -> None:
        changed = True
        while changed:
            changed = False
            for rule in self._rules:
                reach = self._of(rule.alternatives)
                changed |= reach != self._reach[id(rule)]
                self._reach[id(rule)] = reach
        changed = True
        while changed:
            before = dict(self._follow)
            for rule in self._rules:
                if not rule.rule_is_terminal:
                    self._walk(rule.alternatives, self._follow[id(rule)])
            changed = before != self._follow

    def _of(self, node: Any) -> Reach:
        kind = type(node).__name__
        if kind == "LiteralNode":
            text = _plain(node.value)
            return Reach(not text, frozenset(text[:1]) & _SAMPLES, _NOTHING, frozenset(text))
        if kind == "RegexNode":
            chars = _members(node.rx)
            return Reach(False, chars, _NOTHING, chars)
        if kind == "RuleRefNode":
            return self._reach[id(node.target)]
        if kind == "RepetitionNode":
            inner = self._of(node.node)
            again = inner.first if node.min_times == 0 or node.max_times is None or node.max_times > 1 else _NOTHING
            return Reach(inner.is_empty or node.min_times == 0, inner.first, inner.more | again, inner.chars)
        parts = [self._of(part) for part in node.children()]
        return _sequence(parts) if kind == "SequenceNode" else _choice(parts, node.children())

    def _walk(self, node: Any, follow: frozenset[str]) -> None:
        """Note what may come after each rule that `node` names, where `follow` may come after `node`."""
        kind = type(node).__name__
        if kind == "RuleRefNode":
            target = node.target
            self._follow[id(target)] |= follow
            if target.rule_is_terminal and self._reach[id(target)].more & follow:
                self._wrong.add(target.name)
        elif kind == "RepetitionNode":
            again = self._of(node.node).first if node.max_times is None or node.max_times > 1 else _NOTHING
            self._walk(node.node, follow | again)
        elif kind == "SequenceNode":
            for part in reversed(node.children()):
                self._walk(part, follow)
                reach = self._of(part)
                follow = reach.first | follow if reach.is_empty else reach.first
        else:
            for part in node.children():
                self._walk(part, follow)


def _sequence(parts: list[Reach]) -> Reach:
    first, more, chars = _NOTHING, _NOTHING, _NOTHING
    is_empty = True
    for part in parts:
        if is_empty:
            first |= part.first
        more = (more | part.first if part.is_empty else _NOTHING) | part.more
        is_empty = is_empty and part.is_empty
        chars |= part.chars
    return Reach(is_empty, first, more, chars)


def _choice(parts: list[Reach], nodes: list[Any]) -> Reach:
    more = _NOTHING.union(*(part.more for part in parts))
    for place, (part, node) in enumerate(zip(parts, nodes, strict=True)):
        for other_place, (other, longer) in enumerate(zip(parts, nodes, strict=True)):
            if place == other_place:
                continue
            if part.is_empty:
                more |= other.first
            if type(node).__name__ == type(longer).__name__ == "LiteralNode":
                text, whole = _plain(node.value), _plain(longer.value)
                if whole.startswith(text):
                    more |= frozenset(whole[len(text) : len(text) + 1])
            elif part.first & other.first:
                more |= other.chars
    return Reach(
        any(part.is_empty for part in parts),
        _NOTHING.union(*(part.first for part in parts)),
        more,
        _NOTHING.union(*(part.chars for part in parts)),
    )


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else _NAMED.get(found[2], found[2]), text)


@cache
def _members(pattern: str) -> frozenset[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = re.compile(pattern, re.DOTALL)
    return frozenset(filter(compiled.fullmatch, _SAMPLES))
