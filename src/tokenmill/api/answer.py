"""One call's answer as it grows, and the interface of what makes bytes of it: `Shape`, which each API implements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from ..core.errors import TokenmillError
from ..core.speculation import DETAILED, NO_METRICS
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
    draft_metrics  what is told of drafts: NO_METRICS, SUMMARY or DETAILED
    most_drafted  tokens that may be drafted for a choice in a step; 0: none are
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
    draft_metrics: str = NO_METRICS
    most_drafted: int = 0

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
        is_predicted = self.call.prediction is not None
        if is_predicted or any(choice.reasons for choice in self.choices):
            num_thought = sum(choice.num_reasoning_tokens for choice in self.choices)
            details = usage["completion_tokens_details"] = {"reasoning_tokens": num_thought}
            if is_predicted:
                accepted = (min(choice.num_accepted, choice.num_tokens) for choice in self.choices)
                details["accepted_prediction_tokens"] = sum(accepted)
                details["rejected_prediction_tokens"] = sum(choice.num_rejected for choice in self.choices)
        return usage

    def metrics(self) -> dict[str, Any]:
        """The field `metrics`, as vLLM has it, where it is wanted: of drafts, null unless there is one choice."""
        if self.draft_metrics == NO_METRICS:
            return {}
        has_one = len(self.choices) == 1 and self.most_drafted > 0
        told = draft_metrics(self.choices[0].draft_steps, self.most_drafted, self.draft_metrics) if has_one else None
        return {"metrics": {"speculative_decoding": told}}

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


def draft_metrics(steps: Sequence[tuple[int, int]], most_drafted: int, level: str) -> dict[str, Any]:
    """vLLM's object of a request's drafts. steps: of each that verified some, how many, and how many were accepted."""
    num_drafted, num_accepted = sum(drafted for drafted, _ in steps), sum(accepted for _, accepted in steps)
    whole = [0] * (most_drafted + 1)
    by_length: dict[str, list[int]] = {}
    for drafted, accepted in steps:
        whole[accepted] += 1
        by_length.setdefault(str(drafted), [0] * (drafted + 1))[accepted] += 1
    told: dict[str, Any] = {
        "mean_acceptance_length": 1 + num_accepted / len(steps) if steps else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": whole,
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": most_drafted,
    }
    if level == DETAILED:
        told["per_step_accepted"] = [accepted for _, accepted in steps]
        told["per_step_drafted"] = [drafted for drafted, _ in steps]
    return told


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
