"""What a client asks for: `SamplingParams` (how to draw) or `PoolingParams` (which vector), and `Request` (one choice
of one prompt).

A request never changes after admission. Everything random or defaulted (seed, token limit, stop ids) is resolved before
a `Request` is made, so that the same Request gives the same tokens on any engine, whenever it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InvalidRequest
from .moves import KVSource
from .terms import USUAL, Terms

DRAW_VERSION = 2
"""What a seed means: processes whose versions differ draw different tokens. 2: an exponential race over token ids."""

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 4096
MAX_DRY_BREAKERS = 64
MAX_DRY_BREAKER_CHARS = 64
DRY_BREAKERS = ("\n", ":", '"', "*")
_LISTS = ("dry_sequence_breakers", "stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias")
MAX_STOP_TOKENS = 1024
MAX_GRAMMAR_CHARS = 1 << 20
EXPORT = "export"
IMPORT = "import"
IDLE_PRIORITY = 2**31 - 1
"""The lowest there is. The engine computes such a request only in steps that it would not make otherwise."""

POOLINGS = ("last", "cls", "mean", "score")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Names and defaults are the field's (OpenAI's, then vLLM's).

    temperature 0 is greedy; ties go to the lower token id. top_k 0 or -1, top_p 1, min_p 0, typical_p 1,
    top_n_sigma 0 or less, xtc_probability 0 and dry_multiplier 0 are off. `logprobs` and
    `prompt_logprobs` give the number of alternatives reported beside the token itself (None: nothing is reported);
    they are of the raw logits, before penalties and temperature. `stop` and the text switches act in the front end;
    the engine knows stop token ids only, and `bad_words` as a Request has them. `stop_token_ids` end generation; the
    token is not part of the text. `max_tokens` None means the rest of the context. A single stop string or bad word,
    lists, and a mapping for `logit_bias` are taken too, and kept as the tuples declared here; token ids in order, each
    once. `grammar`: what the output must follow, in llguidance's form as JSON text; whoever makes a Request has had it
    checked. Then an end token is possible where the output is whole and nowhere else.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: str = ""

    def __post_init__(self) -> None:
        for name in _LISTS:
            value = getattr(self, name)
            if value is None:
                self._keep(name, ())
            elif not isinstance(value, Iterable):
                raise InvalidRequest(f"{name} must be a list, got {type(value).__name__}.", param=name)
        # A lone string would otherwise be read as one stop string for each of its characters.
        self._keep("stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        breakers = self.dry_sequence_breakers
        self._keep("dry_sequence_breakers", (breakers,) if isinstance(breakers, str) else tuple(breakers))
        self._keep("bad_words", (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words))
        self._keep("stop_token_ids", tuple(self.stop_token_ids))
        self._keep("allowed_token_ids", tuple(self.allowed_token_ids))
        biases = self.logit_bias
        self._keep("logit_bias", tuple(sorted(biases.items())) if isinstance(biases, Mapping) else tuple(biases))
        _check_int("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("typical_p", self.typical_p, 0.0, 1.0, low_open=True)
        _check_float("top_n_sigma", self.top_n_sigma, -1.0, 100.0)
        _check_float("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _check_float("xtc_threshold", self.xtc_threshold, 0.0, 1.0, low_open=True)
        _check_float("dry_multiplier", self.dry_multiplier, 0.0, 100.0)
        _check_float("dry_base", self.dry_base, 1.0, 100.0)
        _check_int("dry_allowed_length", self.dry_allowed_length, 1, 2**31 - 1)
        _check_int("dry_penalty_last_n", self.dry_penalty_last_n, -1, 2**31 - 1)
        _check_breakers(self.dry_sequence_breakers)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not isinstance(self.grammar, str) or len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"grammar must be a text of at most {MAX_GRAMMAR_CHARS} characters.", param="grammar")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequest(f"stop may hold at most {MAX_STOPS} strings, got {len(self.stop)}.", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                raise InvalidRequest(f"each stop must be a string of 1 to {MAX_STOP_CHARS} characters.", param="stop")
        if not all(isinstance(word, str) for word in self.bad_words):
            raise InvalidRequest("bad_words must be strings.", param="bad_words")
        num_chars = sum(map(len, self.bad_words))
        if len(self.bad_words) > MAX_BAD_WORDS or num_chars > MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"bad_words may hold at most {MAX_BAD_WORDS} words of {MAX_BAD_WORD_CHARS} characters together, got "
                f"{len(self.bad_words)} of {num_chars}.",
                param="bad_words",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(
                f"stop_token_ids may hold at most {MAX_STOP_TOKENS} tokens, got {len(self.stop_token_ids)}.",
                param="stop_token_ids",
            )
        self._keep("stop_token_ids", _token_set("stop_token_ids", self.stop_token_ids))
        self._keep("allowed_token_ids", _token_set("allowed_token_ids", self.allowed_token_ids))
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(f"logit_bias may hold at most {MAX_LOGIT_BIAS} tokens.", param="logit_bias")
        for token, bias in self.logit_bias:
            _check_int("logit_bias", token, 0, 2**31 - 1)
            _check_float("logit_bias", bias, -100.0, 100.0)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)

    def _keep(self, name: str, value: tuple[Any, ...]) -> None:
        object.__setattr__(self, name, value)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Which vector a pooling request wants instead of tokens.

    how          "last", "cls" (the first token) or "mean": that of the prompt's last hidden states; "score": what the
                 model's classifier says of the first
    dimensions   keep the first so many values; 0: all
    activation   then: "unit" scales the vector to length 1, "sigmoid" maps each value; "" leaves it
    second_from  where the second text of a pair begins in the prompt; 0: there is one text
    """

    how: str
    dimensions: int = 0
    activation: str = ""
    second_from: int = 0

    def __post_init__(self) -> None:
        assert self.how in POOLINGS, self.how
        assert self.activation in ("", "unit", "sigmoid"), self.activation

    @property
    def needs_all(self) -> bool:
        """Whether positions are needed that a prefix hit would not compute."""
        return self.how != "last"


