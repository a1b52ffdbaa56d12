"""The JSON of answers: whole bodies, and the chunks of a stream.

A chunk that only carries text, as nearly all do, is three byte strings joined: everything but the text is prepared when
the answer starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..core.request import EXPORT
from ..core.step import TokenLogprob
from ..text.choice import Choice, Piece
from .logprobs import TokenNames, chat_logprobs, completion_logprobs, prompt_logprobs
from .openai import Call
from .pieces import Work
from .tokens import Encoded

_encode = msgspec.json.Encoder().encode
_PREFIX, _END = b"data: ", b"\n\n"
_CHOICES_AT_ONCE = 8
_NEXT = {"do_remote_prefill": True, "do_remote_decode": False}
"""What the call to the server that goes on is to carry as its kv_transfer_params."""
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True, eq=False)
class Answer:
    """One call's answer as it grows. Choice c of prompt p is choices[p * n + c].

    echoes        the text each prompt shows again, where the call wants that
    text_offsets  per choice, where in its text the next token's logprobs start
    """

    id: str
    created: int
    model: str
    fingerprint: str
    call: Call
    prompts: Sequence[Encoded]
    choices: Sequence[Choice]
    names: TokenNames
    echoes: Sequence[str] = ()
    text_offsets: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.text_offsets = [0] * len(self.choices)

    @property
    def is_chat(self) -> bool:
        return self.call.conversation is not None

    def prompt_of(self, choice: Choice) -> int:
        return choice.index // self.call.sampling.n

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def usage(self) -> dict[str, Any]:
        """Each prompt counts once, whatever n is; cached tokens are those that its first choice found."""
        num_prompt = sum(len(prompt.tokens) for prompt in self.prompts)
        num_output = 0 if self.call.score_only else sum(choice.num_tokens for choice in self.choices)
        num_cached = sum(choice.num_cached for choice in self.choices[:: self.call.sampling.n])
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprob | int]) -> Work[msgspec.Raw | None]:
        """choices[].logprobs for the next tokens of a choice; null where the call wants none."""
        num_top = self.call.sampling.logprobs
        if num_top is None:
            return None
        if self.is_chat:
            scored = [entry for entry in entries if not isinstance(entry, int)]
            return (yield from chat_logprobs(scored, self.names, num_top))
        start = self.text_offsets[choice.index]
        shaped, offset = yield from completion_logprobs(entries, self.names, num_top, start)
        self.text_offsets[choice.index] = offset
        return shaped

    def echo(self, choice: Choice) -> Piece:
        """The prompt as the first piece of a choice's text; its logprobs are `echo_entries`."""
        return Piece(self.echoes[self.prompt_of(choice)])

    def echo_entries(self, choice: Choice) -> list[TokenLogprob | int]:
        """The prompt's scores, the first token's id standing alone."""
        if self.call.sampling.logprobs is None:
            return []
        return [self.prompts[self.prompt_of(choice)].tokens[0], *choice.prompt_logprobs]

    def shown(self, piece: Piece) -> Piece:
        """What of a piece the caller sees: where the prompt is only scored, how it ended."""
        if not self.call.score_only:
            return piece
        return Piece(finish_reason=piece.finish_reason and "length")


def whole_body(answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
    """The body of an answer that is not streamed; `pieces` per choice."""
    body = answer.head("chat.completion" if answer.is_chat else "text_completion")
    body["choices"] = choices = []
    for choice in answer.choices:
        choices.append((yield from _whole_choice(answer, choice, pieces[choice.index])))
        if len(choices) % _CHOICES_AT_ONCE == 0 or answer.call.sampling.logprobs is not None:
            yield
    body["usage"] = answer.usage()
    if answer.is_chat:
        body |= yield from _prompt_extras(answer, answer.choices[0])
    if answer.call.handoff == EXPORT:
        body["kv_transfer_params"] = _NEXT if all(choice.is_saved for choice in answer.choices) else None
    return _encode(body)


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
        body["message"] = {"role": "assistant", "content": text, "refusal": None}
    else:
        body["text"] = text
    body["logprobs"] = yield from answer.logprobs(choice, entries)
    body["finish_reason"] = shown[-1].finish_reason
    body["stop_reason"] = shown[-1].stop_reason
    if call.return_token_ids:
        body["token_ids"] = [token for piece in shown for token in piece.tokens]
    if not answer.is_chat:
        body |= yield from _prompt_extras(answer, choice)
    return body


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
        self.is_plain = call.sampling.logprobs is None and not (
            call.continuous_usage or call.return_token_ids or call.score_only
        )
        head = _PREFIX + _encode(answer.head(self._kind))[:-1] + b',"choices":[{"index":'
        text = b',"delta":{"content":' if answer.is_chat else b',"text":'
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

    def echo(self, choice: Choice) -> Work[bytes]:
        """The prompt, before the first piece of its choice."""
        answer = self._answer
        body = {"index": choice.index, "text": answer.echo(choice).text}
        body["logprobs"] = yield from answer.logprobs(choice, answer.echo_entries(choice))
        return self._event([body | {"finish_reason": None}])

    def text(self, choice: Choice, piece: Piece) -> bytes:
        """The chunk of a piece that is nothing but text; nothing where it has none."""
        assert self.is_plain and piece.finish_reason is None, piece
        return self._heads[choice.index] + _encode(piece.text) + self._tail if piece.text else b""

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        """The chunk of any piece; nothing where it has nothing to say."""
        answer = self._answer
        piece = answer.shown(piece)
        if not (piece.text or piece.tokens or piece.finish_reason):
            return b""
        body: dict[str, Any] = {"index": choice.index}
        if answer.is_chat:
            body["delta"] = {"content": piece.text} if piece.text else {}
        else:
            body["text"] = piece.text
        body["logprobs"] = (yield from answer.logprobs(choice, piece.logprobs)) if piece.tokens else None
        body["finish_reason"] = piece.finish_reason
        if piece.finish_reason is not None:
            body["stop_reason"] = piece.stop_reason
        if answer.call.return_token_ids:
            body["token_ids"] = list(piece.tokens)
        return self._event([body])

    def usage(self) -> bytes:
        """The chunk that carries only the usage, where the call wants it."""
        if not self._answer.call.include_usage:
            return b""
        return _PREFIX + _encode(self._answer.head(self._kind) | {"choices": [], "usage": self._answer.usage()}) + _END

    def _event(self, choices: list[dict[str, Any]], extras: dict[str, Any] | None = None) -> bytes:
        body = self._answer.head(self._kind) | {"choices": choices} | (extras or {})
        if self._answer.call.continuous_usage:
            body["usage"] = self._answer.usage()
        elif self._answer.call.include_usage:
            body["usage"] = None
        return _PREFIX + _encode(body) + _END
