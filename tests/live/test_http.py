"""The HTTP API as its clients meet it: the openai package and raw sockets against real sockets, the model scripted."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import re
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from scripted import Served
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig

LONG = "abcdefghij" * 30
TOO_LONG = "context_length_exceeded"


def reply(prompt: str) -> str:
    """The last line that a user wrote decides the answer."""
    for word, answer in {"LONG": LONG, "EURO": "5 € für 😀", "ECHO": prompt}.items():
        if word in prompt:
            return answer
    return "hello world"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(reply) as running:
        yield running


def client_of(served: Served, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=served.url + "/v1", **({"api_key": "none", "max_retries": 0, "timeout": 20} | options)
    )


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with client_of(served) as made:
        yield made


def post(served: Served, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
    """(status, body, headers) of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    call = urllib.request.Request(served.url + path, data, {"content-type": "application/json"} | headers)
    return _open(call)


def get(served: Served, path: str, **headers: str) -> tuple[int, Any, Any]:
    return _open(urllib.request.Request(served.url + path, headers=headers))


def _open(call: urllib.request.Request) -> tuple[int, Any, Any]:
    try:
        with urllib.request.urlopen(call, timeout=20) as answer:
            status, text, headers = answer.status, answer.read(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            status, text, headers = error.code, error.read(), error.headers
    return status, json.loads(text) if headers["content-type"] == "application/json" else text.decode(), headers


def metric(served: Served, name: str) -> float:
    """Sum of a metric's series."""
    lines = get(served, "/metrics")[1].splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


# ---- answers ----


def test_a_chat_answer(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=user("hi"))
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello world", "stop")
    assert answer.id.startswith("chatcmpl-") and answer.system_fingerprint
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(
        served.text.tokenizer.encode(prompt, add_special=False)
    )
    assert answer.usage.completion_tokens == len(served.text.tokenizer.encode("hello world")) + 1


def test_a_streamed_chat_says_the_same_in_pieces(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="toy", messages=user("EURO"), stream=True, stream_options={"include_usage": True}
        )
    )
    whole = client.chat.completions.create(model="toy", messages=user("EURO"))
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == whole.choices[0].message.content == "5 € für 😀"
    assert not any("\ufffd" in text for text in texts)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks[:-1]) and chunks[-1].choices == []
    assert chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_continuous_usage_counts_up(served: Served, client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(model="toy", prompt="LONG", max_tokens=40, stream=True, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in stream if chunk.usage]
    assert counts == sorted(counts) and counts[-1] == 40


def test_completions_default_to_16_tokens_and_chats_to_the_context(served: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="LONG")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (LONG[:16], "length")
    chat = client.chat.completions.create(model="toy", messages=user("LONG"))
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (LONG, "stop")
    chat = client.chat.completions.create(model="toy", messages=user("LONG"), extra_body={"ignore_eos": True})
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage is not None and chat.usage.total_tokens == served.engine.max_model_len


def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(served: Served, client: openai.OpenAI) -> None:
    served.script.introductions.clear()
    answer = client.completions.create(model="toy", prompt=["ECHO a", "ECHO b"], n=3, seed=7)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == ["ECHO a"] * 3 + ["ECHO b"] * 3
    drawn = {(intro.prompt_tokens, intro.choice, intro.seed) for intro in served.script.introductions}
    assert len(drawn) == 6 and {choice for _, choice, _ in drawn} == {0, 1, 2} and {seed for *_, seed in drawn} == {7}
    assert answer.usage is not None and answer.usage.prompt_tokens == 12


def test_streamed_choices_interleave_and_each_ends_once(client: openai.OpenAI) -> None:
    texts = ["", "", "", ""]
    ends = []
    for chunk in client.completions.create(model="toy", prompt=["ECHO a", "hi"], n=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        ends += [chunk.choices[0].index] * (chunk.choices[0].finish_reason is not None)
    assert texts == ["ECHO a", "ECHO a", "hello world", "hello world"]
    assert sorted(ends) == [0, 1, 2, 3]


def test_without_a_seed_each_prompt_gets_its_own(served: Served, client: openai.OpenAI) -> None:
    served.script.introductions.clear()
    client.completions.create(model="toy", prompt=["a", "a"], n=2)
    seeds = [intro.seed for intro in sorted(served.script.introductions, key=lambda intro: intro.seed)]
    assert len(set(seeds)) == 2 and seeds[0] == seeds[1] and seeds[2] == seeds[3]


def test_token_ids_in_and_out(served: Served, client: openai.OpenAI) -> None:
    ids = served.text.tokenizer.encode("ECHO x")
    answer = client.completions.create(model="toy", prompt=[ids], extra_body={"return_token_ids": True})
    extra = answer.choices[0].model_extra or {}
    assert answer.choices[0].text == "ECHO x"
    assert (extra["prompt_token_ids"], extra["token_ids"]) == (ids, [*ids, 2])


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_across_token_borders(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(
        model="toy",
        prompt="hi",
        stop=["lo wo"],
        stream=stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].text for chunk in chunks[:-1])
        last, usage = chunks[-2].choices[0], chunks[-1].usage
    else:
        text, last, usage = answer.choices[0].text, answer.choices[0], answer.usage
    assert (text, last.finish_reason, last.stop_reason) == ("hel", "stop", "lo wo")
    assert usage.completion_tokens == 5  # h e llo Ġw o


def test_a_stop_token_and_min_tokens(served: Served, client: openai.OpenAI) -> None:
    (token,) = served.text.tokenizer.encode("o")
    answer = client.completions.create(model="toy", prompt="hi", extra_body={"stop_token_ids": [token]})
    assert (answer.choices[0].text, answer.choices[0].model_extra) == ("hello w", {"stop_reason": token})


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=user("EURO"), logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None and bytes(b for entry in content for b in entry.bytes or ()).decode() == "5 € für 😀"
    assert all(entry.logprob == -1.0 and len(entry.top_logprobs) == 2 for entry in content)
    streamed = client.chat.completions.create(
        model="toy", messages=user("EURO"), logprobs=True, top_logprobs=2, stream=True
    )
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [entry for part in parts if part for entry in part.content or ()] == content


def test_completion_logprobs_and_echo(client: openai.OpenAI) -> None:
    arguments: Any = {"model": "toy", "prompt": "ab", "logprobs": 1, "echo": True}
    answer = client.completions.create(**arguments)
    choice = answer.choices[0]
    assert choice.text == "abhello world"
    logprobs = choice.logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert logprobs.tokens[:3] == ["a", "b", "h"] and "".join(logprobs.tokens) == choice.text
    assert logprobs.token_logprobs is not None and logprobs.token_logprobs[:2] == [None, -1.0]
    assert all(choice.text.startswith(name, at) for name, at in zip(logprobs.tokens, logprobs.text_offset, strict=True))
    chunks = list(client.completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [name for part in parts for name in part.tokens or ()] == logprobs.tokens
    assert [offset for part in parts for offset in part.text_offset or ()] == logprobs.text_offset


def test_completion_logprobs_of_characters_of_several_tokens(served: Served) -> None:
    """Offsets are those in the text that is shown, also behind an echoed prompt with a special token."""
    said = "é世😀!"
    with Served(lambda prompt: said) as running:
        for prompt, echo in (("a世", "a世"), ([1, *served.text.tokenizer.encode("a世")], "a世")):
            for stream in (False, True):
                body = {"model": "toy", "prompt": prompt, "logprobs": 2, "echo": True, "stream": stream}
                text = running.ask("/v1/completions", body)[1]
                events = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")] if stream else [text]
                choices = [json.loads(event)["choices"][0] for event in events]
                assert "".join(choice["text"] for choice in choices) == echo + said
                told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
                names = [name for each in told for name in each["tokens"]]
                offsets = [offset for each in told for offset in each["text_offset"]]
                raw = [b"" if name == "<|im_start|>" else _raw(name) for name in names]
                assert b"".join(raw).decode() == echo + said
                ends = [sum(map(len, raw[:number])) for number in range(len(raw))]
                assert offsets == [len(b"".join(raw)[:end].decode("utf-8", "ignore")) for end in ends]
                assert [len(top) for each in told for top in each["top_logprobs"] if top] == [2] * (len(names) - 1)


def _raw(name: str) -> bytes:
    return bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")) if name.startswith("bytes:") else name.encode()


def test_a_prompt_can_be_scored_without_an_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="abc", logprobs=0, echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "length")
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens == ["a", "b", "c"]
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_prompt_logprobs_in_vllms_shape(served: Served) -> None:
    status, body, _ = post(served, "/v1/completions", {"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1})
    entries = body["choices"][0]["prompt_logprobs"]
    assert status == 200 and entries[0] is None and len(entries) == 3
    assert next(iter(entries[1].values())) == {"logprob": -1.0, "rank": 1, "decoded_token": "b"}


def test_what_the_cache_served_is_reported(client: openai.OpenAI) -> None:
    prompt = "0123456789abcdef" * 3
    client.completions.create(model="toy", prompt=prompt, extra_body={"cache_salt": "mine"})
    again = client.completions.create(model="toy", prompt=prompt, extra_body={"cache_salt": "mine"})
    other = client.completions.create(model="toy", prompt=prompt, extra_body={"cache_salt": "yours"})
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (again, other)]  # type: ignore[union-attr]
    assert cached == [32, 0]


def test_truncation_keeps_the_end_of_the_prompt(served: Served, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="toy", prompt="x ECHO", extra_body={"truncate_prompt_tokens": 4})
    assert answer.choices[0].text == "ECHO"
    answer = client.completions.create(
        model="toy", prompt="ECHO x", extra_body={"truncate_prompt_tokens": 4, "truncation_side": "right"}
    )
    assert answer.choices[0].text == "ECHO"


def test_a_long_prompt_is_encoded_aside_and_gives_the_same_tokens(served: Served, client: openai.OpenAI) -> None:
    served.script.introductions.clear()
    text = "hello world " * 3000
    client.completions.create(model="toy", prompt=text, extra_body={"truncate_prompt_tokens": 100})
    assert list(served.script.introductions[0].prompt_tokens) == served.text.tokenizer.encode(text)[-100:]


def test_a_chat_template_of_the_callers_own_where_it_is_allowed() -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ tail }}"
    body = {"messages": user("ECHO"), "chat_template": template, "chat_template_kwargs": {"tail": "!"}}
    with Served(reply, allow_chat_template=True) as served:
        answer = post(served, "/v1/chat/completions", body | {"skip_special_tokens": False})[1]
        assert answer["choices"][0]["message"]["content"] == "<|endoftext|>ECHO!"
        status, answer, _ = post(served, "/v1/chat/completions", body | {"chat_template": "{% if"})
        assert (status, answer["error"]["param"]) == (400, "chat_template")


def test_request_ids_come_back(served: Served) -> None:
    body = {"prompt": "hi"}
    _, answer, headers = post(served, "/v1/completions", body, **{"X-Request-Id": "mine-1"})
    assert (answer["id"], headers["x-request-id"]) == ("cmpl-mine-1", "mine-1")
    assert post(served, "/v1/completions", body | {"request_id": "mine-2"})[1]["id"] == "cmpl-mine-2"


def test_every_answer_has_a_request_id_that_nobody_can_guess(served: Served) -> None:
    """Of good and bad calls, streams, and paths that need no key; it is no part of the answer's id."""
    bodies = [{"prompt": "hi"}, {"prompt": "hi", "stream": True}, {"prompt": 3}, {"prompt": "hi"}]
    answers = [post(served, "/v1/completions", body) for body in bodies]
    found = [headers["x-request-id"] for _, _, headers in answers]
    for path in ("/health", "/v1/models", "/nowhere"):
        with contextlib.closing(http.client.HTTPConnection(served.url.removeprefix("http://"))) as connection:
            connection.request("GET", path)
            found.append(connection.getresponse().headers["x-request-id"])
    assert len(set(found)) == len(found) and all(re.fullmatch(r"req_[0-9a-f]{32}", each) for each in found)
    assert found[0].removeprefix("req_") not in answers[0][1]["id"]


def test_an_answer_is_compressed_for_who_takes_it(served: Served) -> None:
    """The same body with its true length, to HEAD the same head; small ones and streams stay as they are."""

    def ask(method: str, path: str, body: Any = None, **headers: str) -> tuple[Any, bytes]:
        with contextlib.closing(
            http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
        ) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.headers, answer.read()

    takes = {"Accept-Encoding": "gzip, deflate"}
    plain, whole = ask("GET", "/openapi.json")
    headers, packed = ask("GET", "/openapi.json", **takes)
    assert headers["content-encoding"] == "gzip" and gzip.decompress(packed) == whole and len(packed) < len(whole) / 2
    assert int(headers["content-length"]) == len(packed) and plain["content-encoding"] is None
    assert "accept-encoding" in headers["vary"].lower() and "accept-encoding" in plain["vary"].lower()
    for refused in ("gzip;q=0", "gzip; Q=0.000, identity", "br"):
        headers, read = ask("GET", "/openapi.json", **{"Accept-Encoding": refused})
        assert headers["content-encoding"] is None and read == whole and "accept-encoding" in headers["vary"].lower()
    headers, packed = ask("GET", "/openapi.json", **{"Accept-Encoding": "zstd;q=0, gzip;q=0.50"})
    assert headers["content-encoding"] == "gzip" and gzip.decompress(packed) == whole
    head, nothing = ask("HEAD", "/openapi.json", **takes)
    assert nothing == b"" and head["content-length"] == headers["content-length"]
    body = {"prompt": "LONG", "logprobs": 5, "max_tokens": 200, "seed": 1}
    headers, packed = ask("POST", "/v1/completions", body, **takes)
    answer = json.loads(gzip.decompress(packed))
    assert headers["content-encoding"] == "gzip" and answer["choices"][0]["text"].startswith("abcdefghij")
    for path, small in (("/v1/models/toy", None), ("/v1/completions", body | {"stream": True})):
        headers, read = ask("GET" if small is None else "POST", path, small, **takes)
        assert headers["content-encoding"] is None and read.startswith((b"{", b"data: "))


def test_a_client_that_takes_zstandard_gets_it(served: Served) -> None:
    pytest.importorskip("starlette_compress", reason="tokenmill[zstd] is not installed")
    zstandard = pytest.importorskip("zstandard")
    _, whole, _ = get(served, "/openapi.json")
    call = urllib.request.Request(served.url + "/openapi.json", headers={"Accept-Encoding": "gzip, zstd"})
    with urllib.request.urlopen(call, timeout=20) as answer:
        assert answer.headers["content-encoding"] == "zstd"
        assert json.loads(zstandard.ZstdDecompressor().decompressobj().decompress(answer.read())) == whole


# ---- other paths ----


def test_models_version_load_and_health(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").owned_by == "tokenmill"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/name")
    assert get(served, "/version")[1].keys() == {"version"}
    assert get(served, "/load")[1] == {"server_load": 0}
    assert get(served, "/health")[0] == get(served, "/ping")[0] == post(served, "/ping", b"")[0] == 200


def test_tokenize_and_detokenize(served: Served) -> None:
    _, body, _ = post(served, "/tokenize", {"model": "toy", "prompt": "hello €", "return_token_strs": True})
    ids = served.text.tokenizer.encode("hello €")
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 512)
    assert body["token_strs"][:3] == ["h", "e", "llo"]
    assert post(served, "/detokenize", {"tokens": ids})[1] == {"prompt": "hello €", "content": "hello €"}
    chat = post(served, "/tokenize", {"messages": user("hi"), "add_generation_prompt": False})[1]
    assert post(served, "/detokenize", {"tokens": chat["tokens"]})[1]["prompt"] == "<|im_start|>user\nhi<|im_end|>\n"
    for path, bad in (("/tokenize", {}), ("/tokenize", {"prompt": 3}), ("/detokenize", {"tokens": [9999]})):
        assert post(served, path, bad)[0] == 400
    known = served.text.tokenizer._token_cache
    assert known is not None
    kept = list(known._kept)
    post(served, "/tokenize", {"prompt": "not to be kept " * 200})
    assert list(known._kept) == kept, "its time would tell what others have sent"


