"""Ollama's shape of answers, one object, or a line of JSON for each piece and a last one with the counts; and its
names, times and durations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from ...core.errors import TokenmillError
from ...core.step import TokenLogprob
from ...text.choice import Choice, Piece
from ...text.parts import CallArguments, CallStart, Content, Part, Reasoning
from ...text.text_model import ModelInfo
from ..answer import Answer
from ..errors import describe, ollama_style
from ..json_encoder import encode_json
from ..llama_cpp import durations
from ..logprobs import chat_entries
from ..pieces import Work
from ..port import Described

API_VERSION = "0.13.0"
"""Of Ollama, whose API is spoken here. Clients ask for it before they use what later versions have."""

_LATEST = ":latest"


def tagged(name: str) -> str:
    """A model's name with its tag, which is "latest" where it has none."""
    return name if ":" in name.rpartition("/")[2] else name + _LATEST


def timestamp(seconds: float) -> str:
    """RFC 3339, of seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def details(about: ModelInfo) -> dict[str, object]:
    return {
        "parent_model": "",
        "format": about.format,
        "family": about.architecture,
        "families": [about.architecture] if about.architecture else [],
        "parameter_size": about.parameter_size,
        "quantization_level": about.quantization,
    }


def capabilities(told: Described) -> list[str]:
    """In Ollama's words."""
    if told.gives_vectors:
        return ["embedding"]
    found = ["completion"]
    found += ["tools"] * bool(told.template)
    found += ["thinking"] * told.has_reasoning
    found += ["insert"] * told.has_insert
    return found


class OllamaShape:
    """A `Shape`, of /api/chat if `is_chat`, else of /api/generate. `now`: the clock of the requests' times."""

    prefix = "ollama-"
    media_type = "application/x-ndjson"

    def __init__(self, now: Callable[[], float], *, is_chat: bool) -> None:
        self.is_chat = is_chat
        self._now = now

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        lines = Lines(answer, self._now, is_chat=self.is_chat)
        (choice,) = answer.choices
        parts = [part for piece in pieces[0] for part in piece.parts]
        entries = [entry for piece in pieces[0] for entry in piece.logprobs]
        said = lines.said(parts, is_last=True)
        return encode_json(lines.head() | said | (yield from lines.logprobs(entries)) | lines.last(choice, pieces[0]))

    def chunks(self, answer: Answer) -> Lines:
        return Lines(answer, self._now, is_chat=self.is_chat)


class Lines:
    """The `Chunks` of one answer, which has one choice."""

    def __init__(self, answer: Answer, now: Callable[[], float], *, is_chat: bool) -> None:
        self._answer = answer
        self._now = now
        self._is_chat = is_chat
        self._created = timestamp(time.time())
        self._calls: list[_GrowingCall] = []
        self._tokens: list[int] = []
        (choice,) = answer.choices
        self._gives_context = bool(answer.call.extras.get("gives_context"))
        self.is_plain = answer.call.sampling.logprobs is None and choice.parser is None
        opening = b',"message":{"role":"assistant","content":' if is_chat else b',"response":'
        self._opening = encode_json(self.head())[:-1] + opening
        self._closing = (b"}" if is_chat else b"") + b',"done":false}\n'

    def head(self) -> dict[str, Any]:
        return {"model": self._answer.call.model or self._answer.model, "created_at": self._created}

    def start(self) -> bytes:
        return b""

    def text(self, choice: Choice, piece: Piece) -> bytes:
        if self._gives_context:
            self._tokens.extend(piece.tokens)
        return self._opening + encode_json(piece.text) + self._closing if piece.text else b""

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        if self._gives_context:
            self._tokens.extend(piece.tokens)
        is_last = piece.finish_reason is not None
        said = self.said(piece.parts, is_last=is_last)
        logprobs = yield from self.logprobs(piece.logprobs)
        line = b""
        if logprobs or not self._is_nothing(said):
            line = encode_json(self.head() | said | logprobs | {"done": False}) + b"\n"
        if not is_last:
            return line
        return line + encode_json(self.head() | self.said((), is_last=True) | self.last(choice, [piece])) + b"\n"

    def end(self) -> bytes:
        return b""

    def failure(self, error: TokenmillError) -> bytes:
        return encode_json(describe(error, ollama_style)) + b"\n"

    def said(self, parts: Sequence[Part], *, is_last: bool) -> dict[str, Any]:
        """The fields that carry what is said. A call is told when it is whole; one that the end has cut is not."""
        content = "".join(part.text for part in parts if isinstance(part, Content))
        thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
        for part in parts:
            if isinstance(part, CallStart):
                self._calls.append(_GrowingCall(part))
            elif isinstance(part, CallArguments):
                self._calls[-1].text += part.text
        whole = self._calls if is_last else self._calls[:-1]
        self._calls = [] if is_last else self._calls[-1:]
        told: dict[str, Any] = {"role": "assistant", "content": content} if self._is_chat else {"response": content}
        if thinking:
            told["thinking"] = thinking
        if calls := [shaped for call in whole if (shaped := call.shaped())]:
            told["tool_calls"] = calls
        return {"message": told} if self._is_chat else told

    def _is_nothing(self, said: dict[str, Any]) -> bool:
        told = said.get("message", said)
        return not (told.get("content") or told.get("response") or "thinking" in told or "tool_calls" in told)

    def logprobs(self, entries: Sequence[TokenLogprob]) -> Work[dict[str, Any]]:
        num_top = self._answer.call.sampling.logprobs
        if num_top is None or not entries:
            return {}
        return {"logprobs": (yield from chat_entries(entries, self._answer.names, num_top))}

    def last(self, choice: Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
        """What only the end of an answer has. `pieces`: all, or in a stream the last one."""
        took = durations(choice, self._now())
        prompt = self._answer.prompts[0].tokens
        reason = pieces[-1].finish_reason
        tokens = self._tokens or [token for piece in pieces for token in piece.tokens]
        context = {"context": [*prompt, *tokens]} if self._gives_context else {}
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            **context,
            "total_duration": nanoseconds(took.total_s),
            "load_duration": nanoseconds(took.wait_s),
            "prompt_eval_count": len(prompt),
            "prompt_eval_duration": nanoseconds(took.prompt_s),
            "eval_count": choice.num_tokens,
            "eval_duration": nanoseconds(took.output_s),
            **pieces[-1].warning,
        }


class _GrowingCall:
    """A call of a tool whose arguments are still coming."""

    def __init__(self, start: CallStart) -> None:
        self.start = start
        self.text = ""

    def shaped(self) -> dict[str, Any] | None:
        """None while the arguments are no whole object."""
        try:
            arguments = json.loads(self.text or "{}")
        except ValueError:
            return None
        function = {"index": self.start.index, "name": self.start.name, "arguments": arguments}
        return {"id": self.start.id, "function": function}
