"""Bad input on every path that reads a body: refused with 400, in that API's own shape, by the field's name."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.routing import Route

from scripted import Served, make_text_model
from tokenmill.api.fields import MAX_DEPTH
from tokenmill.text.fim import FimTokens

USER = {"role": "user", "content": "hi"}
CHAT = {"model": "toy", "messages": [USER]}
MESSAGES = CHAT | {"max_tokens": 5}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "2"}
ANSWER = {"type": "tool_result", "tool_use_id": "t", "content": "2"}
ITEM = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "2"}

Bad = tuple[dict[str, Any], str]


def chat_like(tools: list[Any]) -> list[Bad]:
    """What is wrong in the messages and tools of OpenAI's chat and of Ollama's."""
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    return [
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (
            {"messages": [calling | {"tool_calls": [{"type": "function", "function": {"arguments": {}}}]}]},
            "messages[0]",
        ),
        ({"tools": "add"}, "tools"),
        ({"tools": [{"type": "function", "function": {"parameters": {}}}]}, "name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [*tools, *tools]}, "name"),
    ]


SAMPLING: list[Bad] = [
    ({"temperature": -1}, "temperature"),
    ({"top_p": 7}, "top_p"),
    ({"temprature": 1}, "temprature"),
    ({"stop": [1]}, "stop"),
    ({"seed": "x"}, "seed"),
]
OPENAI: list[Bad] = [
    *SAMPLING,
    ({"max_tokens": -1}, "max_tokens"),
    ({"maxTokens": 9}, "maxTokens"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"num_beams": 4}, "num_beams"),
]
MODEL: list[Bad] = [({"model": 7}, "model")]

PATHS: dict[str, tuple[dict[str, Any], list[Bad]]] = {
    "/v1/chat/completions": (
        CHAT,
        [
            *OPENAI,
            *chat_like([TOOL]),
            ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0]"),
            ({"messages": [USER, RESULT]}, "messages[1].tool_call_id"),
            ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, USER]}, "messages[1]"),
            ({"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, RESULT, RESULT]}, "messages[3]"),
            (
                {"tools": [{"type": "function", "function": FUNCTION | {"descripton": "x"}}]},
                "tools[0].function.descripton",
            ),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
            ({"tools": [TOOL], "functions": [FUNCTION]}, "functions"),
            ({"top_logprobs": 3}, "top_logprobs"),
            ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
            ({"response_format": {"type": "yaml"}}, "response_format"),
            ({"max_completion_tokens": 0}, "max_completion_tokens"),
            ({"prompt": "hi", "messages": None}, "messages"),
        ],
    ),
    "/v1/completions": (
        {"model": "toy", "prompt": "hi"},
        [
            *OPENAI,
            ({"prompt": {"text": "hi"}}, "prompt"),
            ({"prompt": [1, "hi", None]}, "prompt"),
            ({"prompt": [10_000_000]}, "prompt"),
            ({"suffix": "x"}, "suffix"),
            ({"max_tokens": 0}, "max_tokens"),
        ],
    ),
    "/v1/responses": (
        {"model": "toy", "input": "hi"},
        [
            *SAMPLING[:3],
            ({"input": 7}, "input"),
            ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input[0]"),
            ({"input": [{"role": "user", "content": "hi"}, OUTPUT]}, "input[1]"),
            ({"input": [{"role": "user", "content": "hi"}, ITEM]}, "call_1"),
            ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
            ({"tools": [{"type": "function", "parameters": {}}]}, "name"),
            ({"background": True}, "background"),
            ({"max_output_tokens": 0}, "max_output_tokens"),
            ({"instrutions": "x"}, "instrutions"),
            ({"conversation": "c"}, "conversation"),
            ({"text": {"format": {"type": "yaml"}}}, "text.format"),
        ],
    ),
    "/v1/messages": (
        MESSAGES,
        [
            *SAMPLING[:3],
            ({"max_tokens": None}, "max_tokens"),
            ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
            ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0]"),
            ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
            ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools[0].name"),
            ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
            ({"tools": [{"name": "a", "input_schema": {}}, {"name": "a", "input_schema": {}}]}, "tools[1]"),
            (
                {"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "b"}},
                "tool_choice",
            ),
            ({"stop": "x"}, "stop_sequences"),
            ({"max_tokens_": 7}, "max_tokens_"),
            ({"systm": "x"}, "systm"),
        ],
    ),
    "/v1/messages/count_tokens": (CHAT, [({"messages": []}, "messages"), ({"sytem": "x"}, "sytem")]),
    "/api/chat": (
        CHAT,
        [
            *chat_like([TOOL]),
            ({"messages": [USER | {"images": ["aGk="]}]}, "images"),
            ({"options": {"temperature": "hot"}}, "temperature"),
            ({"options": {"temprature": 1}}, "temprature"),
            ({"options": {"mirostat": 2}}, "mirostat"),
            ({"options": 7}, "options"),
            ({"format": "yaml"}, "format"),
            ({"think": "deeply"}, "think"),
            ({"strem": False}, "strem"),
        ],
    ),
    "/api/generate": (
        {"model": "toy", "prompt": "hi"},
        [
            ({"prompt": 7}, "prompt"),
            ({"images": ["aGk="]}, "images"),
            ({"options": {"num_predict": "x"}}, "num_predict"),
            ({"raw": "yes"}, "raw"),
            ({"sytem": "x"}, "sytem"),
        ],
    ),
    "/api/embed": ({"model": "toy", "input": "hi"}, [({"input": 7}, "input"), ({"truncat": True}, "truncat")]),
    "/api/embeddings": ({"model": "toy", "prompt": "hi"}, [({"prompt": 7}, "prompt")]),
    "/completion": (
        {"prompt": "hi"},
        [
            *SAMPLING,
            ({"prompt": {"a": 1}}, "prompt"),
            ({"n_predict": "x"}, "n_predict"),
            ({"samplers": ["wizard"]}, "samplers"),
            ({"n_predct": 7}, "n_predct"),
        ],
    ),
    "/infill": ({"input_prefix": "a", "input_suffix": "b"}, [({"input_prefix": 7}, "input_prefix")]),
    "/apply-template": ({"messages": [USER]}, [({"messages": 7}, "messages")]),
    "/embedding": ({"content": "hi"}, [({"content": {}}, "content")]),
    "/inference/v1/generate": (
        {"model": "toy", "token_ids": [70]},
        [
            *(({"sampling_params": changes}, f"sampling_params.{field}") for changes, field in SAMPLING),
            ({"token_ids": "a"}, "token_ids"),
            ({"tokenids": [70]}, "tokenids"),
            ({"sampling_params": 7}, "sampling_params"),
            ({"features": {"a": 1}}, "features"),
        ],
    ),
    "/generate": (
        {"text": "hi"},
        [
            *(({"sampling_params": changes}, f"sampling_params.{field}") for changes, field in SAMPLING),
            ({"input_ids": [70]}, "input_ids"),
            ({"top_logprobs_num": 2}, "top_logprobs_num"),
            ({"sampling_parms": {}}, "sampling_parms"),
        ],
    ),
    "/v1/embeddings": (
        {"model": "toy", "input": "hi"},
        [({"input": 7}, "input"), ({"encoding_format": "hex"}, "encoding_format"), ({"dimension": 7}, "dimension")],
    ),
    "/v1/score": ({"text_1": "a", "text_2": "b"}, [({"text_1": 7}, "text_1"), ({"text1": "a"}, "text1")]),
    "/v1/rerank": ({"query": "a", "documents": ["b"]}, [({"documents": 7}, "documents"), ({"querry": "a"}, "querry")]),
    "/tokenize": ({"prompt": "hi"}, [({"prompt": 7}, "prompt"), ({"add_special_token": True}, "add_special_token")]),
    "/detokenize": ({"tokens": [70]}, [({"tokens": "a"}, "tokens"), ({"tokens": [-1]}, "tokens")]),
    "/v1/load_lora_adapter": ({"lora_name": "a", "lora_path": "b"}, [({"lora_name": 7}, "lora_name")]),
    "/v1/unload_lora_adapter": ({"lora_name": "a"}, [({"lora_name": None}, "lora_name")]),
}
ELSEWHERE = (
    "/api/",
    "/v1/files",
    "/v1/batches",
    "/props",
    "/lora-adapters",
    "/ping",
    "/v1/responses/",
    "/admin/",
    "/v1/conversations",
    "/v1/messages/batches",
    "/models/",
)
"""Paths whose bodies have tests of their own, or none."""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    text = make_text_model(fim=FimTokens("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    with Served(text=text) as server:
        yield server


def ask(served: Served, path: str, body: bytes) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*served.address, timeout=20)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def message_of(path: str, body: Any) -> str:
    """What an error says, whose shape is that of the path's API."""
    if path.startswith("/api/"):
        assert set(body) == {"error"}, body
        return str(body["error"])
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error", body
        assert body["error"]["type"] == "invalid_request_error", body
        return str(body["error"]["message"])
    error = body["error"]
    if not path.startswith(("/completion", "/infill", "/apply-template", "/embedding")):
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error", body
    else:
        assert error["code"] == 400 and error["type"] == "invalid_request_error", body
    return str(error["message"])


