"""Grammars of texts within a string of JSON take exactly what JSON makes of the texts that the grammar itself takes."""

from __future__ import annotations

import json
import random

import pytest

from grammars import takes
from tokenmill.text.grammar.in_json import lark_in_json, pattern_in_json, regex_in_json
from tokenmill.text.grammar.patterns import CannotMend

PATTERNS = [
    r"[a-z]+", r"a.c", r"(?s:a.c)", r'[^"]*', r'"[^"\\]*"', r"\w+\s\w+", r"\S+", r"[\s\S]{1,4}", r"a\nb|c\td", r"\\+",
    r"[\\x]{2}", r"\x41\x22", r"(?i:ab\n)c", r"[^a]", r"\D{2}", r"a{2,3}\/", r"^ab$", "[ä-ü]+", r"(a|\")+", r"\.",
    r"(?P<x>ab)", r"\p{L}+", r"[^\n]+\n",
]  # fmt: skip
TEXTS = [
    "", "a", "abc", "a\nc", 'a"c', '"x"', '"', "ab cd", "ab\ncd", "a\nb", "c\td", "\\", "\\\\", "xx", 'A"', "AB\nc",
    "ab\nc", "b", '"\\', "aa/", "aaa/", "ab", "äö", 'a"a', ".", "é", "x\n", "12", 'ab"', "\t", "a/",
]  # fmt: skip


def lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_takes_the_same_texts_quoted(pattern: str) -> None:
    plain = lark(f"start: T\nT: /{pattern.removeprefix('^').removesuffix('$')}/")
    within = lark(regex_in_json(pattern))
    assert any(takes(plain, text) for text in TEXTS)
    for text in TEXTS:
        assert takes(within, quoted(text)) == takes(plain, text), text


LARKS = [
    'start: "say " NAME "\\n" body*\nNAME: /[a-z]+/ // a comment with "quotes"\nbody: /[^\\n]+\\n/',
    'start: X ("," X)*\nX: "a".."c" | "\\""\n%ignore / +/',
    'start: SELECT CNAME ";"\nSELECT: "select\\n"i\n%import common.CNAME',
    'start: WS L~2..3 N\n%import common.WS_INLINE -> WS\n%import common.INT -> N\n%import common.LETTER -> L\n',
    'start: expr\nexpr: expr "+" term | term\nterm: STRING | "(" expr ")"\n%import common.ESCAPED_STRING -> STRING\n',
]  # fmt: skip
SAID = [
    "say bob\n", "say bob\nhi \"x\"\n\\o/\n", "say bob", "a", "a,b , c", 'a,"', "d", "SELECT\nab_1;", "select\nx;",
    "select x;", "  ab7", "\t abc77", " a7", '"a"+("b\\"c"+"d")', '"a"+', '("a")',
]  # fmt: skip


@pytest.mark.parametrize("grammar", LARKS)
def test_a_grammar_takes_the_same_texts_quoted(grammar: str) -> None:
    plain, within = lark(grammar), lark(lark_in_json(grammar))
    assert any(takes(plain, text) for text in SAID)
    for text in SAID:
        assert takes(within, quoted(text)) == takes(plain, text), text


@pytest.mark.parametrize(
    ("escape", "char"),
    [
        (r"\ud83d\ude00", "😀"),
        (r"\uD83D\uDE00", "😀"),
        (r"\uff01", "！"),
        (r"\ue000", "\ue000"),
        (r"\b", "\b"),
        (r"\x41", "A"),
    ],
)
def test_an_escape_of_a_text_is_its_character(escape: str, char: str) -> None:
    """As it is where the text is the whole answer: also beyond the first 65,536 characters, by a surrogate pair."""
    plain = f'start: "a{escape}"'
    assert takes(lark(plain), "a" + char) and takes(lark(lark_in_json(plain)), quoted("a" + char))
    assert not takes(lark(lark_in_json(plain)), "a??") and not takes(lark(lark_in_json(plain)), "a?")
    between = lark(lark_in_json(f'start: "{escape}".."{escape}"'))
    assert takes(between, quoted(char)) and not takes(between, "?")


def test_an_escape_of_a_pattern_is_its_character() -> None:
    for pattern in (r"\uff01", r"\x{1f600}", r"\u{1F600}", r"[\uff01\x{1f600}]"):
        within = lark(regex_in_json(pattern))
        assert takes(within, "！") or takes(within, "😀")
        assert not takes(within, "?")


def test_random_texts_of_any_characters_are_quoted_as_json_does() -> None:
    rng = random.Random(5)
    within = lark(regex_in_json(r"[\s\S]*"))
    for _ in range(50):
        text = "".join(rng.choice('ab"\\\n\t\r\b\f é€') for _ in range(12))
        assert takes(within, quoted(text))
    assert not takes(within, 'a"') and not takes(within, "\\") and not takes(within, "\n") and not takes(within, "\\q")


@pytest.mark.parametrize(
    "grammar",
    ["start: %json {}", "start: <|end|>", "start: @other", "start: A & B", "start: ~A", 'start: "\\x00"', "start: /a/x",
     "%import python.NAME", "%import common.ODD", 'start: "ab".."c"', "start: /a$b/", "start: /\\ba/",
     'start: "\\ud83d"', 'start: "\\ude00\\ud83d"', r"start: /\ud83d\ude00/", r"start: /\x{110000}/", 'start: "\\q"',
     'start: "\\U0001f600"', 'start: "\ud83d"', 'start: "a".."\\udfff"'],
)  # fmt: skip
def test_what_cannot_be_said_within_json_is_refused(grammar: str) -> None:
    with pytest.raises(CannotMend):
        lark_in_json(grammar)


def test_a_backslash_alone_is_no_pattern() -> None:
    with pytest.raises(CannotMend):
        pattern_in_json("a\\")
