"""One request in flight and the events of its answer: what counts as a token event, and what as an error.

A token event brings text, token ids or tool-call arguments. An event that only names the role, is empty, or carries
nothing but usage is none. One exception: a completion's event with empty text and no finish reason is a token whose
characters are still held back. What a server does not say (usage) stays None. OpenAI's responses and Anthropic's
messages name the type of each event; they become the same exchange.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec


class _Function(msgspec.Struct):
    arguments: str | None = None
    name: str | None = None


class _ToolCall(msgspec.Struct):
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Pooled(msgspec.Struct):
    data: list[msgspec.Raw] | None = None
    results: list[msgspec.Raw] | None = None
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode = msgspec.json.Decoder(_Event).decode
_decode_pooled = msgspec.json.Decoder(_Pooled).decode

FAILED_FINISHES = ("error", "abort")
"""Reasons to finish that are the server giving up, in an answer of status 200."""


class Exchange:
    """The record of one call. Times are those of the play's clock; `sent_s` is the first send's. `num_retries`: how
    often it was sent again because its connection was lost; `num_refused`: because it had been refused, and
    `retry_after_s` what the last refusal said. `is_streamed`: tokens came one after another, not as a whole. `fail`
    keeps the first error."""

    __slots__ = (
        "_count_before",
        "cached_tokens",
        "due_s",
        "end_s",
        "error",
        "error_detail",
        "event_times",
        "event_tokens",
        "finish_reason",
        "first_content_s",
        "index",
        "input_tokens",
        "is_complete",
        "is_streamed",
        "keep_text",
        "num_bytes",
        "num_refused",
        "num_retries",
        "output_tokens",
        "retry_after_s",
        "sent_s",
        "texts",
    )

    def __init__(self, index: int, due_s: float, keep_text: bool = False) -> None:
        self.index = index
        self.due_s = due_s
        self.sent_s: float | None = None
        self.end_s: float | None = None
        self.first_content_s: float | None = None
        self.event_times = array("d")
        self.event_tokens = array("l")
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.error_detail: str | None = None
        self.is_complete = False
        self.is_streamed = True
        self.num_retries = 0
        self.num_refused = 0
        self.retry_after_s: float | None = None
        self.keep_text = keep_text
        self.texts: list[str] = []
        self.num_bytes = 0
        self._count_before = 0

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def fail(self, error: str, detail: str = "") -> None:
        if self.error is None:
            self.error, self.error_detail = error, detail[:300]

    def again(self) -> None:
        """It was refused, and is to be sent once more."""
        assert not self.event_times and self.end_s is not None, "it was not refused"
        self.num_refused += 1
        self.error = self.error_detail = self.end_s = self.retry_after_s = None
        self._count_before = 0

    def on_data(self, at_s: float, payload: bytes) -> None:
        """The data of one server-sent event, or a whole JSON answer."""
        if payload == b"[DONE]":
            self.is_complete = True
            return
        try:
            event = _decode(payload)
        except msgspec.MsgspecError as error:
            self.fail("bad_response", f"{error}: {payload[:200].decode(errors='replace')}")
            return
        if event.error and event.error != b"null":
            self.fail("stream_error", bytes(event.error).decode(errors="replace"))
            return
        num_tokens = 0
        if self.first_content_s is None and any(map(_has_content, event.choices)):
            self.first_content_s = at_s
        for choice in event.choices:
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                if choice.finish_reason in FAILED_FINISHES:
                    self.fail(f"finish_{choice.finish_reason}", "the server ended the answer early")
            num_tokens += self._num_tokens(choice)
        usage = event.usage
        if usage is not None:
            num_tokens = self._on_usage(usage, num_tokens)
        if num_tokens:
            self.event_times.append(at_s)
            self.event_tokens.append(num_tokens)

    def note(self, at_s: float, text: str, *, is_content: bool) -> None:
        """A token event, unless it brings nothing. is_content: some of the answer itself, not reasoning."""
        if not text:
            return
        if is_content and self.first_content_s is None:
            self.first_content_s = at_s
        if self.keep_text:
            self.texts.append(text)
        self.event_times.append(at_s)
        self.event_tokens.append(1)

    def count(self, input_tokens: int | None, output_tokens: int | None, cached_tokens: int | None) -> None:
        """What the server says of the whole answer; None: it says nothing of it."""
        self.input_tokens = self.input_tokens if input_tokens is None else input_tokens
        self.output_tokens = self.output_tokens if output_tokens is None else output_tokens
        self.cached_tokens = self.cached_tokens if cached_tokens is None else cached_tokens

    def end(self, reason: str) -> None:
        self.finish_reason, self.is_complete = reason, True

    def on_pooled(self, at_s: float, payload: bytes) -> None:
        """A whole answer of vectors or scores, which has no tokens: the one event is that it came."""
        try:
            answer = _decode_pooled(payload)
        except msgspec.MsgspecError as error:
            self.fail("bad_response", f"{error}: {payload[:200].decode(errors='replace')}")
            return
        if not (answer.data or answer.results):
            self.fail("no_results", "the answer held neither vectors nor scores")
            return
        if (usage := answer.usage) is not None:
            self.input_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else usage.total_tokens
        self.event_times.append(at_s)
        self.event_tokens.append(0)

    def _num_tokens(self, choice: _Choice) -> int:
        """Tokens this choice says it brings: 0, or at least 1 for anything visible."""
        delta = choice.delta or choice.message
        if delta is not None:
            text = delta.content or delta.reasoning or delta.reasoning_content or ""
            is_token = bool(text) or any(call.function is not None for call in delta.tool_calls or ())
        else:
            text = choice.text or ""
            is_token = bool(text) or (choice.text is not None and choice.finish_reason is None)
        if self.keep_text and text:
            self.texts.append(text)
        return len(choice.token_ids) if choice.token_ids else int(is_token)

    def _on_usage(self, usage: _Usage, num_tokens: int) -> int:
        """Takes the counts; returns the event's tokens, which usage knows where it comes with every event."""
        if usage.prompt_tokens is not None:
            self.input_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if usage.completion_tokens is None:
            return num_tokens
        before, self._count_before = self._count_before, usage.completion_tokens
        self.output_tokens = usage.completion_tokens
        # Usage on the last event only says nothing about that event's own tokens.
        is_continuous = before > 0 or not self.event_times
        return max(num_tokens, usage.completion_tokens - before) if num_tokens and is_continuous else num_tokens