def test_the_tokenizer_is_told_where_it_is_asked_for(served: Served) -> None:
    """Special tokens that the server finds again as one id, and the template; off unless the operator wants it."""
    status, refused, _ = get(served, "/tokenizer_info")
    assert status == 404 and "--enable-tokenizer-info-endpoint" in refused["error"]["message"]
    with Served(reply, tells_tokenizer=True) as telling:
        status, info, _ = get(telling, "/tokenizer_info")
        assert status == 200 and "messages" in info["chat_template"] and info["model_max_length"] == 512
        for number, token in info["added_tokens_decoder"].items():
            ids = post(telling, "/tokenize", {"prompt": token["content"], "add_special_tokens": False})[1]["tokens"]
            assert ids == [int(number)] and token["special"]
        names = {token["content"] for token in info["added_tokens_decoder"].values()}
        assert info["eos_token"] in names and info["bos_token"] is None


def test_metrics_count_what_was_served(served: Served, client: openai.OpenAI) -> None:
    names = ["vllm:request_success_total", "vllm:time_to_first_token_seconds_count", "vllm:request_params_n_count"]
    before = [metric(served, name) for name in names]
    client.completions.create(model="toy", prompt="hi", n=2)
    assert [metric(served, name) - start for name, start in zip(names, before, strict=True)] == [2, 2, 1]
    info = [line for line in get(served, "/metrics")[1].splitlines() if line.startswith("vllm:cache_config_info")]
    assert 'num_gpu_blocks="64"' in info[0] and 'engine="0"' in info[0] and 'model_name="toy"' in info[0]


