"""What every path shares: who may call (web pages, API keys), how a call is named (X-Request-Id), errors as JSON."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.errors import Fault, Style, anthropic_style, describe, headers, style_of
from ..api.json_reply import JSONReply
from ..control.observe.call_context import CALL
from ..control.tenants.access import Access, Credential
from ..control.tenants.keys import digest_of
from ..core.errors import AuthenticationFailed, EngineFailed, Forbidden, TokenmillError
from ..core.masking import Mask
from ..core.tenant import ADAPTERS, ANYONE, OPERATOR
from .callers import Visitors
from .connections import Clients


class Begun:
    """Something awaited whose first steps have been taken elsewhere, up to where it waits."""

    def __init__(self, steps: Generator[Any, Any, Any], waits_for: Any) -> None:
        self._steps = steps
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            yield self._waits_for
        except BaseException:
            self._steps.close()
            raise
        return (yield from self._steps)


OPEN_PATHS = frozenset(
    {"/", "/health", "/v1/health", "/ping", "/version", "/metrics", "/metrics/workers", "/openapi.json", "/docs"}
) | {"/.well-known/jwks.json"}
_OPEN_BELOW = "/console/"
"""Static files, without any data in them."""
_MAX_ID = 256
_MAX_SHOWN = 200
_ALIKE = 0.8
"""How much of a wrong path and the one that is offered instead must be the same."""

_NO_PATH, _NO_METHOD = "unknown_url", "method_not_supported"
"""OpenAI's words."""

_OPEN_SCOPES = frozenset((OPERATOR, ADAPTERS))


class Gate:
    """ASGI middleware: checks where a call comes from and its API key, and names it by an X-Request-Id.

    The caller's own, "" where there is none, is in `scope["state"]["request_id"]`, without what `mask` hides; what its
    answer carries in `scope["state"]["told_id"]`: the caller's, or one of `new_id`, which nobody can guess. Who speaks
    Anthropic's API finds it in `request-id` too. Who calls is in `scope["state"]["client"]`; what is kept for a caller
    is `scope["state"]["owner"]`'s, "" without keys; `tenant` and `scopes` say on what terms it is served and what it
    may do, `key` which of the keys given out it has, if any. Paths that monitoring needs stay open.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        visitors: Visitors,
        clients: Clients,
        new_id: Callable[[str], str],
        mask: Mask,
    ) -> None:
        self._app = app
        self._mask = mask
        self._new_id = new_id
        self._visitors = visitors
        self._clients = clients
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope)
        request_id = given.get("x-request-id", "")
        if not (0 < len(request_id) <= _MAX_ID and request_id.isprintable()):
            request_id = ""
        request_id = self._mask(request_id)
        told_id = request_id or self._new_id("req").replace("-", "_", 1)
        is_anthropic = style_for(scope) is anthropic_style
        scope.setdefault("state", {}).update(request_id=request_id, told_id=told_id)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = MutableHeaders(scope=message)
                named["x-request-id"] = told_id
                if is_anthropic:
                    named["request-id"] = told_id
                for name, value in scope["state"].get("ratelimit", {}).items():
                    named[name] = value
            await send(message)

        asks, found = self._access.asks, None
        try:
            self._visitors.check(scope["method"], given)
            if asks:
                found = await self._find(given, is_open=is_open(route_of(scope)))
        except (Forbidden, AuthenticationFailed) as error:
            await error_reply(error, scope)(scope, receive, send_named)
            return
        state = scope["state"]
        if found is None:
            peer = scope.get("client") or ("", 0)
            state["client"] = self._clients.name(peer[0], given.get("x-forwarded-for", ""))
            state["owner"] = ""
            state["tenant"] = ANYONE
            state["scopes"] = frozenset() if asks else _OPEN_SCOPES
        else:
            state["client"] = found.client
            state["owner"] = found.owner
            state["tenant"] = found.tenant
            state["scopes"] = found.scopes
            state["key"] = found.key
        CALL.set(state)
        await self._app(scope, receive, send_named)

    async def _find(self, given: Headers, *, is_open: bool) -> Credential | None:
        """Of one of the keys that were sent: clients fill in the other header with whatever they have. None on an open
        path without a good one. Raises AuthenticationFailed."""
        kind, _, token = given.get("authorization", "").partition(" ")
        sent = [
            digest_of(key) for key in (token if kind.lower() == "bearer" else "", given.get("x-api-key", "")) if key
        ]
        found = self._first(sent)
        if found is not None or is_open:
            return found
        if sent:
            await self._access.look_again()
            found = self._first(sent)
        if found is None:
            raise AuthenticationFailed("Give a valid API key: Authorization: Bearer KEY, or x-api-key: KEY.")
        return found

    def _first(self, digests: Iterable[bytes]) -> Credential | None:
        found = (self._access.find(digest) for digest in digests)
        return next((credential for credential in found if credential is not None), None)


def is_open(route: str) -> bool:
    """Whether a path needs no key."""
    return route in OPEN_PATHS or f"{route}/".startswith(_OPEN_BELOW)


def route_of(scope: Mapping[str, Any]) -> str:
    """The path below the root path, whether or not a proxy has cut that off."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(root + "/") else path


