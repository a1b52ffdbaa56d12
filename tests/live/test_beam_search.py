"""Beam search over HTTP: what `LLM.beam_search` finds, in the shapes of chat and completions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kill import write_model
from serving import Server

from tokenmill import LLM, BeamSearchParams

PROMPTS = [[5, 60, 100], [7, 8, 9, 200]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server("--kv-cache-memory-bytes", "16MiB", model=str(model)) as running:
        yield running


def ask(server: Server, path: str, **body: Any) -> Any:
    status, text = server.request("POST", path, body)
    return status, json.loads(text)


def test_the_sequences_of_the_library(server: Server, model: Path) -> None:
    """The best n of best_of beams for each prompt, with tokens, their log probabilities and why they ended."""
    params = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=0.7, early_stopping=True)
    with LLM(model, kv_cache_memory_bytes="16MiB") as llm:
        found = llm.beam_search(PROMPTS, params)
    status, body = ask(
        server, "/v1/completions", prompt=PROMPTS, use_beam_search=True, n=3, best_of=4, max_tokens=12,
        length_penalty=0.7, early_stopping=True, return_token_ids=True, logprobs=2, temperature=0.7,
    )  # fmt: skip
    assert status == 200, body
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for choice in body["choices"]:
        prompt, place = divmod(choice["index"], 3)
        expected = found[prompt].sequences[place]
        assert choice["token_ids"] == list(expected.token_ids)
        assert choice["finish_reason"] == expected.finish_reason
        told = expected.logprobs[: len(expected.logprobs) - (expected.finish_reason == "stop")]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx([entry.logprob for entry in told])
        assert all(1 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])  # tokens may share a name
    assert body["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in body["choices"])


def test_chat_takes_it_too(server: Server) -> None:
    """One answer for each of n, the first that of a search of the same width in completions."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "hello"}]
    with_template = Server(
        "--kv-cache-memory-bytes", "16MiB", "--trust-request-chat-template", model=server.model
    )  # fmt: skip
    with with_template as other:
        beams = {"use_beam_search": True, "n": 2, "max_tokens": 5}
        status, chat = ask(other, "/v1/chat/completions", messages=messages, chat_template=template, **beams)
        assert status == 200, chat
        _, plain = ask(other, "/v1/completions", prompt="hello", add_special_tokens=False, **beams)
    assert [each["message"]["content"] for each in chat["choices"]] == [each["text"] for each in plain["choices"]]


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("stream", {"stream": True}),
        ("stop", {"stop": "x"}),
        ("repetition_penalty", {"repetition_penalty": 1.1}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("n", {"n": 3, "best_of": 2}),
        ("beam_width", {"n": 20}),
        ("echo", {"echo": True}),
        ("use_beam_search", {"response_format": {"type": "json_object"}}),
        ("early_stopping", {"early_stopping": "soon"}),
        ("length_penalty", {"length_penalty": 11}),
        ("length_penalty", {"length_penalty": 2, "use_beam_search": False}),
    ],
)
def test_what_cannot_be_had_together_is_refused(server: Server, param: str, body: dict[str, Any]) -> None:
    """A 400 that names the field."""
    status, told = ask(server, "/v1/completions", **({"prompt": [5], "use_beam_search": True, "n": 2} | body))
    assert (status, told["error"]["param"]) == (400, param), told
