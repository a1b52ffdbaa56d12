"""Streams with --resume-file: their ids, who may come back, how long they go on, and what is not kept."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kill import ARGS, write_model
from serving import Server, wait_until

LONG = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 3000, "ignore_eos": True, "seed": 1, "stream": True}
CUT = LONG | {"max_tokens": 1200}
SHORT = LONG | {"max_tokens": 8}
KEYS = ("--api-key", "first-key-of-two", "--api-key", "second-key-of-two")
ONE, OTHER = ({"Authorization": f"Bearer {key}"} for key in KEYS[1::2])
WAITS = {"x-tokenmill-resume": "true"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def serving(model: Path, file: Path, *args: str) -> Iterator[Server]:
    with Server(*ARGS, *KEYS, "--resume-file", str(file), *args, model=str(model)) as server:
        yield server


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    file = tmp_path_factory.mktemp("file") / "resume.db"
    with serving(model, file, "--resume-grace-s", "1", "--max-num-seqs", "4") as server:
        yield server


def call(
    server: Server, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, most: int = 1 << 30
) -> tuple[int, list[bytes]]:
    """(status, the first so many lines of the answer)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, json.dumps(body) if body is not None else None, ONE | (headers or {}))
        response = connection.getresponse()
        lines = []
        for line in response:
            lines.append(line)
            if len(lines) >= most:
                break
        return response.status, lines


def ids(lines: list[bytes]) -> list[int]:
    return [int(line[4:]) for line in lines if line.startswith(b"id: ")]


def id_of(lines: list[bytes]) -> str:
    found = next(line for line in lines if line.startswith(b"data: "))
    return str(json.loads(found[6:])["id"])


def test_a_stream_that_has_ended_is_read_again_from_any_place(server: Server) -> None:
    """By the id of its answer and by X-Request-Id, after=N and Last-Event-ID alike; by its own key alone."""
    status, lines = call(server, "POST", "/v1/completions", SHORT, {"X-Request-Id": "mine"})
    assert status == 200 and lines[-2] == b"data: [DONE]\n"
    numbers = ids(lines)
    assert numbers == list(range(1, len(numbers) + 1))
    path = f"/v1/requests/{id_of(lines)}/stream"
    assert call(server, "GET", path) == (200, lines)
    for after in (0, 3, len(numbers)):
        rest = lines[after * 3 :]
        assert call(server, "GET", f"{path}?after={after}") == (200, rest)
        assert call(server, "GET", "/v1/requests/mine/stream", headers={"Last-Event-ID": str(after)}) == (200, rest)
    assert call(server, "GET", path, headers=OTHER)[0] == 404
    assert call(server, "GET", "/v1/requests/nobody/stream")[0] == 404
    for wrong in ("-1", "x", "1e3", "99999999999"):
        assert call(server, "GET", f"{path}?after={wrong}")[0] == 400


