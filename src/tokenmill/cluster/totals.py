"""The state of several engines as if they were one. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.events import EngineStats

_COUNTERS = (
    "num_steps", "num_preemptions", "prefix_queries", "prefix_hits", "prompt_tokens", "prompt_tokens_computed",
    "generation_tokens", "num_corrupted", "num_constrained", "num_grammar_failures", "external_queries",
    "external_hits", "num_expired",
)  # fmt: skip
_GAUGES = (
    "num_running", "num_waiting", "num_free_blocks", "num_cached_blocks", "num_held_blocks", "num_blocks",
    "num_prompt_left",
)  # fmt: skip


_GAUGE_PLACES = tuple(EngineStats._fields.index(name) for name in _GAUGES)
_PLACES = (*_GAUGE_PLACES, *(EngineStats._fields.index(name) for name in _COUNTERS))


class Totals:
    """`stats`: counters and gauges summed, kv_usage of the fullest engine, and of the step that was last what is told
    of it, and of its engine's costs. Counters go on where engines leave."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self._of: dict[int, EngineStats] = {}
        self._sums = [0] * len(EngineStats._fields)

    def join(self, link: int, num_blocks: int, before: EngineStats) -> None:
        """An engine that runs nothing; its blocks are free. What it counted `before` is not counted here."""
        stats = self._of[link] = before._replace(num_free_blocks=num_blocks, num_blocks=num_blocks)
        self._add(_GAUGE_PLACES, EngineStats(), stats)
        self._tell(self.stats)

    def leave(self, link: int) -> None:
        self._add(_GAUGE_PLACES, self._of.pop(link), EngineStats())
        self._tell(EngineStats() if not self._of else self.stats)

    def step(self, link: int, stats: EngineStats) -> None:
        self._add(_PLACES, self._of[link], stats)
        self._of[link] = stats
        self._tell(stats)

    def _add(self, places: tuple[int, ...], before: Sequence[Any], after: Sequence[Any]) -> None:
        """What has changed, so that a step costs the same however many engines there are."""
        sums = self._sums
        for place in places:
            sums[place] += after[place] - before[place]

    def _tell(self, last: EngineStats) -> None:
        """`last`: where the last step is told of."""
        of, parts, sums = self._of, self._of.values(), self._sums
        fields: list[Any] = list(last)
        for place in _PLACES:
            fields[place] = sums[place]
        told = EngineStats._make(fields)
        if len(of) > 1:
            running = dict.fromkeys(name for part in parts for name in part.running_adapters)
            waiting = dict.fromkeys(name for part in parts for name in part.waiting_adapters)
            fullest = max([part.kv_usage for part in parts])
            told = told._replace(kv_usage=fullest, running_adapters=tuple(running), waiting_adapters=tuple(waiting))
        elif of:
            (part,) = parts
            told = told._replace(
                kv_usage=part.kv_usage, running_adapters=part.running_adapters, waiting_adapters=part.waiting_adapters
            )
        self.stats = told
