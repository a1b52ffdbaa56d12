"""The shape of /v1/responses: one object with its items and its state, or the events that lead to it.

Every event has a type, which is also its SSE name, and a number that counts from 0. The last one is the end: there is
no [DONE]."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from ...core.errors import InvalidRequest, Overloaded, TokenmillError
from ...core.events import FINISH_LENGTH
from ...text.choice import Choice, Piece
from ...text.parts import Content
from ..answer import Answer
from ..common_fields import FLEX
from ..json_encoder import encode_json
from ..logprobs import chat_logprobs
from ..pieces import Work
from .items import Item
from .output import COMPLETED, IN_PROGRESS, INCOMPLETE, Event, Output, item_id

CANCELLED, FAILED, QUEUED = "cancelled", "failed", "queued"
MAX_CALLS = 16
"""Calls of MCP servers' tools in one response, unless `max_tool_calls` is less."""
_HEAD, _TAIL = len(b'{"content":'), len(b"}")


class Progress:
    """The state of one response. `on_end` is told once, when its state is the last: `sealed` is then the object as
    JSON. is_known: its id is about to be sent. wall_s: seconds since the epoch."""

    def __init__(
        self,
        answer: Answer,
        on_end: Callable[[Progress], None] = lambda progress: None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        base = answer.id.removeprefix("resp_")
        self.answer = answer
        self.settings: dict[str, Any] = answer.call.extras["settings"]
        self.input = _named(answer.call.extras["input"], base)
        self.output = Output(base, len(self.input), self.settings["namespaces"], self.settings["mcp"])
        self.created = answer.created
        self.waits_for: dict[str, Any] | None = None
        self._most_calls = min(MAX_CALLS, self.settings["max_tool_calls"] or MAX_CALLS)
        self._num_calls = 0
        self._past: list[dict[str, Any]] = []
        self.status = QUEUED if self.settings["background"] else IN_PROGRESS
        self.sealed = b""
        self.is_known = False
        self._on_end = on_end
        self._wall_s = wall_s
        self._error: dict[str, Any] | None = None
        self._completed_at: int | None = None
        self._has_reached_limit = False
        self._warning: dict[str, str] = {}

    @property
    def is_stored(self) -> bool:
        return bool(self.settings["store"])

    def take(self, piece: Piece) -> Work[list[Event]]:
        """What a piece adds."""
        answer, logprobs = self.answer, None
        if answer.call.sampling.logprobs is not None:
            shaped = yield from chat_logprobs(piece.logprobs, answer.names, answer.call.sampling.logprobs)
            logprobs = bytes(shaped)[_HEAD:-_TAIL]
        return self.output.push(piece.parts, logprobs)

    def finish(self, last: Piece) -> list[Event]:
        """The last piece has been taken."""
        self._has_reached_limit = last.finish_reason == FINISH_LENGTH
        self._warning = last.warning
        status = INCOMPLETE if self._has_reached_limit or self.answer.choices[0].has_cut_call else COMPLETED
        if status == COMPLETED and self.output.place[0] == "mcp_call":
            self._num_calls += 1
            if self._num_calls <= self._most_calls:
                self.waits_for, events = self.output.wait()
                return events
            status = INCOMPLETE
        events = self.output.end(status)
        self._seal(status)
        return [*events, (f"response.{self.status}", {"response": msgspec.Raw(self.sealed)})]

    def go_on(self, answer: Answer) -> None:
        """What it waited for is there, and this is its next turn."""
        self._past.append(self.answer.usage())
        self.answer = answer
        self.waits_for = None

    def fail(self, error: TokenmillError) -> list[Event]:
        """Nothing more will come. A response that was cancelled has no error."""
        if not self.sealed:
            self._error = {"code": _code(error), "message": error.message}
            self.output.end(INCOMPLETE)
            self._seal(FAILED)
        kind = FAILED if self.status == FAILED else INCOMPLETE
        return [(f"response.{kind}", {"response": msgspec.Raw(self.sealed)})]

    def cancel(self) -> None:
        """Nobody wants the rest, if there is one."""
        if not self.sealed:
            self.output.end(INCOMPLETE)
            self._seal(CANCELLED)

    def body(self) -> dict[str, Any]:
        """The response object as it is now, with the fields of OpenAI's."""
        answer, settings = self.answer, self.settings
        sampling, conversation = answer.call.sampling, settings["conversation"]
        return {
            "id": answer.id,
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "background": self.settings["background"],
            "completed_at": self._completed_at,
            "conversation": None if conversation is None else {"id": conversation},
            "error": self._error,
            # A stop string that has cut a call is none of the reasons in OpenAI's schema: the state alone says it.
            "incomplete_details": {"reason": "max_output_tokens"} if self._has_reached_limit else None,
            "instructions": settings["instructions"],
            "max_output_tokens": settings["max_output_tokens"],
            "max_tool_calls": settings["max_tool_calls"],
            "metadata": settings["metadata"],
            "model": answer.model,
            "output": self.output.items(),
            "parallel_tool_calls": settings["parallel_tool_calls"],
            "previous_response_id": settings["previous_response_id"],
            "prompt_cache_key": settings["prompt_cache_key"],
            "reasoning": settings["reasoning"],
            "safety_identifier": settings["safety_identifier"],
            "service_tier": "flex" if answer.call.priority_class == FLEX else "default",
            "store": settings["store"],
            "temperature": sampling.temperature,
            "text": settings["text"],
            "tool_choice": settings["tool_choice"],
            "tools": msgspec.Raw(settings["tools"]),
            "top_logprobs": settings["top_logprobs"],
            "top_p": sampling.top_p,
            "truncation": settings["truncation"],
            "usage": None if self.status in (IN_PROGRESS, QUEUED) else self._usage(),
            "user": settings["user"],
            "system_fingerprint": answer.fingerprint,
            **self._warning,
        }

    def _usage(self) -> dict[str, Any]:
        """Of all turns together."""
        turns = [*self._past, self.answer.usage()]

        def total(name: str, of: str = "") -> int:
            return sum((usage.get(of) or {} if of else usage).get(name, 0) for usage in turns)

        return {
            "input_tokens": total("prompt_tokens"),
            "input_tokens_details": {
                "cached_tokens": total("cached_tokens", "prompt_tokens_details"),
                "cache_write_tokens": 0,
            },
            "output_tokens": total("completion_tokens"),
            "output_tokens_details": {"reasoning_tokens": total("reasoning_tokens", "completion_tokens_details")},
            "total_tokens": total("total_tokens"),
        }

    def _seal(self, status: str) -> None:
        if self.sealed:
            return
        self.status = status
        if status == COMPLETED:
            self._completed_at = int(self._wall_s())
        self.sealed = encode_json(self.body())
        self._on_end(self)


def _named(items: list[Item], base: str) -> list[Item]:
    """The items of an input, each with an id."""
    return [{"id": item_id(item["type"], base, number)} | item for number, item in enumerate(items)]


def _code(error: TokenmillError) -> str:
    if isinstance(error, InvalidRequest):
        return "invalid_prompt"
    return "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"


PREFIX = "resp_"
_TEXT_DELTA = "response.output_text.delta"


class ResponseShape:
    """A `Shape` for one response, whose state is `progress`. chunks: of its stream, where that has begun."""

    prefix = PREFIX
    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, progress: Progress, chunks: ResponseChunks | None = None) -> None:
        self._progress = progress
        self._chunks = chunks

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        (of_choice,) = pieces
        for piece in of_choice:
            yield from self._progress.take(piece)
        assert piece.finish_reason is not None
        self._progress.is_known = True
        self._progress.finish(piece)
        return self._progress.sealed

    def chunks(self, answer: Answer) -> ResponseChunks:
        return self._chunks or ResponseChunks(self._progress)