def style_for(scope: Mapping[str, Any]) -> Style:
    """As the API tells errors that a request is for: its clients say so, or else its path does."""
    return (
        anthropic_style
        if any(name == b"anthropic-version" for name, _ in scope["headers"])
        else style_of(route_of(scope))
    )


def told_id(scope: Mapping[str, Any]) -> str:
    """What the response to a request calls it; "" for one that the gate has not seen."""
    state: Mapping[str, str] = scope.get("state", {})
    return state.get("told_id", "")


def error_reply(error: TokenmillError, scope: Mapping[str, Any]) -> Response:
    """As the API tells it that the request is for."""
    body = describe(error, style_for(scope), told_id(scope))
    return JSONReply(body, status_code=error.status, headers=headers(error))


async def on_http(request: HttpRequest, error: Exception) -> Response:
    """What routes refuse by themselves, and the router's own refusals: no such path, wrong method."""
    assert isinstance(error, HTTPException)
    path, code, added = route_of(request.scope), None, dict(error.headers or {})
    message = f"{error.detail}: {request.method} {path[:_MAX_SHOWN]}"
    if error.status_code == 405:
        methods = ", ".join(sorted(_methods_of(request.app.routes, request.scope)))
        message, code, added["Allow"] = (
            f"{path[:_MAX_SHOWN]} takes {methods}, not {request.method}.",
            _NO_METHOD,
            methods,
        )
    elif "endpoint" not in request.scope:
        nearest = nearest_path(path, [each.path for each in request.app.routes if isinstance(each, Route)])
        hint = f"did you mean {request.scope.get('root_path', '')}{nearest}?" if nearest else "/docs lists all paths."
        message, code = f"There is no path {path[:_MAX_SHOWN]}; {hint}", _NO_PATH
    fault = Fault(error.status_code, message, "invalid_request_error", code=code, request_id=told_id(request.scope))
    return JSONReply(style_for(request.scope)(fault), status_code=error.status_code, headers=added)


def _methods_of(routes: Iterable[BaseRoute], scope: Scope) -> set[str]:
    """All that a path takes, by whichever of its routes."""
    return {
        method
        for route in routes
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
        for method in route.methods or ()
    }


def nearest_path(path: str, known: Iterable[str]) -> str:
    """Of the paths known, whose variable parts are taken from `path`, the only one that it begins, or else the one most
    like it; "": none is."""
    if len(path) > _MAX_SHOWN:
        return ""
    path, known = path.rstrip("/"), tuple(known)
    begun = [each for each in known if each.startswith(path + "/") and "{" not in each]
    if path and len(begun) == 1:
        return begun[0]
    filled = (_filled(each.split("/"), path.split("/")) if "{" in each else each for each in known)
    return next(iter(difflib.get_close_matches(path, filter(None, filled), 1, _ALIKE)), "")


def _filled(parts: list[str], given: list[str]) -> str:
    """A path with variable parts as it is meant, where each of its other parts is like the one given; else ""."""
    if len(parts) != len(given):
        return ""
    pairs = [(one if part.startswith("{") else part, one) for part, one in zip(parts, given, strict=True)]
    is_alike = all(difflib.SequenceMatcher(None, part, one).ratio() >= _ALIKE for part, one in pairs)
    return "/".join(part for part, _ in pairs) if is_alike else ""


async def on_unexpected(request: HttpRequest, error: Exception) -> Response:
    """A bug. The traceback goes to the log, not to the client."""
    reply = error_reply(EngineFailed("Internal error; see the server's log."), request.scope)
    reply.headers["x-request-id"] = told_id(request.scope)  # it is made outside of the gate
    return reply
