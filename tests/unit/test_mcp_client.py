"""MCP servers are asked where the operator allows it and nowhere else, within bounds: real ones, and hostile ones."""

from __future__ import annotations

import asyncio
import contextlib
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


class Slow(BaseHTTPRequestHandler):
    """Tells of a session, and answers neither its end nor the call of the tool `wait`, until `go_on` is set."""

    is_asked: threading.Event
    go_on: threading.Event

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["content-length"])))
        method = said["method"]
        if method == "tools/call" and said["params"]["name"] == "wait":
            self.is_asked.set()
            self.go_on.wait(60)
        results: dict[str, Any] = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "slow", "version": "1"},
            },
            "tools/list": {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("wait", "give")]},
            "tools/call": {"content": [{"type": "text", "text": "done"}]},
        }
        body = json.dumps({"jsonrpc": "2.0", "id": said.get("id"), "result": results.get(method, {})}).encode()
        with contextlib.suppress(ConnectionError):
            self.send_response(200 if "id" in said else 202)
            self.send_header("content-type", "application/json")
            self.send_header("mcp-session-id", "one")
            self.send_header("content-length", str(len(body)) if "id" in said else "0")
            self.end_headers()
            self.wfile.write(body if "id" in said else b"")

    def do_GET(self) -> None:
        self.send_error(405)

    def do_DELETE(self) -> None:
        self.go_on.wait(60)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("tool", ["wait", "give"])
def test_a_server_is_not_waited_for_when_its_call_is_over(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that was cancelled, nor one that has given its result: the SDK tells the server of the end, and would
    wait a minute for the answer."""
    pytest.importorskip("mcp", reason="the MCP SDK is not installed")
    monkeypatch.setattr(mcp_client, "END_S", 0.1)
    handler = type("_", (Slow,), {"is_asked": threading.Event(), "go_on": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        url = f"http://127.0.0.1:{server.server_port}/mcp"

        async def ask() -> None:
            calling = asyncio.create_task(McpClient([url]).call(url, {}, tool, {}))
            if tool == "wait":
                await asyncio.to_thread(handler.is_asked.wait, 20)  # type: ignore[attr-defined]
                calling.cancel()
            await asyncio.wait((calling,), timeout=20)
            assert calling.done() and calling.cancelled() == (tool == "wait")
            assert tool == "wait" or calling.result() == "done"

        try:
            asyncio.run(ask())
        finally:
            handler.go_on.set()  # type: ignore[attr-defined]
            server.shutdown()


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
