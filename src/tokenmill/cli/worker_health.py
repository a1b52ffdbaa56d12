"""A worker's answers to probes: GET /live, whether its steps get on, and GET /ready, whether a front end has it.

    200 {"status": "ok", ...}       503 {"status": "stuck" | "not joined", ...}

A process that is stopped, or whose event loop is held up, answers nothing: probes count that as a failure too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from ..server.listen import listening
from .worker_options import shown_address

_REQUEST_BYTES = 8192
_REQUEST_S = 5.0

Look = Callable[[], tuple[str, Mapping[str, Any]]]
"""What is wrong, "" for nothing, and facts to tell."""


@asynccontextmanager
async def answering(address: tuple[str, int] | None, looks: Mapping[str, Look]) -> AsyncIterator[None]:
    """Answers at `address`, if there is one. `looks`: by path. Raises ConfigError where the address is taken."""
    if address is None:
        yield
        return
    with listening(*address) as listener:
        server = await asyncio.start_server(_Answers(looks).answer, sock=listener, limit=_REQUEST_BYTES)
        async with server:
            print(f"tokenmill: probes are answered at {shown_address(*listener.getsockname()[:2])}", flush=True)
            yield


class _Answers:
    def __init__(self, looks: Mapping[str, Look]) -> None:
        self._looks = looks

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError, OSError):
            pass
        finally:
            writer.close()

    def _response(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        look = self._looks.get(rest.split(b" ", 1)[0].split(b"?", 1)[0].decode("latin-1"))
        if method not in (b"GET", b"HEAD") or look is None:
            status, body = "404 Not Found", {"status": "not found"}
        else:
            wrong, facts = look()
            status = "503 Service Unavailable" if wrong else "200 OK"
            body = {"status": wrong or "ok", **facts}
        data = json.dumps(body).encode()
        lines = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        return f"{lines}Connection: close\r\n\r\n".encode() + (b"" if method == b"HEAD" else data)
