"""The result cache: equal calls that are determined get equal answers without a step, each tenant its own."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from scripted import Served
from tokenmill.cluster.events import Ended
from tokenmill.control.usage.accounting import Accounting
from tokenmill.core.events import FINISH_STOP, Output, Ready
from tokenmill.core.request import PoolingParams, Request, SamplingParams
from tokenmill.core.terms import Terms
from tokenmill.server.result_cache import ResultCache

READY = Ready("m", 512, 100, (2,), "id", 16, 64)
WORDS = "one two three four five "


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    accounting = Accounting(tmp_path / "usage", fold_s=0.01)
    accounting.open()
    with Served(lambda prompt: WORDS * 9, result_cache=1 << 20, accounting=accounting) as one:
        yield one
    accounting.close()


def ask(served: Served, path: str, body: Any, **headers: str) -> tuple[str, str | None]:
    """(body, what it says of the cache)"""
    call = urllib.request.Request(served.url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(call, timeout=20) as answer:
        assert answer.status == 200
        return answer.read().decode(), answer.headers.get("x-tokenmill-cache")


def said(text: str) -> list[tuple[Any, ...]]:
    """(index, text, finish reason, stop reason, log probabilities) of each choice, streamed or whole."""
    if text.startswith("data:"):
        bodies = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    else:
        bodies = [json.loads(text)]
    choices: dict[int, list[Any]] = {}
    for body in bodies:
        for choice in body["choices"]:
            known = choices.setdefault(choice["index"], ["", None, None, []])
            known[0] += choice["text"]
            known[1] = choice["finish_reason"] or known[1]
            known[2] = choice.get("stop_reason") or known[2]
            known[3] += (choice.get("logprobs") or {}).get("token_logprobs", [])
    return [(index, *known) for index, known in sorted(choices.items())]


def usage(served: Served) -> tuple[int, int]:
    told = json.loads(served.ask("/v1/usage")[1])
    results = [each for bucket in told["data"] for each in bucket["results"]]
    return sum(each["input_cached_tokens"] for each in results), sum(each["output_tokens"] for each in results)


BODIES: list[dict[str, Any]] = [
    {"prompt": "a", "temperature": 0, "max_tokens": 40},
    {"prompt": "a", "seed": 3, "max_tokens": 40},
    {"prompt": ["a", "b"], "n": 2, "seed": 3, "max_tokens": 5},
    {"prompt": "a", "temperature": 0, "stop": ["ree f"], "max_tokens": 40},
    {"prompt": "a", "temperature": 0, "logprobs": 2, "max_tokens": 9},
    {"prompt": "abc", "temperature": 0, "prompt_logprobs": 1, "max_tokens": 2},
]


@pytest.mark.parametrize("number", range(len(BODIES)))
def test_a_hit_says_what_a_computation_says(served: Served, number: int) -> None:
    """Text, reasons and log probabilities, streamed or whole whichever came first; usage is told, billed and marked."""
    body = BODIES[number]
    for first, then in ((False, False),) if "prompt_logprobs" in body else ((False, True), (True, False)):
        body = body | {"cache_salt": str(first)}
        computed, told = ask(served, "/v1/completions", body | {"stream": first})
        assert told is None
        known, before = len(served.script.introductions), usage(served)
        found, told = ask(served, "/v1/completions", body | {"stream": then})
        assert told == "hit" and said(found) == said(computed)
        assert len(served.script.introductions) == known
        if not then:
            counts = json.loads(found)["usage"]
            assert counts["prompt_tokens_details"]["cached_tokens"] == counts["prompt_tokens"]
            after = usage(served)
            assert after[1] - before[1] == counts["completion_tokens"]
            assert after[0] - before[0] == counts["prompt_tokens"]


def test_what_is_drawn_without_a_seed_is_computed(served: Served) -> None:
    for body in ({"prompt": "a", "temperature": 1}, {"prompt": "a", "temperature": 0, "xtc_probability": 0.5}):
        for _ in range(2):
            assert ask(served, "/v1/completions", body)[1] is None
    assert len(served.script.introductions) == 4


def test_any_other_word_of_a_call_is_another_call(served: Served) -> None:
    body = {"prompt": "a", "temperature": 0, "max_tokens": 5}
    ask(served, "/v1/completions", body)
    others: list[dict[str, Any]] = [
        {"prompt": "b"}, {"max_tokens": 6}, {"seed": 1, "temperature": 1}, {"stop": ["x"]}, {"logprobs": 1},
        {"cache_salt": "mine"}, {"repetition_penalty": 1.1}, {"ignore_eos": True}, {"logit_bias": {"40": 1}},
    ]  # fmt: skip
    for change in others:
        assert ask(served, "/v1/completions", body | change)[1] is None, change
    assert ask(served, "/v1/completions", body)[1] == "hit"
    assert ask(served, "/v1/completions", body | {"user": "someone", "seed": 1})[1] == "hit", "greedy needs no seed"


def test_a_long_result_comes_whole(served: Served) -> None:
    body = {"prompt": "a", "temperature": 0, "max_tokens": 400, "ignore_eos": True}
    with Served(lambda prompt: WORDS * 30, result_cache=1 << 20) as other:
        for stream in (True, False):
            computed, _ = ask(other, "/v1/completions", body | {"stream": True, "cache_salt": str(stream)})
            found, told = ask(other, "/v1/completions", body | {"stream": stream, "cache_salt": str(stream)})
            assert told == "hit" and said(found) == said(computed) and len(said(found)[0][1]) > 300


def test_tenants_do_not_share_results() -> None:
    with Served(result_cache=1 << 20, api_keys=("one", "two")) as served:
        body = {"prompt": "a", "temperature": 0}
        for name in ("one", "two"):
            assert ask(served, "/v1/completions", body, authorization=f"Bearer {name}")[1] is None
        assert ask(served, "/v1/completions", body, authorization="Bearer one")[1] == "hit"


def test_an_answer_that_was_broken_off_is_not_kept(served: Served) -> None:
    """The engine fails the first call; the second is computed."""
    body = {"prompt": "a", "temperature": 0, "max_tokens": 5}
    served.call(lambda: setattr(served.script, "failure", RuntimeError("broken")))
    assert served.ask("/v1/completions", body)[0] == 500
    served.call(lambda: setattr(served.script, "failure", None))
    served.kill_engine()
    served.call(lambda: served.client.detach(served.link, "killed"))
    served.restart_engine()
    served.wait_until(lambda: served.client.ready is not None)
    assert ask(served, "/v1/completions", body)[1] is None
    assert ask(served, "/v1/completions", body)[1] == "hit"


def request(number: int, **changes: Any) -> Request:
    given: dict[str, Any] = {"sampling": SamplingParams(max_tokens=9, temperature=0.0), "max_tokens": 9, "seed": number}
    return Request(f"r{number}", (number, 5), **(given | changes))


def finish(cache: ResultCache, one: Request, tokens: tuple[int, ...] = (1, 2), vector: bytes = b"") -> None:
    cache.record([one])
    output = Output(one.id, tokens, finish_reason=FINISH_STOP, num_output=len(tokens), vector=vector)
    cache.sending([output], None)
    cache.ended(Ended(one, output, FINISH_STOP, 1.0, 1.0))


def test_it_is_bounded_and_keeps_what_is_used() -> None:
    """Random use: never more bytes than allowed, and the one that is asked for again and again stays."""
    registry, rng = CollectorRegistry(), random.Random(2)
    cache = ResultCache(20_000, "m", registry, lambda: READY)
    favourite = request(0)
    finish(cache, favourite)
    for number in range(1, 400):
        finish(cache, request(number), tuple(range(rng.randrange(100))))
        assert cache.find([favourite], READY) is not None
        value = registry.get_sample_value("tokenmill:result_cache_bytes", {"model_name": "m", "engine": "0"})
        assert value is not None and 0 < value <= 20_000
    assert cache.find([request(1)], READY) is None
    finish(cache, request(999), tuple(range(30_000)))
    assert cache.find([request(999)], READY) is None and cache.find([favourite], READY) is not None


def test_engines_tenants_and_vectors_have_keys_of_their_own() -> None:
    other, ready = replace(READY, numerics_id="other"), [READY]
    cache = ResultCache(1 << 20, "m", CollectorRegistry(), lambda: ready[0])
    one = request(1)
    finish(cache, one)
    assert cache.find([one], READY) is not None
    assert cache.find([one], other) is None
    assert cache.find([request(1, terms=Terms(tenant="t"))], READY) is None
    assert cache.find([request(1, adapter="a")], READY) is None
    assert cache.find([one, request(2)], READY) is None, "all of a call, or none"
    swapped = request(5)
    cache.record([swapped])
    ready[0] = other
    output = Output(swapped.id, (1,), finish_reason=FINISH_STOP, num_output=1)
    cache.sending([output], None)
    cache.ended(Ended(swapped, output, FINISH_STOP, 1.0, 1.0))
    ready[0] = READY
    assert cache.find([swapped], READY) is None, "another engine gave it"
    kept = cache.find([one], READY)
    assert kept is not None and not cache.replay(kept, [one]).is_immediate, "its reader has to count it"
    pooled = request(3, pooling=PoolingParams("mean"), max_tokens=1)
    finish(cache, pooled, (), b"\0\0\0\0")
    kept = cache.find([pooled], READY)
    assert kept is not None and kept[0].vector == b"\0\0\0\0"
    assert cache.find([request(4, sampling=SamplingParams(max_tokens=9, temperature=1.0))], READY) is None
