"""OpenAI's shape of answers to chat and completions: whole bodies, and the chunks of a stream.

A chunk that only carries text, as nearly all do, is three byte strings joined: everything but the text is prepared when
the answer starts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...core.errors import TokenmillError
from ...core.events import FINISH_STOP
from ...core.request import EXPORT
from ...core.step import TokenLogprob
from ...text.choice import Choice, Piece
from ...text.parts import CallArguments, CallStart, Content, Part, Reasoning
from ..answer import Answer
from ..errors import describe
from ..json_encoder import encode_json
from ..logprobs import prompt_logprobs
from ..pieces import Work
from ..tools import FUNCTION_CALL


def message_of(choice: Choice, pieces: Sequence[Piece], *, is_old: bool = False) -> dict[str, Any]:
    """The message of a choice that has ended. Content is null where the model did nothing but think or call. `is_old`:
    a call is a `function_call`."""
    delta = delta_of((part for piece in pieces for part in piece.parts), is_old=is_old)
    message: dict[str, Any] = {"role": "assistant", "content": delta.pop("content", None), "refusal": None}
    if message["content"] is None and not delta:
        message["content"] = ""
    for call in delta.get("tool_calls", ()):
        del call["index"]
    return message | delta


_FIELDS: dict[bool, tuple[str, str]] = {False: ("function", "arguments"), True: ("custom", "input")}
"""What a call is, and what it is given: of a function, and of a custom tool."""


def delta_of(parts: Iterable[Part], *, is_old: bool = False) -> dict[str, Any]:
    """What the parts add to a message, each field once. Reasoning has two names, an older and a newer one."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, Content):
            content.append(part.text)
        elif isinstance(part, Reasoning):
            reasoning.append(part.text)
        elif isinstance(part, CallStart):
            kind, given = _FIELDS[part.is_custom]
            call: dict[str, Any] = {
                "index": part.index,
                "id": part.id,
                "type": kind,
                kind: {"name": part.name, given: ""},
            }
            calls[part.index] = call
        else:
            assert isinstance(part, CallArguments)
            kind, given = _FIELDS[part.is_custom]
            call = calls.setdefault(part.index, {"index": part.index, kind: {given: ""}})
            call[kind][given] += part.text
    delta: dict[str, Any] = {}
    if reasoning:
        delta["reasoning"] = delta["reasoning_content"] = "".join(reasoning)
    if content:
        delta["content"] = "".join(content)
    if calls and is_old:
        delta["function_call"] = calls[min(calls)]["function"]
    elif calls:
        delta["tool_calls"] = list(calls.values())
    return delta


_PREFIX, _END = b"data: ", b"\n\n"
_CHOICES_AT_ONCE = 8
_NEXT = {"do_remote_prefill": True, "do_remote_decode": False}
"""What the call to the server that goes on is to carry as its kv_transfer_params."""
DONE = b"data: [DONE]\n\n"


class OpenAIShape:
    """A `Shape`. `prefix`: what the ids of its answers begin with."""

    media_type = "text/event-stream; charset=utf-8"

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        return whole_body(answer, pieces)

    def chunks(self, answer: Answer) -> Chunks:
        return Chunks(answer)


