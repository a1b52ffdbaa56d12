"""One choice of an answer: tokens in, text and its parts out, stop strings matched, tokens counted. Knows nothing of
JSON or HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..core.events import FINISH_LENGTH, FINISH_STOP, Timing
from ..core.loop_guard import LOOP_WARNING, REPETITION
from ..core.request import Request
from ..core.step import TokenLogprob
from .detokenizer import Detokenizer, StopMatcher
from .parts import CallArguments, CallStart, Content, Parser, Part
from .reasoning import ReasoningParser
from .tokenizer import Tokenizer
from .tools.harmony import HarmonyParser


class Produced(Protocol):
    """What an engine has produced for a request since one last looked; fields as in core.events.Output."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprob]: ...
    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprob]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def error(self) -> str: ...
    @property
    def stop_token(self) -> int | None: ...
    @property
    def num_cached(self) -> int: ...
    @property
    def is_saved(self) -> bool: ...
    @property
    def predicted(self) -> tuple[int, int]: ...
    @property
    def timing(self) -> Timing | None: ...
    @property
    def draft_steps(self) -> Sequence[tuple[int, int]]: ...


@dataclass(slots=True)
class Piece:
    """What one delta adds to an answer. `stop_reason`: the stop string or stop token id that ended it, or TIMEOUT, or
    REPETITION, else None. `parsed`: what a parser has made of the text, if there is one; text that it holds back is in
    a later one. `draft_steps`: as in Choice, of this delta."""

    text: str = ""
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    parsed: Sequence[Part] | None = None
    draft_steps: Sequence[tuple[int, int]] = ()

    @property
    def parts(self) -> Sequence[Part]:
        """What the piece says."""
        if self.parsed is not None:
            return self.parsed
        return (Content(self.text),) if self.text else ()

    @property
    def warning(self) -> dict[str, str]:
        """The field that an answer has where it was ended as a loop; else none."""
        is_loop = self.finish_reason == FINISH_LENGTH and self.stop_reason == REPETITION
        return {"warning": LOOP_WARNING} if is_loop else {}


