"""Bodies of /v1/responses: items become messages, the rest becomes chat's, and what is wrong is named as written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenmill.api.call import Call
from tokenmill.api.responses.parse import parse_continued, parse_response
from tokenmill.api.rules import Rules
from tokenmill.core.errors import InvalidRequest
from tokenmill.text.chat_format import ChatFormat

RULES = Rules(
    vocab_size=100, defaults={"temperature": 0.5}, chat_format=ChatFormat("hermes", knows_tools=True, knows_calls=True)
)
USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "7"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}

SEARCH = {"type": "web_search", "external_web_access": False}
NAMESPACE = {"type": "namespace", "name": "mcp__box", "description": "A box.", "tools": [TOOL | {"name": "open"}]}


def parse(**body: Any) -> Call:
    return parse_response(body, RULES)[0]


def messages(items: Any, **body: Any) -> list[dict[str, Any]]:
    call = parse(input=items, **body)
    assert call.conversation is not None
    shown = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id")
    return [{name: each[name] for name in shown if each.get(name) is not None} for each in call.conversation.messages]


def test_a_string_is_one_message_of_the_user_behind_the_instructions() -> None:
    assert messages("hi", instructions="Be brief.") == [{"role": "system", "content": "Be brief."}, USER]


def test_parts_of_text_become_the_content_of_their_message() -> None:
    """Both kinds of parts, developer as system, and instructions in one message with the system's that follows."""
    given = [
        {"role": "developer", "content": [{"type": "input_text", "text": "A"}, {"type": "input_text", "text": "B"}]},
        {"type": "message", "role": "user", "content": "x"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
         "content": [{"type": "output_text", "text": "y", "annotations": []}, {"type": "refusal", "refusal": "z"}]},
        USER,
    ]  # fmt: skip
    expected = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y\nz"}, USER]
    assert messages(given) == [{"role": "system", "content": "A\nB"}, *expected]
    assert messages(given, instructions="I") == [{"role": "system", "content": "I\n\nA\nB"}, *expected]


def test_items_of_one_turn_of_the_assistant_are_one_message() -> None:
    """Reasoning, text and calls together; outputs behind; then the next turn."""
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}
    text = {"role": "assistant", "content": "t"}
    other = CALL | {"call_id": "c2"}
    given = [
        USER,
        reasoning,
        text,
        CALL,
        other,
        OUTPUT,
        OUTPUT | {"call_id": "c2"},
        {"role": "assistant", "content": "7"},
    ]
    user, assistant, first, second, last = messages(given)
    assert (user, last) == (USER, {"role": "assistant", "content": "7"})
    assert (assistant["reasoning_content"], assistant["content"]) == ("r", "t")
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert [each["tool_call_id"] for each in (first, second)] == ["c1", "c2"]
    assert messages([USER, CALL, OUTPUT, other, OUTPUT | {"call_id": "c2"}])[3]["tool_calls"][0]["id"] == "c2"


def test_a_continued_call_sees_what_came_before_and_what_it_names() -> None:
    outer = {
        "body": {"input": [OUTPUT, {"type": "item_reference", "id": "msg_9"}]},
        "before": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}]}, CALL],
        "known": {"msg_9": {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "again"}]}},
    }
    call, _ = parse_continued(outer, RULES)
    assert call.conversation is not None
    assert [each["role"] for each in call.conversation.messages] == ["user", "assistant", "tool", "user"]
    assert [item["type"] for item in call.extras["input"]] == ["function_call_output", "message"]


