"""Tools of MCP servers in one call of /v1/responses: what is said of them, which may be called, and what came of it.

The model knows such a tool as a function of one name, made of its server's label and its own. One call is made at a
time, and what it gave is part of the conversation of the next turn. `authorization` and headers are in the objects of
one call in memory, and in nothing that is shown or kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ...core.errors import InvalidRequest, TokenmillError
from ..fields import Fields, kind_name
from .items import Item
from .tools import qualified, refuse_others

MAX_SERVERS, MAX_TOOLS = 16, 128
_FORBIDDEN = ("host", "content-length", "transfer-encoding", "connection", "cookie")


class McpFailed(TokenmillError):
    """A server could not be asked, or says that a call failed."""


class McpTool(msgspec.Struct, frozen=True):
    name: str
    description: str = ""
    input_schema: dict[str, Any] = {}
    is_read_only: bool = False


class McpServers(Protocol):
    """The MCP servers that may be asked."""

    def is_allowed(self, url: str) -> bool: ...

    async def list_tools(self, url: str, headers: Mapping[str, str]) -> list[McpTool]:
        """Raises McpFailed."""
        ...

    async def call(self, url: str, headers: Mapping[str, str], name: str, arguments: dict[str, Any]) -> str:
        """What the tool gives, as text. Raises McpFailed."""
        ...


@dataclass(frozen=True, slots=True)
class _Filter:
    """names, is_read_only: what a tool must have; None: either."""

    names: frozenset[str] | None = None
    is_read_only: bool | None = None

    def takes(self, tool: McpTool) -> bool:
        fits = self.is_read_only is None or tool.is_read_only == self.is_read_only
        return fits and (self.names is None or tool.name in self.names)


@dataclass(frozen=True, slots=True)
class _Server:
    where: str
    label: str
    url: str
    headers: Mapping[str, str] = field(repr=False)
    allowed: _Filter
    always: _Filter | None
    never: _Filter | None

    def needs_approval(self, tool: McpTool) -> bool:
        """Where nothing is said of a tool, it does."""
        if self.always is not None and self.always.takes(tool):
            return True
        return self.never is None or not self.never.takes(tool)


@dataclass(slots=True)
class McpCalls:
    """What one call may do with MCP servers. told: of their tools, as the parser needs it; lists: items that show
    them; items: what its response begins with."""

    servers: McpServers
    by_label: dict[str, _Server]
    told: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    lists: list[Item] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    async def list_tools(self) -> None:
        """Ask each server. Raises InvalidRequest for one that does not answer."""
        for server in self.by_label.values():
            try:
                found = await self.servers.list_tools(server.url, server.headers)
            except McpFailed as error:
                message = f"The tools of the MCP server {server.label!r} cannot be listed: {error.message}"
                raise InvalidRequest(message, param=server.where) from None
            tools = [tool for tool in found if server.allowed.takes(tool)][:MAX_TOOLS]
            self.told[server.label] = [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "needs_approval": server.needs_approval(tool),
                }
                for tool in tools
            ]
            shown = [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.input_schema,
                    "annotations": {"read_only": tool.is_read_only},
                }
                for tool in tools
            ]
            self.lists.append({"type": "mcp_list_tools", "server_label": server.label, "tools": shown, "error": None})

    async def call(self, label: str, name: str, arguments: str) -> dict[str, Any]:
        """`output`, or `error`, of a call, as its item has it."""
        server = self.by_label.get(label)
        if server is None or name not in [tool["name"] for tool in self.told[label]]:
            return _error(f"{qualified(label, name)!r} is none of the tools of this call.")
        try:
            given = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
            return {"output": await self.servers.call(server.url, server.headers, name, given), "error": None}
        except (msgspec.MsgspecError, RecursionError):
            return _error("The arguments are not an object of JSON.")
        except McpFailed as error:
            return _error(error.message)

    async def approved(self, items: Sequence[Item]) -> list[Item]:
        """The calls that the items approve and that were not made yet, made. `items`: of all the conversation."""
        requests = {item["id"]: item for item in items if item["type"] == "mcp_approval_request" and "id" in item}
        made = {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}
        found = []
        for item in items:
            if item["type"] != "mcp_approval_response" or not item["approve"]:
                continue
            name = item["approval_request_id"]
            if name in made or name not in requests:
                continue
            made.add(name)
            asked = requests[name]
            result = await self.call(asked["server_label"], asked["name"], asked["arguments"])
            found.append(
                {
                    "type": "mcp_call",
                    "status": "completed" if result["error"] is None else "failed",
                    "approval_request_id": name,
                    **{key: asked[key] for key in ("server_label", "name", "arguments")},
                    **result,
                }
            )
        return found


def _error(message: str) -> dict[str, Any]:
    return {"output": None, "error": {"type": "mcp_tool_execution_error", "content": message[:1000]}}


def read_servers(tools: Any, servers: McpServers) -> McpCalls | None:
    """The MCP servers among `tools`; None where there is none. Raises InvalidRequest naming the field."""
    found: dict[str, _Server] = {}
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if isinstance(tool, dict) and tool.get("type") == "mcp":
            server = _read(f"tools[{index}]", tool, servers)
            if server.label in found:
                raise InvalidRequest(f"tools[{index}].server_label is that of an MCP server before it.", param="tools")
            found[server.label] = server
    if len(found) > MAX_SERVERS:
        raise InvalidRequest(f"tools may hold at most {MAX_SERVERS} MCP servers.", param="tools")
    return McpCalls(servers, found) if found else None


def _read(where: str, tool: dict[str, Any], servers: McpServers) -> _Server:
    fields = Fields(tool, where)
    fields.text("type"), fields.text("server_description")
    fields.any("allowed_callers"), fields.flag("defer_loading")
    for name in ("connector_id", "tunnel_id"):
        if fields.any(name) is not None:
            raise InvalidRequest(f"{where}.{name} is not supported here; give server_url.", param=f"{where}.{name}")
    label, url = fields.required_text("server_label"), fields.required_text("server_url")
    if not servers.is_allowed(url):
        raise InvalidRequest(
            f"{where}.server_url is none that this server may ask (--allowed-mcp-servers).", param=f"{where}.server_url"
        )
    headers = fields.object("headers") or {}
    for name, value in headers.items():
        plain = isinstance(value, str) and value.isprintable() and value.isascii() and len(value) <= 8192
        if not plain or not name.replace("-", "").isalnum() or not name.isascii() or name.lower() in _FORBIDDEN:
            raise InvalidRequest(f"{where}.headers may not have {name[:100]!r} so.", param=f"{where}.headers")
    authorization = fields.text("authorization")
    if authorization is not None:
        if not authorization.isascii() or not authorization.isprintable() or len(authorization) > 8192:
            raise InvalidRequest(f"{where}.authorization must be printable ASCII.", param=f"{where}.authorization")
        headers = {**headers, "authorization": f"Bearer {authorization}"}
    allowed = _filter(f"{where}.allowed_tools", fields.any("allowed_tools")) or _Filter()
    always, never = _approval(f"{where}.require_approval", fields.any("require_approval"))
    refuse_others(fields)
    return _Server(where, label, url, headers, allowed, always, never)


def _filter(where: str, given: Any) -> _Filter | None:
    if given is None:
        return None
    if isinstance(given, list):
        given = {"tool_names": given}
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be an array of names or an object, got {kind_name(given)}.", param=where)
    fields = Fields(given, where)
    names, read_only = fields.array("tool_names"), fields.flag("read_only")
    refuse_others(fields)
    if names is not None and not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"{where}.tool_names must be an array of strings.", param=where)
    return _Filter(None if names is None else frozenset(names), read_only)


def _approval(where: str, given: Any) -> tuple[_Filter | None, _Filter | None]:
    """(which tools always need it, which never do)."""
    if given in (None, "always"):
        return _Filter(), None
    if given == "never":
        return None, _Filter()
    if not isinstance(given, dict):
        raise InvalidRequest(f"{where} must be 'always', 'never' or an object with these.", param=where)
    fields = Fields(given, where)
    found = _filter(f"{where}.always", fields.any("always")), _filter(f"{where}.never", fields.any("never"))
    refuse_others(fields)
    return found
