"""The shape of /v1/responses: one object, or the events that lead to it. See `server.shape`.

Every event has a type, which is also its SSE name, and a number that counts from 0. The last one is the end: there is
no [DONE].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ...api.json_encoder import encode_json
from ...api.pieces import Work
from ...api.responses.output import Event
from ...core.errors import TokenmillError
from ...text.choice import Choice, Piece
from ...text.parts import Content
from ..answer import Answer
from .progress import Progress

PREFIX = "resp_"
_TEXT_DELTA = "response.output_text.delta"


class ResponseShape:
    """A `Shape` for one response, whose state is `progress`."""

    prefix = PREFIX
    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        (of_choice,) = pieces
        for piece in of_choice:
            yield from self._progress.take(piece)
        assert piece.finish_reason is not None
        self._progress.is_known = True
        self._progress.finish(piece.finish_reason)
        return self._progress.sealed

    def chunks(self, answer: Answer) -> ResponseChunks:
        return ResponseChunks(self._progress)


class ResponseChunks:
    """Writes the events of one response. Text that continues a message is joined from prepared bytes."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._sequence_number = 0
        self._head_of = ""
        self._head = b""
        self._last: list[Event] = []
        self.is_plain = progress.answer.call.sampling.logprobs is None

    def start(self) -> bytes:
        body = msgspec.Raw(encode_json(self._progress.body()))
        return self._events(("response." + name, {"response": body}) for name in ("created", "in_progress"))

    def text(self, choice: Choice, piece: Piece) -> bytes:
        self._progress.is_known = True
        parts = piece.parts
        if not parts:
            return b""
        output = self._progress.output
        kind, item, index = output.place
        if kind != "message" or len(parts) > 1 or not isinstance(parts[0], Content):
            return self._events(output.push(parts))
        text = parts[0].text
        if item != self._head_of:
            self._head_of = item
            self._head = _head(item, index)
        output.add_text(text)
        number = self._next_number()
        return b'%s%d,"delta":%s}\n\n' % (self._head, number, encode_json(text))

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        self._progress.is_known = True
        events = yield from self._progress.take(piece)
        if piece.finish_reason is not None:
            self._last = self._progress.finish(piece.finish_reason)
        return self._events(events)

    def end(self) -> bytes:
        return self._events(self._last)

    def failure(self, error: TokenmillError) -> bytes:
        return self._events(self._progress.fail(error))

    def _next_number(self) -> int:
        number = self._sequence_number
        self._sequence_number += 1
        return number

    def _events(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._event(kind, fields) for kind, fields in events)

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        body = {"type": kind, "sequence_number": self._next_number()} | fields
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), encode_json(body))


def _head(item: str, index: int) -> bytes:
    """The event of a delta of text without log probabilities, up to its number."""
    fields = {"type": _TEXT_DELTA, "item_id": item, "output_index": index, "content_index": 0, "logprobs": []}
    return b'event: %s\ndata: %s,"sequence_number":' % (_TEXT_DELTA.encode(), encode_json(fields)[:-1])