@pytest.mark.parametrize("path", PATHS)
def test_what_is_wrong_is_named(served: Served, path: str) -> None:
    base, bad = PATHS[path]
    wrong = []
    for changes, field in bad + (MODEL if "model" in base else []):
        status, body = ask(served, path, json.dumps(base | changes).encode())
        if status != 400 or field not in message_of(path, body):
            wrong.append(f"{changes}: {status} {str(body)[:300]}")
    assert not wrong, "\n".join(wrong)


def reading(served: Served) -> dict[str, Any]:
    """Paths that read bodies, and what answers them."""
    routes = [route for route in served.app.routes if isinstance(route, Route) and "POST" in (route.methods or ())]
    return {route.path: route.endpoint for route in routes}


def test_what_is_no_object_is_refused(served: Served) -> None:
    """Nothing, half of a body, another type, text that is not UTF-8, and an object nested without end; by other names
    of the paths too."""
    endpoints = reading(served)
    known = [endpoints[path] for path in PATHS]
    paths = [path for path, endpoint in endpoints.items() if endpoint in known]
    assert len(paths) > len(PATHS)
    for path in paths:
        for data in (b"", b"{", b"[]", b'"hi"', b"\xff\xfe", b'{"a":' * 1300):
            status, body = ask(served, path, data)
            assert status == 400 and message_of(path, body), (path, data[:20], body)


