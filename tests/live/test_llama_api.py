"""llama-server's own API as its clients meet it: real sockets, the model scripted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from scripted import Served, make_text_model
from tokenmill.api.llama.settings import with_samplers
from tokenmill.core.request import SamplingParams
from tokenmill.text.fim import FimTokens

FIM = FimTokens("<|im_start|>", "<|im_end|>", "<|endoftext|>", ends=(0,))


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(lambda prompt: "two\nlines" if "LINES" in prompt else "hello world") as running:
        yield running


def ask(served: Served, path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    """(status, body); of events, all of them."""
    status, text, kind = served.ask(path, body, method)
    if kind.startswith("text/event-stream"):
        return status, [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")]
    return status, json.loads(text)


def prompts(served: Served) -> list[tuple[int, ...]]:
    found = [each.prompt_tokens for each in served.script.introductions]
    served.script.introductions.clear()
    return found


# ---- answers ----


def test_a_completion(served: Served) -> None:
    status, answer = ask(served, "/completion", {"prompt": "LINES", "n_predict": 64})
    tokenizer = served.text.tokenizer
    assert status == 200 and answer["content"] == "two\nlines" and answer["tokens"] == []
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "eos", "")
    assert (answer["prompt"], answer["tokens_evaluated"]) == ("LINES", len(tokenizer.encode("LINES")))
    assert answer["tokens_predicted"] == len(tokenizer.encode("two\nlines")) + 1
    assert answer["has_new_line"] and not answer["truncated"]
    assert answer["generation_settings"]["n_predict"] == 64
    timings = answer["timings"]
    assert timings["predicted_n"] == answer["tokens_predicted"] and timings["predicted_ms"] > 0
    assert timings["cache_n"] + timings["prompt_n"] == answer["tokens_evaluated"]


def test_a_streamed_completion_says_the_same_in_pieces(served: Served) -> None:
    body = {"prompt": "LINES", "return_tokens": True}
    whole = ask(served, "/completion", body)[1]
    events = ask(served, "/completion", body | {"stream": True})[1]
    assert "".join(event["content"] for event in events) == whole["content"]
    assert [token for event in events for token in event["tokens"]] == whole["tokens"]
    assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True] and len(events) > 2
    differing = {"content", "tokens", "timings", "generation_settings", "tokens_cached"}
    assert {key: events[-1][key] for key in whole.keys() - differing} == {
        key: whole[key] for key in whole.keys() - differing
    }
    assert set(events[0]) == {
        "index", "content", "tokens", "stop", "id_slot", "tokens_predicted", "tokens_evaluated",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "end"),
    [
        ({"n_predict": 3}, ("limit", "", 3)),
        ({"stop": ["wor"]}, ("word", "wor", 7)),
        ({"n_predict": -1}, ("eos", "", 9)),
        ({"n_predict": 0}, ("limit", "", 0)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_it_ended(served: Served, body: Any, end: tuple[str, str, int], stream: bool) -> None:
    answer = ask(served, "/completion", {"prompt": "hi", "stream": stream} | body)[1]
    content = "".join(event["content"] for event in answer) if stream else answer["content"]
    last = answer[-1] if stream else answer
    assert (last["stop_type"], last["stopping_word"]) == end[:2]
    assert last["tokens_predicted"] == end[2] or end[0] == "word"
    assert content == {"limit": "hello" if end[2] else "", "word": "hello ", "eos": "hello world"}[end[0]]


def test_an_answer_may_fill_the_context() -> None:
    """Where nobody said how many tokens, or more than there is room for: the end is told as the context's doing."""
    with Served(lambda prompt: "ab" * 600) as running:
        for many in ({}, {"n_predict": 10_000}):
            answer = ask(running, "/completion", {"prompt": "hi"} | many)[1]
            assert (answer["stop_type"], answer["truncated"]) == ("limit", True)
            assert answer["tokens_predicted"] + answer["tokens_evaluated"] == running.engine.max_model_len
        assert ask(running, "/completion", {"prompt": "hi", "n_predict": 20})[1]["truncated"] is False


