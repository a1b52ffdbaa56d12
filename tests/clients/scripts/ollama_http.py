"""Ollama's API by plain HTTP, as its documentation shows it with curl: the same bodies, another model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 200}, "available": {"type": "boolean"}},
    "required": ["age", "available"],
}
BRIEF = {"temperature": 0, "num_predict": 40}


@pytest.fixture(scope="module")
def http(root: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=root, timeout=50) as client:
        yield client


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == "application/x-ndjson":
        return [json.loads(line) for line in answer.text.splitlines()]
    return answer.json()


def test_a_completion_is_streamed(http: httpx.Client, model: str) -> None:
    lines = ask(http, "/api/generate", model=model, prompt="Why is the sky blue?", options=BRIEF)
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert all(line["model"] == model and line["created_at"] for line in lines)
    last = lines[-1]
    for field in ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration"):
        assert isinstance(last[field], int) and last[field] >= 0
    assert last["prompt_eval_count"] > 0 and last["eval_count"] > 0 and last["context"]


def test_a_completion_at_once(http: httpx.Client, model: str) -> None:
    streamed = ask(http, "/api/generate", model=model, prompt="Why is the sky blue?", options=BRIEF)
    whole = ask(http, "/api/generate", model=model, prompt="Why is the sky blue?", options=BRIEF, stream=False)
    assert whole["response"] == "".join(line["response"] for line in streamed) != ""
    assert whole["context"] == streamed[-1]["context"]


def test_structured_output(http: httpx.Client, model: str) -> None:
    prompt = "Ollama is 22 years old and is busy saving the world. Respond using JSON"
    answer = ask(http, "/api/generate", model=model, prompt=prompt, stream=False, format=SCHEMA, options=BRIEF)
    found = json.loads(answer["response"])
    assert isinstance(found["age"], int) and isinstance(found["available"], bool)


def test_json_mode(http: httpx.Client, model: str) -> None:
    prompt = "What color is the sky at different times of the day? Respond using JSON"
    answer = ask(http, "/api/generate", model=model, prompt=prompt, format="json", stream=False, options=BRIEF)
    assert answer["response"].lstrip().startswith("{")
    assert answer["done_reason"] == "length" or isinstance(json.loads(answer["response"]), dict)


def test_raw_mode(http: httpx.Client, model: str) -> None:
    prompt = "<|im_start|>user\nName a color.<|im_end|>\n<|im_start|>assistant\n"
    answer = ask(http, "/api/generate", model=model, prompt=prompt, raw=True, stream=False, options=BRIEF)
    assert answer["response"] and "context" not in answer


def test_a_seed_gives_the_same_again(http: httpx.Client, model: str) -> None:
    options = {"seed": 123, "temperature": 1.0, "num_predict": 20}
    first, second = (
        ask(http, "/api/generate", model=model, prompt="Why is the sky blue?", options=options, stream=False)
        for _ in range(2)
    )
    assert first["response"] == second["response"] != ""


def test_many_options(http: httpx.Client, model: str) -> None:
    options = {
        "num_keep": 5, "seed": 42, "num_predict": 10, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "typical_p": 0.7,
        "temperature": 0.8, "repeat_penalty": 1.2, "presence_penalty": 1.5, "frequency_penalty": 1.0,
        "penalize_newline": True, "stop": ["\n", "user:"], "numa": False, "num_ctx": 1024, "num_batch": 2, "num_gpu": 1,
        "main_gpu": 0, "use_mmap": True, "num_thread": 8,
    }  # fmt: skip
    answer = ask(http, "/api/generate", model=model, prompt="Why is the sky blue?", stream=False, options=options)
    assert answer["done"] and "\n" not in answer["response"]


def test_loading(http: httpx.Client, model: str) -> None:
    assert ask(http, "/api/generate", model=model)["done_reason"] == "load"
    assert ask(http, "/api/chat", model=model, messages=[], keep_alive=0)["message"] == {
        "role": "assistant", "content": "",
    }  # fmt: skip


def test_a_chat_with_history(http: httpx.Client, model: str) -> None:
    messages = [
        {"role": "user", "content": "why is the sky blue?"},
        {"role": "assistant", "content": "due to rayleigh scattering."},
        {"role": "user", "content": "how is that different than mie scattering?"},
    ]
    lines = ask(http, "/api/chat", model=model, messages=messages, options=BRIEF)
    text = "".join(line["message"]["content"] for line in lines)
    whole = ask(http, "/api/chat", model=model, messages=messages, options=BRIEF, stream=False)
    assert whole["message"] == {"role": "assistant", "content": text} and text


def test_a_chat_with_tools(http: httpx.Client, model: str) -> None:
    """A small model may or may not call; a call that it makes has its arguments as an object."""
    tool = {
        "type": "function",
        "function": {
            "name": "get_current_weather",
            "description": "Get the current weather for a location",
            "parameters": {
                "type": "object",
                "properties": {
                    "location": {"type": "string", "description": "The location, e.g. San Francisco, CA"},
                    "format": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                },
                "required": ["location", "format"],
            },
        },
    }
    asked = [{"role": "user", "content": "What is the weather today in Paris?"}]
    answer = ask(http, "/api/chat", model=model, messages=asked, tools=[tool], stream=False, options=BRIEF)
    for call in answer["message"].get("tool_calls", []):
        assert isinstance(call["function"]["arguments"], dict)
    assert answer["message"]["content"] or answer["message"].get("tool_calls")


def test_models(http: httpx.Client, model: str) -> None:
    assert http.head("/").status_code == 200
    (listed,) = http.get("/api/tags").json()["models"]
    assert listed["name"] == f"{model}:latest" and listed["size"] > 0 and listed["details"]["family"]
    (loaded,) = http.get("/api/ps").json()["models"]
    assert loaded["digest"] == listed["digest"] and loaded["expires_at"] and loaded["context_length"] > 0
    shown = ask(http, "/api/show", model=listed["name"])
    assert shown["template"] and "completion" in shown["capabilities"]
    assert shown["model_info"][f"{listed['details']['family']}.context_length"] == loaded["context_length"]
    assert http.get("/api/version").json()["version"]


def test_what_is_not_offered_says_why(http: httpx.Client, model: str) -> None:
    for path, body, status in (
        ("/api/pull", {"model": "llama3.2"}, 400),
        ("/api/chat", {"model": "llama3.2", "messages": []}, 404),
        ("/api/generate", {"model": model, "prompt": "x", "images": ["aGk="]}, 400),
        ("/api/embed", {"model": model, "input": "x"}, 400),
    ):
        answer = http.post(path, json=body)
        assert answer.status_code == status and answer.json().keys() == {"error"}
