"""A server of raw bytes, for answers that no decent server would give, and a client's calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tokenmill.bench.load.http import Client, parse_url
from tokenmill.bench.load.stream import Exchange
from tokenmill.bench.load.target import send_one

Respond = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


def ask_raw(respond: Respond, num: int = 1, timeout_s: float = 5.0) -> list[Exchange]:
    """Send `num` calls one after another to a server of raw bytes."""

    async def go() -> list[Exchange]:
        server = await asyncio.start_server(respond, "127.0.0.1", 0)
        client = Client(
            parse_url(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), "/completions", timeout_s=timeout_s
        )
        try:
            return [await send_one(client, b"{}") for _ in range(num)]
        finally:
            await client.close()
            server.close()
            # The server's side of each connection notices the end and closes its own.
            await asyncio.sleep(0.02)

    return asyncio.run(go())


async def read_request(reader: asyncio.StreamReader) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)


ANSWER = b'{"choices":[{"text":"hi","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":4}}'
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
)