def test_prompts_of_every_form(served: Served) -> None:
    """Text, ids, both in one, and several of any kind."""
    served.script.introductions.clear()
    hi = tuple(served.text.tokenizer.encode("hi"))
    for given, wanted in (
        ("hi", [hi]),
        ([5, 6], [(5, 6)]),
        ([5, "hi", 6], [(5, *hi, 6)]),
        (["hi", [5, 6]], [hi, (5, 6)]),
        ([["hi", 7], {"prompt_string": "hi"}], [(*hi, 7), hi]),
    ):
        answer = ask(served, "/completion", {"prompt": given, "n_predict": 1})[1]
        assert sorted(prompts(served)) == sorted(wanted)
        assert [each["index"] for each in answer] == [0, 1] if len(wanted) > 1 else answer["index"] == 0


def test_a_heavy_mixed_prompt_is_read_alike(served: Served) -> None:
    """Bodies of more than 20,000 values are read by the sandbox."""
    served.script.introductions.clear()
    hi = tuple(served.text.tokenizer.encode("hi"))
    body = {"prompt": [5, "hi", 6], "n_predict": 1, "stop": [], "unknown": list(range(21_000))}
    assert ask(served, "/completion", body)[0] == 200
    assert prompts(served) == [(5, *hi, 6)]


def test_several_answers_to_one_prompt(served: Served) -> None:
    answer = ask(served, "/completion", {"prompt": "hi", "n_cmpl": 3})[1]
    assert [each["content"] for each in answer] == ["hello world"] * 3


