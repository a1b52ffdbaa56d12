"""Anthropic's API over HTTP: whole and streamed answers, counts, models, failures."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripted import Served, make_text_model
from tokenmill.text.chat_format import find_chat_format
from tokenmill.text.chat_template import ChatTemplate

VERSION = {"anthropic-version": "2023-06-01"}
BODY: dict[str, Any] = {"model": "toy", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(lambda prompt: "hello world" if prompt == PROMPT else prompt[::-1]) as server:
        yield server


def ask(served: Served, path: str, body: Any, method: str = "POST") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(*served.address, timeout=20)
    try:
        connection.request(method, path, json.dumps(body).encode(), {"content-type": "application/json", **VERSION})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def events(data: bytes) -> list[dict[str, Any]]:
    found = [event.partition("\ndata: ") for event in data.decode().removesuffix("\n\n").split("\n\n")]
    for name, _, body in found:
        assert name == f"event: {json.loads(body)['type']}"
    return [json.loads(body) for _, _, body in found]


def test_an_answer_whole_and_streamed(served: Served) -> None:
    """The same text, end and counts; what is in the cache is counted apart from the rest of the prompt."""
    status, data = ask(served, "/v1/messages", BODY)
    body = json.loads(data)
    assert status == 200 and body["content"] == [{"type": "text", "text": "hello world"}]
    assert (body["type"], body["role"], body["stop_reason"], body["model"]) == (
        "message",
        "assistant",
        "end_turn",
        "toy",
    )
    status, data = ask(served, "/v1/messages", BODY | {"stream": True})
    stream = events(data)
    kinds = [event["type"] for event in stream]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"} and len(kinds) > 8, "more than one piece"
    assert "".join(event["delta"]["text"] for event in stream[3:-3]) == "hello world"
    usage, first = stream[-2]["usage"], stream[0]["message"]["usage"]
    assert usage["output_tokens"] == body["usage"]["output_tokens"] and first["output_tokens"] == 0
    for counts in (usage, first):
        assert counts["cache_read_input_tokens"] == 16, "one block of it was found"
        assert counts["input_tokens"] + 16 == sum(
            body["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
        )


def test_a_prompt_is_counted_as_it_is_read(served: Served) -> None:
    body = {name: value for name, value in BODY.items() if name != "max_tokens"} | {"system": "Be brief. " * 100}
    status, data = ask(served, "/v1/messages/count_tokens", body)
    counted = json.loads(data)["input_tokens"]
    assert status == 200 and counted > 512, "a prompt that is too long is counted too"
    status, data = ask(served, "/v1/messages", body | {"max_tokens": 1})
    assert status == 400 and f"messages has {counted}" in json.loads(data)["error"]["message"]
    assert json.loads(data)["error"]["message"].startswith("prompt is too long")


def test_the_beginning_of_an_answer_is_continued(served: Served) -> None:
    begun = [*BODY["messages"], {"role": "assistant", "content": "He"}]
    _, data = ask(served, "/v1/messages", BODY | {"messages": begun, "max_tokens": 3})
    body = json.loads(data)
    assert body["content"][0]["text"] == "eH\n" and body["stop_reason"] == "max_tokens"


def test_an_answer_ends_where_the_context_does(served: Served) -> None:
    long = [{"role": "user", "content": "x" * 400}]
    _, data = ask(served, "/v1/messages", BODY | {"messages": long, "max_tokens": 100_000})
    body = json.loads(data)
    assert body["stop_reason"] == "model_context_window_exceeded"
    assert body["usage"]["input_tokens"] + body["usage"]["output_tokens"] == 512


def test_a_stop_sequence_is_told(served: Served) -> None:
    _, data = ask(served, "/v1/messages", BODY | {"stop_sequences": ["zz", "lo w"]})
    body = json.loads(data)
    assert (body["content"][0]["text"], body["stop_reason"], body["stop_sequence"]) == ("hel", "stop_sequence", "lo w")
    _, data = ask(served, "/v1/messages", BODY | {"stop_sequences": ["lo w"], "stream": True})
    assert events(data)[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "lo w"}


def test_models_are_told_in_the_shape_of_who_asks(served: Served) -> None:
    status, data = ask(served, "/v1/models", None, "GET")
    page = json.loads(data)
    assert status == 200 and page["has_more"] is False and page["first_id"] == page["last_id"] == "toy"
    assert page["data"][0]["type"] == "model" and page["data"][0]["max_input_tokens"] == 512
    assert json.loads(ask(served, "/v1/models/toy", None, "GET")[1]) == page["data"][0]
    status, data = ask(served, "/v1/models/other", None, "GET")
    assert status == 404 and json.loads(data)["error"]["type"] == "not_found_error"


def test_a_heavy_body_is_read_in_the_sandbox(tmp_path: Path) -> None:
    """Of many messages: what is wrong in it is named as it is in a small one."""
    history = [{"role": role, "content": "a, b: c" * 3} for _ in range(4000) for role in ("user", "assistant")]
    with Served(folder=tmp_path) as served:
        status, data = ask(served, "/v1/messages/count_tokens", {"messages": history[:-1]})
        assert status == 200 and json.loads(data)["input_tokens"] > 100_000
        status, data = ask(served, "/v1/messages", BODY | {"messages": [*history[:-1], {"role": "user", "content": 7}]})
        assert status == 400 and "messages[7999].content" in json.loads(data)["error"]["message"]


def test_a_stream_whose_engine_fails_ends_with_an_error(served: Served) -> None:
    """After text has been sent: an error event, and no message_stop."""
    with Served(lambda prompt: "x" * 300, step_s=0.01) as failing:
        connection = http.client.HTTPConnection(*failing.address, timeout=20)
        connection.request("POST", "/v1/messages", json.dumps(BODY | {"max_tokens": 300, "stream": True}).encode())
        response = connection.getresponse()
        data = response.read(600)
        failing.call(lambda: setattr(failing.script, "failure", RuntimeError("broken")))
        data += response.read()
        connection.close()
    stream = events(data)
    assert stream[-1]["type"] == "error" and stream[-1]["error"]["type"] == "api_error"
    assert not any(event["type"] in ("message_delta", "message_stop") for event in stream)


TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
TALKING = (
    "{% if tools %}Tools: {{ tools | tojson }} Call by <tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    ": {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}{% if enable_thinking %}think{% endif %}"
)


@pytest.fixture(scope="module")
def talking() -> Iterator[Served]:
    """A model that thinks if it is told to, calls a tool until it has a result, and then reads that out."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call>'

    def reply(prompt: str) -> str:
        said = prompt.rpartition("tool: ")[2].split("\n")[0] if "tool: " in prompt else f"Well.\n{call}\n{call}"
        return f"<think>\nHm.\n</think>\n\n{said}" if prompt.endswith("think") else said

    text = make_text_model()
    chat_format = find_chat_format(TALKING, text.tokenizer)
    with Served(reply, text=make_text_model(chat=ChatTemplate(TALKING), chat_format=chat_format)) as server:
        yield server


