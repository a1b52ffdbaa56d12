"""Anthropic's bodies become calls, or are refused by the name of what is wrong; answers become messages and events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from scripted import make_text_model
from tokenmill.api.answer import Answer
from tokenmill.api.call import Call
from tokenmill.api.encoder import Encoded
from tokenmill.api.errors import anthropic_style, describe
from tokenmill.api.fields import Fields
from tokenmill.api.logprobs import TokenNames
from tokenmill.api.messages.history import read_messages, read_system
from tokenmill.api.messages.parse import parse_count, parse_messages, read_choice, read_tools
from tokenmill.api.messages.shape import MessageShape, read_object, signature_of
from tokenmill.api.pieces import in_turns
from tokenmill.api.rules import Rules
from tokenmill.core.errors import InvalidRequest, Unavailable
from tokenmill.core.request import Request, SamplingParams
from tokenmill.text.choice import Choice, Piece
from tokenmill.text.parts import CallArguments, CallStart, Content, Part, Reasoning

TEXT = make_text_model()
RULES = Rules(300)
USER = {"role": "user", "content": "hi"}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}


def parse(**changes: Any) -> Call:
    return parse_messages({"model": "m", "max_tokens": 9, "messages": [USER]} | changes, RULES)[0]


def messages(*given: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    return read_messages(Fields({"messages": list(given)}))[:2]


def test_a_result_may_be_empty() -> None:
    for content in ("", [], None, [{"type": "text", "text": ""}]):
        found, _ = messages(USER, said(CALL), *user(RESULT | {"content": content}))
        assert found[-1] == {"role": "tool", "tool_call_id": "toolu_1", "content": ""}


def test_what_nobody_here_can_do_is_left_out_and_told() -> None:
    """Tools of Anthropic's servers, their calls in the history, and thinking of a model that marks none."""
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": []}
    said_before = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        found,
        {"type": "text", "text": "So."},
    ]
    call = parse(
        tools=[SEARCH, TOOL | {"defer_loading": True}],
        messages=[USER, {"role": "assistant", "content": said_before}, USER],
        max_tokens=2000,
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert call.ignored == (
        "content server_tool_use", "content web_search_tool_result", "tool web_search_20250305", "thinking",
    )  # fmt: skip
    assert call.tool_use is not None and [tool.name for tool in call.tool_use.tools] == ["add"]
    assert call.conversation is not None and call.conversation.messages[2]["content"] == "So."
    assert call.reasoning.budget is None
    with pytest.raises(InvalidRequest, match=r"tools\[1\].name"):
        parse(tools=[SEARCH, TOOL | {"name": "a b"}])


def test_a_body_becomes_a_call() -> None:
    call = parse(system="Be brief.", stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=4, stream=True, seed=7)
    assert call.conversation is not None
    assert list(call.conversation.messages) == [{"role": "system", "content": "Be brief."}, USER]
    sampling = call.sampling
    assert (sampling.max_tokens, sampling.stop, sampling.temperature, sampling.seed) == (9, ("x",), 0.5, 7)
    assert (sampling.top_p, sampling.top_k, call.stream, call.fits_room) == (0.9, 4, True, True)
    assert call.conversation.extra == {"enable_thinking": False, "thinking": False} and not call.score_only
    assert parse(max_tokens=0).score_only and parse_count({"messages": [USER]}, RULES)[0].conversation is not None


def test_who_may_think_is_told_so() -> None:
    extra = parse(thinking={"type": "adaptive"}).conversation
    assert extra is not None and extra.extra == {"enable_thinking": True, "thinking": True}
    told = parse(chat_template_kwargs={"enable_thinking": True}).conversation
    assert told is not None and told.extra == {"enable_thinking": True}, "what is said itself counts"
    hidden = parse(thinking={"type": "adaptive", "display": "omitted"})
    assert hidden.extras["hides_thinking"] and not parse().extras["hides_thinking"]


def test_what_agents_send_beside_is_taken() -> None:
    """Marks of caching everywhere, accounting, the edit that keeps everything."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: a=b;"},
        {"type": "text", "text": "One."} | mark,
        {"type": "text", "text": "Two."},
    ]
    assert read_system(Fields({"system": system})) == [{"role": "system", "content": "One.\nTwo."}]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body = {
        "max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"} | mark]}],
        "system": system, "metadata": {"user_id": "u"}, "service_tier": "auto", "context_management": edits, "fancy": 1,
        "tool_choice": {"type": "auto"}, "tools": [],
    }  # fmt: skip
    call, unknown = parse_messages(body, RULES)
    assert unknown == ["fancy"] and call.conversation is not None and call.conversation.messages[1] == USER


def test_tools_and_their_results_are_messages_of_their_own() -> None:
    text = {"type": "text", "text": "Let me see."}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    failed = {
        "type": "tool_result",
        "tool_use_id": "toolu_2",
        "content": [{"type": "text", "text": "no"}],
        "is_error": True,
    }
    second = CALL | {"id": "toolu_2", "input": {"a": "é"}}
    found, is_begun = messages(
        USER,
        {"role": "assistant", "content": [thought, text, CALL, second]},
        {"role": "user", "content": [RESULT]},
        {"role": "user", "content": [failed, {"type": "text", "text": "So?"}]},
        {"role": "user", "content": "Well?"},
        {"role": "assistant", "content": "It"},
    )
    assert is_begun and [message["role"] for message in found] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
        "assistant",
    ]
    said = found[1]
    assert (said["content"], said["reasoning_content"]) == ("Let me see.", "Hm.")
    assert [json.loads(call["function"]["arguments"]) for call in said["tool_calls"]] == [{"a": 1}, {"a": "é"}]
    assert found[2] == {"role": "tool", "tool_call_id": "toolu_1", "content": "2"}
    assert found[3] == {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: no"}
    assert found[4]["content"] == [{"type": "text", "text": "So?"}, {"type": "text", "text": "Well?"}]


def test_tools_are_told_under_the_names_of_chat() -> None:
    examples = [{"a": 1}]
    tools, ignored = read_tools(
        Fields({"tools": [SEARCH, TOOL | {"type": "custom", "strict": True, "input_examples": examples}]})
    )
    ((place, tool),) = tools.items()
    assert (place, ignored) == (1, ["tool web_search_20250305"])
    schema = TOOL["input_schema"] | {"examples": examples}  # type: ignore[operator]
    assert tool == {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": schema, "strict": True},
    }

    def chosen(**choice: Any) -> dict[str, Any]:
        return read_choice(Fields({"tool_choice": choice}), True)

    assert chosen(type="any", disable_parallel_tool_use=True) == {
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    assert chosen(type="auto") == {"tool_choice": "auto"} and chosen(type="none") == {"tool_choice": "none"}
    assert chosen(type="tool", name="add")["tool_choice"] == {"type": "function", "function": {"name": "add"}}


def test_images_that_tools_have_given_back_are_left_out_and_told() -> None:
    """A conversation with them goes on; those that a user shows are refused."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    text = {"type": "text", "text": "2"}
    for content, said_then in (([image, text, image], "2"), ([image], "")):
        call = parse(messages=[USER, said(CALL), *user(RESULT | {"content": content})])
        plain = parse(messages=[USER, said(CALL), *user(RESULT | {"content": said_then})])
        assert call.conversation == plain.conversation
        assert call.ignored == ("content image",) * content.count(image)


def user(*blocks: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(blocks)}]


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": user()}, "messages[0].content"),
    ({"messages": user("x")}, "messages[0].content[0]"),
    ({"messages": user({"type": "text"})}, "messages[0].content[0].text"),
    ({"messages": user({"type": "image", "source": {}})}, "messages[0].content[0]"),
    ({"messages": user({"type": "document", "source": {}})}, "messages[0].content[0]"),
    ({"messages": user({"type": "tool_use"})}, "messages[0].content[0].type"),
    (
        {"messages": user({"type": "text", "text": "x", "cache_control": {"type": "long"}})},
        "messages[0].content[0].cache_control",
    ),
    ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages"),
    ({"messages": [USER, said({"type": "redacted_thinking", "data": "x"})]}, "messages[1].content[0]"),
    ({"messages": user({"type": "server_tool_use"})}, "messages[0].content[0].type"),
    ({"messages": [USER, said(CALL | {"input": "{}"}), *user(RESULT)]}, "messages[1].content[0].input"),
    ({"messages": [USER, said(CALL | {"name": ""}), *user(RESULT)]}, "messages[1].content[0].name"),
    ({"messages": [USER, said(CALL, CALL), *user(RESULT)]}, "messages[1].content[1].id"),
    ({"messages": [USER, said(CALL)]}, "messages[1].content[0]"),
    ({"messages": [USER, said(CALL), USER]}, "messages[1].content[0]"),
    ({"messages": user(RESULT)}, "messages[0].content[0].tool_use_id"),
    ({"messages": [USER, said(CALL), *user(RESULT, RESULT)]}, "messages[2].content[1].tool_use_id"),
    ({"messages": [USER, said(CALL), *user({"type": "text", "text": "x"}, RESULT)]}, "messages[2].content[1]"),
    ({"messages": [USER, said(CALL), *user(RESULT | {"is_error": "yes"})]}, "messages[2].content[0].is_error"),
    (
        {"messages": [USER, said(CALL), *user(RESULT | {"content": [{"type": "search_result"}]})]},
        "messages[2].content[0].content[0]",
    ),
    (
        {"messages": [USER, said(CALL), *user(RESULT | {"content": [{"type": "image"}, {"type": "search_result"}]})]},
        "messages[2].content[0].content[1]",
    ),
    ({"system": 1}, "system"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": "add"}, "tools"),
    ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
    ({"tools": [TOOL | {"name": None}]}, "tools[0].name"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [SEARCH, TOOL], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice"),
    ({"tools": [SEARCH, TOOL | {"name": "a b"}]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "on"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 2}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget": 2}}, "thinking.budget"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"formt": {}}}, "output_config.formt"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format.type"),
    ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
    ({"output_format": {}, "output_config": {"format": {}}}, "output_format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
    ({"tools": [TOOL | {"descripton": "x"}]}, "tools[0].descripton"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "auto", "disable_paralel_tool_use": True}},
        "tool_choice.disable_paralel_tool_use",
    ),
    ({"messages": user({"type": "text", "text": "x", "cache_contol": {}})}, "messages[0].content[0].cache_contol"),
    ({"messages": [USER, said(CALL), *user(RESULT | {"is_eror": True})]}, "messages[2].content[0].is_eror"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": [1]}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stop": "x"}, "stop"),
    ({"n": 2}, "n"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"cache_control": "yes"}, "cache_control"),
]