def test_settings_reach_the_engine_and_the_response() -> None:
    call = parse(
        input="x", max_output_tokens=9, top_p=0.5, seed=3, top_k=4, stream=True, metadata={"a": "b"}, user="me",
        include=["message.output_text.logprobs"], top_logprobs=2, truncation="disabled", reasoning={"summary": "auto"},
    )  # fmt: skip
    sampling, settings = call.sampling, call.extras["settings"]
    assert (sampling.max_tokens, sampling.top_p, sampling.seed, sampling.top_k) == (9, 0.5, 3, 4)
    assert (sampling.temperature, sampling.logprobs, call.stream, call.limit_field) == (
        0.5,
        2,
        True,
        "max_output_tokens",
    )
    assert (settings["metadata"], settings["user"], settings["max_output_tokens"]) == ({"a": "b"}, "me", 9)
    assert (settings["store"], settings["top_logprobs"], settings["tool_choice"]) == (True, 2, "auto")
    assert settings["text"] == {"format": {"type": "text"}, "verbosity": "medium"}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", "", ["f", "g"])),
        ("required", ("required", "", ["f", "g"])),
        ({"type": "function", "name": "g"}, ("named", "g", ["f", "g"])),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
         ("required", "", ["f"])),
    ],
)  # fmt: skip
def test_tools_are_those_of_chat(choice: Any, expected: tuple[str, str, list[str]]) -> None:
    """And the template sees all of them; the response repeats what was said."""
    call = parse(input="x", tools=[TOOL, TOOL | {"name": "g"}], tool_choice=choice, parallel_tool_calls=False)
    assert call.tool_use is not None and call.conversation is not None and not call.tool_use.is_parallel
    assert (call.tool_use.choice, call.tool_use.name, [tool.name for tool in call.tool_use.tools]) == expected
    assert [tool["function"]["name"] for tool in call.conversation.tools] == ["f", "g"]
    assert call.extras["settings"]["tool_choice"] == (choice or "auto")
    assert parse(input="x", tools=[TOOL], tool_choice="none").tool_use is None


