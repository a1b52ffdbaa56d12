"""From logits to tokens and logprobs, with each sequence's own settings.

Order of adjustments on a row's logits, each as vLLM and transformers define it: repetition penalty (tokens of prompt
and output), then frequency and presence penalties (output only), logit bias, allowed token ids, end and stop tokens
held back until min_tokens, last tokens of bad words. Rows without any of these are drawn by the compiled forward
itself, in its own call; the others by ops.sample, after it. Logprobs are of the raw logits. A row whose raw logits are
not all finite draws -1, whatever it asks for. State is a function of (introduction, tokens drawn since), so a resumed
sequence continues as if it had never left.

    L logit rows  V vocabulary
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from ..core.request import SamplingParams
from ..core.step import Introduction, TokenLogprob
from ..ops.api import NEVER, Ops, SampleBatch

SLICE = 16
"""Rows copied at once where rows must be gathered or adjusted: what bounds the sampler's scratch."""

_NO_LOGPROBS = -1


@dataclass(slots=True)
class Drawing:
    """How the rows of a step draw.

    how            settings of the draws that the step makes itself: rows to be adjusted are greedy in it, the cheapest
    temperature_L  what each row's request says
    adjusted       rows drawn again, from adjusted logits
    adjustments    of those
    wanted         rows that report logprobs
    num_top        alternatives each of those wants
    """

    how: SampleBatch
    temperature_L: np.ndarray
    adjusted: np.ndarray
    adjustments: list[Adjustment]
    wanted: np.ndarray
    num_top: list[int]

    @property
    def is_plain(self) -> bool:
        """Whether the draws that the step makes itself are all that is to be done."""
        return not len(self.adjusted) and not len(self.wanted)

    def advanced(self) -> Drawing:
        """The same for the tokens that follow."""
        old = self.how
        how = SampleBatch(
            old.temperature_L, old.top_k_L, old.top_p_L, old.min_p_L, old.seed_L, old.choice_L, old.position_L + 1
        )
        return Drawing(how, self.temperature_L, self.adjusted, self.adjustments, self.wanted, self.num_top)

    def of(self, rows: np.ndarray) -> SampleBatch:
        """The settings that some rows' requests ask for."""
        how = self.how
        return SampleBatch(
            temperature_L=self.temperature_L[rows],
            top_k_L=how.top_k_L[rows],
            top_p_L=how.top_p_L[rows],
            min_p_L=how.min_p_L[rows],
            seed_L=how.seed_L[rows],
            choice_L=how.choice_L[rows],
            position_L=how.position_L[rows],
        )


