"""`stream_interval`: how many tokens a chunk has, in requests and as the server's own setting."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from scripted import Served

SAID = "abcdefghij klmnopq rstuv " * 8


def stream(served: Served, **body: Any) -> dict[int, list[dict[str, Any]]]:
    """The chunks of each choice."""
    data = json.dumps({"prompt": "x", "max_tokens": 100, "stream": True} | body).encode()
    call = urllib.request.Request(served.url + "/v1/completions", data, {"content-type": "application/json"})
    with urllib.request.urlopen(call, timeout=20) as reply:
        lines = [line[6:] for line in reply.read().decode().splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    chunks: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        (choice,) = json.loads(line)["choices"]
        chunks.setdefault(choice["index"], []).append(choice)
    return chunks


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": 1}, {"stop": "vv"}, {"stop": "stuv abc"}])
@pytest.mark.parametrize("interval", [2, 7, 1000])
def test_a_chunk_has_so_many_tokens(more: dict[str, Any], interval: int) -> None:
    """The first comes at once; then as many as asked for, and at the end what is left; the text is the same."""
    with Served(lambda prompt: SAID, step_s=0.001) as served:
        plain = stream(served, return_token_ids=True, **more)
        wide = stream(served, return_token_ids=True, stream_interval=interval, **more)
        assert stream(served, stream_interval=interval, **more).keys() == plain.keys() == wide.keys()
    for index, chunks in wide.items():
        sizes = [len(chunk["token_ids"]) for chunk in chunks]
        # What was drawn before it was looked at comes together.
        assert sizes[0] < 5 and all(interval <= size < interval + 5 for size in sizes[1:-1]), sizes
        for field in ("text", "token_ids"):
            joined = [[part for chunk in some for part in chunk[field]] for some in (plain[index], chunks)]
            assert joined[0] == joined[1]
        assert chunks[-1]["finish_reason"] == plain[index][-1]["finish_reason"]


def test_the_server_has_an_interval_of_its_own() -> None:
    """It holds where a request says nothing."""
    with Served(lambda prompt: SAID, step_s=0.001, stream_interval=5) as served:
        usual, own = (stream(served, return_token_ids=True, **more)[0] for more in ({}, {"stream_interval": 2}))
        assert 5 <= min(len(chunk["token_ids"]) for chunk in usual[1:-1]) < 10
        assert 2 <= min(len(chunk["token_ids"]) for chunk in own[1:-1]) < 5