def test_what_of_a_history_the_model_cannot_be_shown_is_left_out_and_told() -> None:
    """Calls of tools that ran elsewhere, and images that a tool has given back; a conversation with them goes on."""
    user = {"role": "user", "content": "a"}
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    }
    made = {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "QUJD"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,QUJD"}
    text = {"type": "input_text", "text": "seen"}
    given = parse(input=[user, search, call, output_of("c", [image, text, image]), made, user])
    plain = parse(input=[user, call, output_of("c", [text]), user])
    assert given.conversation == plain.conversation
    assert given.extras["input"] == plain.extras["input"]
    assert given.ignored == (
        "item web_search_call", "content input_image", "content input_image", "item image_generation_call",
    )  # fmt: skip
    assert parse(input=[user, call, output_of("c", [image])]).conversation.messages[-1]["content"] == ""
    for wrong in ([search], [user, search | {"type": "web_serch_call"}], [user, {"role": "user", "content": [image]}]):
        with pytest.raises(InvalidRequest) as caught:
            parse(input=wrong)
        assert (caught.value.param or "").startswith("input")


def output_of(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_functions_of_a_namespace_are_offered_and_what_is_no_function_is_told() -> None:
    """As agents send them; a choice may name one with its namespace, or by its own name where that is clear."""
    tools = [SEARCH, TOOL, NAMESPACE, {"type": "custom", "name": "patch"},
             NAMESPACE | {"name": "mcp__bag__", "tools": [TOOL | {"defer_loading": True}, SEARCH]}]  # fmt: skip
    call = parse(input="x", tools=tools)
    assert call.tool_use is not None and call.conversation is not None
    names = ["f", "mcp__box__open", "patch", "mcp__bag__f"]
    assert [tool.name for tool in call.tool_use.tools] == names
    assert [tool["function"]["name"] for tool in call.conversation.tools] == names
    assert call.ignored == ("tool web_search", "tool web_search")
    shown = json.loads(call.extras["settings"]["tools"])
    assert [tool["type"] for tool in shown] == ["function", "namespace", "custom", "namespace"]
    assert (shown[1]["name"], [tool["name"] for tool in shown[1]["tools"]]) == ("mcp__box", ["open"])
    for choice, chosen in (
        ({"name": "open"}, "mcp__box__open"),
        ({"name": "f"}, "f"),
        ({"name": "f", "namespace": "mcp__bag__"}, "mcp__bag__f"),
        ({"name": "mcp__bag__f"}, "mcp__bag__f"),
    ):
        use = parse(input="x", tools=tools, tool_choice={"type": "function"} | choice).tool_use
        assert use is not None and use.name == chosen
    use = parse(input="x", tools=tools, tool_choice={"type": "custom", "name": "patch"}).tool_use
    assert use is not None and use.name == "patch" and use.offered[0].is_custom
    assert parse(input="x", tools=[SEARCH]).tool_use is None
    with pytest.raises(InvalidRequest, match=r"tools\[1\].tools\[0\].name"):
        parse(input="x", tools=[SEARCH, NAMESPACE | {"tools": [TOOL | {"name": "a b"}]}])


def test_calls_of_all_kinds_are_calls_of_functions_with_results() -> None:
    """Of functions in namespaces, of tools that take free text, of the local shell; results are text or parts."""
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    action = {"type": "exec", "command": ["ls"], "timeout_ms": 9}
    kinds: list[tuple[dict[str, Any], str, str, dict[str, Any]]] = [
        (CALL | {"namespace": "mcp__box"}, "function_call_output", "mcp__box__f", {"a": 1}),
        ({"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "*** Begin"},
         "custom_tool_call_output", "patch", {"input": "*** Begin"}),
        ({"type": "local_shell_call", "call_id": "c1", "status": "completed", "action": action},
         "function_call_output", "local_shell", {"command": ["ls"], "timeout_ms": 9}),
        ({"type": "local_shell_call", "id": "c1", "action": action},
         "local_shell_call_output", "local_shell", {"command": ["ls"], "timeout_ms": 9}),
    ]  # fmt: skip
    for call, kind, name, arguments in kinds:
        called, result = messages([USER, call, {"type": kind, "call_id": "c1", "output": parts}, USER])[1:3]
        assert [each["function"] for each in called["tool_calls"]] == [{"name": name, "arguments": arguments}]
        assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "c1", "one\ntwo")


def test_formats_are_those_of_chat_under_their_own_names() -> None:
    """What compiles the schema can name the field; the response repeats it."""
    given = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    call = parse(input="x", text={"format": given})
    assert call.constraint is not None
    assert (call.constraint.kind, call.constraint.value) == ("json_schema", {"type": "object"})
    assert call.constraint.param == "text.format.schema"
    assert call.extras["settings"]["text"]["format"] == given | {"description": None}
    call = parse(input="x", text={"format": {"type": "json_object"}})
    assert call.constraint is not None and call.constraint.kind == "json_object"


def test_nothing_of_the_input_is_kept_where_nothing_is_to_be_stored() -> None:
    assert parse(input="x", store=False).extras["input"] == []


BAD: list[tuple[str, dict[str, Any]]] = [
    ("input", {}), ("input", {"input": []}), ("input", {"input": 3}), ("input[0]", {"input": [3]}),
    ("input[0]", {"input": [{"type": "shell_call"}]}), ("input[0]", {"input": [{"text": "x"}]}),
    ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input[0].content", {"input": [{"role": "user"}]}),
    ("input[0].content[1]", {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""},
                                                                    {"type": "input_image", "image_url": "x"}]}]}),
    ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
    ("input[0].status", {"input": [USER | {"status": "odd"}]}), ("input[0].id", {"input": [USER | {"id": 3}]}),
    ("input[1].call_id", {"input": [USER, OUTPUT]}), ("input", {"input": [USER, CALL]}),
    ("input[2].call_id", {"input": [USER, CALL, CALL, OUTPUT]}),
    ("input", {"input": [USER] * 10_001}),
    ("input[0].content", {"input": [USER | {"content": [{"type": "input_text", "text": ""}] * 10_001}]}),
    ("input", {"input": [USER, CALL, USER]}), ("input[1].arguments", {"input": [USER, CALL | {"arguments": {}}]}),
    ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_none"}]}),
    ("input[0].encrypted_content", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}),
    ("background", {"background": 1}), ("store", {"background": True, "store": False}),
    ("background", {"background": True, "priority": 2**31 - 1}), ("conversation", {"conversation": {"name": "x"}}),
    ("conversation", {"conversation": "conv_1", "previous_response_id": "resp_1"}),
    ("prompt", {"prompt": {"id": "p"}}), ("truncation", {"truncation": "some"}), ("n", {"n": 2}),
    ("max_tokens", {"max_tokens": 5}), ("messages", {"messages": [USER]}), ("response_format", {"response_format": {}}),
    ("max_output_tokens", {"max_output_tokens": 0}), ("temperature", {"temperature": -1}),
    ("include[0]", {"include": ["everything"]}), ("top_logprobs", {"top_logprobs": 3}),
    ("metadata", {"metadata": {"a": 1}}), ("metadata", {"metadata": {str(i): "" for i in range(17)}}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}), ("text.verbosity", {"text": {"verbosity": "loud"}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
    ("structured_outputs.regex", {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}),
    ("text.formt", {"text": {"formt": {}}}), ("reasoning.summary", {"reasoning": {"summary": "concise"}}),
    ("reasoning.efort", {"reasoning": {"efort": "low"}}),
    ("tools[0].type", {"tools": [{"type": "funktion"}]}), ("tools[0].type", {"tools": [{"name": "f"}]}),
    ("tools[0].name", {"tools": [NAMESPACE | {"name": None}]}), ("tools[0].odd", {"tools": [NAMESPACE | {"odd": 1}]}),
    ("tool_choice.name", {"tools": [SEARCH, TOOL], "tool_choice": {"type": "function", "name": "web_search"}}),
    ("tool_choice.tools", {"tools": [SEARCH, TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                                                    "tools": [SEARCH]}}),
    ("tool_choice", {"tools": [SEARCH], "tool_choice": "required"}),
    ("input[1].input", {"input": [USER, {"type": "custom_tool_call", "call_id": "c1", "name": "p"}, OUTPUT]}),
    ("input[1].action", {"input": [USER, {"type": "local_shell_call", "call_id": "c1"}, OUTPUT]}),
    ("input[1].namespace", {"input": [USER, CALL | {"namespace": 3}, OUTPUT]}),
    ("tools[1].name", {"tools": [TOOL, TOOL | {"name": ""}]}),
    ("tools[0].function", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tools[0].parameters", {"tools": [TOOL | {"parameters": []}]}),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}),
    ("tool_choice.name", {"tools": [TOOL], "tool_choice": {"type": "custom", "name": "f"}}),
    ("tools", {"tools": [{"type": "custom", "name": "p", "format": {"type": "xml"}}]}),
    ("tools", {"tools": [{"type": "custom", "name": "p", "format": {"type": "grammar", "syntax": "ebnf",
                                                                    "definition": "x"}}]}),
    ("tools[0].odd", {"tools": [{"type": "custom", "name": "p", "odd": 1}]}),
    ("tool_choice.tools", {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["f"]}}),
    ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "web_search"}}),
    ("stream_options", {"stream_options": {"include_obfuscation": False}}),
    ("stream_options.include_obfuscation", {"stream": True, "stream_options": {"include_obfuscation": True}}),
    ("stream_options.odd", {"stream": True, "stream_options": {"odd": True}}),
    ("max_output_token", {"max_output_token": 3}), ("temprature", {"temprature": 1}), ("stores", {"stores": True}),
    ("instruction", {"instruction": "x"}),
    ("tools", {"tools": [TOOL, TOOL]}), ("tool_choice", {"tool_choice": "required"}),
    ("previous_response_id", {"previous_response_id": 3}), ("store", {"store": "yes"}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "body"), BAD)
def test_what_is_wrong_is_refused_under_its_name(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_response(({} if field == "input" and not body else {"input": "x"}) | body, RULES)
    assert caught.value.param == field, caught.value.message