@pytest.mark.parametrize(("changes", "field"), BAD, ids=lambda value: str(value)[:60])
def test_what_is_wrong_is_named(changes: dict[str, Any], field: str) -> None:
    """In the message itself: Anthropic's errors have no other place for it."""
    with pytest.raises(InvalidRequest) as caught:
        parse(**changes)
    assert caught.value.param == field and field in caught.value.message, caught.value.message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("{", {}),
        ('{"a": 1}', {"a": 1}),
        ('{"a": 1, "b', {"a": 1}),
        ('{"a": 1, "b"', {"a": 1}),
        ('{"a": "x', {"a": "x"}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": "\\\\', {"a": "\\"}),
        ('{"a": [1, {"b": tr', {"a": [1, {}]}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": {"b": "c"}, ', {"a": {"b": "c"}}),
        ('{"a": "{[,', {"a": "{[,"}),
        ("[1]", {}),
        ("no", {}),
    ],
)
def test_json_is_read_as_far_as_it_goes(text: str, value: dict[str, Any]) -> None:
    assert read_object(text) == value


PARTS: dict[str, list[list[Part]]] = {
    "text": [[Content("Hel")], [], [Content("lo"), Content(".")]],
    "thought": [[Reasoning("Hm")], [Reasoning("."), Content("Yes")]],
    "calls": [
        [Content("So: "), CallStart(0, "toolu_1", "add")],
        [CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallStart(1, "toolu_2", "now")],
        [CallArguments(1, "{}"), Content("!")],
    ],
    "cut": [[CallStart(0, "toolu_1", "add")], [CallArguments(0, '{"a": "x')]],
    "nothing": [[]],
}


