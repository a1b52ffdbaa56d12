"""What is kept of a streamed call: enough to carry it out again, with the same request and the same names."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from ...core.events import Output
from ...core.request import Request

Headers = tuple[tuple[bytes, bytes], ...]


class KeptCall(NamedTuple):
    """id           of its answer, which is the same in every life
    created      of its answer, in seconds since the epoch
    fingerprint  of what answers it: another one would not give the same tokens
    request      of the one choice that it has
    waits        its client has asked that it goes on while nobody is connected
    owner, client, tenant's key, request_id, told_id: as in the state of the call (`http.Gate`)
    path, query, headers, body: of the call; headers that hold secrets are left out
    """

    id: str
    created: int
    fingerprint: str
    request: Request
    waits: bool
    owner: str
    client: str
    key: str
    request_id: str
    told_id: str
    path: str
    query: bytes
    headers: Headers
    body: bytes


class KeptAnswer(NamedTuple):
    """A whole answer. body: for status 200 events, each with its number."""

    status: int
    headers: Headers
    body: bytes


class Unfinished(NamedTuple):
    """A call that an earlier process left. key: of its row; outputs: what had come of it."""

    key: int
    call: KeptCall
    outputs: list[Output]


encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(KeptCall).decode
decode_output = msgspec.msgpack.Decoder(Output).decode
decode_loaded = msgspec.msgpack.Decoder(dict[str, Any]).decode
decode_answer = msgspec.msgpack.Decoder(KeptAnswer).decode