@dataclass(frozen=True, slots=True)
class Request:
    """One choice of one prompt, fully resolved. `n` choices are `n` requests that differ in `id` and `choice`. A
    pooling request has one output, which is a vector instead of a token: its max_tokens is 1, its sampling unused.

    prompt_tokens   ids of the prompt, at least one
    max_tokens      most tokens to produce, counted from the original prompt
    seed            64-bit; the random word of a token id is Philox(seed; output position, choice, purpose, id)
    eos_token_ids   the model's end tokens: held back until min_tokens; `end_token_ids` are those that end it
    output_tokens   already produced elsewhere (a resumed stream): limits, penalties and positions count them
    attempt         how often it was given to an engine before; outputs carry it, and those of others are dropped
    is_resumed      another engine had it before: it was let in then, and no bound on a queue keeps it out now
    priority        lower runs earlier, within one class; ties go by arrival
    terms           on whose account it is served, in which class, by when
    cache_salt      requests share cached KV only within one salt
    adapter         digest of the LoRA adapter ("" = base model), never its name
    bad_words       token sequences that must not be produced: the last token of one is never drawn after the others
    handoff         EXPORT: its KV is put in the engine's store before its last output is sent, for other engines to go
                    on from it; IMPORT: another engine has put KV of its prompt there; "": neither
    source          where KV of its tokens can be had; it runs once it is told to go on (core.moves)
    yields          ticket under which its KV is offered: it stops after its first new token, to go on elsewhere
    dry_breakers    tokens over which DRY sees no repetition, in rising order
    session         what its client calls the conversation that it belongs to; "": nothing
    keys            keys of the prompt's full blocks, joined (cache.hashing); b"": nobody has made them
    arrival_s       when the front end admitted it, on the monotonic clock of whoever holds the request
    pooling         the vector it wants; None: it wants tokens
    """

    id: str
    prompt_tokens: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    is_resumed: bool = False
    priority: int = 0
    terms: Terms = USUAL
    cache_salt: str = ""
    adapter: str = ""
    arrival_s: float = 0.0
    pooling: PoolingParams | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    dry_breakers: tuple[int, ...] = ()
    handoff: str = ""
    attempt: int = 0
    source: KVSource | None = None
    yields: str = ""
    session: str = ""
    keys: bytes = b""

    def __post_init__(self) -> None:
        assert self.handoff in ("", EXPORT, IMPORT), self.handoff
        assert self.prompt_tokens, f"request {self.id} has no prompt tokens"
        assert self.max_tokens >= 1, f"request {self.id} has max_tokens {self.max_tokens}"
        assert self.pooling is None or self.max_tokens == 1, f"request {self.id} wants {self.max_tokens} vectors"

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """None where they are ignored; but what has a grammar ends where the grammar allows nothing more."""
        return () if self.sampling.ignore_eos and not self.sampling.grammar else self.eos_token_ids


def _check_breakers(breakers: tuple[str, ...]) -> None:
    fits = all(isinstance(text, str) and 1 <= len(text) <= MAX_DRY_BREAKER_CHARS for text in breakers)
    if not fits or len(breakers) > MAX_DRY_BREAKERS:
        raise InvalidRequest(
            f"dry_sequence_breakers may hold up to {MAX_DRY_BREAKERS} strings of 1 to {MAX_DRY_BREAKER_CHARS} "
            "characters.",
            param="dry_sequence_breakers",
        )


def _token_set(name: str, tokens: tuple[int, ...]) -> tuple[int, ...]:
    if not (set(map(type, tokens)) <= {int} and (not tokens or 0 <= min(tokens) <= max(tokens) < 2**31)):
        for token in tokens:  # to name the one at fault
            _check_int(name, token, 0, 2**31 - 1)
    return tuple(sorted(set(tokens)))


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {type(value).__name__}.", param=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}.", param=name)


def _check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number.", param=name)
    if not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low:g}, {high:g}], got {value:g}.", param=name)