def answer(*, max_tokens: int = 9, produced: int = 9, parser: bool = True, **body: Any) -> Answer:
    call = parse(max_tokens=max_tokens, **body)
    request = Request("r-0", (68, 69), SamplingParams(), produced, 0)
    choice = Choice(0, request, TEXT.tokenizer, parser=Nothing() if parser else None, num_tokens=5, num_cached=1)
    return Answer("msg-1", 1, "m", "fp", call, [Encoded((68, 69))], [choice], TokenNames(TEXT.tokenizer))


class Nothing:
    """A parser that is never asked."""

    def push(self, text: str) -> list[Part]:
        raise AssertionError(text)

    end = push  # type: ignore[assignment]


def pieces(parts: Sequence[Sequence[Part]], reason: str = "stop", stop: Any = None) -> list[Piece]:
    made = [Piece(parsed=each) for each in parts]
    made[-1].finish_reason, made[-1].stop_reason = reason, stop
    return made


def whole(given: Answer, said: Sequence[Piece]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(asyncio.run(in_turns(MessageShape().whole(given, [said]))))
    return body


def events(given: Answer, said: Sequence[Piece]) -> list[dict[str, Any]]:
    chunks = MessageShape().chunks(given)
    data = chunks.start()
    for piece in said:
        if chunks.is_plain and piece.finish_reason is None:
            data += chunks.text(given.choices[0], piece)
        else:
            data += asyncio.run(in_turns(chunks.piece(given.choices[0], piece)))
    return parsed(data + chunks.end())


def parsed(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, body = event.partition("\ndata: ")
        found.append(json.loads(body))
        assert name == f"event: {found[-1]['type']}"
    return found


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of events, which are checked to be in order."""
    message: dict[str, Any] = stream[0]["message"]
    is_open, inputs = False, ""
    assert [event["type"] for event in stream[-2:]] == ["message_delta", "message_stop"]
    for event in stream[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            is_open, inputs = True, ""
        elif event["type"] == "content_block_stop":
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                message["content"][-1]["input"] = read_object(inputs)
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(message["content"]) - 1
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            inputs += delta.pop("partial_json", "")
            for name, value in delta.items():
                message["content"][-1][name] += value
        else:
            assert event == {"type": "ping"}
    assert not is_open
    return message | stream[-2]["delta"] | {"usage": stream[-2]["usage"]}


@pytest.mark.parametrize("said", PARTS)
def test_a_stream_is_the_whole_answer(said: str) -> None:
    """However an answer is sent, the same blocks, end and counts arrive."""
    given, made = answer(), pieces(PARTS[said], "length" if said == "cut" else "stop")
    given.choices[0].has_calls = said in ("calls", "cut")
    body = whole(given, made)
    assert joined(events(given, made)) == body
    blocks = {
        "text": [{"type": "text", "text": "Hello."}],
        "thought": [
            {"type": "thinking", "thinking": "Hm.", "signature": signature_of("Hm.")},
            {"type": "text", "text": "Yes"},
        ],
        "calls": [
            {"type": "text", "text": "So: "},
            {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            {"type": "tool_use", "id": "toolu_2", "name": "now", "input": {}},
            {"type": "text", "text": "!"},
        ],
        "cut": [{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": "x"}}],
        "nothing": [],
    }
    assert body["content"] == blocks[said]
    assert body["stop_reason"] == {"calls": "tool_use", "cut": "max_tokens"}.get(said, "end_turn")
    assert body["usage"] == {
        "input_tokens": 1, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 1, "output_tokens": 5
    }  # fmt: skip


def test_text_alone_is_written_the_quick_way_with_the_same_events() -> None:
    said = [Piece("Hel"), Piece(), Piece("lo\n"), Piece("!", finish_reason="stop")]
    plain = events(answer(parser=False), said)
    parts = [Piece(piece.text, finish_reason=piece.finish_reason) for piece in said]
    assert plain == events(answer(), parts) and joined(plain)["content"][0]["text"] == "Hello\n!"
    assert MessageShape().chunks(answer(parser=False)).is_plain and not MessageShape().chunks(answer()).is_plain


@pytest.mark.parametrize(
    ("reason", "stop", "produced", "told"),
    [
        ("stop", None, 9, ("end_turn", None)),
        ("stop", 7, 9, ("end_turn", None)),
        ("stop", "x", 9, ("stop_sequence", "x")),
        ("length", None, 9, ("max_tokens", None)),
        ("length", None, 8, ("model_context_window_exceeded", None)),
    ],
)
def test_why_an_answer_ended(reason: str, stop: Any, produced: int, told: tuple[str, str | None]) -> None:
    body = whole(answer(produced=produced), pieces([[Content("a")]], reason, stop))
    assert (body["stop_reason"], body["stop_sequence"]) == told


def test_thinking_that_is_not_to_be_shown_is_signed_and_left_out() -> None:
    given, made = answer(thinking={"type": "adaptive", "display": "omitted"}), pieces(PARTS["thought"])
    body = whole(given, made)
    assert body["content"][0] == {"type": "thinking", "thinking": "", "signature": signature_of("Hm.")}
    assert joined(events(given, made)) == body


def test_a_prompt_that_is_only_computed_has_no_answer() -> None:
    given, made = answer(max_tokens=0, produced=1), pieces([[Content("x")]], "length")
    body = whole(given, made)
    assert body["content"] == [] and body["stop_reason"] == "max_tokens" and body["usage"]["output_tokens"] == 0
    assert joined(events(given, made)) == body


def test_who_wants_a_conversation_to_be_kept_here_is_told_to_send_it() -> None:
    """By the code that makes Anthropic's package do so."""
    with pytest.raises(InvalidRequest) as caught:
        parse(thread={"type": "create"})
    told = describe(caught.value, anthropic_style)["error"]
    assert told["details"]["error_code"] == "thread_unsupported_request" and "thread" in told["message"]
    assert "details" not in describe(InvalidRequest("x", param="y"), anthropic_style)["error"]


def test_a_stream_that_fails_says_so() -> None:
    (event,) = parsed(MessageShape().chunks(answer()).failure(Unavailable("No engine.")))
    assert event["type"] == "error" and event["error"] == {"type": "overloaded_error", "message": "No engine."}
