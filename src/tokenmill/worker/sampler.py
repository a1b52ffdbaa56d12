"""What the host's side of drawing does: from each sequence's settings to what a step is told of its rows.

Drawing itself, penalties, masks and the logprobs of drawn tokens belong to the backend (ops/draws.py has their order);
the host keeps the settings of each slot as arrays, from which a step's are gathered. All that changes as a sequence
goes on is its history, to which the draws append: a function of (introduction, tokens drawn since), so a resumed
sequence continues as if it had never left. Prompt logprobs, of known tokens, are asked for here.

Drafts are written to the history when their row is prepared, at positions that no step in flight writes. Each of the
row's draws reads what lies before its position and writes its own token there, while other threads draw the row's
others. Where a draft is what is drawn, writing changes nothing; a draw behind one that is not may see either token, and
is dropped. So nothing is rolled back: places behind the tokens that were taken are written before they are read.

    L logit rows  V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np

from ..core.sampling import FILTERS, PENALTIES, SETTINGS, SamplingParams
from ..core.step import Introduction, TokenLogprob
from ..ops.api import Ops
from ..ops.draws import ALWAYS, COLUMN_DTYPES, Adjustment, Adjustments, Draws, Mask, SampleBatch, Scores
from .grammars import Constrained, DraftMasks, Grammars

SLICE = 16
"""Rows scored at once: what bounds the scratch of prompt logprobs."""

_NO_LOGPROBS = -1
_COLUMNS: dict[str, type[np.generic]] = {
    **{name: dtype for name, dtype in COLUMN_DTYPES.items() if name != "position"},
    "num_logprobs": np.int32,
    "num_prompt": np.int32,
    "is_adjusted": np.bool_,
    "has_grammar": np.bool_,
    "has_filters": np.bool_,
}


@dataclass(slots=True)
class Drawing:
    """How the rows of a step draw, and what they report; None where no row has any.

    constrained   of each row, the sequence that follows a grammar; None for draws behind its drafts
    drafts        of these, by the row's first draw: what the grammar says behind each draft
    """

    how: SampleBatch
    adjustments: Adjustments | None
    num_top_L: np.ndarray | None
    constrained: Sequence[Constrained | None] | None = None
    drafts: Mapping[int, DraftMasks] = field(default_factory=dict)

    def advanced(self) -> Drawing:
        """The same for the tokens that follow."""
        how = self.how.at(self.how.position_L + 1)
        return Drawing(how, self.adjustments, self.num_top_L, self.constrained)

    def draws(self, slots_L: np.ndarray, drawn: np.ndarray) -> Draws:
        scores = None if self.num_top_L is None else Scores.of(self.num_top_L)
        return Draws(self.how, slots_L, np.empty(len(slots_L), np.int32), drawn, self.adjustments, scores)


class _Gathered(NamedTuple):
    """What the columns say of some slots; `how` without positions, num_top_L None where nothing is reported."""

    how: SampleBatch
    num_prompt_L: np.ndarray
    num_top_L: np.ndarray | None
    is_adjusted: bool
    has_grammar: bool


_MOST_GATHERED = 64


def told(draws: Draws) -> dict[int, TokenLogprob]:
    """Row -> logprob of its drawn token, once the step has ended, for the rows whose request wants logprobs."""
    scores = draws.scores
    if scores is None:
        return {}
    columns = (
        scores.num_top_L.tolist(),
        np.maximum(draws.tokens_L, 0).tolist(),
        scores.logprobs_L.tolist(),
        scores.ranks_L.tolist(),
        scores.top_ids_Ln.tolist(),
        scores.top_logprobs_Ln.tolist(),
    )
    return {
        row: TokenLogprob(token, logprob, rank, tuple(zip(ids[:count], values[:count], strict=True)))
        for row, (count, token, logprob, rank, ids, values) in enumerate(zip(*columns, strict=True))
        if count != _NO_LOGPROBS
    }


class Sampler:
    """Sampling state by slot. `max_context`: most tokens of a sequence, prompt and output. grammars: None where no
    sequence has any."""

    def __init__(
        self, ops: Ops, vocab_size: int, num_slots: int, max_context: int, grammars: Grammars | None = None
    ) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._grammars = grammars
        self._num_slots = 0
        self._columns = {name: np.zeros(0, dtype) for name, dtype in _COLUMNS.items()}
        self._gathered: dict[bytes, _Gathered] = {}  # by slots, since one was introduced last
        self._adjustments: dict[int, _Kept] = {}
        self._lists: WeakValueDictionary[tuple[int, tuple[int, ...]], _Lists] = WeakValueDictionary()
        self._pending: list[_Lists] = []  # whose masks are still to be handed over
        self._grow(num_slots)

    def introduce(self, slot: int, intro: Introduction) -> None:
        """Start (or restart) a slot from what the plan says of its sequence."""
        if slot >= self._num_slots:
            self._grow(max(slot + 1, 2 * self._num_slots))
        self._gathered.clear()
        params, columns = intro.sampling, self._columns
        for name in ("temperature", "top_k", "top_p", "min_p", *FILTERS):
            columns[name][slot] = getattr(params, name)
        columns["has_filters"][slot] = any(getattr(params, name) != off for name, (_, off) in FILTERS.items())
        columns["seed"][slot] = intro.seed % 2**64
        columns["choice"][slot] = intro.choice
        num_top = _NO_LOGPROBS if params.logprobs is None else min(params.logprobs, self._vocab_size)
        columns["num_logprobs"][slot] = num_top
        columns["num_prompt"][slot] = len(intro.prompt_tokens)
        columns["is_adjusted"][slot] = is_adjusted = needs_adjustment(params) or bool(intro.bad_words)
        columns["has_grammar"][slot] = bool(params.grammar)
        self._adjustments.pop(slot, None)
        if is_adjusted:
            self._adjustments[slot] = self._adjustment(intro)

    def release(self, slot: int) -> None:
        """Forget what a slot's sequence was adjusted by. Steps under way keep it for themselves."""
        self._adjustments.pop(slot, None)

    def give_up(self, slot: int) -> None:
        """No token of the slot's sequence will come from the step that was to draw one."""
        kept = self._adjustments.get(slot)
        if kept is not None and kept.constrained is not None:
            self._of_grammars.give_up(kept.constrained)

    @property
    def _of_grammars(self) -> Grammars:
        assert self._grammars is not None, "a request has a grammar where none can be followed"
        return self._grammars

    def hand_over_masks(self) -> None:
        """Complete the masks of sequences introduced since the last time; steps that draw by them may run already."""
        if self._grammars is not None:
            self._grammars.hand_over()
        pending, self._pending = self._pending, []
        for lists in pending:
            lists.hand_over(self._ops)

    def prepare(
        self, slots_L: np.ndarray, positions_L: np.ndarray, drafts: Mapping[int, tuple[int, ...]] | None = None
    ) -> Drawing:
        """How to draw, for each of these slots, the token of position positions_L (counted from the start of the
        prompt). `drafts`: of the rows that have some, by their first draw; the others are side by side behind it.
        Later introductions change nothing in it."""
        gathered = self._gather(slots_L)
        how = gathered.how.at(positions_L - gathered.num_prompt_L)
        adjustments = constrained = None
        masks = dict[int, DraftMasks]()
        if gathered.is_adjusted:
            kept = [self._adjustments.get(slot) for slot in slots_L.tolist()]
            for first, tokens in (drafts or {}).items():
                self._take_drafts(kept, first, int(positions_L[first]), tokens, masks)
            adjustments = Adjustments(kept)
            if gathered.has_grammar:
                constrained = [None if one is None else one.constrained for one in kept]
        return Drawing(how, adjustments, gathered.num_top_L, constrained, masks)

    def _gather(self, slots_L: np.ndarray) -> _Gathered:
        """Steps that verify drafts of the same sequences often ask the same."""
        key = slots_L.tobytes()
        if (found := self._gathered.get(key)) is not None:
            return found
        if len(self._gathered) >= _MOST_GATHERED:
            self._gathered.clear()
        columns = self._columns
        has_filters = columns["has_filters"][slots_L].any()
        how = SampleBatch(
            temperature_L=columns["temperature"][slots_L],
            top_k_L=columns["top_k"][slots_L],
            top_p_L=columns["top_p"][slots_L],
            min_p_L=columns["min_p"][slots_L],
            seed_L=columns["seed"][slots_L],
            choice_L=columns["choice"][slots_L],
            position_L=np.zeros(len(slots_L), np.int32),
            filters={name: columns[name][slots_L] for name in FILTERS} if has_filters else {},
        )
        num_top_L = columns["num_logprobs"][slots_L]
        found = self._gathered[key] = _Gathered(
            how,
            columns["num_prompt"][slots_L],
            num_top_L if (num_top_L != _NO_LOGPROBS).any() else None,
            bool(columns["is_adjusted"][slots_L].any()),
            bool(columns["has_grammar"][slots_L].any()),
        )
        return found

    def _take_drafts(
        self,
        kept: list[_Kept | None],
        first: int,
        position: int,
        tokens: tuple[int, ...],
        masks: dict[int, DraftMasks],
    ) -> None:
        """Draws behind drafts find them before them, in the history and, where they follow a grammar, in its masks."""
        one = kept[first]
        if one is None:
            return
        one.history[position : position + len(tokens)] = tokens
        if one.constrained is not None:
            made = self._of_grammars.take_drafts(one.constrained, position - one.num_prompt, tokens)
            masks[first] = made
            for index, mask in enumerate(made.masks, first + 1):
                kept[index] = replace(one, mask=mask, constrained=None, packed=None)

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

    def _adjustment(self, intro: Introduction) -> _Kept:
        params = intro.sampling
        key = id(params), intro.eos_token_ids
        lists = self._lists.get(key)
        if lists is None:
            lists = self._lists[key] = _Lists(params, intro.eos_token_ids, self._vocab_size)
            if lists.mask is not None:
                self._pending.append(lists)
        tokens = (*intro.prompt_tokens, *intro.output_tokens)
        history = np.empty(max(self._max_context, len(tokens)) + 1, np.int32)
        history[: len(tokens)] = tokens
        constrained = None if not params.grammar else self._of_grammars.introduce(intro, lists.allowed)
        words = [word for word in intro.bad_words if word[-1] < self._vocab_size]
        return _Kept(
            history=history,
            num_prompt=len(intro.prompt_tokens),
            params=params,
            dry_breakers=np.array(intro.dry_breakers, np.int32),
            bias_ids=lists.bias_ids,
            bias=lists.bias,
            held_back=lists.held_back,
            bad_tokens=np.array([token for word in words for token in word], np.int32),
            bad_starts=np.cumsum([0, *map(len, words)]).astype(np.int32),
            mask=lists.mask if constrained is None else constrained.mask,
            lists=lists,
            constrained=constrained,
        )

    def _grow(self, num_slots: int) -> None:
        for name, old in self._columns.items():
            new = np.zeros(num_slots, old.dtype)
            new[: len(old)] = old
            self._columns[name] = new
        self._num_slots = num_slots


