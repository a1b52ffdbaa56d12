"""Answers of OpenAI's responses and of Anthropic's messages, as events of an exchange: what `stream` reads of chat.

Every event names its type. A token event is one that brings text, reasoning or arguments of a call; the others tell of
the answer's parts, its counts and its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from .stream import Exchange

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
