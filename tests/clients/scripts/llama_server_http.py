"""llama-server's own API by plain HTTP, as its documentation shows it with curl: the same bodies, another server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

PROMPT = "Building a website can be done in 10 simple steps:"


@pytest.fixture(scope="module")
def http(root: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=root, timeout=50) as client:
        yield client


def ask(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        return [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\n\n")]
    return answer.json()


def test_health(http: httpx.Client) -> None:
    for path in ("/health", "/v1/health"):
        assert http.get(path).json() == {"status": "ok"}


def test_a_completion(http: httpx.Client) -> None:
    answer = ask(http, "/completion", prompt=PROMPT, n_predict=32, temperature=0)
    assert answer["content"] and answer["stop"] and answer["stop_type"] in ("limit", "eos")
    assert answer["tokens_predicted"] <= 32 and answer["tokens_evaluated"] > 5
    assert answer["timings"]["predicted_per_second"] > 0
    assert answer["generation_settings"]["n_predict"] == 32


def test_a_streamed_completion(http: httpx.Client) -> None:
    whole = ask(http, "/completion", prompt=PROMPT, n_predict=16, temperature=0, return_tokens=True)
    events = ask(http, "/completion", prompt=PROMPT, n_predict=16, temperature=0, stream=True)
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [token for event in events for token in event["tokens"]] == whole["tokens"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]


def test_a_stop_word(http: httpx.Client) -> None:
    answer = ask(http, "/completion", prompt="1, 2, 3, 4, 5, 6,", n_predict=32, temperature=0, stop=["9"])
    assert "9" not in answer["content"] and (answer["stop_type"], answer["stopping_word"]) == ("word", "9")


def test_a_schema(http: httpx.Client) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 2}
    answer = ask(http, "/completion", prompt="Two colors as JSON: ", n_predict=32, temperature=0, json_schema=schema)
    found = json.loads(answer["content"])
    assert len(found) == 2 and set(found) <= {"red", "green"}


def test_a_grammar(http: httpx.Client) -> None:
    grammar = 'root ::= "yes" | "no"'
    answer = ask(http, "/completion", prompt="Is water wet? ", n_predict=8, temperature=0, grammar=grammar)
    assert answer["content"] in ("yes", "no")


def test_probabilities(http: httpx.Client) -> None:
    answer = ask(http, "/completion", prompt=PROMPT, n_predict=4, temperature=0, n_probs=3)
    entries = answer["completion_probabilities"]
    assert len(entries) == 4
    for entry in entries:
        assert len(entry["top_logprobs"]) == 3 and entry["logprob"] == entry["top_logprobs"][0]["logprob"]
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_a_bias(http: httpx.Client) -> None:
    first = ask(http, "/completion", prompt=PROMPT, n_predict=1, temperature=0, return_tokens=True)["tokens"][0]
    other = ask(http, "/completion", prompt=PROMPT, n_predict=1, temperature=0, logit_bias=[[first, False]])
    assert other["content"] and other["tokens_predicted"] == 1
    assert ask(http, "/completion", prompt=PROMPT, n_predict=1, temperature=0)["content"] != other["content"]


def test_prompts_of_tokens(http: httpx.Client) -> None:
    tokens = ask(http, "/tokenize", content=PROMPT)["tokens"]
    rest = ask(http, "/detokenize", tokens=tokens[3:])["content"]
    prompts = [PROMPT, tokens, [*tokens[:3], rest]]
    by_text, by_tokens, mixed = ask(http, "/completion", prompt=prompts, n_predict=8, temperature=0)
    assert by_text["content"] == by_tokens["content"] == mixed["content"]


def test_tokens(http: httpx.Client) -> None:
    plain = ask(http, "/tokenize", content="Hello world!")["tokens"]
    pieces = ask(http, "/tokenize", content="Hello world!", with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == plain
    assert "".join(piece["piece"] for piece in pieces) == ask(http, "/detokenize", tokens=plain)["content"]


def test_a_template_and_then_a_completion(http: httpx.Client, model: str) -> None:
    """The prompt of the template is the one that chat uses."""
    messages = [{"role": "user", "content": "Name the capital of France."}]
    prompt = ask(http, "/apply-template", messages=messages)["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n")
    by_hand = ask(http, "/completion", prompt=prompt, n_predict=16, temperature=0)["content"]
    chat = ask(http, "/v1/chat/completions", model=model, messages=messages, max_tokens=16, temperature=0)
    assert by_hand == chat["choices"][0]["message"]["content"]


def test_the_server(http: httpx.Client, model: str) -> None:
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] > 0 and props["chat_template"]
    assert props["model_path"] == model
    assert len(http.get("/slots").json()) == props["total_slots"]
    assert http.get("/lora-adapters").json() == []


def test_what_is_not_offered_says_why(http: httpx.Client) -> None:
    for path, body in (
        ("/infill", {"input_prefix": "def f(", "input_suffix": ")"}),
        ("/completion", {"prompt": PROMPT, "mirostat": 2}),
        ("/completion", {}),
        ("/props", {}),
    ):
        answer = http.post(path, json=body)
        error = answer.json()["error"]
        assert answer.status_code == error["code"] == 400 and error["type"] == "invalid_request_error"
