"""A server that is killed and started again drafts from what it answered before, and says the same."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

from serving import Server, wait_until

from tokenmill.control.tenants.store import TenantStore

QUESTION = "List the first five planets, one per line, and nothing else."


def options(store: Path, **more: Any) -> tuple[str, ...]:
    settings = {"suffix_decoding_store": str(store), "adaptive": False, **more}
    return "--speculative-config", json.dumps(settings), "--kv-cache-memory-bytes", "128MiB"


def num_kept(store: Path) -> int:
    with closing(sqlite3.connect(store)) as database:
        (count,) = database.execute("SELECT count(*) FROM kept").fetchone()
        return int(count)


def ask(server: Server, key: str = "") -> tuple[Any, float, float]:
    """The choice with its log probabilities, tokens that it has, and drafts of these that were accepted."""
    before = server.metrics()["vllm:spec_decode_num_accepted_tokens_total"]
    body = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200}
    data = json.dumps(body | {"temperature": 0, "logprobs": True}).encode()
    headers = {"Content-Type": "application/json", "x-api-key": key}
    with urlopen(UrlRequest(f"{server.url}/v1/chat/completions", data, headers), timeout=60) as response:
        answer = json.load(response)
    assert answer["choices"][0]["finish_reason"] == "stop", answer
    num_accepted = server.metrics()["vllm:spec_decode_num_accepted_tokens_total"] - before
    return answer["choices"][0], answer["usage"]["completion_tokens"], num_accepted


def test_what_was_answered_before_a_kill_is_drafted_from_after_it(tmp_path: Path) -> None:
    """Nearly all of the answer, in several engines, and by the same bits. A damaged file is begun anew."""
    store = tmp_path / "outputs.db"
    with Server(*options(store)) as server:
        said, num_tokens, num_accepted = ask(server)
        wait_until(lambda: num_kept(store) == 1, "the answer in the file")
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    assert num_tokens > 12 and num_accepted < num_tokens / 2
    with Server(*options(store), "--workers", "2") as server:
        again, _, num_accepted = ask(server)
        assert again == said and num_accepted > 0.7 * num_tokens, (num_accepted, num_tokens)
    assert num_kept(store) == 2
    store.write_bytes(bytes(4096) + store.read_bytes()[4096:])
    with Server(*options(store)) as server:
        assert "is damaged" in server.output
        again, _, num_accepted = ask(server)
        assert again == said and num_accepted < num_tokens / 2


def test_what_a_tenant_was_told_goes_with_it(tmp_path: Path) -> None:
    """While the server runs, and where it runs no more; what others were told stays."""
    store, tenants = tmp_path / "outputs.db", TenantStore(str(tmp_path / "tenants.db"))
    keys = {name: tenants.create_key(name, name)[1] for name in ("ann", "bob", "eve")}
    given = (*options(store), "--tenants", str(tmp_path / "tenants.db"))
    with Server(*given) as server:
        for key in keys.values():
            ask(server, key)
        wait_until(lambda: num_kept(store) == 3, "the answers in the file")
        tenants.delete_tenant("ann")
        wait_until(lambda: num_kept(store) == 2, "the end of what one was told")
    tenants.delete_tenant("bob")
    with Server(*given) as server:
        wait_until(lambda: num_kept(store) == 1, "the end of what another was told")
        _, num_tokens, num_accepted = ask(server, keys["eve"])
        assert num_accepted > 0.7 * num_tokens
    tenants.close()


def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenmill.cli.main", "serve", "smollm2", "--port", "0", *options(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "suffix_decoding_store of speculative_config, " in ended.stderr, ended
    assert ended.stderr.count("\n") == 1 and not ended.stdout, ended
