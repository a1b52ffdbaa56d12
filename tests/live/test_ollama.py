"""Ollama's API as its clients meet it: real sockets, the model scripted."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from scripted import Served, make_text_model
from tokenmill.api.ollama.parse import _messages
from tokenmill.core.errors import InvalidRequest
from tokenmill.text.chat_format import ChatFormat
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.fim import FimTokens


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as running:
        yield running


def ask(served: Served, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    """(status, body); of several lines, all of them."""
    status, text, kind = served.ask(path, body, method)
    if kind == "application/x-ndjson":
        return status, [json.loads(line) for line in text.splitlines()]
    return status, json.loads(text) if kind == "application/json" else text


# ---- models ----


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_somebody_is_there(served: Served, method: str) -> None:
    status, text = ask(served, "/", method=method)
    assert status == 200 and ("Ollama is running" in text) == (method == "GET")


def test_liveness_needs_no_key() -> None:
    with Served(api_keys=("secret",)) as running:
        assert ask(running, "/")[0] == 200
        status, body = ask(running, "/api/tags")
        assert status == 401 and list(body) == ["error"]


def test_models_are_listed_with_their_tag(served: Served) -> None:
    (model,) = ask(served, "/api/tags")[1]["models"]
    assert model["name"] == model["model"] == "toy:latest" and len(model["digest"]) == 64
    assert datetime.fromisoformat(model["modified_at"])
    assert set(model["details"]) == {
        "parent_model", "format", "family", "families", "parameter_size", "quantization_level",
    }  # fmt: skip


def test_the_model_is_loaded_for_good(served: Served) -> None:
    (model,) = ask(served, "/api/ps")[1]["models"]
    assert model["context_length"] == served.engine.max_model_len and model["size_vram"] == 0
    assert datetime.fromisoformat(model["expires_at"]).year == 9999


@pytest.mark.parametrize("field", ["model", "name"])
@pytest.mark.parametrize("name", ["toy", "toy:latest"])
def test_what_a_model_is(served: Served, field: str, name: str) -> None:
    status, body = ask(served, "/api/show", {field: name})
    assert status == 200 and body["capabilities"] == ["completion", "tools"]
    assert "<|im_start|>" in body["template"]
    (length,) = [value for key, value in body["model_info"].items() if key.endswith(".context_length")]
    assert length == served.engine.max_model_len


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/show", {"model": "other"}),
        ("/api/chat", {"model": "other", "messages": [{"role": "user", "content": "hi"}]}),
        ("/api/generate", {"model": "other", "prompt": "hi"}),
    ],
)
def test_another_model_is_not_found_in_the_words_that_clients_look_for(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    assert ask(served, path, body) == (404, {"error": "model 'other' not found; this server has: toy."})


def test_a_version_that_clients_can_compare(served: Served) -> None:
    version = ask(served, "/api/version")[1]["version"]
    assert tuple(map(int, version.split("."))) >= (0, 12, 0)


def test_a_served_model_needs_no_pulling(served: Served) -> None:
    assert ask(served, "/api/pull", {"model": "toy"}) == (200, [{"status": "success"}])
    status, body = ask(served, "/api/pull", {"model": "llama3.2"})
    assert status == 400 and "tokenmill pull" in body["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/push"),
        ("POST", "/api/create"),
        ("POST", "/api/copy"),
        ("DELETE", "/api/delete"),
        ("POST", "/api/blobs/sha256:00"),
    ],
)
def test_models_are_not_managed_over_http(served: Served, method: str, path: str) -> None:
    status, body = ask(served, path, {"model": "toy"}, method=method)
    assert status == 400 and list(body) == ["error"] and body["error"].endswith(".")


def test_errors_have_ollamas_shape_wherever_they_arise(served: Served) -> None:
    for path, body, status in (("/api/nothing", None, 404), ("/api/show", {}, 400), ("/api/version", {}, 405)):
        found, answer = ask(served, path, body)
        assert found == status and list(answer) == ["error"] and isinstance(answer["error"], str)


# ---- answers ----


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_streamed_unless_the_caller_says_otherwise(served: Served) -> None:
    status, lines = ask(served, "/api/chat", {"model": "toy", "messages": user("hi")})
    assert status == 200 and all(line["model"] == "toy" for line in lines)
    assert "".join(line["message"]["content"] for line in lines) == "hello world"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True] and len(lines) > 2
    whole = ask(served, "/api/chat", {"model": "toy", "messages": user("hi"), "stream": False})[1]
    assert whole["message"] == {"role": "assistant", "content": "hello world"}
    for last in (lines[-1], whole):
        assert (
            last["done_reason"] == "stop" and last["eval_count"] == len(served.text.tokenizer.encode("hello world")) + 1
        )
        assert last["prompt_eval_count"] > 10 and last["total_duration"] > 0
        parts = ("load_duration", "prompt_eval_duration", "eval_duration")
        assert abs(sum(last[part] for part in parts) - last["total_duration"]) < 5


@pytest.mark.parametrize("stream", [False, True])
def test_options_reach_the_engine(served: Served, stream: bool) -> None:
    served.script.introductions.clear()
    options = {"num_predict": 3, "temperature": 0.5, "top_k": 7, "seed": 9, "repeat_penalty": 1.5, "num_ctx": 4096}
    body = {"model": "toy", "prompt": "hi", "options": options, "stream": stream}
    answer = ask(served, "/api/generate", body)[1]
    answer = answer[-1] if stream else answer
    assert (answer["done_reason"], answer["eval_count"]) == ("length", 3)
    (intro,) = served.script.introductions
    sampling = intro.sampling
    assert (intro.seed, sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (9, 0.5, 7, 1.5)


def test_a_prompt_is_put_in_the_template_unless_it_is_raw(served: Served) -> None:
    served.script.introductions.clear()
    body = {"model": "toy", "prompt": "hi", "system": "be brief", "stream": False}
    answer = ask(served, "/api/generate", body)[1]
    raw = ask(served, "/api/generate", {"model": "toy", "prompt": "hi", "raw": True, "stream": False})[1]
    prompts = [
        served.text.tokenizer.decode(each.prompt_tokens, skip_special=False) for each in served.script.introductions
    ]
    assert prompts == [
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "hi",
    ]
    assert answer["response"] == raw["response"] == "hello world" and "context" in answer and "context" not in raw


@pytest.mark.parametrize("stream", [False, True])
def test_a_context_goes_on_with_what_was_said(served: Served, stream: bool) -> None:
    answer = ask(served, "/api/generate", {"model": "toy", "prompt": "hi", "stream": stream})[1]
    context = (answer[-1] if stream else answer)["context"]
    served.script.introductions.clear()
    ask(served, "/api/generate", {"model": "toy", "prompt": "more", "context": context, "stream": False})
    (intro,) = served.script.introductions
    said = served.text.tokenizer.decode(intro.prompt_tokens, skip_special=False)
    assert list(intro.prompt_tokens[: len(context)]) == context and "hello world" in said
    assert said.endswith("<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")


def test_an_answer_may_fill_the_context(served: Served) -> None:
    """Nobody said how many tokens: /v1/completions would stop after 16."""
    with Served(lambda prompt: "ab" * 40) as running:
        body = {"model": "toy", "prompt": "hi", "raw": True, "stream": False}
        for predict in ({}, {"num_predict": -1}, {"num_predict": -2}, {"num_predict": 10_000}):
            assert ask(running, "/api/generate", body | {"options": predict})[1]["response"] == "ab" * 40


def test_the_last_message_of_the_assistant_is_continued(served: Served) -> None:
    served.script.introductions.clear()
    messages = [*user("hi"), {"role": "assistant", "content": "well,"}]
    ask(served, "/api/chat", {"model": "toy", "messages": messages, "stream": False})
    (intro,) = served.script.introductions
    assert served.text.tokenizer.decode(intro.prompt_tokens, skip_special=False).endswith("assistant\nwell,")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_without_a_prompt_the_model_is_loaded(served: Served, path: str) -> None:
    status, answer = ask(served, path, {"model": "toy:latest", "messages": []} if "chat" in path else {"model": "toy"})
    assert (status, answer["done"], answer["done_reason"]) == (200, True, "load")
    assert answer["message"]["content"] == "" if "chat" in path else answer["response"] == ""
    for given, reason in (
        (0, "unload"),
        ("0s", "unload"),
        (0.0, "unload"),
        ("10m", "load"),
        (-1, "load"),
        (True, "load"),
    ):
        body = {"model": "toy", "messages": [], "keep_alive": given}
        assert ask(served, path, body)[1]["done_reason"] == reason


def test_log_probabilities(served: Served) -> None:
    body = {"model": "toy", "messages": user("hi"), "logprobs": True, "top_logprobs": 2}
    whole = ask(served, "/api/chat", body | {"stream": False})[1]["logprobs"]
    streamed = [entry for line in ask(served, "/api/chat", body)[1] for entry in line.get("logprobs", [])]
    assert streamed == whole and "".join(entry["token"] for entry in whole) == "hello world"
    assert all(entry["logprob"] == -1.0 and len(entry["top_logprobs"]) == 2 for entry in whole)
    raw = {"model": "toy", "prompt": "hi", "raw": True, "logprobs": True, "top_logprobs": 2, "stream": False}
    assert ask(served, "/api/generate", raw)[1]["logprobs"] == whole


def test_a_stream_that_fails_says_so_in_its_last_line() -> None:
    with Served(lambda prompt: "ab" * 100, step_s=0.02) as running:
        body = json.dumps({"model": "toy", "messages": user("hi")}).encode()
        call = urllib.request.Request(running.url + "/api/chat", body)
        with urllib.request.urlopen(call, timeout=20) as answer:
            first = json.loads(answer.readline())
            running.call(lambda: setattr(running.script, "failure", RuntimeError("planted")))
            lines = [json.loads(line) for line in answer]
    assert first["done"] is False and list(lines[-1]) == ["error"]
    assert not any(line.get("done") for line in lines)


CHAT = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
GENERATE = {"model": "toy", "prompt": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/api/chat", CHAT | {"options": {"temperature": "hot"}}, "options.temperature must be a number"),
        ("/api/chat", CHAT | {"options": {"num_predict": 1.5}}, "options.num_predict must be an integer"),
        ("/api/chat", CHAT | {"options": {"repeat_penalty": -1}}, "options.repeat_penalty must be"),
        ("/api/chat", CHAT | {"options": {"mirostat": 2}}, "options.mirostat is not supported"),
        ("/api/chat", CHAT | {"options": {"num_ctx": 0}}, "options.num_ctx"),
        ("/api/chat", CHAT | {"options": {"temprature": 0}}, "options.temperature is"),
        ("/api/chat", CHAT | {"temperature": 0}, "options.temperature"),
        ("/api/chat", CHAT | {"format": "yaml"}, "format must be 'json' or a JSON schema"),
        ("/api/chat", CHAT | {"format": {"type": "nope"}}, "format: 'type' at #"),
        ("/api/generate", GENERATE | {"format": {"uniqueItems": True, "type": "array"}}, "format: 'uniqueItems' at #"),
        ("/api/generate", GENERATE | {"raw": True, "format": {"type": 5}}, "format: 'type' at #"),
        ("/api/chat", CHAT | {"think": "hard"}, "think must be"),
        ("/api/chat", CHAT | {"stream": "yes"}, "stream must be true or false"),
        ("/api/chat", {"model": "toy", "messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ("/api/chat", {"model": "toy", "messages": [*CHAT["messages"], 5]}, "messages[1] must be an object"),  # type: ignore[misc]
        (
            "/api/chat",
            {"model": "toy", "messages": [{"role": "user", "content": "hi", "images": ["aGk="]}]},
            "messages[0].images",
        ),
        (
            "/api/chat",
            {"model": "toy", "messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0].function.name",
        ),
        ("/api/chat", {"messages": CHAT["messages"]}, "model must be a string"),
        ("/api/generate", GENERATE | {"images": ["aGk="]}, "images is not supported"),
        ("/api/generate", GENERATE | {"template": "{{ .Prompt }}"}, "template is not supported"),
        ("/api/generate", GENERATE | {"suffix": "x"}, "suffix needs a model that fills gaps"),
        ("/api/generate", GENERATE | {"raw": True, "system": "x"}, "system does not go with raw"),
        ("/api/generate", GENERATE | {"context": [1, -1]}, "context must be between 0"),
        ("/api/generate", GENERATE | {"prompt": "a" * 2000}, "prompt has"),
    ],
)
def test_what_is_wrong_is_named_as_the_caller_named_it(served: Served, path: str, body: Any, named: str) -> None:
    status, answer = ask(served, path, body)
    assert status == 400 and list(answer) == ["error"] and named in answer["error"], answer


def test_results_of_tools_name_the_call_that_they_answer() -> None:
    """By the tool's name, else in order."""

    def call(name: str) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"x": 1}}}

    messages = [
        *user("hi"),
        {"role": "assistant", "content": "", "tool_calls": [call("a"), call("b"), call("a")]},
        {"role": "tool", "content": "1", "tool_name": "b"},
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "3", "tool_name": "a"},
    ]
    found = _messages(messages)
    assert [message.get("tool_call_id") for message in found] == [None, None, "call_1_1", "call_1_0", "call_1_2"]
    assert found[1]["tool_calls"][0]["function"] == {"name": "a", "arguments": '{"x": 1}'}
    messages[2]["tool_name"] = "c"
    with pytest.raises(InvalidRequest, match=r"messages\[2\] answers no call"):
        _messages(messages)


