"""Answers as Anthropic's API has them: a message of content blocks, whole or as events; and its list of models. Pure.

Events come in this order: message_start; for each block content_block_start, deltas, content_block_stop; message_delta
with the reason of the end and the counts; message_stop. A ping follows the first block's start.

The arguments of a call that max_tokens has cut off stop in the middle: their JSON is closed where it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ...core.errors import TokenmillError
from ...core.events import FINISH_LENGTH
from ...text.choice import Choice, Piece
from ...text.parts import CallArguments, CallStart, Content, Part, Reasoning
from ..answer import Answer
from ..errors import anthropic_style, describe
from ..json_encoder import encode_json
from ..pieces import Work


def model_body(card: dict[str, Any]) -> dict[str, Any]:
    """`card`: OpenAI's, with vLLM's max_model_len."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def page_body(cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All of them on one page."""
    data = [model_body(card) for card in cards]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


_CLOSER = {"{": "}", "[": "]"}


def read_object(text: str) -> dict[str, Any]:
    """The object that `text` writes, as far as it goes: what is open is closed, what has no value is left out. An empty
    object where there is none."""
    for candidate in _candidates(text):
        try:
            value = msgspec.json.decode(candidate)
        except msgspec.MsgspecError:
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _candidates(text: str) -> list[str]:
    """The text as it is, then closed at its end, then where the value before its last ended."""
    open_: list[str] = []
    ends: list[tuple[int, str]] = []  # where a closing may follow, and which
    in_string = is_escaped = False
    for position, char in enumerate(text):
        if in_string:
            in_string = is_escaped or char != '"'
            is_escaped = not is_escaped and char == "\\"
            continue
        if char == '"':
            in_string = True
        elif char == ",":
            ends.append((position, _closing(open_)))
        elif char in _CLOSER:
            open_.append(char)
            ends.append((position + 1, _closing(open_)))
        elif char in "}]" and open_:
            open_.pop()
    closing = _closing(open_)
    found = [text, text + closing]
    if in_string:
        cut = text.rfind("\\")
        found += [f'{text}"{closing}', f'{text[:cut]}"{closing}'] if cut >= 0 else [f'{text}"{closing}']
    return found + [text[:position] + rest for position, rest in ends[-1:]]


def _closing(open_: list[str]) -> str:
    return "".join(_CLOSER[char] for char in reversed(open_))


_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_AT_ONCE = 1000
"""Parts of an answer that is put together before others have their turn."""


class MessageShape:
    prefix = "msg_"
    media_type = "text/event-stream; charset=utf-8"

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        (choice,) = answer.choices
        shown = [answer.shown(piece) for piece in pieces[0]]
        blocks = _Blocks(hides_thinking=answer.call.extras["hides_thinking"])
        num_parts = 0
        for piece in shown:
            for part in piece.parts:
                blocks.add(part)
                num_parts += 1
                if num_parts % _AT_ONCE == 0:
                    yield
        reason, sequence = stop_of(answer, choice, shown[-1])
        message = start_of(answer) | {"content": blocks.end(), "stop_reason": reason, "stop_sequence": sequence}
        return encode_json(message | {"usage": usage_of(answer)} | shown[-1].warning)

    def chunks(self, answer: Answer) -> MessageChunks:
        return MessageChunks(answer)