def joined(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks that a client makes of events."""
    blocks: list[dict[str, Any]] = []
    inputs: dict[int, str] = {}
    for event in stream:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = {name: value for name, value in event["delta"].items() if name != "type"}
            if "partial_json" in delta:
                inputs[event["index"]] = inputs.get(event["index"], "") + delta.pop("partial_json")
            for name, value in delta.items():
                blocks[event["index"]][name] += value
    for index, written in inputs.items():
        blocks[index]["input"] = json.loads(written)
    return blocks


def test_tools_there_and_back(talking: Served) -> None:
    """Calls come as blocks, whole and streamed; with their results the conversation goes on; one call where one is
    wanted, none where tools are forbidden."""
    body = BODY | {"tools": [TOOL], "max_tokens": 200}
    _, data = ask(talking, "/v1/messages", body)
    answer = json.loads(data)
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "tool_use"]
    first, second = answer["content"][1:]
    assert (first["name"], first["input"], answer["stop_reason"]) == ("add", {"a": 4}, "tool_use")
    assert first["id"] != second["id"] and first["id"].startswith("toolu_")
    _, data = ask(talking, "/v1/messages", body | {"stream": True})
    stream = events(data)
    assert [block | {"id": ""} for block in joined(stream)] == [block | {"id": ""} for block in answer["content"]]
    assert stream[-2]["delta"]["stop_reason"] == "tool_use"
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "It is 4."} for call in (first, second)]
    history = [
        *body["messages"],
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": results},
    ]
    _, data = ask(talking, "/v1/messages", body | {"messages": history})
    answer = json.loads(data)
    assert answer["content"] == [{"type": "text", "text": "It is 4."}] and answer["stop_reason"] == "end_turn"
    one = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    _, data = ask(talking, "/v1/messages", body | one)
    assert [block["type"] for block in json.loads(data)["content"]].count("tool_use") == 1
    _, data = ask(talking, "/v1/messages", body | {"tool_choice": {"type": "none"}})
    answer = json.loads(data)
    assert [block["type"] for block in answer["content"]] == ["text"] and answer["stop_reason"] == "end_turn"
    _, with_tools = ask(talking, "/v1/messages/count_tokens", body)
    _, without = ask(talking, "/v1/messages/count_tokens", BODY)
    assert json.loads(with_tools)["input_tokens"] > json.loads(without)["input_tokens"] + 50, "tools are counted too"


def test_thinking_is_a_block_of_its_own(talking: Served) -> None:
    """Where it is wanted; it comes back signed in the history, and is part of the prompt then."""
    body = BODY | {"tools": [TOOL], "max_tokens": 200}
    thinks = body | {"thinking": {"type": "adaptive"}}
    _, data = ask(talking, "/v1/messages", thinks)
    answer = json.loads(data)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    thought = answer["content"][0]
    assert thought["thinking"] == "Hm." and thought["signature"]
    assert 0 < answer["usage"]["output_tokens_details"]["thinking_tokens"] < answer["usage"]["output_tokens"]
    _, data = ask(talking, "/v1/messages", thinks | {"stream": True})
    assert joined(events(data))[0] == thought
    said = [
        *body["messages"],
        {"role": "assistant", "content": [thought, {"type": "text", "text": "x"}]},
        *body["messages"],
    ]
    _, with_thought = ask(talking, "/v1/messages/count_tokens", {"messages": said})
    said[1] = {"role": "assistant", "content": "x"}
    _, without = ask(talking, "/v1/messages/count_tokens", {"messages": said})
    assert json.loads(with_thought)["input_tokens"] > json.loads(without)["input_tokens"]