# ---- tools and thinking ----

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALLS = (
    '<think>where?</think>two:<tool_call>{"name": "weather", "arguments": {"city": "Bonn"}}</tool_call>'
    '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
)


@pytest.fixture(scope="module")
def thinker() -> Iterator[Served]:
    """Thinks, then calls a tool twice; with thinking off it just answers."""

    def reply(prompt: str) -> str:
        return "no thought" if prompt.endswith("</think>") else "<think>hm</think>yes" if "SAY" in prompt else CALLS

    text = make_text_model(
        chat=ChatTemplate(THINKING, "<|endoftext|>", "<|im_end|>"),
        chat_format=ChatFormat("hermes", True, "think", knows_calls=True),
    )
    with Served(reply, text=text) as running:
        yield running


def test_a_call_whose_arguments_are_no_object_locks_no_conversation(thinker: Served) -> None:
    """As a client has it that keeps calls of OpenAI's API: arguments are text, which may be cut off."""
    calls = [{"function": {"name": "weather", "arguments": '{"city": "Bo'}}]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "no such city", "tool_name": "weather"},
    ]
    body = {"model": "toy", "messages": messages, "stream": False}
    assert ask(thinker, "/api/chat", body)[0] == 200


def test_calls_of_tools_are_told_whole_with_their_arguments_as_objects(thinker: Served) -> None:
    body = {"model": "toy", "messages": user("hi"), "tools": TOOLS}
    whole = ask(thinker, "/api/chat", body | {"stream": False})[1]
    message = whole["message"]
    assert (message["content"].strip(), message["thinking"], whole["done_reason"]) == ("two:", "where?", "stop")
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [
        {"index": 0, "name": "weather", "arguments": {"city": "Bonn"}},
        {"index": 1, "name": "weather", "arguments": {"city": "Ulm"}},
    ]
    lines = ask(thinker, "/api/chat", body)[1]
    said = [line["message"] for line in lines]
    assert "".join(each.get("thinking", "") for each in said) == "where?"
    assert "".join(each["content"] for each in said) == message["content"]
    assert [call["function"] for each in said for call in each.get("tool_calls", [])] == calls
    assert "tool_calls" not in said[-1] and lines[-1]["done"]


