"""Token ids in and out: vLLM's /inference/v1/generate and SGLang's /generate, beside what completions say."""

from __future__ import annotations

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from scripted import EOS, Served
from tokenmill.api.ids import shape

PROMPT = [70, 71, 72]
SAID = "abc def ghi"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(lambda prompt: SAID) as running:
        yield running


def post(served: Served, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """(status, JSON); of a stream all its events."""
    data = json.dumps(body).encode()
    call = urllib.request.Request(served.url + path, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=20) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
    if not text.startswith("data: "):
        return status, json.loads(text)
    lines = [line[6:] for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return status, [json.loads(line) for line in lines]


def completed(served: Served, **more: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 100, "return_token_ids": True} | more
    return post(served, "/v1/completions", body)[1]


def test_vllm_gives_the_ids_of_a_completion(served: Served) -> None:
    """Whole and streamed, with log probabilities, counts and the caller's own name of the request."""
    (plain,) = completed(served, logprobs=1)["choices"]
    params = {"max_tokens": 100, "logprobs": 1, "detokenize": False, "output_kind": 0}
    body = {"token_ids": PROMPT, "sampling_params": params, "request_id": "mine", "model": "toy"}
    status, told = post(served, "/inference/v1/generate", body)
    assert status == 200, told
    (choice,) = told["choices"]
    assert choice["token_ids"] == plain["token_ids"] and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) - 1  # nothing is told of the end token
    assert told["request_id"] == "generate-tokens-mine" and told["usage"]["prompt_tokens"] == 3
    _, events = post(
        served, "/inference/v1/generate", body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    assert [token for event in events[:-1] for token in event["choices"][0]["token_ids"]] == plain["token_ids"]
    assert events[-2]["choices"][0]["finish_reason"] == "stop" and events[-1]["usage"] == told["usage"]


def test_sglang_gives_text_and_ids(served: Served) -> None:
    """Of a text, of ids and of lists; why it ended, and log probabilities as SGLang writes them."""
    (plain,) = completed(served)["choices"]
    params = {"max_new_tokens": 100, "temperature": 0}
    status, told = post(served, "/generate", {"input_ids": PROMPT, "sampling_params": params, "rid": "mine"})
    assert status == 200 and told["text"] == SAID and told["output_ids"] == plain["token_ids"]
    meta = told["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": EOS} and meta["id"] == "gen-mine"
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (3, len(told["output_ids"]))
    _, several = post(served, "/generate", {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2, "n": 2}})
    assert [each["meta_info"]["finish_reason"] for each in several] == [{"type": "length", "length": 2}] * 4
    asked = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    _, told = post(served, "/generate", {"text": "a", "sampling_params": params} | asked)
    first = told["meta_info"]["output_token_logprobs"][0]
    assert first[:2] == [-1.0, told["output_ids"][0]] and SAID.startswith(first[2])
    assert [len(top) for top in told["meta_info"]["output_top_logprobs"]] == [2] * (len(told["output_ids"]) - 1)
    _, events = post(served, "/generate", {"input_ids": PROMPT, "sampling_params": params, "stream": True})
    assert [SAID.startswith(event["text"]) for event in events] == [True] * len(events)
    assert (events[-1]["text"], events[-1]["output_ids"]) == (SAID, plain["token_ids"])
    assert events[-1]["meta_info"]["finish_reason"]["type"] == "stop"


def test_the_last_event_of_a_stream_tells_all_that_a_whole_answer_does(served: Served) -> None:
    """Every event repeats what came before it, log probabilities too."""
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 100, "temperature": 0}}
    asked = body | {"return_logprob": True, "top_logprobs_num": 2}
    _, whole = post(served, "/generate", asked)
    _, events = post(served, "/generate", asked | {"stream": True})
    told = [each["meta_info"]["output_top_logprobs"] for each in events]
    assert len(events) > 3 and all(len(one) <= len(other) for one, other in itertools.pairwise(told))
    for each in (whole, *events):
        each["meta_info"].pop("id"), each["meta_info"].pop("cached_tokens")
    assert events[-1] == whole


def test_telling_all_again_costs_no_second_look_at_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an event adds is made JSON, not what it repeats: the loop has other work."""
    made: list[int] = []
    real = shape._GrowingList.add
    monkeypatch.setattr(shape._GrowingList, "add", lambda self, items: (made.append(len(items)), real(self, items))[1])
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 100}, "return_logprob": True}
    _, events = post(served, "/generate", body | {"top_logprobs_num": 1, "stream": True})
    assert len(events) > 3 and sum(made) <= 3 * len(events[-1]["output_ids"])


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/inference/v1/generate", {}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": ["a"]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [10**6]}, "token_ids"),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"a": 1}}, "features"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"top_p": 3}}, "sampling_params.top_p"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"tmp": 3}}, "sampling_params.tmp"),
        ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"stream": True}}, "sampling_params.stream"),
        ("/generate", {}, "text"),
        ("/generate", {"text": "a", "input_ids": [1]}, "text"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 0}}, "sampling_params.max_new_tokens"),
        ("/generate", {"text": "a", "logprob_start_len": 0}, "logprob_start_len"),
        ("/generate", {"text": ["a", "b"], "stream": True}, "stream"),
        ("/generate", {"text": "a", "lora_path": "x"}, "lora_path"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    """By the name that the caller knows."""
    status, told = post(served, path, body)
    assert (status, told["error"]["param"]) == (400, param), told
