"""The endpoints of /v1/conversations: items that responses go on from and add to, kept under a name of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import InvalidRequest, NotFound
from ..fields import Fields, said_as
from ..json_encoder import encode_json
from ..json_reply import JSONReply
from ..port import Server
from ..sandbox import parse_small
from .history import Conversation, Store, id_of, no_conversation
from .items import read_items
from .lists import check_include, listed, page_of
from .output import item_id
from .parse import read_metadata
from .tools import refuse_others

_PATH = "/v1/conversations"
_MAX_ADDED = 20


class Conversations:
    """`store`: None where nothing is kept."""

    def __init__(self, server: Server, store: Store | None) -> None:
        self._server = server
        self._given = store

    def routes(self) -> list[Route]:
        named = _PATH + "/{conversation_id}"
        return [
            Route(_PATH, self.create, methods=["POST"]),
            Route(named, self.retrieve, methods=["GET"]),
            Route(named, self.update, methods=["POST"]),
            Route(named, self.delete, methods=["DELETE"]),
            Route(named + "/items", self.items, methods=["GET"]),
            Route(named + "/items", self.add_items, methods=["POST"]),
            Route(named + "/items/{item_id}", self.item, methods=["GET"]),
            Route(named + "/items/{item_id}", self.delete_item, methods=["DELETE"]),
        ]

    async def create(self, request: HttpRequest) -> Response:
        fields = await self._body(request)
        metadata, given = read_metadata(fields), fields.array("items") or []
        refuse_others(fields)
        created = Conversation(self._new_id("conv"), int(time.time()), metadata, tuple(self._read(given)))
        await self._store.add_conversation(request.state.owner, created)
        return JSONReply(_shown(created))

    async def retrieve(self, request: HttpRequest) -> Response:
        return JSONReply(_shown(await self._find(request)))

    async def update(self, request: HttpRequest) -> Response:
        fields = await self._body(request)
        if fields.object("metadata") is None:
            raise InvalidRequest("metadata must be given.", param="metadata")
        metadata = read_metadata(fields)
        refuse_others(fields)

        def change(found: Conversation) -> Conversation:
            return msgspec.structs.replace(found, metadata=metadata)

        return JSONReply(_shown(await self._change(request, change)))

    async def delete(self, request: HttpRequest) -> Response:
        identifier = request.path_params["conversation_id"]
        if not await self._store.delete_conversation(request.state.owner, identifier):
            raise no_conversation(identifier)
        return JSONReply({"id": identifier, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: HttpRequest) -> Response:
        check_include(request)
        found = await self._find(request)
        return JSONReply(page_of(request, [msgspec.Raw(item) for item in found.items], "conversation"))

    async def add_items(self, request: HttpRequest) -> Response:
        check_include(request)
        fields = await self._body(request)
        given = fields.array("items")
        refuse_others(fields)
        if not given:
            raise InvalidRequest("items must be an array of at least one item.", param="items")
        added = self._read(given)
        await self._change(request, lambda found: found.with_items(added))
        return JSONReply(listed([msgspec.Raw(item) for item in added]))

    async def item(self, request: HttpRequest) -> Response:
        check_include(request)
        found = await self._find(request)
        return Response(found.items[_place(found, request)], media_type="application/json")

    async def delete_item(self, request: HttpRequest) -> Response:
        def change(found: Conversation) -> Conversation:
            place = _place(found, request)
            return msgspec.structs.replace(found, items=(*found.items[:place], *found.items[place + 1 :]))

        return JSONReply(_shown(await self._change(request, change)))

    # ---- what they share ----

    @property
    def _store(self) -> Store:
        if self._given is None:
            raise InvalidRequest("This server keeps no conversations: start it with --responses-store FILE.")
        return self._given

    def _new_id(self, prefix: str) -> str:
        return self._server.new_id(prefix).replace("-", "_", 1)

    async def _body(self, request: HttpRequest) -> Fields:
        self._server.limits.refuse_when_draining()
        async with self._server.limits.body(request) as data:
            return Fields(parse_small(data) if data else {})

    def _read(self, given: Sequence[Any]) -> list[bytes]:
        """Items as they are kept, with ids of their own. Raises InvalidRequest."""
        if not given:
            return []
        if len(given) > _MAX_ADDED:
            raise InvalidRequest(f"At most {_MAX_ADDED} items may be added at a time.", param="items")
        with said_as({"input": "items"}):
            items, _ = read_items(list(given), {})
        base = self._new_id("item").removeprefix("item_")
        return [encode_json(item | {"id": item_id(item["type"], base, number)}) for number, item in enumerate(items)]

    async def _find(self, request: HttpRequest) -> Conversation:
        identifier = request.path_params["conversation_id"]
        found = await self._store.conversation(request.state.owner, identifier)
        if found is None:
            raise no_conversation(identifier)
        return found

    async def _change(self, request: HttpRequest, change: Any) -> Conversation:
        identifier = request.path_params["conversation_id"]
        found = await self._store.change_conversation(request.state.owner, identifier, change)
        if found is None:
            raise no_conversation(identifier)
        return found


def _shown(conversation: Conversation) -> dict[str, Any]:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": conversation.metadata,
    }


def _place(conversation: Conversation, request: HttpRequest) -> int:
    """Of the item that a path names. Raises NotFound."""
    wanted = request.path_params["item_id"]
    for place, item in enumerate(conversation.items):
        if id_of(msgspec.Raw(item)) == wanted:
            return place
    raise NotFound(f"The conversation has no item {wanted[:100]!r}.", param="item_id")
