"""The state of several engines as if they were one. Pure."""

from __future__ import annotations

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


class Totals:
    """`stats`: counters and gauges summed, kv_usage of the fullest engine, and of the step that was last what is told
    of it, and of its engine's costs. Counters go on where engines leave."""

    def __init__(self) -> None:
        self.stats = EngineStats()
        self._gone = EngineStats()
        self._of: dict[int, EngineStats] = {}

    def join(self, link: int, num_blocks: int, before: EngineStats) -> None:
        """An engine that runs nothing; its blocks are free. What it counted `before` is not counted here."""
        self._of[link] = before._replace(num_free_blocks=num_blocks, num_blocks=num_blocks)
        self._settle(before, -1)
        self._sum(self.stats)

    def leave(self, link: int) -> None:
        self._settle(self._of.pop(link), 1)
        self._sum(EngineStats() if not self._of else self.stats)

    def step(self, link: int, stats: EngineStats) -> None:
        self._of[link] = stats
        if len(self._of) == 1 and not self._gone.num_steps:
            self.stats = stats
        else:
            self._sum(stats)

    def _settle(self, stats: EngineStats, sign: int) -> None:
        """Counters that are to be added to those of the engines that serve now, or taken away."""
        gone = self._gone
        self._gone = gone._replace(**{name: getattr(gone, name) + sign * getattr(stats, name) for name in _COUNTERS})

    def _sum(self, last: EngineStats) -> None:
        """`last`: where the last step is told of."""
        parts, gone = list(self._of.values()), self._gone
        changes = {name: sum([getattr(part, name) for part in parts], getattr(gone, name)) for name in _COUNTERS}
        changes |= {name: sum([getattr(part, name) for part in parts]) for name in _GAUGES}
        adapters = [part.running_adapters for part in parts], [part.waiting_adapters for part in parts]
        running, waiting = (tuple(dict.fromkeys(name for names in each for name in names)) for each in adapters)
        self.stats = last._replace(
            kv_usage=max((part.kv_usage for part in parts), default=0.0),
            running_adapters=running,
            waiting_adapters=waiting,
            **changes,
        )
