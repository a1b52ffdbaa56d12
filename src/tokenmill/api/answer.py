"""One call's answer as it grows, and the interface of what makes bytes of it: `Shape`, which each API implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ..core.errors import TokenmillError
from ..core.step import TokenLogprob
from ..text.choice import Choice, Piece
from .call import Call
from .encoder import Encoded
from .logprobs import TextOffsets, TokenNames, chat_logprobs, completion_logprobs
from .pieces import Work


@dataclass(slots=True, eq=False)
class Answer:
    """One call's answer as it grows. Choice c of prompt p is choices[p * n + c].

    echoes        the text each prompt shows again, where the call wants that
    text_offsets  per choice, where in its text tokens begin, where that is told
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
    text_offsets: list[TextOffsets] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.is_chat or self.call.sampling.logprobs is None:
            return
        for choice in self.choices:
            prompt = self.prompt_of(choice)
            echo = (self.echoes[prompt], len(self.prompts[prompt].tokens)) if self.call.echo else ("", 0)
            skip = self.call.sampling.skip_special_tokens
            self.text_offsets.append(TextOffsets(choice.tokenizer, skip_special=skip, echo=echo[0], num_echoed=echo[1]))

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
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        if any(choice.reasons for choice in self.choices):
            num_thought = sum(choice.num_reasoning_tokens for choice in self.choices)
            usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
        return usage

    def logprobs(self, choice: Choice, entries: Sequence[TokenLogprob | int]) -> Work[msgspec.Raw | None]:
        """choices[].logprobs for the next tokens of a choice; null where the call wants none."""
        num_top = self.call.sampling.logprobs
        if num_top is None:
            return None
        if self.is_chat:
            scored = [entry for entry in entries if not isinstance(entry, int)]
            return (yield from chat_logprobs(scored, self.names, num_top))
        return (yield from completion_logprobs(entries, self.names, num_top, self.text_offsets[choice.index]))

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


class Chunks(Protocol):
    """One answer's stream. Each method gives bytes to be sent at once, or none.

    is_plain  `text` may write a piece that does not end its choice, whatever it is
    """

    is_plain: bool

    def start(self) -> bytes:
        """Before any piece; the first output has come."""
        ...

    def text(self, choice: Choice, piece: Piece) -> bytes:
        """The quick way for nothing but text: called only while `is_plain`."""
        ...

    def piece(self, choice: Choice, piece: Piece) -> Work[bytes]:
        """Any piece. One with a finish_reason is the last of its choice."""
        ...

    def end(self) -> bytes:
        """After the last piece of all choices: what makes the stream complete."""
        ...

    def failure(self, error: TokenmillError) -> bytes:
        """In place of all that was still to come."""
        ...


class Shape(Protocol):
    """prefix      of the ids that answers get, with the character behind it
    media_type  of streams
    """

    @property
    def prefix(self) -> str: ...

    @property
    def media_type(self) -> str: ...

    def whole(self, answer: Answer, pieces: Sequence[Sequence[Piece]]) -> Work[bytes]:
        """The JSON body of an answer that is not streamed; `pieces` per choice."""
        ...

    def chunks(self, answer: Answer) -> Chunks: ...