def test_the_request_id_that_an_answer_was_given_opens_its_stream(server: Server) -> None:
    """It is in the head, which a client has before the first event."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(SHORT), ONE)
        response = connection.getresponse()
        name, lines = response.headers["x-request-id"], list(response)
    assert call(server, "GET", f"/v1/requests/{name}/stream") == (200, lines)
    assert call(server, "GET", f"/v1/requests/{name}/stream", headers=OTHER)[0] == 404


def test_a_client_comes_back_while_it_runs(server: Server) -> None:
    """And another connection reads the same at the same time."""
    headers = WAITS | {"X-Request-Id": "long"}
    _, first = call(server, "POST", "/v1/completions", LONG, headers, most=30)
    _, second = call(server, "GET", "/v1/requests/long/stream?after=10", most=60)
    _, third = call(server, "GET", "/v1/requests/long/stream?after=30")
    assert ids(first) + ids(second) + ids(third) == [*range(1, ids(third)[-1] + 1)]
    assert call(server, "GET", "/v1/requests/long/stream") == (200, first + second + third)
    assert server.metrics()["tokenmill:stream_reconnects_total"] >= 3


def test_nobody_comes_back(server: Server) -> None:
    """A stream ends with its connection; where it was asked to wait, only after the grace."""
    for headers in ({}, WAITS):
        call(server, "POST", "/v1/completions", LONG, headers | {"X-Request-Id": "left"}, most=3)
        assert not headers or server.metrics()["tokenmill:streams_kept"] == 1
        wait_until(lambda: server.metrics()["tokenmill:streams_kept"] == 0, "the stream is let go")
        wait_until(server.idle, "the request is cancelled")
        assert headers or call(server, "GET", "/v1/requests/left/stream")[0] == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", SHORT | {"n": 2}),
        ("/v1/completions", SHORT | {"stream": False}),
        ("/v1/completions", SHORT | {"prompt": [[1, 2], [3]]}),
        ("/api/generate", {"model": "tiny", "prompt": "a", "options": {"num_predict": 4}}),
    ],
)
def test_what_is_not_kept_has_no_ids(server: Server, path: str, body: dict[str, Any]) -> None:
    status, lines = call(server, "POST", path, body, {"X-Request-Id": "unkept"})
    assert status == 200 and not ids(lines)
    assert call(server, "GET", "/v1/requests/unkept/stream")[0] == 404


def test_a_call_that_is_refused_says_so(server: Server) -> None:
    status, lines = call(server, "POST", "/v1/completions", SHORT | {"prompt": []})
    assert status == 400 and b"error" in lines[0]


def test_a_key_of_idempotency_and_a_stream_that_is_kept(server: Server) -> None:
    """A repeat gets the answer as it was before it had ids; the stream can be read as well."""
    headers = {"Idempotency-Key": "once", "X-Request-Id": "keyed"}
    _, lines = call(server, "POST", "/v1/completions", SHORT, headers)
    plain = [line for line in lines if not line.startswith(b"id: ")]
    # A repeat is a stream of its own connection: nothing runs, so there is nothing to keep.
    assert call(server, "POST", "/v1/completions", SHORT, headers) == (200, plain)
    assert call(server, "GET", "/v1/requests/keyed/stream") == (200, lines)


def test_an_orderly_restart_goes_on_too(model: Path, tmp_path: Path) -> None:
    """What a stop cuts off is taken up by the next server."""
    file = tmp_path / "resume.db"
    with serving(model, file, "--drain-s", "0") as server:
        _, whole = call(server, "POST", "/v1/completions", CUT, {"X-Request-Id": "plain"})
        _, first = call(server, "POST", "/v1/completions", CUT, WAITS | {"X-Request-Id": "cut"}, most=60)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
    with serving(model, file) as server:
        _, second = call(server, "GET", f"/v1/requests/cut/stream?after={len(ids(first))}")
        assert texts(first + second) == texts(whole)
        assert server.metrics()["tokenmill:streams_resumed_total"] == 1


def test_a_stream_of_a_canary_goes_on_with_its_version(model: Path, tmp_path: Path) -> None:
    """Whatever the name stands for by then: here for nothing."""
    file, versions = tmp_path / "resume.db", ("--upstream", "far=http://127.0.0.1:9", "--canary", "named=1:tiny,0:far")
    with serving(model, file, *versions) as server:
        _, whole = call(server, "POST", "/v1/completions", CUT)
        named = CUT | {"model": "named"}
        _, first = call(server, "POST", "/v1/completions", named, WAITS | {"X-Request-Id": "cut"}, most=60)
        server.process.kill()
        server.process.wait(30)
    with serving(model, file) as server:
        status, second = call(server, "GET", f"/v1/requests/cut/stream?after={len(ids(first))}")
        assert status == 200 and texts(first + second) == texts(whole)


def test_a_server_with_other_numerics_says_that_it_cannot_go_on(model: Path, tmp_path: Path) -> None:
    """What was in the file is there, and behind it an error instead of other text."""
    file = tmp_path / "resume.db"
    with serving(model, file) as server:
        _, first = call(server, "POST", "/v1/completions", CUT, WAITS | {"X-Request-Id": "cut"}, most=60)
        server.process.kill()
        server.process.wait(30)
    with serving(model, file, "--kv-cache-dtype", "bf16") as server:
        status, second = call(server, "GET", "/v1/requests/cut/stream")
        if status == 500:  # the file had none of its outputs yet
            assert "would give other answers" in json.loads(second[0])["error"]["message"]
            return
        _, last = call(server, "GET", "/v1/requests/cut/stream?after=999999")
        error = json.loads(second[-2].removeprefix(b"data: "))["error"]
        assert "would give other answers" in error["message"]
        had, has = texts(first), texts(second[:-3])
        assert had.startswith(has) or has.startswith(had)
        assert last in ([], second[-3:])
        assert ids(second) == list(range(1, len(ids(second)) + 1))


def texts(lines: list[bytes]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events)