# ---- refusals ----


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/chat/completions", b"{", 400, None, None),
        ("/v1/chat/completions", {"messages": user("x"), "model": "gpt"}, 404, "model", "model_not_found"),
        ("/v1/chat/completions", {"messages": user("x" * 512)}, 400, "messages", TOO_LONG),
        ("/v1/chat/completions", {"messages": user("x"), "max_tokens": 500}, 400, "max_tokens", TOO_LONG),
        ("/v1/chat/completions", {"messages": user("x"), "temperature": "hot"}, 400, "temperature", None),
        ("/v1/completions", {"prompt": "x" * 512}, 400, "prompt", TOO_LONG),
        ("/v1/completions", {"prompt": "x" * 3_000_000}, 400, "prompt", TOO_LONG),
        ("/v1/completions", {"prompt": "x", "max_tokens": 512}, 400, "max_tokens", TOO_LONG),
        ("/v1/completions", {"prompt": ""}, 400, "prompt", None),
        ("/v1/completions", {"prompt": ["x"] * 200, "n": 128}, 400, "n", None),
        ("/nowhere", {}, 404, None, "unknown_url"),
        ("/v1/models", {}, 405, None, "method_not_supported"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(
    served: Served, path: str, body: Any, status: int, param: str | None, code: str | None
) -> None:
    answered, error, _ = post(served, path, body)
    assert answered == status
    assert error.keys() == {"error"} and error["error"].keys() == {"message", "type", "param", "code"}
    assert (error["error"]["param"], error["error"]["code"]) == (param, code)
    assert served.call(lambda: served.client.num_open) == 0


def test_unknown_fields_are_ignored_and_logged_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert post(served, "/v1/completions", {"prompt": "x", "colour_of_the_sky": 1})[0] == 200
    assert sum("colour_of_the_sky" in record.getMessage() for record in caplog.records) == 1


def test_a_body_that_is_too_large_is_413() -> None:
    with Served(max_body_bytes=1000) as served:
        status, body, _ = post(served, "/v1/completions", {"prompt": "x" * 2000})
        assert (status, body["error"]["type"]) == (413, "invalid_request_error")
        with served.connect() as raw:  # Undeclared: in chunks.
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            raw.sendall(b"400\r\n" + b"x" * 1024 + b"\r\n")
            assert raw.recv(1000).startswith(b"HTTP/1.1 413")
        assert post(served, "/v1/completions", {"prompt": "x"})[0] == 200


def test_keys_open_the_api_and_only_what_monitoring_needs_is_open_without() -> None:
    with Served(api_keys=("one", "two")) as served:
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert get(served, path)[0] == 200
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "two"},
            {"authorization": "Basic two"},
        ):
            status, body, answered = get(served, "/v1/models", **headers)
            assert (status, body["error"]["code"], answered["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
        with pytest.raises(openai.AuthenticationError), client_of(served, api_key="no") as client:
            client.completions.create(model="toy", prompt="x")
        with client_of(served, api_key="two") as client:
            assert client.completions.create(model="toy", prompt="x").choices


def test_browsers_of_allowed_origins_may_call() -> None:
    with Served(cors_origins=("http://a.example",), api_keys=("k",)) as served:
        asked = {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}
        call = urllib.request.Request(served.url + "/v1/completions", headers=asked, method="OPTIONS")
        status, _, headers = _open(call)
        assert (status, headers["access-control-allow-origin"]) == (200, "http://a.example")
        assert get(served, "/v1/models", Origin="http://b.example")[2]["access-control-allow-origin"] is None
        assert (
            get(served, "/v1/models", Origin="http://a.example")[2]["access-control-allow-origin"] == "http://a.example"
        )


def test_overload_is_429_with_retry_after_and_passes() -> None:
    with Served(reply, max_open_requests=2, step_s=0.005) as served, client_of(served) as client:
        stream = client.completions.create(model="toy", prompt="LONG", max_tokens=200, n=2, stream=True)
        next(iter(stream))
        status, body, headers = post(served, "/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["type"]) == (429, "overloaded_error") and int(headers["retry-after"]) >= 1
        stream.close()
        served.wait_until(lambda: served.client.num_open == 0)
        assert post(served, "/v1/completions", {"prompt": "x"})[0] == 200


def test_prompt_tokens_are_bounded_too() -> None:
    with Served(reply, max_open_tokens=100, step_s=0.005) as served, client_of(served) as client:
        stream = client.completions.create(model="toy", prompt="LONG" + "x" * 80, max_tokens=200, stream=True)
        next(iter(stream))
        assert post(served, "/v1/completions", {"prompt": "y" * 50})[0] == 429
        stream.close()


def test_urgent_priorities_are_for_those_whom_the_settings_allow() -> None:
    for settings, priority, status in (({}, -1, 400), ({}, 3, 200), ({"max_priority": -5}, -5, 200)):
        with Served(reply, **settings) as served:
            answered, body, _ = post(served, "/v1/completions", {"prompt": "x", "priority": priority})
            assert answered == status
            assert status == 200 or (body["error"]["param"] == "priority" and "at least 0" in body["error"]["message"])


def test_one_call_of_many_choices_shuts_nobody_out() -> None:
    """A client with 1,024 prompts open holds all but three of 16 rows; one with another key is answered meanwhile."""
    engine = EngineConfig(groups=full_groups(2048), max_model_len=512, max_num_seqs=16)
    with Served(reply, engine=engine, step_s=0.005, api_keys=("one", "two")) as served:
        with client_of(served, api_key="one") as hog:
            stream = hog.completions.create(model="toy", prompt=["LONG"] * 1024, max_tokens=300, stream=True)
            next(iter(stream))
            served.wait_until(lambda: served.client.stats.num_running == 13)
            status, _, _ = post(served, "/v1/completions", {"prompt": "x"}, authorization="Bearer two")
            assert status == 200 and served.call(lambda: served.client.request_queue.num_waiting) > 900
            shown = get(served, "/metrics")[1]
            (waiting,) = re.findall(r"^vllm:num_requests_waiting{.*} (.*)$", shown, re.M)
            assert float(waiting) > 900
            stream.close()
        served.wait_until(lambda: served.client.num_open == 0)
        assert served.call(lambda: served.client.request_queue.num_waiting) == 0


@contextlib.contextmanager
def crowded(max_queue_s: float) -> Iterator[Served]:
    """A server whose two rows are taken for seconds."""
    engine = EngineConfig(groups=full_groups(2048), max_model_len=512, max_num_seqs=2)
    with Served(reply, engine=engine, step_s=0.01, max_queue_s=max_queue_s) as served, client_of(served) as client:
        streams = [
            client.completions.create(
                model="toy", prompt="LONG", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(2)
        ]
        for stream in streams:
            next(iter(stream))
        served.wait_until(lambda: served.client.stats.num_steps > 20)
        yield served
        for stream in streams:
            stream.close()


def test_a_call_that_would_wait_too_long_is_refused_and_told_when_to_come_back() -> None:
    with crowded(max_queue_s=0.5) as served:
        status, body, headers = post(served, "/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["code"]) == (429, "overloaded") and "wait" in body["error"]["message"]
        assert 1 <= int(headers["retry-after"]) <= 10


def test_where_no_wait_is_too_long_a_call_is_let_in_behind_all_others() -> None:
    """The load that refuses the call above, with a bound of 0, which is none."""
    with crowded(max_queue_s=0.0) as served:
        assert post(served, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_while_an_engine_is_restarted_calls_wait_and_503_says_when_it_is_back() -> None:
    with Served(reply, max_queue_s=0.5) as served:
        served.kill_engine()
        served.wait_until(lambda: served.client.ready is None)
        status, _, headers = post(served, "/v1/completions", {"prompt": "x"})
        assert (status, headers["retry-after"]) == (503, None), "after half a second"
        for back_s, told in ((40.0, range(11, 41)), (400.0, (300,))):
            served.call(lambda back_s=back_s: served.client.detach(served.link, "down", back_s))
            status, _, headers = post(served, "/v1/completions", {"prompt": "x"})
            assert status == 503 and int(headers["retry-after"]) in told, "at once: it would wait too long"
        assert get(served, "/health")[0] == 503


def test_what_the_engine_refuses_is_an_http_error_even_where_a_stream_was_asked_for() -> None:
    with Served(
        engine=EngineConfig(groups=full_groups(64), max_model_len=512, max_num_seqs=1, max_num_waiting=1)
    ) as served:
        served.call(served.script.go.clear)
        with client_of(served) as client:
            prompts = ["a", "b", "c", "d", "e", "f"]
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="toy", prompt=prompts, stream=True)
        served.call(served.script.go.set)
        served.wait_until(lambda: served.client.num_open == 0)


# ---- departures and deaths ----


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_in_the_engine(stream: bool) -> None:
    with Served(reply, step_s=0.005) as served:
        body = json.dumps({"prompt": "LONG", "max_tokens": 300, "n": 2, "stream": stream}).encode()
        with served.connect() as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            served.wait_until(lambda: served.client.stats.num_running == 2)
        served.wait_until(lambda: served.client.num_open == 0)
        served.wait_until(lambda: served.client.stats.num_held_blocks == 0)
        assert served.call(lambda: served.client.stats.generation_tokens) < 600
        served.wait_until(lambda: served.client.observers.metrics._disconnects._value.get() == 1)
        assert get(served, "/health")[0] == 200


def test_a_slow_reader_holds_one_merged_delta() -> None:
    with Served(lambda prompt: "€" * 400, engine=EngineConfig(groups=full_groups(128), max_model_len=2048)) as served:
        body = json.dumps({"prompt": "x", "max_tokens": 1200, "stream": True, "n": 4}).encode()
        with served.connect() as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            served.wait_until(lambda: served.client.num_open == 0 and served.client.stats.num_steps > 100)
            text = b""
            while b"[DONE]" not in text:
                text += raw.recv(65536)
        events = [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: {")]
        pieces = ["".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == i) for i in range(4)]
        assert pieces == ["€" * 400] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_when_the_engine_dies_answers_pause_and_new_calls_wait(stream: bool) -> None:
    """A stop string in the middle of what comes, log probabilities and counts are what they are without a death."""
    with Served(reply, step_s=0.01) as served, client_of(served) as client, ThreadPoolExecutor(2) as pool:

        def ask() -> Any:
            options: Any = {"stream_options": {"include_usage": True}} if stream else {}
            given = client.completions.create(
                model="toy",
                prompt="LONG",
                max_tokens=90,
                n=2,
                logprobs=2,
                stop=["jab no such"],
                stream=stream,
                **options,
            )
            texts, ends, logprobs, usage = ["", ""], [None, None], [[], []], None
            for part in given if stream else [given]:
                usage = part.usage
                for choice in part.choices:
                    texts[choice.index] += choice.text
                    ends[choice.index] = choice.finish_reason
                    logprobs[choice.index] += choice.logprobs.token_logprobs
            return texts, ends, logprobs, usage

        expected = ask()
        before = served.call(lambda: served.client.stats.num_steps)
        asking = pool.submit(ask)
        served.wait_until(lambda: served.client.stats.num_steps > before + 20)
        served.kill_engine()
        served.wait_until(lambda: served.client.ready is None)
        status, body_, _ = get(served, "/health")
        assert (status, body_["error"]["type"], body_["error"]["code"]) == (503, "unavailable_error", 503)
        new = pool.submit(post, served, "/v1/completions", {"prompt": "x"})
        time.sleep(0.1)
        assert not asking.done() and not new.done()
        served.restart_engine()
        assert new.result(20)[1]["choices"][0]["text"] == "hello world"
        assert asking.result(20) == expected
        assert expected[1] == ["length", "length"] and expected[3].completion_tokens == 180
        assert get(served, "/health")[0] == 200
        metrics = served.client.observers.metrics
        assert metrics._losses._value.get() == 1 and metrics._resumed._value.get() == 2


def test_when_no_engine_comes_any_more_a_stream_ends_with_an_error_event_and_no_done() -> None:
    with Served(reply, step_s=0.01) as served:
        body = json.dumps({"prompt": "LONG", "max_tokens": 300, "stream": True}).encode()
        with served.connect() as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s"
                % (len(body), body)
            )
            text = raw.recv(100)
            served.call(lambda: served.client.close("over"))
            while part := raw.recv(65536):
                text += part
        assert b"[DONE]" not in text and text.endswith(b"0\r\n\r\n")
        last = [line for line in text.split(b"\n") if line.startswith(b"data: ")][-1]
        assert json.loads(last[6:])["error"]["type"] == "unavailable_error"


def test_a_failed_step_is_500_and_the_next_request_is_served() -> None:
    with Served() as served:
        served.call(lambda: setattr(served.script, "failure", RuntimeError("boom")))
        status, body, _ = post(served, "/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["type"]) == (500, "internal_error")
        served.call(lambda: setattr(served.script, "failure", None))
        assert post(served, "/v1/completions", {"prompt": "x"})[0] == 200


def test_while_the_model_loads_everything_says_so() -> None:
    with Served(attach=False, max_queue_s=0.2) as served:
        expected = {"error": {"message": "Loading model", "type": "unavailable_error", "param": None, "code": 503}}
        assert get(served, "/health")[:2] == (503, expected)
        assert post(served, "/v1/completions", {"prompt": "x"})[:2] == (503, expected)
        assert get(served, "/v1/models")[0] == post(served, "/tokenize", {"prompt": "x"})[0] == 200


def test_health_fails_when_steps_hang_and_recovers() -> None:
    with Served(reply, stall_after_s=0.05) as served, client_of(served) as client:
        served.call(served.script.go.clear)
        asking = threading.Thread(target=lambda: client.completions.create(model="toy", prompt="x"))
        asking.start()
        served.wait_until(lambda: served.client.stalled_s(served.loop.time()) > 0.05)
        status, body, _ = get(served, "/health")
        assert status == 503 and "no step" in body["error"]["message"]
        served.call(served.script.go.set)
        asking.join(20)
        assert get(served, "/health")[0] == 200


def test_draining_refuses_new_calls_and_finishes_open_ones() -> None:
    with Served(reply, step_s=0.005) as served, client_of(served) as client:
        stream = client.completions.create(model="toy", prompt="LONG", max_tokens=100, stream=True)
        first = next(iter(stream))
        served.call(lambda: setattr(served.app.state.limits, "draining", True))
        assert post(served, "/v1/completions", {"prompt": "x"})[0] == get(served, "/health")[0] == 503
        assert first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream) == LONG[:100]


def test_compressed_bodies_are_read_or_named(served: Served) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    plain = post(served, "/v1/completions", body)
    for coding, data in {"gzip": gzip.compress(body), "deflate": zlib.compress(body)}.items():
        status, answer, _ = post(served, "/v1/completions", data, **{"content-encoding": coding})
        assert status == 200 and answer["choices"] == plain[1]["choices"]
    status, answer, _ = post(served, "/v1/completions", body, **{"content-encoding": "zstd"})
    assert status == 415 and "zstd" in answer["error"]["message"]
    bomb = gzip.compress(bytes(1 << 26))
    assert post(served, "/v1/completions", bomb, **{"content-encoding": "gzip"})[0] == 413
