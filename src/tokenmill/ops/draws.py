"""What a step is told of the tokens it draws: settings of each row, what is done to its logits first, what it reports.

The order for a row: repetition, frequency and presence penalties, DRY, bias, mask, tokens held back, bad words (the
last two give way where nothing else is left); then temperature, top_n_sigma, top_k, typical_p, top_p, min_p, XTC; then
the draw. See docs/use/sampling.md.

    L logit rows  V vocabulary  n most alternatives of a row
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.sampling import COLUMNS, FILTERS, SamplingParams

NEVER = np.finfo(np.float32).min
"""The logit of a token that must not be drawn. Not minus infinity: that is a sign of damage, as NaN is."""

NOT_FINITE = -1
"""In place of a token: the row's logits are not finite."""

MASK_LATE = -2
"""In place of a token: the row's mask has not come in time."""

MASK_WAIT_S = 5.0
"""How long a row waits for a mask that does not come."""

ALWAYS = 2**31 - 1
"""Above all output positions."""

_NAP_S = 1e-4
_LONGEST_NAP_S = 1e-3
"""What a nap counts at most: a process that was stopped meanwhile has not waited."""


_DTYPES: Mapping[str, type[np.generic]] = {"float": np.float32, "int32_t": np.int32, "uint64_t": np.uint64}
COLUMN_DTYPES = {name: _DTYPES[c_type] for name, (c_type, _) in COLUMNS.items()}


@dataclass(slots=True)
class SampleBatch:
    """How to draw one token from each of L logit rows: the columns of core/sampling.py. The words of a draw are
    made by Philox(seed; position, choice, purpose, block). filters: columns by name, none where no row has any."""

    temperature_L: np.ndarray  # float32; 0 = greedy
    top_k_L: np.ndarray  # int32; 0 = off
    top_p_L: np.ndarray  # float32; 1 = off
    min_p_L: np.ndarray  # float32; 0 = off
    seed_L: np.ndarray  # uint64
    choice_L: np.ndarray  # int32
    position_L: np.ndarray  # int32: output position, 0 for a sequence's first output token
    filters: Mapping[str, np.ndarray] = field(default_factory=dict)

    def at(self, position_L: np.ndarray) -> SampleBatch:
        """The same for tokens at other positions."""
        return SampleBatch(
            self.temperature_L,
            self.top_k_L,
            self.top_p_L,
            self.min_p_L,
            self.seed_L,
            self.choice_L,
            position_L,
            self.filters,
        )

    def columns(self) -> list[np.ndarray | None]:
        """In the order of COLUMNS, None for one that is not there."""
        return [
            self.temperature_L,
            self.top_k_L,
            self.top_p_L,
            self.min_p_L,
            self.seed_L,
            self.choice_L,
            self.position_L,
            *map(self.filters.get, FILTERS),
        ]

    def filter(self, name: str, row: int) -> float:
        """The value of a row, where it is off if there is no column."""
        column_L = self.filters.get(name)
        return FILTERS[name][1] if column_L is None else float(column_L[row])


class Mask:
    """The tokens that may be drawn, a bit each: uint32 words, of a vocabulary. They are those of output positions below
    `until`, which `Ops.publish` writes. Whoever computes them may do so while a step runs that draws by them: only that
    row waits, for `wait_s` at most, and then has MASK_LATE for a token. `place`: address and bytes of the words;
    `until_at`: address of `until`. To ask an array for its address costs more than to write a word there."""

    __slots__ = ("place", "until", "until_at", "wait_s", "words")

    def __init__(self, vocab_size: int, wait_s: float = MASK_WAIT_S) -> None:
        self.words = np.zeros(-(-vocab_size // 32), np.uint32)
        self.until = np.zeros(1, np.int32)
        self.wait_s = wait_s
        self.place: tuple[int, int] = (self.words.ctypes.data, self.words.nbytes)
        self.until_at: int = self.until.ctypes.data

    def allow(self, ids: np.ndarray) -> None:
        """These and no others; they lie in the vocabulary."""
        bits = np.zeros(len(self.words) * 32, np.uint8)
        bits[ids] = 1
        self.words[:] = np.packbits(bits, bitorder="little").view(np.uint32)

    def wait(self, position: int) -> bool:
        """Whether that of an output position has come."""
        left_s = self.wait_s
        while self.until[0] <= position:
            if left_s <= 0:
                return False
            before_s = time.monotonic()
            time.sleep(_NAP_S)
            left_s -= min(time.monotonic() - before_s, _LONGEST_NAP_S)
        return True


def _no_ids() -> np.ndarray:
    return np.zeros(0, np.int32)


def _no_values() -> np.ndarray:
    return np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class Adjustment:
    """What one sequence's settings do to its logits. Its only state is `history`, int32: prompt, then output; a draw of
    output position p reads what lies before num_prompt + p, and writes its token there. Several rows of a step may
    draw with it, for positions in a row: those behind the first find drafts before them, and while they read, the
    draft may become the token that was drawn. All other ids lie in the vocabulary, in rising order.

    params   penalties and min_tokens are read of it, and no lists
    packed   what a backend makes of it, once
    """

    history: np.ndarray
    num_prompt: int
    params: SamplingParams = field(default_factory=SamplingParams)
    dry_breakers: np.ndarray = field(default_factory=_no_ids)
    bias_ids: np.ndarray = field(default_factory=_no_ids)
    bias: np.ndarray = field(default_factory=_no_values)
    held_back: np.ndarray = field(default_factory=_no_ids)
    bad_tokens: np.ndarray = field(default_factory=_no_ids)  # words one after the other
    bad_starts: np.ndarray = field(default_factory=_no_ids)  # where each begins, and the end
    mask: Mask | None = None
    packed: Any = None


@dataclass(slots=True, eq=False)
class Adjustments:
    """Those of L rows. packed: as in Adjustment."""

    rows: Sequence[Adjustment | None]
    packed: Any = None


@dataclass(slots=True)
class Scores:
    """What rows report of the tokens they draw, by their raw log softmax; the call fills all but the first.

    num_top_L         int32: alternatives beside the token itself; -1: the row reports nothing
    logprobs_L        float32
    ranks_L           int32, 1 for the most likely; 0, and all else of no meaning, where the logits are not finite
    top_ids_Ln        int32, best first, ties to the lower id
    top_logprobs_Ln   float32
    """

    num_top_L: np.ndarray
    logprobs_L: np.ndarray
    ranks_L: np.ndarray
    top_ids_Ln: np.ndarray
    top_logprobs_Ln: np.ndarray

    @classmethod
    def of(cls, num_top_L: np.ndarray) -> Scores:
        count, most = len(num_top_L), max(0, int(num_top_L.max(initial=0)))
        return cls(
            num_top_L,
            np.empty(count, np.float32),
            np.empty(count, np.int32),
            np.empty((count, most), np.int32),
            np.empty((count, most), np.float32),
        )


@dataclass(slots=True)
class Draws:
    """Tokens to draw in the call that computes a step, and the memory that carries them into later steps.

    how       one entry for each of the last rows of the step's logits
    slots_L   int32: the slot of `drawn` that keeps each token; with several draws, the token of one of them
    tokens_L  int32: what was drawn, or NOT_FINITE or MASK_LATE; the call fills it
    drawn     int32 [slots], the caller's; read as the call begins, written as it ends (0 where no token was drawn)
    adjustments   None: no row has any
    scores        None: no row reports anything
    """

    how: SampleBatch
    slots_L: np.ndarray
    tokens_L: np.ndarray
    drawn: np.ndarray
    adjustments: Adjustments | None = None
    scores: Scores | None = None