@dataclass(slots=True, eq=False)
class Choice:
    """The state of one choice. `parser` takes its text apart; without one all of it is content. `has_calls`: a call of
    a tool has begun; `has_cut_call`: a stop string or stop token ended the last one before it was whole. `num_tokens`
    counts up to and including the token that completed a stop string, and the stop token; what the engine drew beyond a
    stop string is dropped here and never shows. `shown`: special tokens that the parser must see. `timing`: when the
    engine began with it and with its output, as far as is known. `draft_steps`: of each step that verified drafts, how
    many, and how many were accepted; `num_accepted`, `num_rejected`: of those of its prediction."""

    index: int
    request: Request
    tokenizer: Tokenizer
    parser: Parser | None = None
    shown: frozenset[int] = frozenset()
    has_calls: bool = False
    has_cut_call: bool = False
    num_tokens: int = 0
    num_cached: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    is_saved: bool = False
    is_finished: bool = False
    timing: Timing | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    draft_steps: list[tuple[int, int]] = field(default_factory=list)
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopMatcher | None = field(init=False)
    _thinker: ReasoningParser | HarmonyParser | None = field(init=False)
    _num_thought: int = 0
    _parts: list[Part] = field(default_factory=list)
    _arguments: list[str] = field(default_factory=list)
    _is_text: bool = False

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self._detokenizer = Detokenizer(
            self.tokenizer, skip_special=sampling.skip_special_tokens, shown=self.shown if self.parser else frozenset()
        )
        self._thinker = self.parser if isinstance(self.parser, ReasoningParser | HarmonyParser) else None
        self._stops = StopMatcher(sampling.stop, include=sampling.include_stop_str_in_output) if sampling.stop else None

    def push(self, delta: Produced) -> Piece:
        """The text that is now certain. A piece with a finish_reason is the last."""
        self.num_cached = delta.num_cached
        self.is_saved = delta.is_saved
        self.num_accepted += delta.predicted[0]
        self.num_rejected += delta.predicted[1]
        if delta.timing is not None:
            self.timing = delta.timing
        self.prompt_logprobs.extend(delta.prompt_logprobs)
        piece = self._match(delta) if self._stops else self._decode(delta)
        if delta.draft_steps:
            self.draft_steps.extend(delta.draft_steps)
            piece.draft_steps = delta.draft_steps
        if piece.finish_reason is None and delta.finish_reason is not None:
            self._end(piece, delta)
        self.is_finished = piece.finish_reason is not None
        if self.parser is not None:
            if self.is_finished:
                self._parts += self.parser.end()
            piece.parsed, self._parts = self._parts, []
            self._note_calls(piece.parsed)
            self.has_cut_call = self.has_calls and piece.stop_reason is not None and not self._is_call_whole()
        return piece

    def _note_calls(self, parts: Sequence[Part]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self.has_calls = True
                self._arguments = []
                self._is_text = part.is_custom
            elif isinstance(part, CallArguments):
                self._arguments.append(part.text)

    def _is_call_whole(self) -> bool:
        if self._is_text:  # which may end anywhere
            return True
        try:
            json.loads("".join(self._arguments))
        except ValueError:
            return False
        return True

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told from the answer."""
        return self._thinker is not None

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of reasoning, with the one that ended it."""
        return self._num_thought if self._thinker is not None and self._thinker.has_reasoned else 0

    def _hear(self, text: str, num_tokens: int) -> str:
        """Text that is certain, for the parser too."""
        if self._thinker is not None and self._thinker.is_thinking:
            self._num_thought += num_tokens
        if self.parser is not None and text:
            self._parts += self.parser.push(text)
        return text

    def _decode(self, delta: Produced) -> Piece:
        self.num_tokens += len(delta.tokens)
        push = self._detokenizer.push
        if self.parser is None:
            text = push(delta.tokens)
        elif self._thinker is not None and self._thinker.may_think:
            text = "".join([self._hear(push([token]), 1) for token in delta.tokens])
        else:
            text = self._hear(push(delta.tokens), 0)
        return Piece(text, delta.tokens, delta.logprobs)

    def _match(self, delta: Produced) -> Piece:
        """Token by token, so that the one that completes a stop string is known. Text of the first min_tokens tokens
        is not searched."""
        assert self._stops is not None
        text: list[str] = []
        for number, token in enumerate(delta.tokens, 1):
            self.num_tokens += 1
            added = self._detokenizer.push([token])
            if self.num_tokens <= self.request.sampling.min_tokens:
                text.append(self._hear(added, 1))
                continue
            safe, stop = self._stops.push(added)
            text.append(self._hear(safe, 1))
            if stop is not None:
                return Piece("".join(text), delta.tokens[:number], delta.logprobs[:number], FINISH_STOP, stop)
        return Piece("".join(text), delta.tokens, delta.logprobs)

    def _end(self, piece: Piece, delta: Produced) -> None:
        """Add what was held back, and say why it ended."""
        sampling, token = self.request.sampling, delta.stop_token
        piece.finish_reason = delta.finish_reason
        if delta.error:
            piece.stop_reason = delta.error
        rest = ""
        if token is not None:
            self.num_tokens += 1
            piece.tokens = [*piece.tokens, token]
            if token in sampling.stop_token_ids:
                piece.stop_reason = token
                if sampling.include_stop_str_in_output:
                    rest = self._detokenizer.push([token])
        rest += self._detokenizer.flush()
        if self._stops is not None:
            safe, stop = self._stops.push(rest)
            rest = safe if stop is not None else safe + self._stops.flush()
            if stop is not None:
                piece.finish_reason, piece.stop_reason = FINISH_STOP, stop
        piece.text += self._hear(rest, 0)
