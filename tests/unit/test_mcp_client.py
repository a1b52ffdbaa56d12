"""MCP servers are asked where the operator allows it and nowhere else, within bounds: real ones, and hostile ones."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import uvicorn

from tokenmill.api.responses.mcp import McpFailed
from tokenmill.core.errors import ConfigError
from tokenmill.server import mcp_client
from tokenmill.server.mcp_client import McpClient, covers

SECRET = "secret-of-the-caller"


@pytest.mark.parametrize(
    ("allowed", "url", "expected"),
    [
        ("https://a.test/mcp", "https://a.test/mcp", True),
        ("https://a.test/mcp", "https://a.test/mcp/x?y=1", True),
        ("https://a.test/mcp/", "https://a.test/mcp", True),
        ("https://a.test", "https://A.test:443/any", True),
        ("https://a.test/mcp", "https://a.test/mcp2", False),
        ("https://a.test/mcp", "https://a.test/", False),
        ("https://a.test/mcp", "https://a.test/mcp/../admin", False),
        ("https://a.test/mcp", "https://a.test/mcp/%2e%2e/admin", False),
        ("https://a.test/mcp", "https://a.test/mcp/%252e%252e/admin", False),
        ("https://a.test/mcp", "https://a.test/mcp/..%2fadmin", False),
        ("https://a.test/mcp", "https://a.test/mcp/..;x=y/admin", False),
        ("https://a.test/mcp", "https://a.test/mcp/%2e%2e%3b/admin", False),
        ("https://a.test/mcp", "https://a.test/mcp\\..\\admin", False),
        ("https://a.test/mcp", "http://a.test/mcp", False),
        ("https://a.test/mcp", "https://a.test:8443/mcp", False),
        ("https://a.test/mcp", "https://a.test.evil/mcp", False),
        ("https://a.test/mcp", "https://evil@a.test/mcp", False),
        ("https://a.test/mcp", "https://a.test@evil/mcp", False),
        ("https://a.test/mcp", "https://a.test/mcp#x", False),
        ("https://a.test/mcp", "https://a.test:x/mcp", False),
        ("https://a.test/mcp", "file:///mcp", False),
        ("https://a.test/mcp", "", False),
    ],
)
def test_what_an_allowed_url_covers(allowed: str, url: str, expected: bool) -> None:
    assert covers(allowed, url) == expected


@pytest.mark.parametrize("url", ["a.test", "ftp://a.test", "https://", "https://u:p@a.test"])
def test_what_is_no_url_of_a_server_stops_the_start(url: str) -> None:
    with pytest.raises(ConfigError, match="allowed-mcp-servers"):
        McpClient([url])


@pytest.fixture(scope="module")
def box() -> Iterator[str]:
    """The URL of a server of the SDK."""
    server = pytest.importorskip("mcp.server", reason="the MCP SDK is not installed").MCPServer("box")
    hints = pytest.importorskip("mcp_types").ToolAnnotations(read_only_hint=True)

    def add(a: int, b: int) -> str:
        """Adds."""
        return str(a + b)

    def fail() -> str:
        raise ValueError("it broke")

    server.tool(annotations=hints)(add)
    server.tool()(fail)
    listener = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_config=None, ws="none"))
    thread = threading.Thread(target=lambda: running.run([listener]))
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
    running.should_exit = True
    thread.join()


def test_tools_of_a_real_server_are_listed_and_called(box: str) -> None:
    client = McpClient([box])

    async def ask() -> None:
        tools = await client.list_tools(box, {"authorization": f"Bearer {SECRET}"})
        assert [(tool.name, tool.is_read_only) for tool in tools] == [("add", True), ("fail", False)]
        assert tools[0].description == "Adds." and set(tools[0].input_schema["properties"]) == {"a", "b"}
        assert await client.call(box, {}, "add", {"a": 1, "b": 2}) == "3"
        for name, arguments in (("add", {"a": "x"}), ("fail", {}), ("none", {})):
            with pytest.raises(McpFailed):
                await client.call(box, {}, name, arguments)

    asyncio.run(ask())


def hostile(answer: Callable[[BaseHTTPRequestHandler], None]) -> tuple[ThreadingHTTPServer, list[str]]:
    """A server that answers each POST so, and the paths it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("content-length", 0)))
            answer(self)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    return server, asked


def redirect(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(307)
    handler.send_header("location", "/admin")
    handler.send_header("content-length", "0")
    handler.end_headers()


def flood(handler: BaseHTTPRequestHandler) -> None:
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "result": "x" * (mcp_client.MAX_BYTES + 1)}).encode()
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def unfold(handler: BaseHTTPRequestHandler) -> None:
    body = gzip.compress(b" " * (mcp_client.MAX_BYTES * 20))
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-encoding", "gzip")
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def refuse(handler: BaseHTTPRequestHandler) -> None:
    body = handler.headers["authorization"].encode()
    handler.send_response(401, SECRET)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def hang(handler: BaseHTTPRequestHandler) -> None:
    handler.connection.settimeout(20)
    handler.rfile.read(1)


@pytest.mark.parametrize("answer", [redirect, flood, unfold, refuse, hang])
def test_hostile_servers_are_bounded(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it redirects nobody goes; what is too much or too slow is dropped; secrets are in no message."""
    pytest.importorskip("mcp", reason="the MCP SDK is not installed")
    monkeypatch.setattr(mcp_client, "LIST_S", 0.5 if answer is hang else 20.0)
    server, asked = hostile(answer)
    url = f"http://127.0.0.1:{server.server_port}/mcp"
    try:
        with pytest.raises(McpFailed) as caught:
            headers = {"authorization": f"Bearer {SECRET}", "x-empty": ""}
            asyncio.run(McpClient([url]).list_tools(url, headers))
    finally:
        server.shutdown()
        server.server_close()
    assert set(asked) == {"/mcp"} and SECRET not in caught.value.message and "......" not in caught.value.message
