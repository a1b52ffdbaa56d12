"""What a call continues: the items of the responses before it, and those that it names, put before its own input."""

from __future__ import annotations

import asyncio

import msgspec

from ...api.helper import Caller, Helper, is_heavy
from ...api.jobs import Skim
from ...api.json_encoder import encode_json
from ...api.responses.output import response_of
from ...api.responses.parse import outline_of, unpack_outline
from ...core.errors import InvalidRequest, PreviousResponseNotFound
from .store import MAX_CHAIN, Record, ResponseStore

_decode = msgspec.json.decode


class _Stored(msgspec.Struct):
    output: list[msgspec.Raw]


class _Named(msgspec.Struct):
    """Of an item that is stored."""

    id: str = ""


async def with_history(
    body: bytes, store: ResponseStore | None, owner: str, most_bytes: int, helper: Helper, caller: Caller
) -> bytes | None:
    """`body` and what it needs of the store, for parse.parse_continued; None if it needs nothing. `most_bytes`: of all
    that it continues. Raises InvalidRequest, and PreviousResponseNotFound."""
    if is_heavy(body):
        outline = unpack_outline(await caller.stay(helper.run(Skim(body), caller.name)))
    else:
        outline = outline_of(body)
    previous, references = outline.previous, outline.references
    if previous is None and not references:
        return None
    if store is None:
        field = "input" if previous is None else "previous_response_id"
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
    known: dict[str, msgspec.Raw] = {}
    for name in references:
        record = await store.get(owner, response_of(name))
        if record is not None:
            known.update((id_of(item), item) for item in items_of(record) if id_of(item) == name)
    tail = encode_json({"before": before, "known": known})
    return b'{"body":' + body.strip() + b"," + tail[1:]


async def earlier_items(store: ResponseStore, owner: str, identifier: str, most_bytes: int) -> list[msgspec.Raw]:
    """Input and output of a response and of all that it continues, in order, as JSON. Raises PreviousResponseNotFound,
    and InvalidRequest where it is too much."""
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
    found = []
    for record in chain:
        found += items_of(record)
        await asyncio.sleep(0)  # Between many responses the streams of others have their turn.
    return found


def items_of(record: Record) -> list[msgspec.Raw]:
    """What a response adds to its conversation, as JSON."""
    return _decode(record.input, type=list[msgspec.Raw]) + _decode(record.body, type=_Stored).output


def id_of(item: msgspec.Raw) -> str:
    return str(_decode(item, type=_Named).id)
