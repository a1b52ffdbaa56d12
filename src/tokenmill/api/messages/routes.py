"""Which path of Anthropic's API leads where."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.errors import InvalidRequest
from ...text.calls import require_tokens
from ..json_reply import JSONReply
from ..port import Server
from ..sandbox import caller_of
from .parse import renamed
from .shape import MessageShape

_SHAPE = MessageShape()


def routes(server: Server) -> list[Route]:
    async def messages(request: HttpRequest) -> ASGIApp:
        try:
            return await server.reply(request, "messages", _SHAPE)
        except InvalidRequest as error:
            raise renamed(error) from error

    async def count(request: HttpRequest) -> Response:
        """How many tokens a prompt has, as it would be for `messages`."""
        caller = caller_of(request)
        async with server.limits.body(request) as data:
            call, rendered = await server.read("count_tokens", data, caller)
            require_tokens(await server.wait_ready(caller))
            num_tokens = await server.encoder.count(call, rendered, "messages", caller)
        return JSONReply({"input_tokens": num_tokens})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]
