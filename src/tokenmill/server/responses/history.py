"""What a call continues: the items of the responses before it, and those that it names, put before its own input."""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.errors import InvalidRequest, PreviousResponseNotFound
from ..fields import parse_object
from .items import Item
from .output import INCOMPLETE, response_of
from .store import MAX_CHAIN, Record, ResponseStore

MAX_REFERENCES = 100

_decode = msgspec.json.decode


class _Outline(msgspec.Struct):
    """Of a body: what may name something stored. All else is passed over without being made."""

    previous_response_id: Any = None
    input: msgspec.Raw = msgspec.Raw(b"null")


class _Reference(msgspec.Struct):
    type: Any = None
    id: Any = None
    role: Any = None


class _Stored(msgspec.Struct):
    output: list[Item]


async def with_history(body: bytes, store: ResponseStore | None, owner: str, most_bytes: int) -> bytes | None:
    """`body` and what it needs of the store, for parse.parse_continued; None if it needs nothing. `most_bytes`: of all
    that it continues. Raises InvalidRequest, and PreviousResponseNotFound."""
    try:
        outline = _decode(body, type=_Outline)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        parse_object(body)  # says what is wrong
        raise
    previous, references = outline.previous_response_id, _references(outline.input)
    if previous is None and not references:
        return None
    if store is None:
        field = "input" if previous is None else "previous_response_id"
        raise InvalidRequest(
            f"{field} names something stored, but this server keeps no responses (--responses-store off); give the "
            "items as input.",
            param=field,
        )
    before: list[Item] = []
    if previous is not None:
        if not isinstance(previous, str) or not previous:
            raise InvalidRequest("previous_response_id must be the id of a response.", param="previous_response_id")
        before = await earlier_items(store, owner, previous, most_bytes)
    known: dict[str, Item] = {}
    for name in references:
        record = await store.get(owner, response_of(name))
        if record is not None:
            known |= {item["id"]: item for item in items_of(record) if item.get("id") == name}
    tail = msgspec.json.encode({"before": before, "known": known})
    return b'{"body":' + body.strip() + b"," + tail[1:]


async def earlier_items(store: ResponseStore, owner: str, identifier: str, most_bytes: int) -> list[Item]:
    """Input and output of a response and of all that it continues, in order. Raises PreviousResponseNotFound, and
    InvalidRequest where it is too much."""
    chain = await store.chain(owner, identifier, most_bytes)
    if not chain:
        raise PreviousResponseNotFound(
            f"There is no response {identifier[:100]!r} here; responses are kept for a day.",
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
    return [item for record in chain for item in items_of(record)]


def items_of(record: Record) -> list[Item]:
    """What a response adds to its conversation: a call that was cut off is no call."""
    output = _decode(record.body, type=_Stored).output
    kept = [item for item in output if item["type"] != "function_call" or item.get("status") != INCOMPLETE]
    return [*_decode(record.input), *kept]


def _references(given: msgspec.Raw) -> list[str]:
    """The ids that item references of an input name. What is no input is for its reader to refuse."""
    try:
        items = _decode(given, type=list[_Reference])
    except msgspec.ValidationError:
        return []
    found = [
        item.id
        for item in items
        if isinstance(item.id, str) and (item.type == "item_reference" or item.type is item.role is None)
    ]
    if len(found) > MAX_REFERENCES:
        raise InvalidRequest(f"input may name at most {MAX_REFERENCES} stored items.", param="input")
    return found