def test_settings_reach_the_engine_and_come_back(served: Served) -> None:
    served.script.introductions.clear()
    body = {
        "prompt": "hi", "temperature": 0.5, "top_k": 7, "seed": 9, "repeat_penalty": 1.5, "min_p": 0.1,
        "logit_bias": [[5, 1.5], [6, False]], "dry_multiplier": 0.5, "n_predict": 2,
    }  # fmt: skip
    answer = ask(served, "/completion", body)[1]
    (intro,) = served.script.introductions
    sampling = intro.sampling
    assert (intro.seed, sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (9, 0.5, 7, 1.5)
    assert sampling.logit_bias == ((5, 1.5), (6, -100.0))
    said = answer["generation_settings"]
    assert (said["seed"], said["top_k"], said["repeat_penalty"], said["dry_multiplier"]) == (9, 7, 1.5, 0.5)


def test_log_probabilities(served: Served) -> None:
    body = {"prompt": "hi", "n_probs": 2}
    whole = ask(served, "/completion", body)[1]["completion_probabilities"]
    events = ask(served, "/completion", body | {"stream": True})[1]
    assert [entry for event in events for entry in event.get("completion_probabilities", [])] == whole
    assert "".join(entry["token"] for entry in whole) == "hello world"
    assert all(set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"} for entry in whole)
    assert [len(entry["top_logprobs"]) for entry in whole] == [2] * len(whole)


def test_only_the_fields_that_are_wanted(served: Served) -> None:
    body = {"prompt": "hi", "n_predict": 2, "response_fields": ["content", "generation_settings/n_predict", "none"]}
    assert ask(served, "/completion", body)[1] == {"content": "he", "n_predict": 2}
    assert ask(served, "/completion", body | {"stream": True})[1][-1] == {"content": "", "n_predict": 2}


def test_timings_with_every_event(served: Served) -> None:
    events = ask(served, "/completion", {"prompt": "hi", "stream": True, "timings_per_token": True})[1]
    assert all("timings" in event for event in events)


def test_a_gap_is_filled_by_the_models_marks() -> None:
    with Served(text=replace(make_text_model(), fim=FIM)) as running:
        body = {"input_prefix": "def f(", "input_suffix": "<|im_end|>", "prompt": "x", "n_predict": 4}
        body["input_extra"] = [{"filename": "a.py", "text": "one"}]
        answer = ask(running, "/infill", body)[1]
        assert answer["content"] == "hello w" and answer["tokens_predicted"] == 4
        assert answer["prompt"] == "one\n<|im_start|>def f(<|im_end|><|im_end|><|endoftext|>x"
        (prompt,) = prompts(running)
        assert [prompt.count(mark) for mark in (0, 1, 2)] == [1, 1, 1]
        assert answer["generation_settings"]["n_predict"] == 4
        heavy = ask(running, "/infill", body | {"unknown": list(range(21_000))})[1]
        assert (heavy["content"], prompts(running)) == (answer["content"], [prompt])


def test_what_would_begin_another_file_ends_the_gap() -> None:
    text = replace(make_text_model(), fim=FIM)
    with Served(lambda prompt: [*text.tokenizer.encode("ab"), 0, 5], text=text) as running:
        answer = ask(running, "/infill", {"input_prefix": "a", "input_suffix": "b"})[1]
        assert (answer["content"], answer["stop_type"]) == ("ab", "eos")


# ---- samplers ----


def test_samplers_that_are_left_out_are_off() -> None:
    given = SamplingParams(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    found = with_samplers(given, ["top_k", "temperature"])
    assert found == SamplingParams(temperature=0.7, top_k=40)
    assert with_samplers(given, []) == with_samplers(given, None) == given


def test_an_order_that_would_draw_otherwise_is_refused() -> None:
    """llama-server's own order has temperature last; that is another distribution, unless it is 0 or 1."""
    order = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    given = SamplingParams(temperature=0.7, top_p=0.9)
    with pytest.raises(Exception, match="here the order is temperature, top_p"):
        with_samplers(given, order)
    for temperature in (0, 1):
        assert with_samplers(replace(given, temperature=temperature), order).top_p == 0.9
    assert with_samplers(SamplingParams(temperature=0.7, top_k=40), order).top_k == 40
    with pytest.raises(Exception, match="no 'infill' here"):
        with_samplers(given, ["top_k", "infill"])
    with pytest.raises(Exception, match="here the order is"):
        with_samplers(SamplingParams(min_p=0.1, top_p=0.9), ["min_p", "top_p"])


# ---- of the server ----


def test_properties(served: Served) -> None:
    props = ask(served, "/props")[1]
    assert props["default_generation_settings"]["n_ctx"] == served.engine.max_model_len
    assert props["default_generation_settings"]["params"]["n_predict"] == 4096
    assert "<|im_start|>" in props["chat_template"] and props["total_slots"] >= 1
    assert props["model_path"] == "toy"
    assert ask(served, "/props", {})[0] == 400


def test_models_tell_what_they_are(served: Served) -> None:
    """By either path; other clients find OpenAI's fields beside it."""
    assert ask(served, "/models") == ask(served, "/v1/models")
    (model,) = ask(served, "/models")[1]["data"]
    assert model["id"] == "toy" and model["meta"]["n_ctx_train"] == 512
    assert model["meta"]["n_vocab"] == served.text.tokenizer.vocab_size


def test_slots_and_adapters(served: Served) -> None:
    slots = ask(served, "/slots")[1]
    assert [slot["id"] for slot in slots] == list(range(ask(served, "/props")[1]["total_slots"]))
    assert not any(slot["is_processing"] for slot in slots)
    assert ask(served, "/lora-adapters")[1] == []
    assert ask(served, "/lora-adapters", [])[0] == 400


def test_a_template_is_applied(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = ask(served, "/apply-template", {"messages": messages})[1]
    assert answer == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}


def test_tokens_of_a_text_and_back(served: Served) -> None:
    tokenizer = served.text.tokenizer
    ids = tokenizer.encode("hello €", add_special=False)
    assert ask(served, "/tokenize", {"content": "hello €"})[1] == {"tokens": ids}
    pieces = ask(served, "/tokenize", {"content": "lé", "with_pieces": True})[1]["tokens"]
    assert [piece["piece"] for piece in pieces] == ["l", [0xC3], [0xA9]]
    assert ask(served, "/tokenize", {"content": "<|im_end|>"})[1] == {"tokens": [2]}
    assert len(ask(served, "/tokenize", {"content": "<|im_end|>", "parse_special": False})[1]["tokens"]) == 10
    assert ask(served, "/detokenize", {"tokens": ids})[1]["content"] == "hello €"


def test_health_by_either_name_while_there_is_no_engine() -> None:
    with Served(attach=False, max_queue_s=0.1, api_keys=("secret",)) as running:
        for path in ("/health", "/v1/health"):
            status, answer = ask(running, path)
            error = answer["error"]
            assert (status, error["code"], error["message"], error["type"]) == (
                503, 503, "Loading model", "unavailable_error",
            )  # fmt: skip
        assert ask(running, "/props")[0] == 401


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/completion", {}, "prompt must be"),
        ("/completion", {"prompt": []}, "prompt must hold"),
        ("/completion", {"prompt": [1, 2.5]}, "prompt must be"),
        ("/completion", {"prompt": [1, "a", None]}, "prompt must be an integer"),
        ("/completion", {"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "prompt.multimodal_data"),
        ("/completion", {"prompt": "a" * 2000}, "prompt has 2000;"),
        ("/completion", {"prompt": "a", "n_predict": -3}, "n_predict must be"),
        ("/completion", {"prompt": "a", "n_cmpl": 0}, "n_cmpl must be"),
        ("/completion", {"prompt": "a", "repeat_penalty": 0}, "repeat_penalty must be"),
        ("/completion", {"prompt": "a", "samplers": ["infill"]}, "samplers: there is no 'infill'"),
        ("/completion", {"prompt": "a", "samplers": "kpm"}, "samplers must be an array"),
        ("/completion", {"prompt": "a", "mirostat": 2}, "mirostat is not supported"),
        ("/completion", {"prompt": "a", "t_max_predict_ms": 100}, "t_max_predict_ms is not supported"),
        ("/completion", {"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs is not supported"),
        ("/completion", {"prompt": "a", "logit_bias": [["text", 1]]}, "logit_bias must hold pairs"),
        ("/completion", {"prompt": "a", "response_fields": [1]}, "response_fields"),
        ("/completion", {"prompt": "a", "json_schema": {"type": "nope"}}, "json_schema: 'type' at #"),
        ("/completion", {"prompt": "a", "grammar": "root ::= bad"}, "grammar is no grammar"),
        ("/completion", {"prompt": "a", "grammar": 'root ::= "x"', "json_schema": {}}, "grammar and json_schema"),
        ("/completion", {"prompt": "a", "echo": True}, "echo is not supported"),
        ("/completion", {"prompt": "a", "lora": [{"id": 0, "scale": 1}]}, "lora is not supported"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_prefix needs a model that fills gaps"),
        ("/infill", {"input_prefix": "a"}, "input_suffix must be a string"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [5]}, "input_extra[0]"),
        ("/apply-template", {"messages": []}, "messages must be"),
    ],
)
def test_what_is_wrong_is_named(served: Served, path: str, body: Any, named: str) -> None:
    status, answer = ask(served, path, body)
    assert status == 400 and named in answer["error"]["message"], answer
    assert answer["error"]["code"] == 400 and answer["error"]["type"] in (
        "invalid_request_error", "exceed_context_size_error",
    )  # fmt: skip


@pytest.mark.parametrize("more", [{}, {"unknown": list(range(21_000))}])
def test_integers_that_no_machine_has_are_refused_by_field(served: Served, more: Any) -> None:
    """In schemas, which are passed on as they are, also where the sandbox reads the body."""
    schema = {"type": "integer", "maximum": 2**70}
    for path, body in (
        ("/completion", {"prompt": "a", "json_schema": schema}),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": schema}}),
    ):
        status, answer = ask(served, path, body | more)
        assert status == 400 and "of more than 64 bits" in answer["error"]["message"], answer