def _has_content(choice: _Choice) -> bool:
    """Whether a choice brings some of the answer itself: text or a tool call, not reasoning."""
    delta = choice.delta or choice.message
    if delta is None:
        return bool(choice.text)
    return bool(delta.content) or any(call.function is not None for call in delta.tool_calls or ())


class EventParser:
    """Cuts a text/event-stream into events and hands their data to an exchange, by `read`. Any of \\n, \\r\\n ends a
    line."""

    __slots__ = ("_exchange", "_read", "_rest")

    def __init__(self, exchange: Exchange, read: Callable[[Exchange, float, bytes], None] = Exchange.on_data) -> None:
        self._exchange = exchange
        self._read = read
        self._rest = b""

    def feed(self, at_s: float, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            # A final \r, half of a line end, stays in the rest until its other half is there.
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                self._read(self._exchange, at_s, event[6:])
            else:
                self._feed_lines(at_s, event)

    def _feed_lines(self, at_s: float, event: bytes) -> None:
        lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
        if lines:
            self._read(self._exchange, at_s, b"\n".join(lines))

    def close(self, at_s: float) -> None:
        """The stream has ended; an event without its empty line still counts."""
        rest, self._rest = self._rest.strip(), b""
        if rest:
            self._feed_lines(at_s, rest)


Read = Callable[[Exchange, float, bytes], None]
"""Takes the data of one event, or a whole answer, with its time."""

_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
"""Anthropic's reasons, in OpenAI's words."""


def read_of(path: str) -> Read:
    """How answers at `path` are read."""
    if path.endswith(("/embeddings", "/rerank")):
        return Exchange.on_pooled
    if path.endswith("/responses"):
        return on_response
    return on_message if path.endswith("/messages") else Exchange.on_data


# ---- responses ----


class _ResponsePart(msgspec.Struct):
    text: str = ""


class _Item(msgspec.Struct):
    type: str = ""
    content: list[_ResponsePart] | None = None
    arguments: str = ""


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _ResponseUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Cached | None = None


class _Response(msgspec.Struct):
    status: str = ""
    output: list[_Item] = []
    usage: _ResponseUsage | None = None
    error: Any = None


class _ResponseEvent(msgspec.Struct):
    """Of a stream, or a whole response, which has no type."""

    type: str = ""
    delta: str = ""
    response: msgspec.Raw = msgspec.Raw()
    message: str = ""


_decode_event = msgspec.json.Decoder(_ResponseEvent).decode
_decode_response = msgspec.json.Decoder(_Response).decode
_ENDS = ("response.completed", "response.incomplete", "response.failed")


def on_response(exchange: Exchange, at_s: float, payload: bytes) -> None:
    try:
        event = _decode_event(payload)
        kind = event.type
        if kind.endswith(".delta"):
            exchange.note(at_s, event.delta, is_content=not kind.startswith("response.reasoning"))
        elif kind in _ENDS:
            _end_response(exchange, _decode_response(event.response))
        elif kind == "error":
            exchange.fail("stream_error", event.message)
        elif not kind:
            response = _decode_response(payload)
            for item in response.output:
                text = item.arguments or "".join(part.text for part in item.content or ())
                exchange.note(at_s, text, is_content=item.type != "reasoning")
            _end_response(exchange, response)
    except msgspec.MsgspecError as error:
        exchange.fail("bad_response", f"{error}: {payload[:200].decode(errors='replace')}")


def _end_response(exchange: Exchange, response: _Response) -> None:
    if response.status not in ("completed", "incomplete"):
        exchange.fail("stream_error", f"{response.status or 'no status'}: {response.error}")
        return
    exchange.end("stop" if response.status == "completed" else "length")
    usage = response.usage
    if usage is not None:
        details = usage.input_tokens_details
        exchange.count(usage.input_tokens, usage.output_tokens, None if details is None else details.cached_tokens)


# ---- messages ----


class _MessageUsage(msgspec.Struct):
    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def all_input_tokens(self) -> int | None:
        """Those that were cached are not among `input_tokens`."""
        if self.input_tokens is None:
            return None
        return self.input_tokens + (self.cache_creation_input_tokens or 0) + (self.cache_read_input_tokens or 0)


class _Block(msgspec.Struct):
    """A part of a message, or what is added to one."""

    type: str = ""
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    input: Any = None
    stop_reason: str | None = None


class _Message(msgspec.Struct):
    usage: _MessageUsage | None = None


class _MessageEvent(msgspec.Struct):
    """Of a stream, or a whole message, whose type is message."""

    type: str = ""
    message: _Message | None = None
    delta: _Block | None = None
    content: list[_Block] = []
    stop_reason: str | None = None
    usage: _MessageUsage | None = None
    error: msgspec.Raw = msgspec.Raw()


_decode_message = msgspec.json.Decoder(_MessageEvent).decode


def on_message(exchange: Exchange, at_s: float, payload: bytes) -> None:
    try:
        event = _decode_message(payload)
    except msgspec.MsgspecError as error:
        exchange.fail("bad_response", f"{error}: {payload[:200].decode(errors='replace')}")
        return
    if event.type == "error":
        exchange.fail("stream_error", bytes(event.error).decode(errors="replace"))
        return
    reason, usage = event.stop_reason, event.usage
    if event.type == "message_start" and event.message is not None:
        usage = event.message.usage
    for block in event.content if event.delta is None else (event.delta,):
        text = block.text or block.thinking or block.partial_json
        if block.type == "tool_use":
            text = msgspec.json.encode(block.input).decode()
        exchange.note(at_s, text, is_content=not block.thinking)
        reason = block.stop_reason or reason
    if usage is not None:
        exchange.count(usage.all_input_tokens, usage.output_tokens or None, usage.cache_read_input_tokens)
    if reason is not None:
        exchange.end(_REASONS.get(reason, reason))
