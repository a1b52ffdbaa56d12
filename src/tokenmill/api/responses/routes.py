"""The endpoints of /v1/responses, and the responses that are under way.

With `truncation: auto` an input that is too long loses its earliest turns, as few as must go."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import ContextTooLong, InvalidRequest, NotFound, TokenmillError, Unavailable
from ...core.request import IDLE_PRIORITY
from ...text.calls import context_limit, require_tokens
from ...text.special_tokens import Rendered
from ..call import Call
from ..fields import parse_object, said_as
from ..json_encoder import encode_json
from ..json_reply import JSONReply
from ..port import Running, Server
from ..sandbox import Caller, caller_of, is_heavy
from .background import STREAM_INTERVAL, Background, BackgroundRun, event_stream, split
from .conversations import Conversations
from .history import Record, Store, earlier_items, with_history
from .items import Item, read_items
from .lists import check_include, page_of
from .mcp import McpCalls, McpServers, read_servers
from .output import COMPLETED, INCOMPLETE
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
_SETTLE_S = 1.0
"""An answer waits no longer for the disk."""


def routes(server: Server, store: Store | None, background: Background, mcp: McpServers | None = None) -> list[Route]:
    """`store`: open while the application serves; None: nothing is kept. `mcp`: the MCP servers that may be asked."""
    service = _Responses(server, store, background, mcp)
    named = _PATH + "/{response_id}"
    return [
        Route(_PATH, service.create, methods=["POST"]),
        Route(_PATH + "/input_tokens", service.count, methods=["POST"]),
        Route(named, service.retrieve, methods=["GET"]),
        Route(named, service.delete, methods=["DELETE"]),
        Route(named + "/cancel", service.cancel, methods=["POST"]),
        Route(named + "/input_items", service.input_items, methods=["GET"]),
        *Conversations(server, store).routes(),
    ]


class _Cancelled(TokenmillError):
    status = 400
    kind = "invalid_request_error"


@dataclass(frozen=True, slots=True)
class _Read:
    """A body that was read. outer: with what it continues, as it is parsed for each turn; {}: there is one turn."""

    call: Any
    rendered: Rendered | None
    size_bytes: int
    mcp: McpCalls | None = None
    outer: dict[str, Any] = field(default_factory=dict, repr=False)


class _Turns:
    """`background.NextTurn`. begin: submits a call."""

    def __init__(self, server: Server, caller: Caller, read: _Read, begin: Callable[..., Awaitable[Running]]) -> None:
        assert read.mcp is not None
        self._server = server
        self._caller = replace(caller, request=None)
        self._mcp = read.mcp
        self._outer = read.outer
        self._begin = begin

    async def call(self, item: Item) -> dict[str, Any]:
        return await self._mcp.call(item["server_label"], item["name"], item["arguments"])

    async def begin(self, items: Sequence[Item]) -> Running:
        data = encode_json(self._outer | {"after": items})
        with said_as({"messages": "input"}), self._server.limits.held(len(data)):
            call, rendered = await self._server.read("continued_response", data, self._caller)
            call = replace(call, stream=True)
            return await self._begin(call, caller=self._caller, rendered=rendered, arrival_s=self._server.now())


class _Responses:
    def __init__(self, server: Server, store: Store | None, background: Background, mcp: McpServers | None) -> None:
        self._server = server
        self._mcp = mcp
        self._store = store
        self._background = background
        self._running, self._in_background = background.running, background.runs

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
        async with self._read(request) as read:
            call, rendered, size_bytes = read.call, read.rendered, read.size_bytes
            await self._check_store(call, size_bytes)
            is_streamed, is_run = call.stream, call.extras["settings"]["background"] or read.mcp is not None
            if is_run:
                begin = partial(begin, media_type="")
                call = replace(call, stream=True, stream_interval=None if is_streamed else STREAM_INTERVAL)
            try:
                running = await begin(call, rendered=rendered)
            except ContextTooLong:
                if not (call.extras["settings"]["truncation"] == "auto" and rendered is None):
                    raise
                running = await begin(await fitted(call, server, caller), rendered=None)
        if is_run:
            turn = partial(begin, new_name=lambda: running.answer.id)
            turns = None if read.mcp is None else _Turns(server, caller, read, turn)
            return await self._start_run(owner, running, caller, read, turns, is_streamed=is_streamed)
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
        async with self._read(request) as read:
            require_tokens(await server.wait_ready(caller))
            num_tokens = await server.encoder.count(read.call, read.rendered, "input", caller)
        return JSONReply({"object": "response.input_tokens", "input_tokens": num_tokens})

    @contextlib.asynccontextmanager
    async def _read(self, request: HttpRequest) -> AsyncIterator[_Read]:
        """The call with what it continues. Its bytes count as held until the block ends. Errors of the block are told
        in this API's words."""
        server = self._server
        caller, most_bytes = caller_of(request), server.max_body_bytes
        async with server.limits.body(request) as data:
            continued = await with_history(data, self._store, request.state.owner, most_bytes, server.sandbox, caller)
            mcp, outer = await self._asked(data, continued, caller)
            if mcp is not None:
                continued = encode_json(outer)
            endpoint = "response" if continued is None else "continued_response"
            with server.limits.held(0 if continued is None else len(continued)), said_as({"messages": "input"}):
                call, rendered = await server.read(endpoint, continued or data, caller)
                yield _Read(call, rendered, len(data), mcp, outer)

    async def _asked(
        self, data: bytes, continued: bytes | None, caller: Caller
    ) -> tuple[McpCalls | None, dict[str, Any]]:
        """(the MCP servers that a body names, what is parsed instead of it), after asking them for their tools and
        making the calls that it approves. Raises InvalidRequest."""
        if self._mcp is None or b'"mcp"' not in data or is_heavy(data):
            return None, {}
        body = parse_object(data)
        mcp = read_servers(body.get("tools"), self._mcp)
        if mcp is None:
            return None, {}
        if body.get("priority") == IDLE_PRIORITY:
            raise InvalidRequest("MCP servers are not asked for a batch.", param="tools")
        outer: dict[str, Any] = {"body": body, "before": [], "known": {}}
        if continued is not None:
            outer = msgspec.json.decode(continued)
        items, _ = read_items(body.get("input"), outer["known"])
        before = [*outer["before"], *items]
        await caller.stay(mcp.list_tools())
        made = await caller.stay(mcp.approved(before))
        known = {item["server_label"] for item in before if item["type"] == "mcp_list_tools"}
        mcp.items = [*(item for item in mcp.lists if item["server_label"] not in known), *made]
        return mcp, outer | {"mcp": mcp.told, "after": made}

    async def retrieve(self, request: HttpRequest) -> Response:
        check_include(request)
        streams, after = _stream_query(request)
        identifier = request.path_params["response_id"]
        running = self._find_running(request)
        if running is None:
            record = await self._find(request, identifier)
            if not streams:
                return Response(record.body, media_type="application/json")
            if not record.events:
                raise _NO_EVENTS
            return Response(b"".join(split(record.events)[after + 1 :]), media_type=ResponseShape.media_type)
        if not streams:
            return JSONReply(running[0].body())
        run = self._in_background.get(identifier)
        if run is None or run.log is None:
            raise _NO_EVENTS
        return event_stream(run.log.after(after))

    async def delete(self, request: HttpRequest) -> Response:
        identifier = request.path_params["response_id"]
        running = self._find_running(request)
        if running is not None:
            if not running[0].sealed:
                raise InvalidRequest("The response is in progress; cancel it first.", param="response_id")
            await self._background.wait(self._in_background[identifier])
        if self._store is None or not await self._store.delete(request.state.owner, identifier):
            raise _not_found(identifier)
        return JSONReply({"id": identifier, "object": "response", "deleted": True})

    async def cancel(self, request: HttpRequest) -> Response:
        running = self._find_running(request)
        if running is None:
            record = await self._find(request, request.path_params["response_id"])
            if record.server:
                raise InvalidRequest("The response runs in another process, which alone can cancel it.")
            if not msgspec.json.decode(record.body)["background"]:
                raise InvalidRequest("The response is not in progress any more: nothing is left to cancel.")
            return Response(record.body, media_type="application/json")
        progress, call = running
        progress.cancel()
        run = self._in_background.get(progress.answer.id)
        (call if run is None else run).cancel(_Cancelled("The response was cancelled."))
        return Response(progress.sealed, media_type="application/json")

    async def input_items(self, request: HttpRequest) -> Response:
        """What the model was given, those of earlier responses included."""
        check_include(request)
        return JSONReply(page_of(request, await self._input_of(request), "response"))

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
        named = "background" if settings["background"] else "store"
        if self._store is None:
            if settings["asks_to_store"]:
                raise InvalidRequest(
                    f"{named} may not be true: this server keeps no responses; start it with --responses-store FILE.",
                    param=named,
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
                raise Unavailable(f"{named} may not be true now: responses cannot be kept: {why}.")
            settings["store"] = False

    async def _start_run(
        self, owner: str, running: Running, caller: Caller, read: _Read, turns: _Turns | None, *, is_streamed: bool
    ) -> ASGIApp:
        """The reply to who asks for a response that runs without its connection: in the background, where it is kept as
        what is under way until it ends; else it ends with its client."""
        progress, store = Progress(running.answer), self._store
        identifier, is_background = progress.answer.id, progress.settings["background"]
        items = () if read.mcp is None else read.mcp.items
        run = BackgroundRun(progress, running, self._server, has_log=is_streamed, items=items, next_turn=turns)
        progress.is_known = True
        shown = progress.body()

        def end(run: BackgroundRun) -> None:
            self._running.pop(identifier, None)
            self._in_background.pop(identifier, None)
            if store is not None and progress.is_stored:
                events = run.log.whole() if run.log is not None and is_background else b""
                store.put(self._record(owner, progress, progress.sealed, events))
            self._extend(owner, progress)

        if progress.is_stored:
            self._running[identifier] = (owner, progress, running)
            self._in_background[identifier] = run
        if is_background:
            assert progress.is_stored and store is not None, "who asks for it asks to have it stored"
            store.put(self._record(owner, progress, encode_json(shown), server=store.name))
        self._background.start(run, read.size_bytes, end)
        if not is_background:
            return await self._attended(run, caller)
        await self._settle()
        return JSONReply(shown) if run.log is None else event_stream(run.log.after(-1))

    async def _attended(self, run: BackgroundRun, caller: Caller) -> ASGIApp:
        """The answer of a run to the client that waits for it: without it, the run ends."""
        gone = _Cancelled("The client has left.")
        if run.log is None:
            try:
                await caller.stay(self._background.wait(run))
            except BaseException:
                run.cancel(gone)
                raise
            await self._settle()
            return Response(run.progress.sealed, media_type="application/json")
        log = run.log

        async def events() -> AsyncIterator[bytes]:
            try:
                async for data in log.after(-1):
                    yield data
                await self._settle()
            finally:
                run.cancel(gone)

        return event_stream(events())

    async def _settle(self) -> None:
        if self._store is not None:
            await self._store.settle(_SETTLE_S)

    def _record(self, owner: str, progress: Progress, body: bytes, events: bytes = b"", server: str = "") -> Record:
        settings = progress.settings
        previous, conversation = settings["previous_response_id"] or "", settings["conversation"] or ""
        given = encode_json(progress.input)
        return Record(progress.answer.id, owner, previous, body, given, events, server, conversation)

    def _extend(self, owner: str, progress: Progress) -> None:
        """Put what was said to the conversation that the response belongs to, if it came to its end."""
        conversation = progress.settings["conversation"]
        if conversation is None or self._store is None or progress.status not in (COMPLETED, INCOMPLETE):
            return
        items = [*progress.input, *progress.output.items()]
        self._store.extend_conversation(owner, conversation, [encode_json(item) for item in items])

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
            if progress.is_stored or progress.settings["conversation"] is not None:
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
        self._extend(owner, progress)
        if self._running.pop(progress.answer.id, None) is None or self._store is None:
            return
        self._store.put(self._record(owner, progress, progress.sealed))

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


_NO_EVENTS = InvalidRequest(
    "This response has no stream that could be read again: it was not asked for with background and stream.",
    param="stream",
)


def _stream_query(request: HttpRequest) -> tuple[bool, int]:
    """(whether events are wanted, the number of the last one that the client has)."""
    stream, after = request.query_params.get("stream", "false"), request.query_params.get("starting_after")
    if stream not in ("true", "false"):
        raise InvalidRequest("stream must be true or false.", param="stream")
    if after is None:
        return stream == "true", -1
    if stream != "true" or not (after.isascii() and after.isdigit() and len(after) < 10):
        raise InvalidRequest(
            "starting_after must be the sequence_number of an event, and needs stream to be true.",
            param="starting_after",
        )
    return True, int(after)
