"""Custom tools take texts: what each family's grammar allows follows the tool's own grammar, however it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from grammars import byte_tokenizer, takes
from tokenmill.api.fields import Fields
from tokenmill.api.tools import read_tools
from tokenmill.core.errors import InvalidRequest
from tokenmill.text.chat_format import ChatFormat
from tokenmill.text.grammar.build import to_grammar
from tokenmill.text.grammar.constraint import Constraint
from tokenmill.text.tools.call_grammar import ToolConstraint
from tokenmill.text.tools.families import FAMILIES
from tokenmill.text.tools.parser import TextArgument
from tokenmill.text.tools.tool_choice import ToolUse
from tool_answers import read

PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
PATCHES = [
    '*** Begin Patch\n*** Add File: a.py\n+print("hi\\n")\n+\n*** End Patch',
    "*** Begin Patch\n*** Update File: b.c\n@@ main\n-\tx = 1;\n+\tx = 2;\n*** End of File\n*** End Patch\n",
]
BAD_PATCHES = ["*** Begin Patch\n*** End Patch", "print()", "*** Begin Patch\n*** Add File: a\nx\n*** End Patch"]


def tool(syntax: str = "", definition: str = "", **fields: Any) -> dict[str, Any]:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}} if syntax else {"type": "text"}
    return {"type": "custom", "custom": {"name": "write", "description": "Writes.", "format": form} | fields}


def use_of(given: dict[str, Any], **body: Any) -> ToolUse:
    use = read_tools(Fields({"tools": [given]} | body)).use
    assert use is not None
    return use


def grammar_of(family: str, use: ToolUse) -> str:
    return to_grammar(Constraint("tools", ToolConstraint(family, use, "tools[{}]").as_json(), "tools"))


def call(family: str, text: str) -> str:
    form = FAMILIES[family].form
    form = form if form.arguments is None else FAMILIES["hermes"].form
    arguments = json.dumps({"input": text}, ensure_ascii=False)
    return form.before + form.opening.replace("{name}", "write") + arguments + form.closing + form.after


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_takes_what_the_tools_grammar_takes(family: str) -> None:
    """Forced, and where the model calls of its own accord; the parser finds the text again, whole and in characters."""
    forced, free = use_of(tool("lark", PATCH), tool_choice="required"), use_of(tool("lark", PATCH))
    for use in (forced, free):
        for text in PATCHES:
            assert takes(grammar_of(family, use), call(family, text)), text
        for text in BAD_PATCHES:
            assert not takes(grammar_of(family, use), call(family, text)), text
    for text in PATCHES:
        for pieces in ([call(family, text)], list(call(family, text))):
            parser = ChatFormat(family, True).parser(forced, "r")
            assert parser is not None and read(parser, *pieces).calls == (("write", text),)


@pytest.mark.parametrize("syntax", ["regex", ""])
def test_a_pattern_and_any_text(syntax: str) -> None:
    use = use_of(tool(syntax, r'[a-z"\n]+'), tool_choice={"type": "custom", "custom": {"name": "write"}})
    text = grammar_of("hermes", use)
    assert takes(text, call("hermes", 'ab"\nc'))
    assert takes(text, call("hermes", "AB")) == (syntax == "")


def test_random_answers_under_the_grammar_are_texts_of_it() -> None:
    """Drawn byte by byte from what is allowed."""
    definition = 'start: "x=" /["\\\\a-c\\n]{1,5}/ ";"'
    use = use_of(tool("lark", definition), tool_choice="required", parallel_tool_calls=False)
    from llguidance import LLMatcher

    plain = json.dumps({"grammars": [{"lark_grammar": definition}]})
    for seed in range(20):
        rng, matcher, tokens = random.Random(seed), LLMatcher(byte_tokenizer(), grammar_of("json", use)), []
        while not matcher.is_stopped():
            mask = matcher.compute_logit_bias()
            token = rng.choice([number for number, allowed in enumerate(mask) if allowed and number < 256] or [256])
            if token == 256 or not matcher.consume_token(token):
                break
            tokens.append(token)
        parser = ChatFormat("json", True).parser(use, "r")
        assert parser is not None
        ((_, text),) = read(parser, bytes(tokens).decode()).calls
        assert takes(plain, text), text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\"b\\\\c\\n\\u00e9\\ud83d\\ude00"}', 'a"b\\c\né😀'),
        (' {\n "input" : "x"} ', "x"),
        ('{"input": "cut o', "cut o"),
        ('{"input": "\\ud83dabcdef"}', "\ufffdabcdef"),
        ('{"code": "x = 1"}', "x = 1"),
        ('{"a": 1}', '{"a": 1}'),
        ("print(1)", "print(1)"),
        ("", ""),
    ],
)
def test_the_text_of_arguments(arguments: str, text: str) -> None:
    whole, cut = TextArgument(), TextArgument()
    assert whole.push(arguments) + whole.end() == text
    assert "".join(map(cut.push, arguments)) + cut.end() == text


def test_templates_see_a_function_that_is_told_of_the_grammar() -> None:
    (shown,) = read_tools(Fields({"tools": [tool("regex", "[a-z]+")]})).shown
    assert shown["type"] == "function" and "[a-z]+" in shown["function"]["description"]
    assert shown["function"]["parameters"]["required"] == ["input"]


@pytest.mark.parametrize(
    "given",
    [
        {"type": "custom"}, tool(name="a b"), tool("ebnf", "x"), tool("lark", ""), tool(format={"type": "xml"}),
        tool(format={"type": "grammar"})
    ],
)  # fmt: skip
def test_what_is_no_custom_tool_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        read_tools(Fields({"tools": [given]}))


def test_a_grammar_that_json_cannot_carry_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\].custom.format.grammar.definition .*%json"):
        grammar_of("hermes", use_of(tool("lark", "start: %json {}")))
