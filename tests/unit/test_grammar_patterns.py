"""Patterns in JSON text: the library's own slips, and that they are mended."""

from __future__ import annotations

import json
import re

import pytest
from tests.grammars import schema_takes, takes

from tokenmill.text.grammar.complement import other_strings
from tokenmill.text.grammar.patterns import CannotMend, mend

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


@pytest.mark.parametrize("pattern", [r"a\x01", "a\x7f", r"\u0000", r"[\x02]", r"\v", r"[\x00-\x20]"])
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