class Sampler:
    """Sampling state by slot. `introduce` and `prepare` are one thread's, the rest may be another's: what drawing needs
    and changes of a sequence goes with the Drawing."""

    def __init__(self, ops: Ops, vocab_size: int, num_slots: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._num_slots = 0
        self._temperature = np.zeros(0, np.float32)
        self._top_k = np.zeros(0, np.int32)
        self._top_p = np.zeros(0, np.float32)
        self._min_p = np.zeros(0, np.float32)
        self._seed = np.zeros(0, np.uint64)
        self._choice = np.zeros(0, np.int32)
        self._num_logprobs = np.zeros(0, np.int32)
        self._num_prompt = np.zeros(0, np.int32)
        self._adjusted = np.zeros(0, bool)
        self._adjustments: dict[int, Adjustment] = {}
        self._lists: WeakValueDictionary[tuple[int, tuple[int, ...]], _Lists] = WeakValueDictionary()
        self._grow(num_slots)

    def introduce(self, slot: int, intro: Introduction) -> None:
        """Start (or restart) a slot from what the plan says of its sequence."""
        if slot >= self._num_slots:
            self._grow(max(slot + 1, 2 * self._num_slots))
        params = intro.sampling
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = intro.seed % 2**64
        self._choice[slot] = intro.choice
        self._num_logprobs[slot] = _NO_LOGPROBS if params.logprobs is None else params.logprobs
        self._num_prompt[slot] = len(intro.prompt_tokens)
        self._adjusted[slot] = needs_adjustment(params) or bool(intro.bad_words)
        self._adjustments.pop(slot, None)
        if self._adjusted[slot]:
            key = id(params), intro.eos_token_ids
            lists = self._lists.get(key)
            if lists is None:
                lists = self._lists[key] = _Lists(params, intro.eos_token_ids, self._vocab_size)
            self._adjustments[slot] = Adjustment(intro, self._vocab_size, lists)

    def prepare(self, slots_L: np.ndarray, positions_L: np.ndarray) -> Drawing:
        """How to draw, for each of these slots, the token of position positions_L (counted from the start of the
        prompt). Later introductions change nothing in it."""
        how = SampleBatch(
            temperature_L=self._temperature[slots_L],
            top_k_L=self._top_k[slots_L],
            top_p_L=self._top_p[slots_L],
            min_p_L=self._min_p[slots_L],
            seed_L=self._seed[slots_L],
            choice_L=self._choice[slots_L],
            position_L=positions_L - self._num_prompt[slots_L],
        )
        temperature_L = how.temperature_L
        adjusted = np.flatnonzero(self._adjusted[slots_L])
        if len(adjusted):
            how.temperature_L = temperature_L.copy()
            how.temperature_L[adjusted] = 0
        num_logprobs_L = self._num_logprobs[slots_L]
        wanted = np.flatnonzero(num_logprobs_L != _NO_LOGPROBS)
        return Drawing(
            how=how,
            temperature_L=temperature_L,
            adjusted=adjusted,
            adjustments=[self._adjustments[slot] for slot in slots_L[adjusted].tolist()],
            wanted=wanted,
            num_top=num_logprobs_L[wanted].tolist(),
        )

    def redraw(self, logits_LV: np.ndarray, drawing: Drawing, tokens_L: np.ndarray) -> None:
        """Put right the tokens of rows whose logits must be adjusted first; their penalty counts advance. `logits_LV`
        is left as it is."""
        for first in range(0, len(drawing.adjusted), SLICE):
            rows = drawing.adjusted[first : first + SLICE]
            adjustments = drawing.adjustments[first : first + SLICE]
            how = drawing.of(rows)
            copied_LV = logits_LV[rows]
            for logits_V, adjustment, num_output in zip(copied_LV, adjustments, how.position_L.tolist(), strict=True):
                adjustment.apply(logits_V, num_output)
            drawn = self._ops.sample(copied_LV, how)
            # The step's own draw was from the raw logits: it is -1 where these are not finite.
            tokens_L[rows] = drawn = np.where(tokens_L[rows] < 0, tokens_L[rows], drawn)
            for adjustment, token in zip(adjustments, drawn.tolist(), strict=True):
                if token >= 0:
                    adjustment.count(token)

    def logprobs(self, logits_LV: np.ndarray, drawing: Drawing, tokens_L: np.ndarray) -> dict[int, TokenLogprob]:
        """Row -> logprob of its drawn token, for the rows whose request wants logprobs."""
        wanted = drawing.wanted
        if not len(wanted):
            return {}
        scored = self.score(logits_LV, wanted, np.maximum(tokens_L[wanted], 0), drawing.num_top)
        return dict(zip(wanted.tolist(), scored, strict=True))

    def score(
        self, logits_LV: np.ndarray, rows: np.ndarray, tokens: np.ndarray, num_top: Sequence[int]
    ) -> list[TokenLogprob]:
        """Logprobs under the raw logits of the given token of each of `rows`, with that many alternatives."""
        scored: list[TokenLogprob] = []
        for part in _slices(np.arange(len(rows))):
            counts = num_top[part[0] : part[-1] + 1]
            own, rank, top, top_logprobs = self._ops.token_logprobs(logits_LV[rows[part]], tokens[part], max(counts))
            columns = (tokens[part].tolist(), own.tolist(), rank.tolist(), top.tolist(), top_logprobs.tolist(), counts)
            for token, logprob, place, ids, values, count in zip(*columns, strict=True):
                best = tuple(zip(ids[:count], values[:count], strict=True))
                scored.append(TokenLogprob(token, logprob, place, best))
        return scored

    def _grow(self, num_slots: int) -> None:
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "choice",
            "num_logprobs",
            "num_prompt",
            "adjusted",
        ):
            old = getattr(self, f"_{name}")
            new = np.zeros(num_slots, old.dtype)
            new[: len(old)] = old
            setattr(self, f"_{name}", new)
        self._num_slots = num_slots


