"""What a server asks of a KV store ahead of time: what clients and tools want kept, and what operators prefetch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest

from scripted import Served, make_text_model
from tokenmill.cluster.events import Ended
from tokenmill.cluster.keys import keys_of
from tokenmill.core.block import full_groups, split_keys
from tokenmill.core.config import EngineConfig
from tokenmill.core.effects import FetchBlocks, Job, PinBlocks, PromoteBlocks
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.tiers import HOST, TierFacts
from tokenmill.server.kv.hints import KVHints, KVRetention
from tokenmill.text.chat_format import find_chat_format
from tokenmill.text.chat_template import ChatTemplate
from tokenmill.text.choice import Choice

TEMPLATE = (
    "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]
TIERS = (TierFacts(HOST, 1 << 30, 1e-4, 1e9),)
PROMPT = "x" * 64


def serve(answer: str = "hello", tiers: tuple[TierFacts, ...] = TIERS, **settings: Any) -> Served:
    text = make_text_model(chat=ChatTemplate(TEMPLATE))
    text = replace(text, chat_format=find_chat_format(TEMPLATE, text.tokenizer))
    engine = EngineConfig(groups=full_groups(256, 1000), max_model_len=2048)
    return Served(lambda prompt: answer, text=text, engine=engine, tiers=tiers, **settings)


def jobs(served: Served, kind: type[Job]) -> list[Any]:
    return served.call(lambda: [job for job in served.script.jobs if isinstance(job, kind)])


def chat(served: Served, **more: Any) -> None:
    body = {"messages": [{"role": "user", "content": "what time is it, please, and where?"}], "max_tokens": 200}
    assert served.ask("/v1/chat/completions", body | more)[0] == 200


def keys(served: Served, tokens: Sequence[int]) -> list[bytes]:
    ready = served.client.ready
    assert ready is not None
    return list(split_keys(keys_of(tokens, ready, "", "")))


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_calls_a_tool_is_kept_for_as_long_as_the_server_says(stream: bool) -> None:
    with serve(CALL, kv_keep_tools_s=7.0) as served:
        chat(served, tools=TOOLS, stream=stream)
        served.wait_until(lambda: any(isinstance(job, PinBlocks) for job in served.script.jobs))
        (pin,) = jobs(served, PinBlocks)
        assert pin.seconds == 7.0
        prompt = served.script.introductions[0].prompt_tokens
        drawn = served.text.tokenizer.encode(CALL, add_special=False)
        assert [key for _, key in pin.wanted] == keys(served, (*prompt, *drawn)), "the end token has no KV"


def test_other_answers_are_not_kept_nor_are_those_whose_client_does_not_want_it_nor_any_without_tiers() -> None:
    with serve("hello", kv_keep_tools_s=7.0) as served:
        chat(served, tools=TOOLS)
        chat(served)
        assert jobs(served, PinBlocks) == []
    with serve(CALL, kv_keep_tools_s=7.0) as served:
        chat(served, tools=TOOLS, kv_hints={"keep_s": 0})
        assert jobs(served, PinBlocks) == []
    with serve(CALL, kv_keep_tools_s=0.0) as served:
        chat(served, tools=TOOLS)
        assert jobs(served, PinBlocks) == []
    with serve(CALL, ()) as served:
        chat(served, tools=TOOLS, kv_hints={"keep_s": 9})
        assert jobs(served, PinBlocks) == []


def test_a_client_says_how_long_its_kv_is_kept() -> None:
    with serve("hello world") as served:
        body = {"prompt": PROMPT, "max_tokens": 40, "cache_salt": "mine", "kv_hints": {"keep_s": 33}}
        assert served.ask("/v1/completions", body)[0] == 200
        served.wait_until(lambda: any(isinstance(job, PinBlocks) for job in served.script.jobs))
        (pin,) = jobs(served, PinBlocks)
        assert (pin.seconds, pin.owner) == (33.0, "mine") and len(pin.wanted) >= 4
        for wrong in ({"keep_s": -1}, {"keep_s": 10**9}, {"keep_s": "long"}, 3):
            status, text, _ = served.ask("/v1/completions", body | {"kv_hints": wrong})
            assert status == 400 and "kv_hints" in json.loads(text)["error"]["param"]


class Chosen(NamedTuple):
    """A choice of an answer."""

    request: Request
    has_calls: bool = True


class Kept:
    """Notes what is kept, in the place of the engines."""

    def __init__(self) -> None:
        self.kept: list[float] = []

    def has_store(self, link: int) -> bool:
        return link == 0

    def keys_of(self, link: int, request: Request, drawn: Sequence[int]) -> bytes:
        return b"keys"

    def keep(self, link: int, keys: bytes, seconds: float, owner: str) -> None:
        self.kept.append(seconds)


@pytest.mark.parametrize("comes_first", ["end", "client"])
@pytest.mark.parametrize("goes", [False, True])
def test_nothing_is_held_of_answers_whose_clients_have_gone(comes_first: str, goes: bool) -> None:
    """Nor of those that have been kept, or that have no store."""
    later = Kept()
    retention = KVRetention(cast(KVHints, later), 7.0)
    for nth, (reason, link) in enumerate([("stop", 0), ("abort", 0), ("stop", 1), ("abort", None)]):
        choice = cast(Choice, Chosen(Request(str(nth), (1, 2, 3), SamplingParams(), 8, 0)))
        ended = Ended(choice.request, None, reason, 0.0, 0.0, link, ())
        retention.watch([choice.request], None)
        assert len(retention) == 1
        if comes_first == "end":
            retention.ended(ended)
        if not goes:
            retention.finish(choice)
        retention.forget([choice])
        if comes_first == "client":
            retention.ended(ended)
        assert len(retention) == 0, (reason, link)
    kept_aborted = [7.0] if comes_first == "client" else []  # its client had seen its end: a stop string, say
    assert later.kept == ([] if goes else [7.0, *kept_aborted])


def test_a_server_holds_nothing_of_answers_that_are_over() -> None:
    with serve("hello", kv_keep_tools_s=7.0) as served:
        for stream in (False, True):
            chat(served, tools=TOOLS, stream=stream)
        (retention,) = (each for each in served.client.observers.added if isinstance(each, KVRetention))
        served.wait_until(lambda: len(retention) == 0)


def test_an_answer_that_a_stop_string_ended_is_kept_up_to_there() -> None:
    with serve("one two three four five six seven eight nine ten") as served:
        body = {"prompt": PROMPT, "max_tokens": 100, "stop": [" five"], "kv_hints": {"keep_s": 5}}
        assert served.ask("/v1/completions", body)[0] == 200
        served.wait_until(lambda: any(isinstance(job, PinBlocks) for job in served.script.jobs))
        (pin,) = jobs(served, PinBlocks)
        assert [key for _, key in pin.wanted][:4] == keys(served, served.script.introductions[0].prompt_tokens)


def test_a_prompt_is_promoted_or_brought_into_the_pool() -> None:
    with serve() as served:
        body = {"prompt": PROMPT}
        status, text, _ = served.ask("/admin/kv/prefetch", body)
        said = json.loads(text)
        assert status == 202 and said["worker"] == "w0" and said["to"] == "host" and said["num_blocks"] == 4
        served.wait_until(lambda: any(isinstance(job, PromoteBlocks) for job in served.script.jobs))
        (promoted,) = jobs(served, PromoteBlocks)
        served.script.stored = {key for _, key in promoted.wanted[:3]}
        status, text, _ = served.ask("/admin/kv/prefetch", body | {"to": "pool", "worker": "w0"})
        assert (status, json.loads(text)["num_cached"], json.loads(text)["error"]) == (200, 3, None)
        assert [len(job.moves) for job in jobs(served, FetchBlocks)] == [3]
        served.ask("/v1/completions", body | {"max_tokens": 1})
        usage = json.loads(served.ask("/v1/completions", body | {"max_tokens": 1})[1])["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 3 * 16


@pytest.mark.parametrize(
    ("body", "status"),
    [({"prompt": PROMPT, "to": "moon"}, 400), ({"prompt": PROMPT, "worker": "nobody"}, 404), ({}, 400)],
)
def test_prefetches_of_nothing_and_to_nowhere_are_refused(body: dict[str, Any], status: int) -> None:
    with serve() as served:
        assert served.ask("/admin/kv/prefetch", body, "POST")[0] == status


def test_without_a_store_a_prefetch_says_so() -> None:
    with serve(tiers=()) as served:
        status, text, _ = served.ask("/admin/kv/prefetch", {"prompt": PROMPT})
        assert status == 404 and "--kv-host" in text
