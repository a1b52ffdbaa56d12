"""What `LLM` and `AsyncLLM` answer with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.request import Request, SamplingParams
from ..core.step import TokenLogprob
from ..server.choice import Choice, Piece


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_tokens`: of the prompt, served from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `token_ids` holds what was drawn, a stop token included. `stop_reason`: the stop string or stop token
    id that ended it, else None. `finish_reason`: None while more is to come."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    stop_reason: str | int | None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All choices of one prompt; the properties are those of the first."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    outputs: tuple[CompletionOutput, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(output.finished for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Call:
    """One prompt's requests, and the text it came from."""

    prompt: str | None
    requests: tuple[Request, ...]

    def output(self, choices: Mapping[int, Choice], outputs: Sequence[CompletionOutput]) -> RequestOutput:
        """What `choices` (by index) have come to."""
        request, first = self.requests[0], choices.get(0)
        wants_prompt = request.sampling.prompt_logprobs is not None
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=request.prompt_tokens,
            prompt_logprobs=tuple(first.prompt_logprobs) if wants_prompt and first is not None else None,
            outputs=tuple(outputs),
            usage=Usage(
                prompt_tokens=len(request.prompt_tokens),
                completion_tokens=sum(choice.num_tokens for choice in choices.values()),
                cached_tokens=0 if first is None else max(0, first.num_cached),
            ),
        )


def completion_output(index: int, pieces: Sequence[Piece], sampling: SamplingParams) -> CompletionOutput:
    """A choice whose pieces have all come."""
    last = pieces[-1]
    return CompletionOutput(
        index=index,
        text="".join(piece.text for piece in pieces),
        token_ids=tuple(token for piece in pieces for token in piece.tokens),
        logprobs=None if sampling.logprobs is None else tuple(entry for piece in pieces for entry in piece.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
