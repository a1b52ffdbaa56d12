"""What `LLM` and `AsyncLLM` answer with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..api.openai.shape import delta_of
from ..core.events import FINISH_LENGTH, FINISH_STOP, Timing
from ..core.request import Request
from ..core.step import TokenLogprob
from ..text.beams import Beams
from ..text.choice import Choice, Piece
from ..text.parts import Parser, Part
from ..text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens. `cached_tokens`: of the prompt, served from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. `arguments`: JSON text, or the text that a custom tool takes. `id` names it in the message that
    answers it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `token_ids` holds what was drawn, a stop token included. `stop_reason`: the stop string or stop token
    id that ended it, else None. `finish_reason`: None while more is to come. `text` is all that was said; of the answer
    to a conversation `content`, `reasoning` and `tool_calls` are what it is made of. `draft_steps`: of each step that
    verified drafts, how many, and how many were accepted. `timing`: when the engine had it, began it, and had its first
    and its last token. These two say how it was made: answers are equal whatever they are."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: str | None
    stop_reason: str | int | None
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    draft_steps: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    timing: Timing | None = field(default=None, compare=False)

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
    def content(self) -> str:
        return self.outputs[0].content

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

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
class BeamSearchSequence:
    """One sequence that a beam search found.

    tokens       prompt and output, as vLLM has them; text: all of it
    token_ids    the output alone, a stop token included, and logprobs of these
    cum_logprob  sum of the output's log probabilities; score: that over length ** length_penalty
    """

    tokens: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    cum_logprob: float
    score: float
    finish_reason: str
    stop_reason: int | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What was found for one prompt, the best first."""

    sequences: tuple[BeamSearchSequence, ...]


def _no_parser(request_id: str) -> Parser | None:
    return None


@dataclass(frozen=True, slots=True)
class PromptCall:
    """One prompt's requests, and the text it came from. `parser`: of the answer to a request, by its id;
    `shown`: special tokens that it must see."""

    prompt: str | None
    requests: tuple[Request, ...]
    parser: Callable[[str], Parser | None] = _no_parser
    shown: frozenset[int] = frozenset()

    def output(self, said: Mapping[int, Said], unfinished: str | None = None) -> RequestOutput:
        """What the choices have said so far, by index. unfinished: the finish_reason of those that have not ended."""
        request, first = self.requests[0], said.get(0)
        wants_prompt = request.sampling.prompt_logprobs is not None
        return RequestOutput(
            prompt=self.prompt,
            prompt_token_ids=request.prompt_tokens,
            prompt_logprobs=tuple(first.choice.prompt_logprobs) if wants_prompt and first is not None else None,
            outputs=tuple(_completion(request, said.get(request.choice), unfinished) for request in self.requests),
            usage=Usage(
                prompt_tokens=len(request.prompt_tokens),
                completion_tokens=sum(each.choice.num_tokens for each in said.values()),
                cached_tokens=0 if first is None else max(0, first.choice.num_cached),
            ),
        )


@dataclass(slots=True)
class Said:
    """What one choice has said so far."""

    choice: Choice
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    parts: list[Part] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.parts.extend(piece.parsed or ())
        self.tokens.extend(piece.tokens)
        self.logprobs.extend(piece.logprobs)
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason


def _spoken(said: Said | None) -> dict[str, Any]:
    """What the text is made of."""
    if said is None:
        return {}
    if said.choice.parser is None:
        return {"content": said.text}
    delta = delta_of(said.parts)
    calls = [(call["id"], call[call["type"]]) for call in delta.get("tool_calls", ())]
    return {
        "content": delta.get("content", ""),
        "reasoning": delta.get("reasoning", ""),
        "tool_calls": tuple(
            ToolCall(call_id, each["name"], each.get("arguments", each.get("input"))) for call_id, each in calls
        ),
    }


def _completion(request: Request, said: Said | None, unfinished: str | None) -> CompletionOutput:
    wants_logprobs = request.sampling.logprobs is not None
    return CompletionOutput(
        index=request.choice,
        text=said.text if said else "",
        token_ids=tuple(said.tokens) if said else (),
        logprobs=tuple(said.logprobs if said else ()) if wants_logprobs else None,
        finish_reason=(said.finish_reason if said else None) or unfinished,
        stop_reason=said.stop_reason if said else None,
        draft_steps=tuple(said.choice.draft_steps) if said else (),
        timing=said.choice.timing if said else None,
        **_spoken(said),
    )


def beams_found(request: Request, beams: Beams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """What a search on the prompt of `request` has found."""
    sequences = []
    for ended in beams.ended:
        beam = ended.beam
        tokens = request.prompt_tokens + beam.tokens
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                text=tokenizer.decode(list(tokens)),
                token_ids=beam.tokens,
                logprobs=beam.entries,
                cum_logprob=beam.total,
                score=ended.score,
                finish_reason=FINISH_LENGTH if ended.stop_token is None else FINISH_STOP,
                stop_reason=ended.stop_token if ended.stop_token not in request.eos_token_ids else None,
            )
        )
    return BeamSearchOutput(tuple(sequences))