class ResponseChunks:
    """Writes the events of one response. Text that continues a message is joined from prepared bytes."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._sequence_number = 0
        self._head_of = ""
        self._head = b""
        self._last: list[Event] = []
        self._is_begun = False
        self.is_plain = progress.answer.call.sampling.logprobs is None

    def announce(self) -> bytes:
        """What a response in the background says before anything is computed."""
        self._is_begun = True
        return self._states("created", "queued")

    def start(self) -> bytes:
        if self._is_begun:
            return b""
        self._is_begun = True
        return self._states("created", "in_progress")

    def told(self, events: Iterable[Event]) -> bytes:
        """Of items that no model has made."""
        return self.start() + self._begin() + self._events(events)

    def _begin(self) -> bytes:
        """What one that was announced says with its first piece."""
        if self._progress.status != QUEUED:
            return b""
        self._progress.status = IN_PROGRESS
        return self._states("in_progress")

    def _states(self, *names: str) -> bytes:
        body = msgspec.Raw(encode_json(self._progress.body()))
        return self._events(("response." + name, {"response": body}) for name in names)

    def text(self, choice: Choice, piece: Piece) -> bytes:
        self._progress.is_known = True
        begun = self._begin()
        parts = piece.parts
        if not parts:
            return begun
        output = self._progress.output
        kind, item, index = output.place
        if kind != "message" or len(parts) > 1 or not isinstance(parts[0], Content):
            return begun + self._events(output.push(parts))
        text = parts[0].text
        if item != self._head_of:
            self._head_of = item
            self._head = _head(item, index)
        output.add_text(text)
        number = self._next_number()
        return b'%s%s%d,"delta":%s}\n\n' % (begun, self._head, number, encode_json(text))

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        self._progress.is_known = True
        begun = self._begin()
        events = yield from self._progress.take(piece)
        if piece.finish_reason is not None:
            self._last = self._progress.finish(piece)
        return begun + self._events(events)

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
