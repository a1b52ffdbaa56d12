"""How tokens are drawn: `SamplingParams`, whose declarations are the one table of what a caller may set.

A field declared with `setting` says all that the rest of the program needs to know of it: its default and range, what
it means (docs/use/api.md), its flag, its names in other APIs, and whether drawing has a number of it for each row. From
that follow the field of request bodies, the key of --override-generation-config, the flag of `chat` and `generate`, the
columns of a step's draws (ops/draws.py) and the native struct that carries them (`native_header`). What a setting does
to a draw is said in ops/reference_sample.py and native/src/sample.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import InvalidRequest

CHAT_TOKENS = 4096
"""Most tokens of a chat answer where neither its caller nor an operator names a number: one that repeats itself is not
to run through the whole context."""
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 512
MAX_BAD_WORD_CHARS = 4096
MAX_DRY_BREAKERS = 64
MAX_DRY_BREAKER_CHARS = 64
_LISTS = ("dry_sequence_breakers", "stop", "bad_words", "stop_token_ids", "allowed_token_ids", "logit_bias")
MAX_STOP_TOKENS = 1024
MAX_GRAMMAR_CHARS = 1 << 20

SAMPLERS = ("penalties", "dry", "temperature", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc")
"""What acts on a draw, in this order, under llama-server's names."""

_MOST = 2**31 - 1
_KEY = "setting"


@dataclass(frozen=True, slots=True)
class Setting:
    """What is known of a field of SamplingParams beside its name.

    default   its type is that of the values: an int, a float or a tuple of texts
    meaning   what it does, for docs/use/api.md
    low, high the range of a number; above: `low` itself is not in it
    help      what its flag of `chat` and `generate` says; None: they have none
    flag      its flag, if that is not the name with hyphens; also: further spellings; metavar: what stands for a value
    names     what other servers' callers name it in bodies
    is_filter a step's draws have a column of it, where some row has another value than the default, which is off
    is_penalty  it changes logits before the filters: a sequence's Adjustment has it (ops/draws.py)
    sampler   which of SAMPLERS the default turns off; "": it only shapes what others turn on
    """

    default: Any
    meaning: str
    low: float = 0
    high: float = 1
    above: bool = False
    help: str | None = None
    flag: str = ""
    also: tuple[str, ...] = ()
    metavar: str = "X"
    names: tuple[str, ...] = ()
    is_filter: bool = False
    is_penalty: bool = False
    sampler: str = ""

    def flags(self, name: str) -> tuple[str, ...]:
        """All spellings of its flag, where the field is called `name`."""
        return (self.flag or f"--{name.replace('_', '-')}", *self.also)

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidRequest for a value out of range."""
        if isinstance(self.default, int):
            _check_int(name, value, int(self.low), int(self.high))
        elif isinstance(self.default, float):
            check_float(name, value, self.low, self.high, low_open=self.above)


def setting(default: Any, meaning: str, low: float = 0, high: float = 1, **rest: Any) -> Any:
    """A field of SamplingParams that acts on draws; rest: see Setting."""
    return field(default=default, metadata={_KEY: Setting(default, meaning, low, high, **rest)})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Names and defaults are the field's (OpenAI's, then vLLM's).

    temperature 0 is greedy; ties go to the lower token id. `logprobs` and `prompt_logprobs` give the number of
    alternatives reported beside the token itself (None: nothing is reported); they are of the raw logits, before
    penalties and temperature. `stop` and the text switches act in the front end; the engine knows stop token ids only,
    and `bad_words` as a Request has them. `stop_token_ids` end generation; the token is not part of the text.
    `max_tokens` None means the rest of the context. A single stop string or bad word, lists, and a mapping for
    `logit_bias` are taken too, and kept as the tuples declared here; token ids in order, each once. `grammar`: what the
    output must follow, in llguidance's form as JSON text; whoever makes a Request has had it checked. Then an end token
    is possible where the output is whole and nowhere else. `loop_guard` ends output that repeats itself
    (core/loop_guard.py), where it follows no grammar.
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = setting(
        1.0, "0 is greedy", 0, 100, help="0 is greedy (default: the model's own)", also=("--temp",), metavar="T",
        sampler="temperature",
    )  # fmt: skip
    top_p: float = setting(
        1.0, "nucleus; 1 is off", above=True, help="nucleus (default: the model's own)", metavar="P",
        sampler="top_p",
    )  # fmt: skip
    top_k: int = setting(
        0, "draw from so many most likely tokens; 0 and -1: all", -1, _MOST,
        help="most likely K only (default: the model's own)", metavar="K", sampler="top_k",
    )  # fmt: skip
    min_p: float = setting(
        0.0, "leave out tokens less likely than this share of the most likely; 0 is off",
        help="least share of the best token's probability", metavar="P", sampler="min_p",
    )  # fmt: skip
    typical_p: float = setting(
        1.0, "keep tokens as surprising as is to be expected, up to this share; 1 is off", above=True,
        help="share of tokens whose surprise is closest to the expected one", also=("--typical",), metavar="P",
        names=("typ_p",), is_filter=True, sampler="typ_p",
    )  # fmt: skip
    top_n_sigma: float = setting(
        0.0, "keep logits within so many standard deviations of the largest; 0 and -1: all", -1, 100,
        help="keep logits within N standard deviations of the largest", also=("--top-nsigma",), metavar="N",
        names=("nsigma",), is_filter=True, sampler="top_n_sigma",
    )  # fmt: skip
    xtc_probability: float = setting(
        0.0, "how often the most likely tokens are left out, all but the last of them; 0 is off",
        help="how often the most likely tokens are left out", metavar="P", is_filter=True, sampler="xtc",
    )  # fmt: skip
    xtc_threshold: float = setting(
        0.1, "share from which a token counts as one of these; above 0.5 none is left out", above=True,
        help="share from which these count as such", metavar="P", is_filter=True,
    )  # fmt: skip
    dry_multiplier: float = setting(
        0.0, "DRY: what a token loses that would go on with a repetition; 0 is off", 0, 100,
        help="strength of DRY, against repetitions; 0 is off", is_penalty=True, sampler="dry",
    )  # fmt: skip
    dry_base: float = setting(
        1.75, "DRY: how this grows with each token that is repeated", 1, 100,
        help="how DRY grows with the length of a repetition", is_penalty=True,
    )  # fmt: skip
    dry_allowed_length: int = setting(
        2, "DRY: repetitions of fewer tokens cost nothing", 1, _MOST, help="DRY: shorter repetitions are free",
        metavar="N", is_penalty=True,
    )  # fmt: skip
    dry_penalty_last_n: int = setting(
        -1, "DRY: how far back repetitions are looked for; -1 is everything, 0 is off", -1, _MOST,
        help="DRY: how far back to look; -1 is everything", metavar="N", is_penalty=True,
    )  # fmt: skip
    dry_sequence_breakers: tuple[str, ...] = setting(
        ("\n", ":", '"', "*"), "DRY: texts over which nothing counts as repeated, up to 64 of up to 64 characters",
        help=r"DRY: no repetition reaches across this text, such as \n; none: there is no such text (repeatable)",
        flag="--dry-sequence-breaker", metavar="TEXT",
    )  # fmt: skip
    repetition_penalty: float = setting(
        1.0, "above 1 discourages tokens of prompt and answer; 1 is off", 0, 100, above=True,
        help="above 1 discourages", also=("--repeat-penalty",), names=("repeat_penalty",),
        is_penalty=True, sampler="penalties",
    )  # fmt: skip
    presence_penalty: float = setting(
        0.0, "above 0 discourages tokens that the answer has already", -2, 2, is_penalty=True, sampler="penalties"
    )
    frequency_penalty: float = setting(
        0.0, "the same, by how often it has them", -2, 2, is_penalty=True, sampler="penalties"
    )
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    loop_guard: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    grammar: str = ""

    def __post_init__(self) -> None:
        self._keep_tuples()
        _check_int("n", self.n, 1, MAX_CHOICES)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).", param="min_tokens"
            )
        for name, declared in SETTINGS.items():
            declared.check(name, getattr(self, name))
        _check_breakers(self.dry_sequence_breakers)
        if not isinstance(self.grammar, str) or len(self.grammar) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(f"grammar must be a text of at most {MAX_GRAMMAR_CHARS} characters.", param="grammar")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        self._check_lists()
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)

    def _keep_tuples(self) -> None:
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

    def _check_lists(self) -> None:
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
            check_float("logit_bias", bias, -100.0, 100.0)

    def _keep(self, name: str, value: tuple[Any, ...]) -> None:
        object.__setattr__(self, name, value)


SETTINGS: Mapping[str, Setting] = {
    each.name: each.metadata[_KEY] for each in fields(SamplingParams) if _KEY in each.metadata
}
"""By name, in the order in which they are declared."""


def _column(declared: Setting) -> tuple[str, float]:
    return "int32_t" if isinstance(declared.default, int) else "float", declared.default


FILTERS: Mapping[str, tuple[str, float]] = {
    name: _column(declared) for name, declared in SETTINGS.items() if declared.is_filter
}
COLUMNS: Mapping[str, tuple[str, float]] = {
    **{name: _column(SETTINGS[name]) for name in ("temperature", "top_k", "top_p", "min_p")},
    "seed": ("uint64_t", 0),
    "choice": ("int32_t", 0),
    "position": ("int32_t", 0),
    **FILTERS,
}
"""The members of tm_sampling in their order: C type of a row's value, and the value where there is no column."""


