"""A server that has nothing to do gets ready for grammars by itself."""

from __future__ import annotations

from pathlib import Path

from serving import Server, resident_bytes, wait_until

LEAST_BYTES = 8 << 20
"""What the vocabulary of a model of 49,152 tokens takes, at least."""


def test_vocabularies_are_loaded_when_nobody_is_served() -> None:
    """By the engine, and by the sandbox, whose children share what it has."""
    with Server("--kv-cache-memory-bytes", "50MiB") as server:
        engine, sandbox = server.engine_pid, server.sandbox_pid
        assert engine is not None
        before = resident_bytes(engine)
        wait_until(lambda: resident_bytes(engine) > before + LEAST_BYTES, "the engine has its vocabulary", 30)
        sandbox = sandbox or server.sandbox_pid
        assert sandbox is not None
        children = Path(f"/proc/{sandbox}/task/{sandbox}/children")
        wait_until(lambda: len(children.read_text().split()) == 2, "one renders, one compiles grammars", 30)
        body = {"prompt": "x", "structured_outputs": {"choice": ["yes"]}, "max_tokens": 9}
        status, answer = server.request("POST", "/v1/completions", body)
        assert status == 200 and '"text":"yes"' in answer.replace(" ", "")
