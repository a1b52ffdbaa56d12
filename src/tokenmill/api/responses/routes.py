"""The endpoints of /v1/responses, and the responses that are under way.

With `truncation: auto` an input that is too long loses its earliest turns, as few as must go."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import ContextTooLong, InvalidRequest, NotFound, TokenmillError, Unavailable
from ...text.calls import context_limit, require_tokens
from ...text.special_tokens import Rendered
from ..call import Call
from ..fields import said_as
from ..json_encoder import encode_json
from ..json_reply import JSONReply
from ..port import Running, Server
from ..sandbox import Caller, caller_of
from .history import Record, Store, earlier_items, id_of, with_history
from .parse import INCLUDES
from .shape import PREFIX, Progress, ResponseShape


async def fitted(call: Call, server: Server, caller: Caller) -> Call:
    """`call` with as many of its latest turns as fit the context with the answer. System messages at the start stay,
    and so does the last turn. Raises ContextTooLong where that alone is too long."""
    assert call.conversation is not None
    messages = call.conversation.messages
    room = context_limit(await server.wait_ready(caller))
    cuts = cut_points(messages)
    head = messages[: cuts[0]] if cuts else messages

    def without(num_turns: int) -> Call:
        assert call.conversation is not None
        kept = (*head, *messages[cuts[num_turns] :])
        return replace(call, conversation=replace(call.conversation, messages=kept))

    async def fits(num_turns: int) -> bool:
        try:
            (prompt,) = await server.encoder.encode_call(without(num_turns), room, caller=caller)
        except ContextTooLong:
            return False
        return len(prompt.tokens) + (call.sampling.max_tokens or 1) <= room

    low, high = 0, len(cuts) - 1  # the fewest turns to drop are in (low, high], if any number will do
    if high < 1 or not await fits(high):
        raise ContextTooLong("The last turn of input is too long for this model's context; shorten it.", param="input")
    while low + 1 < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle
    return without(high)


def cut_points(messages: Sequence[dict[str, Any]]) -> list[int]:
    """Where turns begin: at each message of the user. What is before the first is no turn."""
    return [index for index, message in enumerate(messages) if message["role"] == "user"]


_PATH = "/v1/responses"
_MAX_LIMIT, _LIMIT = 100, 20
_SETTLE_S = 1.0
"""An answer waits no longer for the disk."""


def routes(server: Server, store: Store | None) -> list[Route]:
    """`store`: open while the application serves; None: nothing is kept."""
    service = _Responses(server, store)
    named = _PATH + "/{response_id}"
    return [
        Route(_PATH, service.create, methods=["POST"]),
        Route(_PATH + "/input_tokens", service.count, methods=["POST"]),
        Route(named, service.retrieve, methods=["GET"]),
        Route(named, service.delete, methods=["DELETE"]),
        Route(named + "/cancel", service.cancel, methods=["POST"]),
        Route(named + "/input_items", service.input_items, methods=["GET"]),
    ]


class _Cancelled(TokenmillError):
    status = 400
    kind = "invalid_request_error"


class _Responses:
    """`running`: responses to be stored that are not complete yet, by id, with their owner and what feeds them."""

    def __init__(self, server: Server, store: Store | None) -> None:
        self._server = server
        self._store = store
        self._running: dict[str, tuple[str, Progress, Running]] = {}

    async def create(self, request: HttpRequest) -> ASGIApp:
        server, owner = self._server, request.state.owner
        server.limits.refuse_when_draining()
        caller = caller_of(request)
        begin = partial(
            server.begin,
            prefix=PREFIX,
            caller=caller,
            arrival_s=server.now(),
            media_type=ResponseShape.media_type,
            new_name=self._new_name,
        )
        async with self._read(request) as (call, rendered, size_bytes):
            await self._check_store(call, size_bytes)
            try:
                running = await begin(call, rendered=rendered)
            except ContextTooLong:
                if not (call.extras["settings"]["truncation"] == "auto" and rendered is None):
                    raise
                running = await begin(await fitted(call, server, caller), rendered=None)
        progress = Progress(running.answer, partial(self._keep, owner))
        if progress.is_stored:
            self._running[running.answer.id] = (owner, progress, running)
        return self._followed(progress, running, size_bytes)

    def _new_name(self) -> str:
        """Whoever knows it may read what is kept: it is not the id that logs, traces and views of the server tell."""
        return self._server.new_id(PREFIX[:-1]).replace("-", "_", 1)

    async def count(self, request: HttpRequest) -> Response:
        """How many tokens the model would be given."""
        server, caller = self._server, caller_of(request)
        async with self._read(request) as (call, rendered, _):
            require_tokens(await server.wait_ready(caller))
            num_tokens = await server.encoder.count(call, rendered, "input", caller)
        return JSONReply({"object": "response.input_tokens", "input_tokens": num_tokens})

    @contextlib.asynccontextmanager
    async def _read(self, request: HttpRequest) -> AsyncIterator[tuple[Any, Rendered | None, int]]:
        """(the call with what it continues, its conversation where that is rendered already, bytes of the body), which
        count as held until the block ends. Errors of the block are told in this API's words."""
        server = self._server
        caller, most_bytes = caller_of(request), server.max_body_bytes
        async with server.limits.body(request) as data:
            continued = await with_history(data, self._store, request.state.owner, most_bytes, server.sandbox, caller)
            endpoint = "response" if continued is None else "continued_response"
            with server.limits.held(0 if continued is None else len(continued)), said_as({"messages": "input"}):
                call, rendered = await server.read(endpoint, continued or data, caller)
                yield call, rendered, len(data)

    async def retrieve(self, request: HttpRequest) -> Response:
        for name in ("stream", "starting_after"):
            if request.query_params.get(name) not in (None, "false"):
                raise InvalidRequest(f"{name} is not supported here: read the stream of the call itself.", param=name)
        _check_include(request)
        identifier = request.path_params["response_id"]
        running = self._find_running(request)
        if running is not None:
            return JSONReply(running[0].body())
        record = await self._find(request, identifier)
        return Response(record.body, media_type="application/json")

    async def delete(self, request: HttpRequest) -> Response:
        identifier = request.path_params["response_id"]
        if self._find_running(request) is not None:
            raise InvalidRequest("The response is in progress; cancel it first.", param="response_id")
        if self._store is None or not await self._store.delete(request.state.owner, identifier):
            raise _not_found(identifier)
        return JSONReply({"id": identifier, "object": "response", "deleted": True})

    async def cancel(self, request: HttpRequest) -> Response:
        running = self._find_running(request)
        if running is None:
            await self._find(request, request.path_params["response_id"])
            raise InvalidRequest("The response is not in progress any more: nothing is left to cancel.")
        progress, call = running
        progress.cancel()
        call.cancel(_Cancelled("The response was cancelled."))
        return Response(progress.sealed, media_type="application/json")

    async def input_items(self, request: HttpRequest) -> Response:
        """What the model was given, those of earlier responses included."""
        query = request.query_params
        _check_include(request)
        limit, order, after = query.get("limit", str(_LIMIT)), query.get("order", "desc"), query.get("after")
        if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= _MAX_LIMIT):
            raise InvalidRequest(f"limit must be an integer from 1 to {_MAX_LIMIT}.", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc.", param="order")
        items = await self._input_of(request)
        if order == "desc":
            items.reverse()
        if after is not None:
            place = next((place for place, item in enumerate(items) if id_of(item) == after), None)
            if place is None:
                raise InvalidRequest(f"after names no item of this response: {after[:100]!r}.", param="after")
            items = items[place + 1 :]
        page = items[: int(limit)]
        return JSONReply(
            {
                "object": "list",
                "data": page,
                "first_id": id_of(page[0]) if page else None,
                "last_id": id_of(page[-1]) if page else None,
                "has_more": len(items) > len(page),
            }
        )

    async def _input_of(self, request: HttpRequest) -> list[msgspec.Raw]:
        identifier, owner = request.path_params["response_id"], request.state.owner
        running = self._find_running(request)
        if running is not None:
            previous, given = running[0].settings["previous_response_id"], encode_json(running[0].input)
        else:
            record = await self._find(request, identifier)
            previous, given = record.previous, record.input
        own = msgspec.json.decode(given, type=list[msgspec.Raw])
        if not previous:
            return own
        assert self._store is not None
        return [*await earlier_items(self._store, owner, previous, self._server.max_body_bytes), *own]

    async def _check_store(self, call: Call, size_bytes: int) -> None:
        """Whether what is asked for can be done. Where nothing is kept, only who says so is refused."""
        settings: dict[str, Any] = call.extras["settings"]
        if not settings["store"]:
            return
        if self._store is None:
            if settings["asks_to_store"]:
                raise InvalidRequest(
                    "store may not be true: this server keeps no responses; start it with --responses-store FILE.",
                    param="store",
                )
            settings["store"] = False
        elif size_bytes > self._store.max_record_bytes:
            raise InvalidRequest(
                f"The body has {size_bytes} bytes, more than the {self._store.max_record_bytes} that are kept of a "
                "response; give store false.",
                param="store",
            )
        elif why := await self._store.why_not():
            if settings["asks_to_store"]:
                raise Unavailable(f"store may not be true now: responses cannot be kept: {why}.")
            settings["store"] = False

    def _followed(self, progress: Progress, running: Running, size_bytes: int) -> ASGIApp:
        """The reply. Until its end what the body said counts as held: the response repeats it. Then the response is not
        under way any more, however it ended; one that nobody has heard of is not kept. The last of the answer waits for
        the store: what a client has read to its end is there after a crash."""

        reply = running.reply(ResponseShape(progress))

        def after_store(send: Send) -> Send:
            async def send_on(message: Message) -> None:
                if self._store is not None and message["type"] == "http.response.body" and not message.get("more_body"):
                    await self._store.settle(_SETTLE_S)
                await send(message)

            return send_on

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            if progress.is_stored:
                state = scope["state"]
                scope = {**scope, "state": state | {"send": after_store(state.get("send", send))}}
                send = after_store(send)
            try:
                with self._server.limits.held(size_bytes):
                    await reply(scope, receive, send)
            finally:
                running.close()
                if not progress.is_known:
                    self._running.pop(progress.answer.id, None)
                progress.cancel()

        return run

    def _keep(self, owner: str, progress: Progress) -> None:
        if self._running.pop(progress.answer.id, None) is None or self._store is None:
            return
        previous = progress.settings["previous_response_id"] or ""
        given = encode_json(progress.input)
        self._store.put(Record(progress.answer.id, owner, previous, progress.sealed, given))

    def _find_running(self, request: HttpRequest) -> tuple[Progress, Running] | None:
        found = self._running.get(request.path_params["response_id"])
        return None if found is None or found[0] != request.state.owner else found[1:]

    async def _find(self, request: HttpRequest, identifier: str) -> Record:
        record = None if self._store is None else await self._store.get(request.state.owner, identifier)
        if record is None:
            raise _not_found(identifier)
        return record


def _not_found(identifier: str) -> NotFound:
    return NotFound(
        f"There is no response {identifier[:100]!r} here; responses are kept for a day.", param="response_id"
    )


def _check_include(request: HttpRequest) -> None:
    """What may be included is stored with the response, or never occurs."""
    for name in ("include", "include[]"):
        for value in request.query_params.getlist(name):
            if value not in INCLUDES:
                raise InvalidRequest(f"include must be one of {', '.join(INCLUDES)}.", param="include")