def test_no_path_that_reads_a_body_is_left_out(served: Served) -> None:
    """What answers it is tried under one of its names."""
    endpoints = reading(served)
    known = [endpoints[path] for path in PATHS]
    left_out = [path for path, endpoint in endpoints.items() if endpoint not in known]
    assert not [path for path in left_out if not path.startswith(ELSEWHERE)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_what_is_nested_as_deeply_as_it_may_be_is_no_fault_of_the_server(served: Served, path: str) -> None:
    """Arguments of a call that are just shallow enough to be read, and are then to be written."""
    for depth in range(MAX_DEPTH - 12, MAX_DEPTH + 3):
        arguments = '{"a":' * depth + "1" + "}" * depth
        if path == "/v1/messages":
            said = f'{{"type":"tool_use","id":"t","name":"n","input":{arguments}}}'
            turns = f'{{"role":"assistant","content":[{said}]}},{{"role":"user","content":[{json.dumps(ANSWER)}]}}'
        else:
            call = f'{{"id":"call_1","type":"function","function":{{"name":"add","arguments":{arguments}}}}}'
            turns = f'{{"role":"assistant","tool_calls":[{call}]}},{json.dumps(RESULT)}'
        status, body = ask(served, path, f'{{"max_tokens":1,"messages":[{turns}]}}'.encode())
        assert status == 400 and message_of(path, body), (depth, body)
