"""What of a body of /v1/responses may name something stored: looked for before the body is read. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from ...core.errors import InvalidRequest
from ..fields import parse_object

MAX_REFERENCES = 100

_decode = msgspec.json.decode


class Outline(msgspec.Struct, frozen=True):
    """previous: `previous_response_id` as it stands there; references: the ids that item references name."""

    previous: Any = None
    references: tuple[str, ...] = ()


class _Body(msgspec.Struct):
    """All else is passed over without being made."""

    previous_response_id: Any = None
    input: msgspec.Raw = msgspec.Raw(b"null")


class _Item(msgspec.Struct):
    type: Any = None
    id: Any = None
    role: Any = None


def unpack_outline(result: bytes) -> Outline:
    """Of a Skim."""
    return msgspec.msgpack.decode(result, type=Outline)


def outline_of(body: bytes) -> Outline:
    """Raises InvalidRequest for what is no body, and for too many references."""
    try:
        found = _decode(body, type=_Body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        parse_object(body)  # says what is wrong
        raise
    return Outline(found.previous_response_id, _references(found.input))


def _references(given: msgspec.Raw) -> tuple[str, ...]:
    """What is no input is for its reader to refuse."""
    try:
        items = _decode(given, type=list[_Item])
    except msgspec.ValidationError:
        return ()
    found = [
        item.id
        for item in items
        if isinstance(item.id, str) and (item.type == "item_reference" or item.type is item.role is None)
    ]
    if len(found) > MAX_REFERENCES:
        raise InvalidRequest(f"input may name at most {MAX_REFERENCES} stored items.", param="input")
    return tuple(found)
