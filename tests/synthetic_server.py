"""A server with exactly known latencies: it answers by a script of send times and records when it really sent.

Speaks enough of OpenAI's API for a load generator: /v1/models, /v1/completions and /v1/chat/completions (streamed),
/metrics. Each answer follows a script: a delay to the first token and from token to token, drawn by a seed from the
request's number. What a client measures can be held against `Sent`: the moments the bytes were given to the kernel, on
the same monotonic clock. As a program it prints its port, serves, and on SIGTERM writes its records as JSON.

    python tests/synthetic_server.py --ttft 0.02 --itl 0.005 --jitter 0.2 --records OUT
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True)
class Script:
    """ttft_s, itl_s: means. jitter: each delay is drawn evenly within +- that share of it. tokens_per_event: how many
    tokens come in one event. fail_every: each such request gets status fail_status instead, and a Retry-After that is
    not 0. refused_key: requests with this key get the same. drop_every: each such connection is cut in the middle of
    its answer. max_running: requests served at once; more wait for their turn, which makes an overload. usage,
    cached_tokens: what is said at the end. takes_tokens: prompts may be token ids."""

    ttft_s: float = 0.02
    itl_s: float = 0.005
    jitter: float = 0.0
    tokens_per_event: int = 1
    fail_every: int = 0
    refused_key: str = ""
    fail_status: int = 500
    retry_after_s: float = 0.0
    drop_every: int = 0
    max_running: int = 0
    usage: bool = True
    cached_tokens: int | None = None
    takes_tokens: bool = True
    seed: int = 0

    def delays(self, number: int, num_events: int) -> list[float]:
        rng = random.Random(f"{self.seed}/{number}")
        means = [self.ttft_s, *([self.itl_s] * (num_events - 1))]
        return [mean * (1 + self.jitter * (2 * rng.random() - 1)) for mean in means]


@dataclass
class Sent:
    """One answered request. Times are time.perf_counter's: arrival of its last byte, each event's send."""

    number: int
    arrived_s: float
    request_id: str
    body: dict[str, Any]
    key: str = ""
    events_s: list[float] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """One client connection: reads requests one at a time, writes what answers give it."""

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._serve_next()

    def _serve_next(self) -> None:
        if self._busy or self._transport is None:
            return
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        request_line, *lines = head.decode().split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            return
        body, self._buffer = rest[:length], rest[length:]
        method, path, _ = request_line.split(" ")
        if method == "GET":
            self._reply(200, *self._shared.page(path))
            self._serve_next()
            return
        self._busy = True
        self._shared.accept(self, path, json.loads(body), headers)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def cut(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        self._busy = False
        self._serve_next()

    def _reply(self, status: int, content_type: str, text: str, more: bytes = b"") -> None:
        body = text.encode()
        self.write(
            b"HTTP/1.1 %d X\r\nContent-Type: %b\r\n%bContent-Length: %d\r\n\r\n%b"
            % (status, content_type.encode(), more, len(body), body)
        )

    def refuse(self, status: int, message: str, retry_after_s: float = 0.0) -> None:
        more = b"Retry-After: %g\r\n" % retry_after_s if retry_after_s else b""
        self._reply(status, "application/json", json.dumps({"error": {"message": message, "code": status}}), more)
        self.end()


class _Shared:
    """One script and one set of records for all connections."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.records: list[Sent] = []
        self.num_tokens = 0
        self._running = 0
        self._waiting: list[Callable[[], None]] = []

    def page(self, path: str) -> tuple[str, str]:
        if path.endswith("/models"):
            return "application/json", json.dumps({"data": [{"id": "synthetic"}]})
        num = len(self.records)
        return "text/plain", (
            f"# TYPE synthetic_tokens counter\nsynthetic_tokens_total {self.num_tokens}\n"
            f"# TYPE synthetic_running gauge\nsynthetic_running {self._running}\n"
            f'# TYPE synthetic_seconds histogram\nsynthetic_seconds_bucket{{le="+Inf"}} {num}\n'
            f"synthetic_seconds_sum {0.5 * num}\nsynthetic_seconds_count {num}\n"
        )

    def accept(self, connection: _Connection, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        script = self.script
        key = headers.get("authorization", "").removeprefix("Bearer ")
        sent = Sent(len(self.records), time.perf_counter(), headers.get("x-request-id", ""), body, key)
        self.records.append(sent)
        is_refused = bool(script.refused_key) and sent.key == script.refused_key
        if is_refused or (script.fail_every and sent.number % script.fail_every == script.fail_every - 1):
            connection.refuse(script.fail_status, "as the script says", script.retry_after_s)
            return
        if isinstance(body.get("prompt"), list) and not script.takes_tokens:
            connection.refuse(400, "prompt must be text")
            return
        answer = _Answer(self, connection, sent, path.endswith("/chat/completions"))
        if script.max_running and self._running >= script.max_running:
            self._waiting.append(answer.start)
        else:
            self._running += 1
            answer.start()

    def ended(self) -> None:
        if self._waiting:
            self._waiting.pop(0)()
        else:
            self._running -= 1


class _Answer:
    """Sends one answer by its script. Delays count from the request's start, so a late send does not delay the next."""

    def __init__(self, shared: _Shared, connection: _Connection, sent: Sent, is_chat: bool) -> None:
        self._shared, self._connection, self._sent, self._is_chat = shared, connection, sent, is_chat
        body, per_event = sent.body, shared.script.tokens_per_event
        num_tokens = int(body.get("max_tokens") or 16)
        self._counts = [min(per_event, num_tokens - i) for i in range(0, num_tokens, per_event)]
        self._delays = shared.script.delays(sent.number, len(self._counts))
        self._next = 0
        self._due_s = 0.0

    def start(self) -> None:
        self._due_s = time.perf_counter() + self._delays[0]
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        role = (
            _chunk({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}) if self._is_chat else b""
        )
        self._connection.write(head + role)
        self._wait()

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(max(0.0, self._due_s - time.perf_counter()), self._send)

    def _send(self) -> None:
        script, i = self._shared.script, self._next
        is_last = i == len(self._counts) - 1
        if script.drop_every and self._sent.number % script.drop_every == script.drop_every - 1 and i == 1:
            self._connection.cut()
            self._shared.ended()
            return
        data = _token_event(self._counts[i], is_last, self._is_chat)
        now_s = time.perf_counter()
        self._connection.write(data)
        self._sent.events_s.append(now_s)
        self._shared.num_tokens += self._counts[i]
        if is_last:
            self._finish()
            return
        self._next += 1
        self._due_s += self._delays[self._next]
        self._wait()

    def _finish(self) -> None:
        script, prompt = self._shared.script, self._sent.body.get("prompt")
        num_input = len(prompt) if isinstance(prompt, list) else len(json.dumps(self._sent.body).split())
        usage: dict[str, Any] = {"prompt_tokens": num_input, "completion_tokens": sum(self._counts)}
        if script.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": script.cached_tokens}
        tail = _chunk({"choices": [], "usage": usage}) if script.usage else b""
        self._connection.write(tail + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        self._connection.end()
        self._shared.ended()


@lru_cache
def _token_event(num_tokens: int, is_last: bool, is_chat: bool) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
    text = " word" * num_tokens
    return _chunk({"choices": [choice | ({"delta": {"content": text}} if is_chat else {"text": text})]})


def _chunk(event: dict[str, Any]) -> bytes:
    data = b"data: %b\n\n" % json.dumps(event).encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(script: Script, port: int = 0) -> tuple[asyncio.Server, int, list[Sent]]:
    """Start listening on 127.0.0.1: (server, port, records)."""
    shared = _Shared(script)
    server = await asyncio.get_running_loop().create_server(
        lambda: _Connection(shared), "127.0.0.1", port, backlog=1024
    )
    return server, server.sockets[0].getsockname()[1], shared.records


async def _main(script: Script, port: int, records: Path | None) -> None:
    server, bound, sent = await serve(script, port)
    print(bound, flush=True)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)
    await stopped.wait()
    server.close()
    if records is not None:
        plain = [asdict(one) | {"body": {}} for one in sent]
        records.write_text(json.dumps(plain))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, kind in Script.__annotations__.items():
        default = Script.__dataclass_fields__[name].default
        flag = f"--{name.removesuffix('_s').replace('_', '-')}"
        if kind == "bool":
            parser.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=default)
        else:
            parser.add_argument(flag, dest=name, type={"float": float, "str": str}.get(kind, int), default=default)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--records", type=Path)
    args = vars(parser.parse_args())
    port, records = args.pop("port"), args.pop("records")
    try:
        from uvloop import new_event_loop as factory
    except ImportError:
        factory = None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_main(Script(**args), port, records))


if __name__ == "__main__":
    sys.exit(main())
