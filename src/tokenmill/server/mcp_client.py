"""Asks MCP servers for their tools and calls them, by the official SDK (the extra `mcp`), over streamable HTTP.

Only servers that the operator has named are asked: scheme, host and port are equal, and the path begins with theirs, at
the border of a segment. Each request is looked at, so that nothing that an answer says leads elsewhere; a redirect is
an error. Each operation has a connection of its own, and bounds of time and bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from ..api.responses.mcp import MAX_TOOLS, McpFailed, McpTool
from ..core.errors import ConfigError

LIST_S, CALL_S, END_S = 20.0, 60.0, 2.0
MAX_BYTES = 1 << 20
"""Of all that a server answers in one operation."""
_LOUD = ("mcp", "httpx2", "httpcore2")
_PORTS = {"http": 80, "https": 443}


class McpClient:
    """allowed: URLs. Raises ConfigError for what is none, and where the SDK is not installed."""

    def __init__(self, allowed: Sequence[str]) -> None:
        for url in allowed:
            if _parts(url) is None:
                raise ConfigError(f"--allowed-mcp-servers must be URLs of http or https, got {url!r}.")
        try:
            import mcp.client.streamable_http  # noqa: F401
        except ImportError:
            raise ConfigError("--allowed-mcp-servers needs the MCP SDK: pip install 'tokenmill[mcp]'.") from None
        self._allowed = tuple(allowed)
        for name in _LOUD:  # they tell of each request, with its URL
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def is_allowed(self, url: str) -> bool:
        return any(covers(allowed, url) for allowed in self._allowed)

    async def list_tools(self, url: str, headers: Mapping[str, str]) -> list[McpTool]:
        async with _told(LIST_S, headers), self._session(url, headers) as session:
            found: list[McpTool] = []
            cursor = None
            while True:
                listed = await session.list_tools(cursor=cursor) if cursor else await session.list_tools()
                for tool in listed.tools:
                    hints = tool.annotations
                    is_read_only = hints is not None and hints.read_only_hint is True
                    found.append(McpTool(tool.name, tool.description or "", tool.input_schema, is_read_only))
                cursor = listed.next_cursor
                if not cursor or len(found) >= MAX_TOOLS:
                    return found[:MAX_TOOLS]

    async def call(self, url: str, headers: Mapping[str, str], name: str, arguments: dict[str, Any]) -> str:
        async with _told(CALL_S, headers), self._session(url, headers) as session:
            result = await session.call_tool(name, arguments)
        text = "\n".join(each.text for each in result.content if each.type == "text")
        others = sorted({each.type for each in result.content if each.type != "text"})
        text = "\n".join([*filter(None, [text]), *(f"[{kind} that cannot be shown]" for kind in others)])
        if result.is_error:
            raise McpFailed(text or "The tool failed.")
        return text

    @contextlib.asynccontextmanager
    async def _session(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
        import httpx2
        from mcp.client.session import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        is_over = False

        async def look(request: Any) -> None:
            if is_over:  # the SDK would tell the server of the end, and wait for its answer
                raise McpFailed("The call was cancelled.")
            if not self.is_allowed(str(request.url)):
                raise McpFailed("The server leads to an address that may not be asked.")
            if request.method == "DELETE":  # of the session, which has given what was asked of it
                request.extensions["timeout"] = httpx2.Timeout(END_S).as_dict()

        async def refuse(response: Any) -> None:
            if response.is_redirect:
                raise McpFailed("The server redirects, which is not followed.")
            if response.headers.get("content-encoding", "identity") != "identity":  # it could unfold to any size
                raise McpFailed("The server compresses its answers, which it was not asked for.")

        async with (
            httpx2.AsyncClient(
                headers={**headers, "accept-encoding": "identity"},
                timeout=httpx2.Timeout(CALL_S),
                transport=_bounded(httpx2),
                trust_env=False,
                event_hooks={"request": [look], "response": [refuse]},
            ) as http,
            streamable_http_client(url, http_client=http, max_sse_event_size=MAX_BYTES) as streams,
            ClientSession(streams[0], streams[1], read_timeout_seconds=CALL_S) as session,
        ):
            try:
                await session.initialize()
                yield session
            except asyncio.CancelledError:
                is_over = True
                raise


def _bounded(httpx2: Any) -> Any:
    """A transport, all of whose answers together have at most MAX_BYTES."""
    num_bytes = 0

    class Counted(httpx2.AsyncByteStream):
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal num_bytes
            async for data in self._inner:
                num_bytes += len(data)
                if num_bytes > MAX_BYTES:
                    raise McpFailed(f"The server answers with more than {MAX_BYTES} bytes.")
                yield data

        async def aclose(self) -> None:
            await self._inner.aclose()

    class Bounded(httpx2.AsyncHTTPTransport):
        async def handle_async_request(self, request: Any) -> Any:
            response = await super().handle_async_request(request)
            response.stream = Counted(response.stream)
            return response

    return Bounded(trust_env=False)


@contextlib.asynccontextmanager
async def _told(within_s: float, headers: Mapping[str, str]) -> AsyncIterator[None]:
    """What fails in the block, in words, without what the headers hold."""
    try:
        async with asyncio.timeout(within_s):
            yield
    except TimeoutError:
        raise McpFailed(f"The server did not answer within {within_s:g} s.") from None
    except McpFailed:
        raise
    except Exception as error:
        found: BaseException = error
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if isinstance(found, McpFailed):
            raise found from None
        text = str(found) or type(found).__name__
        for value in headers.values():
            for secret in filter(None, (value, value.removeprefix("Bearer "))):
                text = text.replace(secret, "...")
        raise McpFailed(text[:300]) from None


def _parts(url: str) -> SplitResult | None:
    """None for what is no URL of a server. A user, a password or a fragment are in none."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    is_plain = url.isascii() and url.isprintable() and "\\" not in url and " " not in url
    if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc or parts.fragment or not is_plain:
        return None
    return parts


def covers(allowed: str, url: str) -> bool:
    """Whether a URL is that of an allowed one, or below it."""
    of, asked = _parts(allowed), _parts(url)
    if of is None or asked is None:
        return False

    def origin(parts: SplitResult) -> tuple[str, str | None, int]:
        return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme]

    below, path = of.path.rstrip("/"), asked.path
    segments = [each.partition(";")[0] for each in unquote(unquote(path)).split("/")]  # some servers drop what follows
    if ".." in segments or "%2f" in path.lower() or "%5c" in path.lower():
        return False
    return origin(of) == origin(asked) and (path == below or path.startswith(f"{below}/") or not below)
