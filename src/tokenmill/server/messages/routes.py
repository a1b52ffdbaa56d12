"""Which path of Anthropic's API leads where."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ...api.messages.parse import renamed
from ...core.errors import InvalidRequest
from ...text.calls import require_tokens
from ..generation import Generation
from ..helper import caller_of
from ..http import JSONReply
from ..limits import wait_ready
from .shape import MessageShape

_SHAPE = MessageShape()


def routes(generation: Generation) -> list[Route]:
    async def messages(request: HttpRequest) -> ASGIApp:
        try:
            return await generation.reply(request, "messages", _SHAPE)
        except InvalidRequest as error:
            raise renamed(error) from error

    async def count(request: HttpRequest) -> Response:
        """How many tokens a prompt has, as it would be for `messages`."""
        caller = caller_of(request)
        async with generation.limits.body(request) as data:
            call, rendered = await generation.read("count_tokens", data, caller)
            require_tokens(await wait_ready(generation.client, generation.config, caller))
            if rendered is None:
                rendered = await generation.encoder.render(call.conversation, caller)
            # Nothing is taken from other texts or left to them, else its time would tell what others have sent.
            prompt = await generation.encoder.encode(
                rendered, add_special=call.add_special_tokens, shared=False, param="messages", caller=caller
            )
        return JSONReply({"input_tokens": len(prompt.tokens)})

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]
