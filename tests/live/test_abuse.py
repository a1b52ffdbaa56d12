"""A server under abuse from many sides: what others see of it meanwhile, and what it takes.

One server with the real model, attacked in turns by what once held it up or filled its memory. All the while a client
of another address asks for short answers. Nothing may fail but the abuse itself, with a 4xx; nobody else waits; and all
processes together stay within the memory plan that the server printed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from serving import Server, resident_bytes

MOST_TTFT_S = 10.0
MOST_TIMES = 60
"""Of what an answer takes with nobody else there, where that is more: on a busy machine."""

ABUSER, BYSTANDER = "127.0.0.2", "127.0.0.3"
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
ROW = {"role": "user", "content": "a"}
LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
FOLDED = "{{ 'a' | center(1500000000) }}"


def post(server: Server, path: str, body: Any, source: str = ABUSER, timeout_s: float = 60) -> int:
    """The status; 0 where the client gave up first."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s, source_address=(source, 0))
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    except (TimeoutError, ConnectionError):
        return 0
    finally:
        connection.close()


def first_token_s(server: Server) -> float:
    """Seconds to the first text of a short streamed answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30, source_address=(BYSTANDER, 0))
    body = {"prompt": f"It is {time.monotonic_ns()} now.", "max_tokens": 4, "stream": True, "ignore_eos": True}
    start_s = time.monotonic()
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200, (response.status, response.read())
        assert response.readline().startswith(b"data: {")
        taken_s = time.monotonic() - start_s
        assert response.read().endswith(b"data: [DONE]\n\n")
        return taken_s
    finally:
        connection.close()


class Meanwhile:
    """Does `work` again and again while the block runs. What it raises, the block's end raises."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._failure: BaseException | None = None

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._over.wait(0.05):
                self._work()
        except BaseException as failure:
            self._failure = failure


def held_bytes(pid: int) -> int:
    """What a server's processes hold together: shared pages count once."""
    return sum(map(_anonymous_bytes, _tree(pid)))


