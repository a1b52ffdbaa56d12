"""What a call continues: the items of the responses before it, and those that it names, put before its own input."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from ...core.errors import InvalidRequest, NotFound, PreviousResponseNotFound
from ..jobs import Skim
from ..json_encoder import encode_json
from ..sandbox import Caller, Sandbox, is_heavy
from .items import MAX_ITEMS
from .output import response_of
from .parse import conversation_of, outline_of, unpack_outline

_decode = msgspec.json.decode

MAX_CHAIN = 1000
"""Responses that one may continue, one after the other."""


@dataclass(frozen=True, slots=True)
class Record:
    """A response as it is kept.

    previous      the id of the response that it continues; "" for none
    body          the object as JSON
    input         the items of its own call, a JSON array
    events        of a stream in the background, which may be read again; b"": there are none
    server        the store of the process that it runs in, by its name; "": it has ended
    conversation  the id of the conversation that it belongs to; "" for none
    """

    id: str
    owner: str
    previous: str
    body: bytes
    input: bytes
    events: bytes = b""
    server: str = ""
    conversation: str = ""

    @property
    def size_bytes(self) -> int:
        return len(self.body) + len(self.input) + len(self.events)

    def abandoned(self) -> Record:
        """What it is when its process has ended before it."""
        error = {"code": "server_error", "message": "The server that ran this response has ended; ask again."}
        body = _decode(self.body) | {"status": "failed", "error": error}
        return replace(self, body=encode_json(body), server="")


class Conversation(msgspec.Struct, frozen=True, array_like=True):
    """As it is kept. items: each as JSON, with its id."""

    id: str
    created_at: int
    metadata: dict[str, str]
    items: tuple[bytes, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.items))

    def with_items(self, items: Sequence[bytes]) -> Conversation:
        """The same with these behind its own. Raises InvalidRequest where it has as many as it may."""
        if len(self.items) + len(items) > MAX_ITEMS:
            raise InvalidRequest(f"A conversation may have at most {MAX_ITEMS} items; begin another.", param="items")
        return msgspec.structs.replace(self, items=(*self.items, *items))


class Store(Protocol):
    """Keeps responses and conversations for a while."""

    @property
    def name(self) -> str:
        """Of this process: what is kept as running here has ended when the process has."""
        ...

    @property
    def max_record_bytes(self) -> int:
        """A call with more input than this is not kept."""
        ...

    def put(self, record: Record) -> None:
        """Keep a response; it need not be waited for."""
        ...

    async def why_not(self) -> str:
        """Why no response can be kept now; "": it can, as far as is known."""
        ...

    async def settle(self, longest_s: float) -> None:
        """Wait until what was put before is kept, at most so long."""
        ...

    async def get(self, owner: str, identifier: str) -> Record | None: ...

    async def chain(self, owner: str, identifier: str, most_bytes: int) -> list[Record]:
        """A response and all that it continues, the oldest first; it ends early where one is not there any more or
        where there are more than MAX_CHAIN or `most_bytes`: the first one's `previous` is then not ""."""
        ...

    async def delete(self, owner: str, identifier: str) -> bool:
        """Whether there was one to delete."""
        ...

    async def add_conversation(self, owner: str, conversation: Conversation) -> None: ...

    async def conversation(self, owner: str, identifier: str) -> Conversation | None: ...

    async def change_conversation(
        self, owner: str, identifier: str, change: Callable[[Conversation], Conversation]
    ) -> Conversation | None:
        """What it is then; `change` may raise. None: there is none."""
        ...

    def extend_conversation(self, owner: str, identifier: str, items: Sequence[bytes]) -> None:
        """Put items behind those of a conversation, if it is there still; it need not be waited for."""
        ...

    async def delete_conversation(self, owner: str, identifier: str) -> bool:
        """Whether there was one to delete."""
        ...


class _Stored(msgspec.Struct):
    output: list[msgspec.Raw]


class _Named(msgspec.Struct):
    """Of an item that is stored."""

    id: str = ""


