"""Tools, the choice among them and reasoning as chat bodies say it: what is meant, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from tokenmill.api.call import Call
from tokenmill.api.openai.parse import parse_chat
from tokenmill.api.parsers import constraint_of
from tokenmill.api.rules import Rules
from tokenmill.core.errors import InvalidRequest
from tokenmill.text.chat_format import ChatFormat
from tokenmill.text.grammar.constraint import Thinking

RULES = Rules(100, chat_format=ChatFormat("hermes", True, "think", knows_calls=True))
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
F = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
G = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "f"}}
STRICT = {"type": "function", "function": F["function"] | {"strict": True}}  # type: ignore[operator]
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def parse(**body: Any) -> Call:
    return parse_chat({"messages": MESSAGES} | body, RULES)[0]


def test_tools_and_the_choice_among_them() -> None:
    use = parse(tools=[F, G]).tool_use
    assert use is not None and [tool.name for tool in use.tools] == ["f", "g"]
    assert (use.choice, use.is_parallel, use.is_forced) == ("auto", True, False)
    assert use.tools[0].parameters == SCHEMA and use.tools[1].parameters["type"] == "object"
    use = parse(tools=[F, G], tool_choice="required", parallel_tool_calls=False).tool_use
    assert use is not None and use.is_forced and not use.is_parallel
    use = parse(tools=[F, G], tool_choice=NAMED).tool_use
    assert use is not None and (use.choice, use.name) == ("named", "f") and [tool.name for tool in use.offered] == ["f"]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    call = parse(tools=[F, G], tool_choice=allowed)
    assert call.tool_use is not None and [tool.name for tool in call.tool_use.tools] == ["f"]
    assert call.conversation is not None and call.conversation.tools == (F, G)  # all are shown


def test_stop_strings_are_no_part_of_calls_that_are_demanded() -> None:
    """Where the model may also answer in words, they are kept."""
    for choice, stop in (("required", ()), (NAMED, ()), ("auto", ("a",)), ("none", ("a",))):
        assert parse(tools=[F], tool_choice=choice, stop=["a"]).sampling.stop == stop


def test_no_tools_and_tools_that_are_forbidden_are_the_same() -> None:
    assert parse() == parse(tools=[]) == parse(tools=[F], tool_choice="none") == parse(tool_choice="auto")


def test_the_older_form_means_the_same() -> None:
    older = parse(functions=[F["function"]], function_call={"name": "f"})
    newer = parse(tools=[F], tool_choice=NAMED)
    assert (older.tool_use, older.conversation) == (newer.tool_use, newer.conversation)
    assert older.extras and not newer.extras


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": ["f"]}, "tools", r"tools\[0\] must be an object"),
    ({"tools": [F, {"type": "web_search"}]}, "tools", r"tools\[1\].type must be 'function'"),
    ({"tools": [{"type": "function"}]}, "tools", r"tools\[0\].function"),
    ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "tools", r"tools\[0\].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", r"tools\[0\].function.name"),
    ({"tools": [F, F]}, "tools", r"tools\[1\] has the name 'f'"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools", "parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools", "object"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools", "strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools", "description"),
    ({"tools": [F], "tool_choice": "maybe"}, "tool_choice", "'required'"),
    ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice", "NAME"),
    ({"tools": [G], "tool_choice": NAMED}, "tool_choice", "none of the tools"),
    ({"tools": [G], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}}, "tool_choice",
     "none of"),
    ({"tools": [F], "tool_choice": {"type": "allowed_tools", "allowed_tools": [NAMED]}}, "tool_choice", "must have"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": [F], "functions": [G["function"]]}, "functions", "one of them"),
    ({"functions": [{"name": ""}]}, "functions", r"functions\[0\].name"),
    ({"functions": [F["function"]], "tool_choice": "auto"}, "tool_choice", "function_call"),
    ({"functions": [F["function"]], "function_call": "required"}, "function_call", "function_call"),
    ({"functions": [F["function"]], "function_call": {"name": "g"}}, "function_call", "none of the tools"),
    ({"tools": [F], "structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "cannot go with tools"),
    ({"include_reasoning": False, "separate_reasoning": False}, "include_reasoning", "separate_reasoning"),
    ({"reasoning_format": "none", "separate_reasoning": True}, "reasoning_format", "contradicts"),
    ({"thinking_token_budget": 5, "reasoning_budget": 6}, "reasoning_budget", "contradicts"),
    ({"thinking_token_budget": -2}, "thinking_token_budget", "between"),
    ({"thinking_token_budget": 5, "use_beam_search": True, "n": 2}, "thinking_token_budget", "use_beam_search"),
    ({"reasoning_budget": 5, "use_beam_search": True, "n": 2}, "reasoning_budget", "use_beam_search"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), BAD)
def test_what_cannot_be_meant_is_refused_by_name(body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        parse(**body)
    assert caught.value.param == param


def test_calls_are_demanded_where_the_caller_wants_them() -> None:
    assert parse(tools=[F]).constraint is None
    for choice, parallel in (("required", True), (NAMED, False)):
        constraint = parse(tools=[F, G], tool_choice=choice).constraint
        assert constraint is not None and (constraint.kind, constraint.param) == ("tools", "tool_choice")
        assert constraint.value["is_forced"] and constraint.value["is_parallel"] is parallel
        assert constraint.value["tools"][0]["parameters"] == SCHEMA
        assert constraint.value["tools"][0]["place"] == "tools[0].function.parameters"
    assert parse(tools=[F], tool_choice="required", response_format=FORMAT).constraint is not None
    constraint = parse(tools=[STRICT, G]).constraint
    assert constraint is not None and not constraint.value["is_forced"]
    assert [tool["parameters"] for tool in constraint.value["tools"]] == [SCHEMA, {"type": "object"}]
    constraint = parse(tools=[F], response_format=FORMAT).constraint
    assert constraint is not None and constraint.value["answer"] == [SCHEMA, "response_format.json_schema.schema"]
    constraint = parse(response_format=FORMAT, tools=[F], tool_choice="none").constraint
    assert constraint is not None and constraint.kind == "json_schema"


def test_reasoning_comes_before_what_is_constrained() -> None:
    """As the prompt leaves it: open, over, or for the model to begin."""
    chat_format = RULES.chat_format
    given = parse(response_format=FORMAT)

    def thinking(prompt: str, call: Call = given) -> Thinking | None:
        constraint = constraint_of(call, chat_format, prompt)
        return None if constraint is None else constraint.thinking

    assert thinking("assistant\n") == Thinking("<think>", "</think>", may_skip=True)
    assert thinking("assistant\n<think>\n") == Thinking("<think>", "</think>", True, may_skip=True)
    assert thinking("assistant\n<think>\n\n</think>\n\n") is None
    assert thinking("assistant\n", parse()) is None
    budget = parse(thinking_token_budget=5, reasoning_budget=5)
    assert thinking("assistant\n", budget) == Thinking("<think>", "</think>", budget=5)
    assert thinking("assistant\n", parse(reasoning_budget=-1)) is None
    free = constraint_of(parse(thinking_budget_tokens=0, tools=[F]), chat_format, "assistant\n")
    assert free is not None and free.kind == "tools" and not free.value["is_forced"]
    assert constraint_of(given, ChatFormat(), "assistant\n") == given.constraint