def test_results_of_tools_go_back_in(thinker: Served) -> None:
    calls = [{"function": {"name": "weather", "arguments": {"city": "Bonn"}}}]
    messages = [
        *user("SAY"),
        {"role": "assistant", "content": "", "tool_calls": calls, "thinking": "where?"},
        {"role": "tool", "tool_name": "weather", "content": "sun"},
    ]
    thinker.script.introductions.clear()
    answer = ask(thinker, "/api/chat", {"model": "toy", "messages": messages, "tools": TOOLS, "stream": False})[1]
    assert (answer["message"]["content"], answer["message"]["thinking"]) == ("yes", "hm")
    (intro,) = thinker.script.introductions
    prompt = thinker.text.tokenizer.decode(intro.prompt_tokens, skip_special=False)
    assert "[weather Bonn]" in prompt and "tool\nsun" in prompt
    status, error = ask(thinker, "/api/chat", {"model": "toy", "messages": [*user("hi"), messages[2]]})
    assert status == 400 and "messages[1]" in error["error"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_thinking_can_be_turned_off(thinker: Served, path: str) -> None:
    body = {"model": "toy", "stream": False} | ({"messages": user("SAY")} if "chat" in path else {"prompt": "SAY"})

    def said(think: Any) -> tuple[str, str | None]:
        answer = ask(thinker, path, body | ({} if think is None else {"think": think}))[1]
        told = answer.get("message", answer)
        return told.get("content", told.get("response")), told.get("thinking")

    assert said(None) == said(True) == said("high") == ("yes", "hm")
    assert said(False) == ("no thought", None)


def test_a_model_that_does_not_think_says_so(served: Served) -> None:
    status, error = ask(served, "/api/chat", CHAT | {"think": True})
    assert status == 400 and "think needs a model" in error["error"]
    assert ask(served, "/api/chat", CHAT | {"think": False, "stream": False})[0] == 200


def test_a_call_that_is_cut_is_not_told(thinker: Served) -> None:
    """Arguments are objects, and half of one is none."""
    options = {"num_predict": 70}
    body = {"model": "toy", "messages": user("hi"), "tools": TOOLS, "stream": False, "options": options}
    answer = ask(thinker, "/api/chat", body)[1]
    assert answer["done_reason"] == "length" and "tool_calls" not in answer["message"]


def test_a_model_without_a_template_takes_prompts_as_they_are() -> None:
    with Served(text=make_text_model(chat=None)) as running:
        answer = ask(running, "/api/generate", {"model": "toy", "prompt": "hi", "stream": False})[1]
        assert (answer["response"], answer["context"][:2]) == ("hello world", running.text.tokenizer.encode("hi"))
        again = {"model": "toy", "prompt": "more", "context": answer["context"], "stream": False}
        running.script.introductions.clear()
        assert ask(running, "/api/generate", again)[0] == 200
        (intro,) = running.script.introductions
        assert running.text.tokenizer.decode(intro.prompt_tokens) == "hihello worldmore"
        status, error = ask(running, "/api/generate", {"model": "toy", "prompt": "hi", "system": "x"})
        assert status == 400 and "system needs a model with a chat template" in error["error"]


def test_a_suffix_makes_a_gap_to_fill() -> None:
    fim = FimTokens("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    with Served(text=make_text_model(fim=fim)) as running:
        body = {"model": "toy", "prompt": "def f(", "suffix": "return x", "stream": False}
        assert ask(running, "/api/generate", body)[1]["response"] == "hello world"
        (intro,) = running.script.introductions
        said = running.text.tokenizer.decode(intro.prompt_tokens, skip_special=False)
        assert said == "<|im_start|>def f(<|im_end|>return x<|endoftext|>"
        assert "insert" in ask(running, "/api/show", {"model": "toy"})[1]["capabilities"]


HEAVY = {"unknown": list(range(21_000))}
"""Bodies of so many values are read by the sandbox."""


def test_heavy_bodies_are_read_alike(served: Served, thinker: Served) -> None:
    chat = {"model": "toy", "messages": user("hi"), "tools": TOOLS, "stream": False}
    for body in (chat, chat | HEAVY):
        message = ask(thinker, "/api/chat", body)[1]["message"]
        assert (message["thinking"], len(message["tool_calls"])) == ("where?", 2)
    generate = {"model": "toy", "prompt": "hi", "context": [5, 6], "stream": False}
    for body in (generate, generate | HEAVY):
        served.script.introductions.clear()
        answer = ask(served, "/api/generate", body)[1]
        (intro,) = served.script.introductions
        assert intro.prompt_tokens[:2] == (5, 6) and answer["context"][: len(intro.prompt_tokens)] == list(
            intro.prompt_tokens
        )
    assert ask(served, "/api/chat", {"model": "toy", "messages": []} | HEAVY)[1]["done_reason"] == "load"
    status, error = ask(served, "/api/chat", {"model": "other", "messages": user("hi")} | HEAVY)
    assert status == 404 and "'other'" in error["error"]
