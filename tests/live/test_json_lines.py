"""Every line that goes out is one line for whoever splits text by `str.splitlines`, as many clients do."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import tokenmill
from scripted import Served
from tokenmill.api.json_encoder import encode_json
from tokenmill.cli.logs import JSONLines
from tokenmill.core.masking import Mask
from tokenmill.server.files.lines import answered, unanswered

SAID = "a\u2028b\u2029c\x85d\u2019é\u0085"
CHAT: dict[str, Any] = {"model": "toy", "messages": [{"role": "user", "content": "hi"}]}
RAW = ("/v1/completions", {"model": "toy", "prompt": "hi", "max_tokens": 40, "logprobs": 2})
CALLS = [
    ("/v1/chat/completions", CHAT | {"logprobs": True}),
    RAW,
    ("/v1/responses", {"model": "toy", "input": SAID}),
    ("/v1/messages", CHAT | {"max_tokens": 40}),
    ("/api/chat", CHAT),
    ("/api/generate", {"model": "toy", "prompt": "hi"}),
    ("/completion", {"prompt": "hi", "n_predict": 40}),
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served(lambda prompt: SAID) as running:
        yield running


def test_what_is_escaped_reads_as_the_same() -> None:
    """Nothing changes but how three characters are written; neighbours of theirs in UTF-8 stay as they are."""
    value = {SAID: [SAID, "plain", "\u2027\u202a\x84\x86\u00e2", msgspec.Raw('"\u2028"'.encode())]}
    data = encode_json(value)
    assert json.loads(data) == value | {SAID: [*value[SAID][:3], "\u2028"]}
    assert len(data.decode().splitlines()) == 1 and "\u2027\u202a\x84\x86" in data.decode()


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("stream", [False, True])
def test_lines_of_an_answer(served: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    """Split either way an answer has the same lines, and the text is whole."""
    status, text, _ = served.ask(path, body | {"stream": stream})
    assert status == 200
    assert text.splitlines() == text.removesuffix("\n").split("\n")
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith(("data: {", "{"))]
    said = json.dumps([json.loads(line) for line in lines], ensure_ascii=False)
    assert all(char in said for char in SAID)


def test_lines_of_a_batch() -> None:
    body = msgspec.Raw(msgspec.json.encode({"said": SAID}))
    lines = answered("l", SAID, 200, "r", body) + unanswered("l", "c", "expired", SAID)
    assert len(lines.decode().splitlines()) == 2


def test_lines_of_the_log() -> None:
    record = logging.LogRecord("n", logging.INFO, "p", 1, SAID, None, None)
    line = JSONLines(Mask()).format(record)
    assert len(line.splitlines()) == 1 and json.loads(line)["message"] == SAID


def test_one_encoder_writes_all_json_of_the_server() -> None:
    """But what a chat template reads as text: there characters stay as they are."""
    package = Path(tokenmill.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for room in ("api", "server")
        for path in (package / room).rglob("*.py")
        if any(name in path.read_text() for name in ("msgspec.json.encode", "msgspec.json.Encoder"))
    }
    assert found == {"api/json_encoder.py", "api/messages/history.py"}
