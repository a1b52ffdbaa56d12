"""`kv_transfer_params` as a proxy uses them: one server computes a prompt, another goes on from its KV."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import Server

TEXT = " ".join(f"Item {number} of the list costs {number * 7 % 50} coins." for number in range(60))
BODY = {"prompt": TEXT, "max_tokens": 24, "temperature": 0.8, "seed": 11, "logprobs": 2}


def ask(server: Server, **more: object) -> tuple[int, dict]:
    status, text = server.request("POST", "/v1/completions", BODY | more)
    return status, json.loads(text)


@pytest.mark.sampled(1 / 3)
def test_one_server_prefills_and_another_decodes(smollm2: Path, tmp_path: Path) -> None:
    """Both run all the time on one folder; the second answers with the bits that it gives alone."""
    args = ("--kv-save", str(tmp_path), "--kv-cache-memory-bytes", "100MiB")
    with Server(*args) as prefill, Server(*args) as decode:
        salted = {"cache_salt": "alone"}
        _, alone = ask(decode, **salted)
        status, first = ask(prefill, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        assert status == 200 and list(tmp_path.glob("*.blocks"))
        params = first["kv_transfer_params"]
        assert params == {"do_remote_prefill": True, "do_remote_decode": False}
        _, second = ask(decode, kv_transfer_params=params)
        assert second["choices"] == alone["choices"] and "kv_transfer_params" not in second
        assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 600
        _, chat = ask(prefill, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
        assert chat["choices"] == first["choices"] and chat["kv_transfer_params"] == params


def test_without_a_folder_it_is_refused_by_name(smollm2: Path) -> None:
    with Server() as server:
        status, answer = ask(server, kv_transfer_params={"do_remote_decode": True})
        assert status == 400 and answer["error"]["param"] == "kv_transfer_params", answer
        assert "--kv-save" in answer["error"]["message"]
