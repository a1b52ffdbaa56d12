"""Patterns in JSON text: the library's own slips, and that they are mended."""

from __future__ import annotations

import json
import re
import warnings

import pytest
from tests.grammars import schema_takes, takes

from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint
from tokenmill.text.grammar.patterns import CannotMend, mend, other_strings

CHARS = [*(chr(code) for code in range(32, 127)), *"\b\t\n\f\r", "é", "😀"]


def library_takes(pattern: str, text: str) -> bool:
    schema = {"x-guidance": {"json_allowed_escapes": 'nrbtf\\"'}, "type": "string", "pattern": pattern}
    return takes(json.dumps({"grammars": [{"json_schema": schema}]}), json.dumps(text, ensure_ascii=False))


def test_the_library_still_needs_mending() -> None:
    """Once these fail, `patterns` can go."""
    assert library_takes(r"^[^\\]$", "\\")
    assert library_takes(r"^a\x01b$", "ab")


@pytest.mark.parametrize(
    "pattern",
    [
        r"^[^\\]$",
        r'^[^"]$',
        r"^[^\\\n]$",
        r'^[^\\"]$',
        r"^[^a\\]$",
        r"^[^]\\]$",
        r"^[^\w\\]$",
        r"^[a-z\\]$",
        r"^\S$",
        "^.$",
    ],
)
def test_sets_take_what_they_say(pattern: str) -> None:
    """Every character of a set, and no other, escaped or not."""
    for char in CHARS:
        wanted = re.search(pattern.replace("$", r"\Z"), char, re.ASCII) is not None
        assert schema_takes({"type": "string", "pattern": pattern}, json.dumps(char, ensure_ascii=False)) == wanted, (
            char
        )


@pytest.mark.parametrize(
    "members", ["a&&b", "~~a", "!--", "--/", "a-c--", "[a", "^[a", "]a", "^]&&", r"\[0-\]", "^+--9", "&&[~~"]
)
def test_sets_have_no_operators_and_no_sets_within(members: str) -> None:
    """What would be an operator or an inner set to the library is a character, in patterns of JSON and in others."""
    pattern = f"[{members}]"
    grammars = [
        to_grammar(Constraint("regex", pattern)),
        to_grammar(Constraint("json_schema", {"pattern": f"^{pattern}$"})),
    ]
    if not members.startswith(("[", "^[", "]", "^]")):
        grammars.append(to_grammar(Constraint("gbnf", f"root ::= {pattern}")))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Python has no such operators yet
        compiled = re.compile(pattern, re.ASCII)
    for char in CHARS:
        wanted = compiled.fullmatch(char) is not None
        for number, grammar in enumerate(grammars):
            text = json.dumps(char, ensure_ascii=False) if number == 1 else char
            assert takes(grammar, text) == wanted, (char, number)


@pytest.mark.parametrize("pattern", ["[[:alpha:]]", r"a\x01", "a\x7f", r"\u0000", r"[\x02]", r"\v", r"[\x00-\x20]"])
def test_characters_that_json_cannot_hold_are_refused(pattern: str) -> None:
    """The library would take nothing in their place."""
    with pytest.raises(CannotMend):
        mend(pattern)


def test_other_strings_are_all_but_the_given() -> None:
    """Prefixes, extensions and neighbours are taken; the texts themselves are not, odd characters or not."""
    texts = ["", "a", "abc", "a.b", 'x"y', "q\\", "[^-]", "é"]
    pattern = re.compile(other_strings(texts).replace("$", r"\Z"))
    assert not any(pattern.match(text) for text in texts)
    for other in ["b", "ab", "abcd", "acb", 'x"', "q", "q\\\\", "[", "[^-]]", "éé", "\n", "a\n"]:
        assert pattern.match(other), other