def needs_adjustment(params: SamplingParams) -> bool:
    """Whether any setting changes logits before they are sampled."""
    return bool(
        params.repetition_penalty != 1
        or params.frequency_penalty
        or params.presence_penalty
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
    )


class _Lists:
    """The token ids of one SamplingParams object as arrays. The choices that have the object share them; it is kept,
    so that no other takes its identity."""

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._params = params
        bias = {token: value for token, value in params.logit_bias if token < vocab_size}
        self.bias_ids = np.fromiter(bias, np.int64, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self.allowed = _ids(params.allowed_token_ids, vocab_size)
        held_back = _ids(eos_token_ids + params.stop_token_ids, vocab_size)
        if len(self.allowed) and np.isin(self.allowed, held_back).all():
            held_back = held_back[:0]
        self.held_back = held_back


class Adjustment:
    """What one sequence's settings do to its logits. Token ids outside the vocabulary are ignored; where every allowed
    token is an end or stop token, min_tokens gives way, and bad words where nothing else is left, since some token must
    be possible."""

    def __init__(self, intro: Introduction, vocab_size: int, lists: _Lists) -> None:
        params = intro.sampling
        self._lists = lists
        self._repetition = np.float32(params.repetition_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self._presence = np.float32(params.presence_penalty)
        self._min_tokens = params.min_tokens
        self._penalises = params.repetition_penalty != 1 or bool(params.frequency_penalty or params.presence_penalty)
        # Every token of prompt and output, and how often it was produced.
        seen = _ids(intro.prompt_tokens if self._penalises else (), vocab_size)
        self._index = {token: place for place, token in enumerate(seen.tolist())}
        self._seen = seen
        self._produced = np.zeros(len(seen), np.float32)
        # What may not follow which tokens, and as many output tokens as matter for that.
        self._forbidden: dict[tuple[int, ...], list[int]] = {}
        for *before, last in intro.bad_words:
            if last < vocab_size:
                self._forbidden.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._forbidden})
        self._recent: deque[int] = deque(maxlen=max(self._lengths, default=0))
        for token in intro.output_tokens:
            self.count(token)

    def count(self, token: int) -> None:
        """One more output token."""
        self._recent.append(token)
        if not self._penalises:
            return
        place = self._index.get(token)
        if place is None:
            place = self._index[token] = len(self._index)
            if place == len(self._seen):
                self._seen = np.concatenate([self._seen, np.zeros(max(16, place), np.int64)])
                self._produced = np.concatenate([self._produced, np.zeros(max(16, place), np.float32)])
            self._seen[place] = token
        self._produced[place] += 1

    def apply(self, logits_V: np.ndarray, num_output: int) -> None:
        """Adjust one row in place. `num_output`: tokens produced before this draw."""
        if self._penalises:
            seen, produced = self._seen[: len(self._index)], self._produced[: len(self._index)]
            values = logits_V[seen]
            with np.errstate(all="ignore"):  # a penalty near 0 divides beyond what a float32 holds
                values = np.where(values > 0, values / self._repetition, values * self._repetition)
            values = np.clip(values, NEVER, -NEVER)
            logits_V[seen] = values - self._frequency * produced - self._presence * (produced > 0)
        lists = self._lists
        if len(lists.bias):
            logits_V[lists.bias_ids] += lists.bias
        if len(lists.allowed):
            values = logits_V[lists.allowed]
            logits_V[:] = NEVER
            logits_V[lists.allowed] = values
        if num_output < self._min_tokens:
            logits_V[lists.held_back] = NEVER
        if self._forbidden:
            self._forbid(logits_V)

    def _forbid(self, logits_V: np.ndarray) -> None:
        recent = tuple(self._recent)
        ends = [recent[len(recent) - length :] for length in self._lengths if length <= len(recent)]
        forbidden = [token for end in ends for token in self._forbidden.get(end, ())]
        if not forbidden:
            return
        values = logits_V[forbidden]
        logits_V[forbidden] = NEVER
        if logits_V.max() == NEVER:
            logits_V[forbidden] = values


def _ids(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    return np.array(sorted({token for token in tokens if 0 <= token < vocab_size}), np.int64)


def _slices(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[first : first + SLICE] for first in range(0, len(rows), SLICE)]