_FIRST = ("repetition_penalty", "frequency_penalty", "presence_penalty", "dry_multiplier", "dry_base",
          "dry_allowed_length", "dry_penalty_last_n")  # fmt: skip
PENALTIES: Mapping[str, tuple[str, float]] = {
    name: _column(SETTINGS[name]) for name in (*_FIRST, *SETTINGS) if SETTINGS[name].is_penalty
}
"""The same of tm_adjustment: its settings, in their order."""


def native_layout(members: Mapping[str, tuple[str, float]]) -> str:
    """COLUMNS or PENALTIES as the native library tells them: what it was built with must be what this table says."""
    return "".join(f"{c_type} {name};" for name, (c_type, _) in members.items())


def native_header() -> str:
    """What native/include/tokenmill_native.h needs of this table, written as the library is built."""
    lines = ["/* Made of src/tokenmill/core/sampling.py. */"]
    for macro, members in (("TM_SAMPLING_COLUMNS", COLUMNS), ("TM_SAMPLING_PENALTIES", PENALTIES)):
        lines += [
            f"#define {macro}(X) \\",
            *(f"  X({kind}, {name}, {off}) \\" for name, (kind, off) in members.items()),
        ]
        lines[-1] = lines[-1].removesuffix(" \\")
    return "\n".join(lines) + "\n"


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


def check_float(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number.", param=name)
    if not low <= value <= high or (low_open and value == low):
        bracket = "(" if low_open else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low:g}, {high:g}], got {value:g}.", param=name)