def _tree(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from _tree(int(child))


def _anonymous_bytes(pid: int) -> int:
    """Memory of its own, in proportion where it is shared; files that are mapped can be dropped and do not count."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss_Anon:"):
                return int(line.split()[1]) << 10
    return 0


def planned_bytes(server: Server) -> int:
    found = re.search(r"at most ([\d.]+) (KiB|MiB|GiB)", server.output)
    assert found is not None, server.output
    return int(float(found[1]) * UNITS[found[2]])


# ---- the abuse ----

Attack = Callable[[Server], list[int]]


def together(*works: Callable[[], int]) -> list[int]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def repeated(path: str, body: Any, times: int = 4, timeout_s: float = 6) -> Attack:
    data = json.dumps(body).encode()
    return lambda server: together(*[lambda: post(server, path, data, timeout_s=timeout_s)] * times)


def flood_of_heads(server: Server) -> list[int]:
    """400 MB of header lines, on connections that never end their head."""

    def one() -> int:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), 5, (ABUSER, 0)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n")
            for _ in range(100):
                raw.sendall(b"h: " + b"v" * 40_000 + b"\r\n")
        return 0

    return together(*[one] * 100)


def half_sent(server: Server) -> list[int]:
    with contextlib.ExitStack() as stack:
        for _ in range(500):
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 5, (ABUSER, 0)))
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n{")
        time.sleep(2)
    return []


def overload(server: Server) -> list[int]:
    """Several times what the machine can do, from a few addresses."""

    def one(number: int) -> int:
        body = {"prompt": f"{number} " + "word " * 300, "max_tokens": 32, "ignore_eos": True}
        return post(server, "/v1/completions", body, source=f"127.0.1.{number % 3 + 1}", timeout_s=5)

    return together(*[lambda number=number: one(number) for number in range(128)])


def bomb(pattern: str) -> Any:
    return {"prompt": "hi", "max_tokens": 30, "guided_regex": pattern}


def bombs(server: Server, number: int = 0) -> list[int]:
    """Eight grammars at once whose first mask explodes, then eight that explode after some tokens."""
    first = [bomb(f"({letter}{{1000}}){{{1000 + number}}}") for letter in "abcdefgh"]
    later = [bomb(f"[{letter}x]{{{9 + number}}}(a{{1000}}){{1000}}") for letter in "abcdefgh"]
    codes = []
    for bodies in (first, later):
        codes += together(*[lambda body=body: post(server, "/v1/completions", body) for body in bodies])
    return codes


WIDE = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(550)}, "additionalProperties": False}
RULES = "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(30)) + 'a30: "x"\n'

ATTACKS: dict[str, Attack] = {
    "grammars that explode": bombs,
    "rules that double": repeated("/v1/completions", {"prompt": "a", "guided_grammar": RULES}),
    "many optional properties": repeated("/v1/completions", {"prompt": "a", "guided_json": WIDE}),
    "a crowd in one call": repeated("/v1/completions", {"prompt": ["a"] * 1024, "max_tokens": 250}, times=1),
    "overload": overload,
    "large texts": repeated("/tokenize", {"prompt": "The sea is wide, " * 600_000}),
    "many stop tokens": repeated("/v1/completions", {"prompt": "a", "stop_token_ids": [7] * 400_000, "n": 32}),
    "many allowed tokens": repeated(
        "/v1/completions", {"prompt": "a", "allowed_token_ids": [*range(1000, 41_000)] * 10, "n": 32, "max_tokens": 4}
    ),
    "a flood of heads": flood_of_heads,
    "half-sent bodies": half_sent,
    "many messages": repeated("/v1/chat/completions", {"messages": [ROW] * 200_000}),
    "many variables": repeated(
        "/v1/chat/completions", {"messages": [ROW], "chat_template_kwargs": {f"k{i}": i for i in range(300_000)}}
    ),
    "endless templates": repeated("/v1/chat/completions", {"messages": [ROW], "chat_template": LOOPS}, times=8),
    "huge templates": repeated("/v1/chat/completions", {"messages": [ROW], "chat_template": FOLDED}, times=8),
    "many alternatives": repeated(
        "/v1/completions", {"prompt": "a", "n": 64, "logprobs": 20, "max_tokens": 8, "ignore_eos": True}, times=2
    ),
}


@pytest.mark.sampled(1 / 3)
def test_abuse_harms_only_the_abuser(smollm2: Path) -> None:
    with Server("--kv-cache-memory-bytes", "2GiB", "--trust-request-chat-template") as server:
        first_token_s(server)
        most_s = max(MOST_TTFT_S, MOST_TIMES * statistics.median(first_token_s(server) for _ in range(9)))
        assert post(server, "/v1/chat/completions", {"messages": [ROW], "max_tokens": 1}) == 200
        held: list[int] = []
        waits: dict[str, list[float]] = {name: [] for name in ATTACKS}
        statuses: dict[str, list[int]] = {}
        with Meanwhile(lambda: held.append(held_bytes(server.process.pid))):
            for name, attack in ATTACKS.items():
                with Meanwhile(lambda seen=waits[name]: seen.append(first_token_s(server))):
                    statuses[name] = attack(server)
        assert server.request("GET", "/health")[0] == 200
        failed = {name: codes for name, codes in statuses.items() if any(code >= 500 for code in codes)}
        assert not failed, failed
        all_s = sorted(wait_s for seen in waits.values() for wait_s in seen)
        slowest = {name: f"{max(seen, default=0):.2f} s" for name, seen in waits.items()}
        assert all_s[int(0.99 * len(all_s))] < most_s, (most_s, slowest)
    assert 0 < max(held) < planned_bytes(server), (max(held), server.output)


WAITS = re.compile(r"The wait would be ([\d.]+) s, and at most 1 s are allowed; retry in (\d+) s\.")


@pytest.mark.sampled(1 / 3)
def test_refusals_of_a_burst_to_a_fresh_server_tell_one_story(smollm2: Path) -> None:
    """More than may wait, twice: of what is refused for its wait, Retry-After is what the message says, and no
    less than the wait is too long. The rest is answered."""
    refused: list[tuple[str, str]] = []

    def one(number: int) -> int:
        connection = http.client.HTTPConnection(
            "127.0.0.1", server.port, timeout=300, source_address=(f"127.0.1.{number % 16 + 1}", 0)
        )
        body = {"prompt": f"{number} " + "word " * 300, "max_tokens": 8, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        if response.status == 429:
            refused.append((answer["error"]["message"], response.headers["retry-after"]))
        return response.status

    with Server("--max-queue-s", "1") as server:
        for burst in range(2):
            codes = together(*[lambda number=32 * burst + each: one(number) for each in range(32)])
            assert set(codes) <= {200, 429} and 200 in codes, codes
    stories = [(WAITS.fullmatch(message), told) for message, told in refused]
    assert any(found for found, _ in stories), refused
    for found, told in stories:
        assert found is None or (found[2] == told and int(told) >= float(found[1]) - 1 - 0.05), refused


MOST_GROWN_BYTES = 160 << 20
"""Of an engine: the grammars that are kept, and eight that are at work."""

MOST_BOMB_S = 0.25
"""Processor time of an engine for one, its tokens included: several times what it takes, and half of what one takes
that nothing bounds."""


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.sampled(1 / 3)
def test_grammars_that_explode_cost_an_engine_little(smollm2: Path) -> None:
    """Eight at once, four times, each pattern new: refused as bad requests, and the engine neither grows nor works."""
    with Server("--kv-cache-memory-bytes", "50MiB") as server:
        assert post(server, "/v1/completions", {"prompt": "a", "guided_choice": ["yes"], "max_tokens": 4}) == 200
        engine = server.engine_pid
        assert engine is not None
        bytes_before, began_s = resident_bytes(engine), processor_s(engine)
        for number in range(4):
            assert bombs(server, number) == [400] * 16
        assert resident_bytes(engine) - bytes_before < MOST_GROWN_BYTES
        assert processor_s(engine) - began_s < 64 * MOST_BOMB_S
