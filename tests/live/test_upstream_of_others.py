"""A server of others behind this one: skipped unless TOKENMILL_TEST_UPSTREAM is the URL of one (vLLM, llama-server)
with one model, and TOKENMILL_TEST_UPSTREAM_KEY its key, if it wants one. For vLLM that publishes KV events:
TOKENMILL_TEST_KV_EVENTS (ADDRESS,replay=ADDRESS), TOKENMILL_TEST_UPSTREAM_MODEL (the folder of its model)."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from kill import write_model
from serving import Server, wait_until

from tokenmill.api.sandbox import Caller
from tokenmill.cli.upstream_options import _named_feed, _text_of
from tokenmill.net.kv_subscriber import KVSubscriber
from tokenmill.server.upstream.prefixes import Prefixes

URL, KEY = os.environ.get("TOKENMILL_TEST_UPSTREAM", ""), os.environ.get("TOKENMILL_TEST_UPSTREAM_KEY", "")
EVENTS, MODEL = os.environ.get("TOKENMILL_TEST_KV_EVENTS", ""), os.environ.get("TOKENMILL_TEST_UPSTREAM_MODEL", "")
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.mark.skipif(not URL, reason="TOKENMILL_TEST_UPSTREAM names no server")
def test_its_chats_stream_through(tmp_path: Path) -> None:
    """Streamed and whole answers are those that it gives directly; tokens are those that it tells."""
    keys = tmp_path / "keys"
    keys.write_text(f"big={KEY}\n" if KEY else "")
    keys.chmod(0o600)
    args = ("--upstream", f"big={URL}", "--upstream-api-key-file", str(keys), "--kv-cache-memory-bytes", "16MiB")
    with Server(*args, model=str(write_model(tmp_path))) as server:
        wait_until(lambda: '"model":"big"' not in server.request("GET", "/admin/models")[1], "the name of its model")
        theirs = openai.OpenAI(base_url=URL, api_key=KEY or "none", timeout=300)
        (card,) = theirs.models.list().data
        ours = openai.OpenAI(base_url=server.url + "/v1", api_key="a tenant's", timeout=300, max_retries=0)
        asked: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 32, "temperature": 0}
        expected = theirs.chat.completions.create(model=card.id, **asked)
        whole = ours.chat.completions.create(model="big", **asked)
        parts = list(
            ours.chat.completions.create(model="big", stream=True, stream_options={"include_usage": True}, **asked)
        )
        text = expected.choices[0].message.content
        assert whole.choices[0].message.content == text
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text
        assert expected.usage is not None and whole.usage is not None and parts[-1].usage is not None
        assert whole.usage.total_tokens == parts[-1].usage.total_tokens == expected.usage.total_tokens
        metrics = server.metrics()
        assert metrics["tokenmill:upstream_tokens_total"] == 2 * expected.usage.total_tokens


@pytest.mark.skipif(not (URL and EVENTS and MODEL), reason="TOKENMILL_TEST_KV_EVENTS names no server")
def test_its_events_tell_which_prompts_it_has() -> None:
    """A long chat is found among what it has cached, by its tokens as they are made here; another one is not."""
    asyncio.run(_follow())


async def _follow() -> None:
    feed = _named_feed(f"big={EVENTS}")
    text, sandbox = _text_of(MODEL)
    prefixes = Prefixes(text, sandbox, [KVSubscriber(feed.endpoint, feed.replay)], sandbox.warm_up, sandbox.close)
    theirs = openai.AsyncOpenAI(base_url=URL, api_key=KEY or "none", timeout=300)
    prefixes.open()
    try:
        (card,) = (await theirs.models.list()).data
        words = " ".join(f"{time.time():.3f} {number}" for number in range(40))
        chat: Any = [{"role": "user", "content": words}]
        said = await theirs.chat.completions.create(model=card.id, messages=chat, max_tokens=4)
        assert said.usage is not None
        async with asyncio.timeout(20):
            while not prefixes.num_blocks(0):
                await asyncio.sleep(0.05)
        path, body = "/v1/chat/completions", json.dumps({"messages": chat}).encode()
        async with asyncio.timeout(20):  # while the sandbox starts, calls go by load
            while not (known := await prefixes.read(path, body, Caller())).num_tokens:
                await asyncio.sleep(0.05)
        assert known.num_tokens == said.usage.prompt_tokens
        async with asyncio.timeout(20):
            while not (hits := prefixes.hits(known)):
                await asyncio.sleep(0.05)
        (size,) = known.keys
        assert hits[0] == known.num_tokens // size * size > 0
        other = await prefixes.read(path, json.dumps({"messages": MESSAGES}).encode(), Caller())
        assert prefixes.hits(other).get(0, 0) < size
    finally:
        await theirs.close()
        await prefixes.close()
