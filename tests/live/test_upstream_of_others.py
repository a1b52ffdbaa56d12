"""A server of others behind this one: skipped unless TOKENMILL_TEST_UPSTREAM is the URL of one (vLLM, llama-server)
with one model, and TOKENMILL_TEST_UPSTREAM_KEY its key, if it wants one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import openai
import pytest
from kill import write_model
from serving import Server, wait_until

URL, KEY = os.environ.get("TOKENMILL_TEST_UPSTREAM", ""), os.environ.get("TOKENMILL_TEST_UPSTREAM_KEY", "")
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