def start_of(answer: Answer) -> dict[str, Any]:
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def stop_of(answer: Answer, choice: Choice, last: Piece) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence). An answer that the context had no room for says so."""
    if last.finish_reason == FINISH_LENGTH:
        is_cut = choice.request.max_tokens < (answer.call.extras["max_tokens"] or 1)
        return "model_context_window_exceeded" if is_cut else "max_tokens", None
    if isinstance(last.stop_reason, str):
        return "stop_sequence", last.stop_reason
    return "tool_use" if choice.has_calls and not choice.has_cut_call else "end_turn", None


def usage_of(answer: Answer) -> dict[str, Any]:
    """Tokens found in the cache are counted apart from the others of the prompt. Nothing is charged for writing it."""
    usage = answer.usage()
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
    }
    thought = usage.get("completion_tokens_details")
    return counts | (
        {} if thought is None else {"output_tokens_details": {"thinking_tokens": thought["reasoning_tokens"]}}
    )


def signature_of(thinking: str) -> str:
    """Clients expect one and send it back; nothing is read from it here, so it is but a digest of the text."""
    return hashlib.sha256(thinking.encode("utf8", "surrogatepass")).hexdigest()


class _Blocks:
    """Parts joined to content blocks."""

    def __init__(self, *, hides_thinking: bool) -> None:
        self._hides_thinking = hides_thinking
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []

    def add(self, part: Part) -> None:
        kind = _kind(part)
        if isinstance(part, CallStart):
            self._blocks.append(({"type": kind, "id": _call_id(part), "name": part.name}, []))
            return
        if not self._blocks or self._blocks[-1][0]["type"] != kind:
            assert not isinstance(part, CallArguments), "arguments come behind the start of their call"
            self._blocks.append(({"type": kind}, []))
        self._blocks[-1][1].append(part.text)

    def end(self) -> list[dict[str, Any]]:
        return [self._finish(block, "".join(texts)) for block, texts in self._blocks]

    def _finish(self, block: dict[str, Any], text: str) -> dict[str, Any]:
        if block["type"] == "tool_use":
            return block | {"input": read_object(text)}
        if block["type"] == "thinking":
            return block | {"thinking": "" if self._hides_thinking else text, "signature": signature_of(text)}
        return block | {"text": text}


def _call_id(part: CallStart) -> str:
    """As Anthropic's ids begin, where a model's family has no form of its own."""
    return f"toolu_{part.id.removeprefix('call_')}" if part.id.startswith("call_") else part.id


def _kind(part: Part) -> str:
    if isinstance(part, Content):
        return "text"
    return "thinking" if isinstance(part, Reasoning) else "tool_use"


class MessageChunks:
    """Writes the events of one answer. `is_plain`: nothing but text can come."""

    def __init__(self, answer: Answer) -> None:
        (choice,) = answer.choices
        self._answer = answer
        self.is_plain = choice.parser is None and not answer.call.score_only
        self._has_begun = False
        self._kind = ""  # of the open block
        self._thoughts: list[str] = []
        self._index = -1
        self._stop: tuple[str, str | None] = ("end_turn", None)
        self._warning: dict[str, str] = {}
        self._text_head = b""

    def start(self) -> bytes:
        """Nothing: what was cached is known with the first piece."""
        return b""

    def text(self, choice: Choice, piece: Piece) -> bytes:
        assert self.is_plain and piece.finish_reason is None, piece
        if not piece.text:
            return b""
        if self._kind != "text":
            return b"".join([*self._begin(), *self._add(Content(piece.text))])
        return self._text_head + encode_json(piece.text) + b"}}\n\n"

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        piece = self._answer.shown(piece)
        events = list(self._begin())
        for number, part in enumerate(piece.parts, 1):
            events += self._add(part)
            if number % _AT_ONCE == 0:
                yield
        if piece.finish_reason is not None:
            events += self._close()
            self._stop = stop_of(self._answer, choice, piece)
            self._warning = piece.warning
        return b"".join(events)

    def end(self) -> bytes:
        reason, sequence = self._stop
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        return _event("message_delta", {"delta": delta, "usage": usage_of(self._answer)} | self._warning) + _STOP

    def failure(self, error: TokenmillError) -> bytes:
        return b"event: error\ndata: " + encode_json(describe(error, anthropic_style)) + b"\n\n"

    def _begin(self) -> Iterable[bytes]:
        if not self._has_begun:
            self._has_begun = True
            usage = usage_of(self._answer) | {"output_tokens": 0}
            yield _event("message_start", {"message": start_of(self._answer) | {"usage": usage}})

    def _add(self, part: Part) -> Iterable[bytes]:
        kind = _kind(part)
        if isinstance(part, CallStart):
            yield from self._open(kind, {"id": _call_id(part), "name": part.name, "input": {}})
            return
        if kind != self._kind:
            assert not isinstance(part, CallArguments), "arguments come behind the start of their call"
            yield from self._open(kind, {"text": ""} if kind == "text" else {"thinking": "", "signature": ""})
        if isinstance(part, CallArguments):
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Reasoning):
            self._thoughts.append(part.text)
            if not self._answer.call.extras["hides_thinking"]:
                yield self._delta({"type": "thinking_delta", "thinking": part.text})
        else:
            yield self._text_head + encode_json(part.text) + b"}}\n\n"

    def _open(self, kind: str, block: dict[str, Any]) -> Iterable[bytes]:
        yield from self._close()
        self._index += 1
        self._kind = kind
        self._text_head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
            b'{"type":"text_delta","text":' % self._index
        )
        yield _event("content_block_start", {"index": self._index, "content_block": {"type": kind} | block})
        if self._index == 0:
            yield _PING

    def _close(self) -> Iterable[bytes]:
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature_of("".join(self._thoughts))})
            self._thoughts.clear()
        self._kind = ""
        yield _event("content_block_stop", {"index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})


def _event(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json({"type": kind} | data))