async def with_history(
    body: bytes, store: Store | None, owner: str, most_bytes: int, sandbox: Sandbox, caller: Caller
) -> bytes | None:
    """`body` and what it needs of the store, for parse.parse_continued; None if it needs nothing. `most_bytes`: of all
    that it continues. Raises InvalidRequest, and PreviousResponseNotFound."""
    if is_heavy(body):
        outline = unpack_outline(await caller.stay(sandbox.run(Skim(body), caller.name)))
    else:
        outline = outline_of(body)
    previous, references = outline.previous, outline.references
    conversation = conversation_of(outline.conversation, previous)
    if previous is None and conversation is None and not references:
        return None
    if store is None:
        field = "conversation" if conversation is not None else "input" if previous is None else "previous_response_id"
        raise InvalidRequest(
            f"{field} names something stored, but this server keeps no responses (start it with "
            "--responses-store FILE); give the items as input.",
            param=field,
        )
    before: list[msgspec.Raw] = []
    if previous is not None:
        if not isinstance(previous, str) or not previous:
            raise InvalidRequest("previous_response_id must be the id of a response.", param="previous_response_id")
        before = await earlier_items(store, owner, previous, most_bytes)
    elif conversation is not None:
        before = await items_of_conversation(store, owner, conversation, most_bytes)
    known = {id_of(item): item for item in before} if references else {}
    for name in references:
        if name in known:
            continue
        record = await store.get(owner, response_of(name))
        if record is not None:
            known.update((id_of(item), item) for item in items_of(record) if id_of(item) == name)
    tail = encode_json({"before": before, "known": known})
    return b'{"body":' + body.strip() + b"," + tail[1:]


async def earlier_items(store: Store, owner: str, identifier: str, most_bytes: int) -> list[msgspec.Raw]:
    """Input and output of a response and of all that it continues, in order, as JSON. Raises PreviousResponseNotFound,
    and InvalidRequest where it is too much."""
    chain = await store.chain(owner, identifier, most_bytes)
    if not chain:
        raise PreviousResponseNotFound(
            f"There is no response {identifier[:100]!r} here; responses are kept for a day.",
            param="previous_response_id",
        )
    if chain[-1].conversation:
        raise InvalidRequest(
            f"The response {identifier[:100]!r} belongs to the conversation {chain[-1].conversation!r}; give that "
            "instead.",
            param="previous_response_id",
        )
    size_bytes = sum(record.size_bytes for record in chain)
    if len(chain) >= MAX_CHAIN and chain[0].previous:
        raise InvalidRequest(
            f"previous_response_id continues more than {MAX_CHAIN} responses; give the items as input instead.",
            param="previous_response_id",
        )
    if size_bytes > most_bytes:
        raise InvalidRequest(
            f"previous_response_id continues responses of more than {most_bytes} bytes; give the items as input "
            "instead.",
            param="previous_response_id",
        )
    if chain[0].previous:
        raise PreviousResponseNotFound(
            f"The response {chain[0].previous[:100]!r}, which {identifier[:100]!r} continues, is not here any more.",
            param="previous_response_id",
        )
    found = []
    for record in chain:
        found += items_of(record)
        await asyncio.sleep(0)  # Between many responses the streams of others have their turn.
    return found


async def items_of_conversation(store: Store, owner: str, identifier: str, most_bytes: int) -> list[msgspec.Raw]:
    """Raises NotFound, and InvalidRequest where it is too much."""
    found = await store.conversation(owner, identifier)
    if found is None:
        raise no_conversation(identifier)
    if found.size_bytes > most_bytes:
        raise InvalidRequest(
            f"The items of the conversation have more than {most_bytes} bytes; begin another.", param="conversation"
        )
    return [msgspec.Raw(item) for item in found.items]


def no_conversation(identifier: str) -> NotFound:
    return NotFound(
        f"There is no conversation {identifier[:100]!r} here; one that is not used is kept for 30 days.",
        param="conversation",
    )


def items_of(record: Record) -> list[msgspec.Raw]:
    """What a response adds to its conversation, as JSON."""
    return _decode(record.input, type=list[msgspec.Raw]) + _decode(record.body, type=_Stored).output


def id_of(item: msgspec.Raw) -> str:
    return str(_decode(item, type=_Named).id)