_PENALTIES_OFF = {name: off for name, (_, off) in PENALTIES.items() if SETTINGS[name].sampler}
"""Of those that do something by themselves."""


def needs_adjustment(params: SamplingParams) -> bool:
    """Whether any setting changes logits before they are sampled."""
    return bool(
        any(getattr(params, name) != off for name, off in _PENALTIES_OFF.items())
        or params.logit_bias
        or params.allowed_token_ids
        or params.min_tokens
        or params.grammar
    )


class _Lists:
    """The token ids of one SamplingParams object as arrays. The choices that have the object share them; it is kept,
    so that no other takes its identity. Ids outside the vocabulary are ignored."""

    def __init__(self, params: SamplingParams, eos_token_ids: tuple[int, ...], vocab_size: int) -> None:
        self._params = params
        bias = {token: value for token, value in params.logit_bias if token < vocab_size}
        self.bias_ids = np.fromiter(bias, np.int32, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self.allowed = _ids(params.allowed_token_ids, vocab_size)
        self.mask = Mask(vocab_size) if len(self.allowed) else None
        self.held_back = _ids(eos_token_ids + params.stop_token_ids, vocab_size)

    def hand_over(self, ops: Ops) -> None:
        assert self.mask is not None
        self.mask.allow(self.allowed)
        ops.publish(self.mask, ALWAYS)


@dataclass(slots=True, eq=False)
class _Kept(Adjustment):
    """With what keeps the lists that it shares with other choices, and the grammar that it follows."""

    lists: _Lists | None = None
    constrained: Constrained | None = None


def _ids(tokens: Sequence[int], vocab_size: int) -> np.ndarray:
    return np.array(sorted({token for token in tokens if 0 <= token < vocab_size}), np.int32)


def _slices(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[first : first + SLICE] for first in range(0, len(rows), SLICE)]