def whole_body(answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
    """The body of an answer that is not streamed; `pieces` per choice."""
    body = answer.head("chat.completion" if answer.is_chat else "text_completion")
    body["choices"] = choices = []
    for choice in answer.choices:
        choices.append((yield from _whole_choice(answer, choice, pieces[choice.index])))
        if len(choices) % _CHOICES_AT_ONCE == 0 or answer.call.sampling.logprobs is not None:
            yield
    body["usage"] = answer.usage()
    body |= answer.metrics()
    if answer.is_chat:
        body |= yield from _prompt_extras(answer, answer.choices[0])
    if answer.call.handoff == EXPORT:
        body["kv_transfer_params"] = _NEXT if all(choice.is_saved for choice in answer.choices) else None
    return encode_json(body)


def _whole_choice(answer: Answer, choice: Choice, pieces: Sequence[Piece]) -> Work[dict[str, Any]]:
    call = answer.call
    shown = [answer.shown(piece) for piece in pieces]
    text = "".join(piece.text for piece in shown)
    entries: list[TokenLogprob | int] = [entry for piece in shown for entry in piece.logprobs]
    if call.echo:
        text = answer.echo(choice).text + text
        entries = [*answer.echo_entries(choice), *entries]
    body: dict[str, Any] = {"index": choice.index}
    if answer.is_chat:
        body["message"] = message_of(choice, shown, is_old=FUNCTION_CALL in call.extras)
    else:
        body["text"] = text
    body["logprobs"] = yield from answer.logprobs(choice, entries)
    body["finish_reason"] = _finish_reason(answer, choice, shown[-1])
    body["stop_reason"] = shown[-1].stop_reason
    body |= shown[-1].warning
    if call.return_token_ids:
        body["token_ids"] = [token for piece in shown for token in piece.tokens]
    if not answer.is_chat:
        body |= yield from _prompt_extras(answer, choice)
    return body


def _finish_reason(answer: Answer, choice: Choice, piece: Piece) -> str | None:
    if piece.finish_reason != FINISH_STOP or not choice.has_calls or choice.has_cut_call:
        return piece.finish_reason
    return "function_call" if FUNCTION_CALL in answer.call.extras else "tool_calls"


def _prompt_extras(answer: Answer, choice: Choice) -> Work[dict[str, Any]]:
    """vLLM's fields about the prompt: in the body for chat, in each choice for completions."""
    call = answer.call
    extras: dict[str, Any] = {}
    if call.prompt_logprobs is not None:
        shaped = yield from prompt_logprobs(choice.prompt_logprobs, answer.names, call.prompt_logprobs)
        extras["prompt_logprobs"] = shaped
    if call.return_token_ids:
        extras["prompt_token_ids"] = answer.prompts[answer.prompt_of(choice)].tokens
    return extras


class Chunks:
    """Writes the server-sent events of one answer. `is_plain`: all but the first and last carry nothing but text."""

    def __init__(self, answer: Answer) -> None:
        call = answer.call
        self._answer = answer
        self._kind = "chat.completion.chunk" if answer.is_chat else "text_completion"
        self._says_text_alone = (
            call.sampling.logprobs is None
            and not (call.continuous_usage or call.return_token_ids or call.score_only)
            and all(choice.parser is None for choice in answer.choices)
        )
        self.is_plain = self._says_text_alone and not call.echo
        self._shows_tokens = call.sampling.logprobs is not None or call.return_token_ids or call.continuous_usage
        head = _PREFIX + encode_json(answer.head(self._kind))[:-1] + b',"choices":[{"index":'
        text = b',"delta":{"content":' if answer.is_chat else b',"text":'
        self._unechoed = set(range(len(answer.choices))) if call.echo else set()
        self._heads = [head + str(choice.index).encode() + text for choice in answer.choices]
        usage = b',"usage":null' if call.include_usage else b""
        self._tail = (
            (b"}" if answer.is_chat else b"") + b',"logprobs":null,"finish_reason":null}]' + usage + b"}" + _END
        )

    def start(self) -> bytes:
        """What comes before any text: the role of every choice, for chat."""
        if not self._answer.is_chat:
            return b""
        extras = {"prompt_token_ids": self._answer.prompts[0].tokens} if self._answer.call.return_token_ids else {}
        delta = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return b"".join(
            self._event([{"index": choice.index} | delta], extras if choice.index == 0 else {})
            for choice in self._answer.choices
        )

    def text(self, choice: Choice, piece: Piece) -> bytes:
        """The chunk of a piece that is nothing but text; nothing where it has none."""
        assert self.is_plain and piece.finish_reason is None, piece
        return self._heads[choice.index] + encode_json(piece.text) + self._tail if piece.text else b""

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        """The chunk of any piece, behind the prompt where that is to be shown first; nothing where it has nothing to
        say."""
        echo = b""
        if choice.index in self._unechoed:
            self._unechoed.discard(choice.index)
            self.is_plain = self._says_text_alone and not self._unechoed
            echo = yield from self._echo(choice)
        return echo + (yield from self._piece(choice, self._answer.shown(piece)))

    def _echo(self, choice: Choice) -> Work[bytes]:
        answer = self._answer
        body = {"index": choice.index, "text": answer.echo(choice).text}
        body["logprobs"] = yield from answer.logprobs(choice, answer.echo_entries(choice))
        return self._event([body | {"finish_reason": None}])

    def _piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        answer = self._answer
        says_more = bool(piece.tokens) and (piece.parsed is None or self._shows_tokens)
        if not (piece.parts or says_more or piece.finish_reason):
            return b""
        body: dict[str, Any] = {"index": choice.index}
        if answer.is_chat:
            body["delta"] = delta_of(piece.parts, is_old=FUNCTION_CALL in answer.call.extras)
        else:
            body["text"] = piece.text
        body["logprobs"] = (yield from answer.logprobs(choice, piece.logprobs)) if piece.tokens else None
        body["finish_reason"] = _finish_reason(answer, choice, piece)
        if piece.finish_reason is not None:
            body["stop_reason"] = piece.stop_reason
            body |= piece.warning
        if answer.call.return_token_ids:
            body["token_ids"] = list(piece.tokens)
        return self._event([body])

    def end(self) -> bytes:
        """After the last piece: a chunk that carries only the usage, where the call wants it, and the end's mark."""
        if not self._answer.call.include_usage:
            return DONE
        usage = self._answer.head(self._kind) | {"choices": [], "usage": self._answer.usage()}
        usage |= self._answer.metrics()
        return _PREFIX + encode_json(usage) + _END + DONE

    def failure(self, error: TokenmillError) -> bytes:
        """In place of all that was still to come."""
        return _PREFIX + encode_json(describe(error)) + _END

    def _event(self, choices: list[dict[str, Any]], extras: dict[str, Any] | None = None) -> bytes:
        body = self._answer.head(self._kind) | {"choices": choices} | (extras or {})
        if self._answer.call.continuous_usage:
            body["usage"] = self._answer.usage()
        elif self._answer.call.include_usage:
            body["usage"] = None
        return _PREFIX + encode_json(body) + _END
