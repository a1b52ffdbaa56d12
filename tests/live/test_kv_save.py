"""`--kv-save` as its users meet it: a server that was stopped and started again answers from what it had computed."""

from __future__ import annotations

import json
import signal
import stat
from pathlib import Path

import pytest
from serving import Server

from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import ConfigError

TEXT = " ".join(f"Item {number} of the list costs {number * 7 % 50} coins." for number in range(60))
BODY = {"prompt": TEXT, "max_tokens": 24, "temperature": 0.8, "seed": 11, "logprobs": 2}


def ask(server: Server) -> tuple[dict, int]:
    """(the choice, cached tokens)"""
    status, text = server.request("POST", "/v1/completions", BODY)
    answer = json.loads(text)
    assert status == 200, answer
    return answer["choices"][0], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def stop(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0
    server._reader.join(10)


@pytest.mark.sampled(1 / 3)
def test_a_restarted_server_keeps_its_hits(smollm2: Path, tmp_path: Path) -> None:
    """The same tokens and logprobs, most of the prompt from the folder, which only its owner can read; a server whose
    files were damaged computes them, and says so in one line."""
    args = ("--kv-save", str(tmp_path / "kv"), "--kv-cache-memory-bytes", "100MiB")
    with Server(*args) as server:
        first, cached = ask(server)
        assert cached == 0
        stop(server)
        assert "saved" in server.output and "KV blocks" in server.output
    (path,) = (tmp_path / "kv").glob("*.blocks")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with Server(*args) as server:
        second, cached = ask(server)
        assert second == first and cached > 600
        stop(server)
        assert "saved 0 KV blocks" in server.output
    path.write_bytes(path.read_bytes()[:-1])
    with Server(*args) as server:
        third, cached = ask(server)
        assert third == first and cached == 0
        assert sum("is not used: it is cut short" in line for line in server.lines) == 1


def test_a_disk_tier_goes_on_from_the_folder(smollm2: Path, tmp_path: Path) -> None:
    """Beside other tiers the folder is the disk tier's: it has what was saved, and adds to it; no other server may use
    it meanwhile, and a later one without tiers finds all that is there."""
    folder = tmp_path / "kv"
    args = ("--kv-save", str(folder), "--kv-cache-memory-bytes", "100MiB")
    with Server(*args) as server:
        first, _ = ask(server)
        stop(server)
    with Server(*args, "--kv-host", "64MiB") as server:
        second, cached = ask(server)
        assert second == first and cached > 600
        with pytest.raises(AssertionError, match="used by another KV store"), Server(*args):
            pass
        status, _ = server.request("POST", "/v1/completions", BODY | {"prompt": "Another list. " + TEXT})
        assert status == 200
        stop(server)
    with Server(*args) as server:
        third, cached = ask(server)
        assert third == first and cached > 600
        status, text = server.request("POST", "/v1/completions", BODY | {"prompt": "Another list. " + TEXT})
        assert status == 200 and json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"] > 600


def test_a_model_in_this_process_saves_as_it_is_closed(smollm2: Path, tmp_path: Path) -> None:
    """And shares the folder with servers, or leaves it to a disk tier; without a prefix cache nothing is saved."""
    options = {"kv_cache_memory_bytes": 100 * 2**20, "kv_save": str(tmp_path)}
    sampling = SamplingParams(temperature=0, max_tokens=8)
    with LLM(str(smollm2), **options) as llm:
        (first,) = llm.generate(TEXT, sampling)
    with LLM(str(smollm2), **options) as llm:
        (second,) = llm.generate(TEXT, sampling)
    with LLM(str(smollm2), **options, kv_host=64 * 2**20) as llm:
        (third,) = llm.generate(TEXT, sampling)
    assert third.text == second.text == first.text
    assert first.usage.cached_tokens == 0 and second.usage.cached_tokens > 600 and third.usage.cached_tokens > 600
    with pytest.raises(ConfigError, match="prefix caching is off"):
        LLM(str(smollm2), **options, enable_prefix_caching=False)
