"""The state of several engines as if they were one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from operator import add, itemgetter, sub
from typing import Any

from ..core.cost import UNKNOWN
from ..core.events import EngineStats
from ..core.experts import ExpertLoad, WeightReads

_Tokens = tuple[tuple[int, ...], ...]


class ExpertTotals:
    """`load`: summed over all engines that have served, since they joined; None: their model has no experts, or none
    has joined. Engines of a gateway have the same model."""

    def __init__(self) -> None:
        self.load: ExpertLoad | None = None
        self._of: dict[int, ExpertLoad] = {}

    def join(self, link: int, before: ExpertLoad | None) -> None:
        """What the engine counted `before` is not counted here."""
        if before is None:
            return
        self._of[link] = before
        if self.load is None:
            reads = None if before.reads is None else WeightReads()
            self.load = ExpertLoad(before.layers, tuple(tuple(0 for _ in each) for each in before.tokens), reads=reads)

    def leave(self, link: int) -> None:
        """What it did stays counted."""
        self._of.pop(link, None)

    def note(self, link: int, load: ExpertLoad) -> None:
        """What an engine has counted by now. Raises ValueError where that cannot follow what it said before."""
        before = self._of.get(link)
        if before is None:
            return
        if load.layers != before.layers or [*map(len, load.tokens)] != [*map(len, before.tokens)]:
            raise ValueError("An engine tells of other experts than it had.")
        assert self.load is not None
        self._of[link] = load
        num_steps = self.load.num_steps + load.num_steps - before.num_steps
        reads = _sum_of_reads(self.load.reads, load.reads, before.reads)
        self.load = ExpertLoad(load.layers, _sum(self.load.tokens, load.tokens, before.tokens), num_steps, reads)


def _sum_of_reads(whole: WeightReads | None, now: WeightReads | None, before: WeightReads | None) -> WeightReads | None:
    """The same; engines may keep weights on disk or not."""
    if now is None:
        return whole
    parts = zip(whole or WeightReads(), now, before or WeightReads(), strict=True)
    return WeightReads._make(a + b - c for a, b, c in parts)


def _sum(whole: _Tokens, now: _Tokens, before: _Tokens) -> _Tokens:
    """whole + now - before"""
    return tuple(
        tuple(a + b - c for a, b, c in zip(*rows, strict=True)) for rows in zip(whole, now, before, strict=True)
    )


def _added(whole: tuple[int, ...], now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    """whole + now - before, where some may be longer."""
    return tuple(a + b - c for a, b, c in zip_longest(whole, now, before, fillvalue=0))


_COUNTERS = (
    "num_steps", "num_preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "prompt_tokens_computed",
    "generation_tokens", "num_corrupted", "num_constrained", "num_grammar_failures", "external_queries",
    "external_hits", "num_expired", "external_recomputed", "external_missed", "fetch_s", "kv_written", "kv_unwritten",
    "num_drafts", "num_draft_tokens",
)  # fmt: skip
_GAUGES = (
    "num_running", "num_waiting", "num_free_blocks", "num_cached_blocks", "num_held_blocks", "num_blocks",
    "num_prompt_left",
)  # fmt: skip


_GAUGE_PLACES = tuple(EngineStats._fields.index(name) for name in _GAUGES)
_PLACES = (*_GAUGE_PLACES, *(EngineStats._fields.index(name) for name in _COUNTERS))
_gauges_of = itemgetter(*_GAUGE_PLACES)
_summed_of = itemgetter(*_PLACES)
_COSTS = EngineStats._fields.index("costs")
_NUM = len(EngineStats._fields)


def _source(i: int) -> int:
    if i in _PLACES:
        return _PLACES.index(i)
    return len(_PLACES) + (_NUM if i == _COSTS else i)


_filled = itemgetter(*(_source(i) for i in range(_NUM)))
"""Of the sums, with the fields of a state and costs behind them: that state, with sums and costs in their slots."""


class Totals:
    """`stats`: counters and gauges summed, kv_usage of the fullest engine, and of the step that was last what is told
    of it. costs: of the engine that has computed most tokens of prompts, since one that draws alone knows nothing of
    what they take. Counters go on where engines leave. A step costs the same however many engines there are; what is of
    all of them (`kv_usage`, adapters) is put together when `stats` is read."""

    def __init__(self) -> None:
        self._of: dict[int, EngineStats] = {}
        self._sums: list[Any] = [0] * len(_PLACES)
        self._last = EngineStats()
        self._costs, self._costs_of, self._most_computed = UNKNOWN, -1, -1
        self._costliest: set[int] = set()
        self._last_s = self._costs_s = 0.0  # when these were told
        self._tier_hits: tuple[int, ...] = ()
        self._accepted: tuple[int, ...] = ()

    @property
    def sums(self) -> EngineStats:
        """The same but for kv_usage and adapters, which are of the engine that told last."""
        told = EngineStats._make(_filled((*self._sums, *self._last, self._costs)))
        if self._tier_hits or self._accepted or told.tier_hits or told.accepted_per_pos:
            return told._replace(tier_hits=self._tier_hits, accepted_per_pos=self._accepted)
        return told

    @property
    def stats(self) -> EngineStats:
        told, parts = self.sums, self._of.values()
        running = dict.fromkeys(name for part in parts for name in part.running_adapters)
        waiting = dict.fromkeys(name for part in parts for name in part.waiting_adapters)
        fullest = max([part.kv_usage for part in parts], default=told.kv_usage)
        return told._replace(kv_usage=fullest, running_adapters=tuple(running), waiting_adapters=tuple(waiting))

    @property
    def costliest(self) -> Iterable[int] | None:
        """Of whom it depends what steps cost; None: of all."""
        return self._costliest if self._costs_of >= 0 else None

    def join(self, link: int, num_blocks: int, before: EngineStats) -> None:
        """An engine that runs nothing; its blocks are free. What it counted `before` is not counted here."""
        stats = self._of[link] = before._replace(num_free_blocks=num_blocks, num_blocks=num_blocks)
        self._add_gauges(EngineStats(), stats)

    def leave(self, link: int) -> None:
        self._add_gauges(self._of.pop(link), EngineStats())
        self._costliest.discard(link)
        if link == self._costs_of:  # what it knew holds until another knows something
            self._costs_of, self._most_computed = -1, -1
        if not self._of:
            self._last, self._costs = EngineStats(), UNKNOWN

    def step(self, link: int, stats: EngineStats, now: float = 0.0) -> None:
        """`now`: what was told later than that stays what was told last."""
        before = self._of[link]
        self._sums = list(map(add, self._sums, map(sub, _summed_of(stats), _summed_of(before))))
        if stats.tier_hits:
            self._tier_hits = _added(self._tier_hits, stats.tier_hits, before.tier_hits)
        if stats.accepted_per_pos:
            self._accepted = _added(self._accepted, stats.accepted_per_pos, before.accepted_per_pos)
        num_more = stats.prompt_tokens_computed - self._most_computed
        if num_more > 0:
            self._costliest = {link}
        elif num_more == 0:
            self._costliest.add(link)
        if num_more > 0 or link == self._costs_of or (num_more == 0 and now >= self._costs_s):
            self._costs, self._costs_of, self._most_computed = stats.costs, link, stats.prompt_tokens_computed
            self._costs_s = now
        self._of[link] = stats
        if now >= self._last_s:
            self._last, self._last_s = stats, now

    def _add_gauges(self, before: EngineStats, after: EngineStats) -> None:
        for place, (was, now) in enumerate(zip(_gauges_of(before), _gauges_of(after), strict=True)):
            self._sums[place] += now - was
