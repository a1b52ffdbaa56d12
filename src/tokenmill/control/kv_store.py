"""The KV store of this machine, as a front end asks it, and series about its tiers, as it told of itself last."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ..core.errors import TokenmillError
from ..core.events import EngineStats
from ..core.tiers import HOST, TIERS

FOR_EVER = -1.0

AskStore = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""(what, argument) -> the answer; both JSON. Besides what a store is asked by `core.tiers.Inquire`:

    find   {"keys": [hex]}                       {"digits": ["12", ...]}, one for each KV group
    pin    {"keys": [hex], "seconds", "owner"}   {}
    drop   {"keys": [hex]}                       {}

Raises Unavailable while there is none, and InvalidRequest for what it does not do."""


class StoredPrefix(NamedTuple):
    """Of a prompt: blocks that it has, and those of its beginning that are stored, by tier."""

    num_blocks: int
    num_stored: int
    by_tier: Mapping[str, int]


def stored_prefix(digits: Sequence[str], tiers: Sequence[str], num_blocks: int) -> StoredPrefix:
    """`digits` as `find` gives them. A block counts where all its groups have it, as of the farthest tier."""
    by_tier: dict[str, int] = {}
    num_stored = 0
    for each in zip(*digits, strict=True):
        if "0" in each:
            break
        tier = tiers[max(map(int, each)) - 1]
        by_tier[tier] = by_tier.get(tier, 0) + 1
        num_stored += 1
    return StoredPrefix(num_blocks, num_stored, by_tier)


LONGEST_S = 1.0
GAUGES = {
    "bytes": ("tokenmill:kv_tier_bytes", "Bytes of blocks in a tier"),
    "max_bytes": ("tokenmill:kv_tier_max_bytes", "Bytes that a tier may take"),
    "blocks": ("tokenmill:kv_tier_blocks", "Blocks in a tier"),
    "pinned_bytes": ("tokenmill:kv_tier_pinned_bytes", "Bytes of a tier that are pinned"),
    "is_down": ("tokenmill:kv_tier_down", "Remote stores and peers that are not asked, having failed"),
}
COUNTERS = {
    "hits": ("tokenmill:kv_tier_hits", "Blocks that engines fetched and a tier had"),
    "misses": ("tokenmill:kv_tier_misses", "Blocks that engines fetched and a tier did not have, or lost"),
    "loads": ("tokenmill:kv_tier_loads", "Blocks loaded from a tier"),
    "load_bytes": ("tokenmill:kv_tier_load_bytes", "Bytes loaded from a tier"),
    "load_s": ("tokenmill:kv_tier_load_seconds", "Time that loads from a tier took"),
    "saves": ("tokenmill:kv_tier_saves", "Blocks saved in a tier"),
    "save_bytes": ("tokenmill:kv_tier_save_bytes", "Bytes saved in a tier"),
    "save_s": ("tokenmill:kv_tier_save_seconds", "Time that saves in a tier took"),
    "evictions": ("tokenmill:kv_tier_evictions", "Blocks that left a tier for others"),
    "corrupt": ("tokenmill:kv_tier_corrupt", "Blocks of a tier that were not what had been saved"),
    "refused": ("tokenmill:kv_tier_refused", "Blocks that a tier did not take: not worth it, or no room"),
    "errors": ("tokenmill:kv_tier_errors", "Loads and saves of a tier that failed"),
}
"""Key of a tier's counts -> the name of its series, and what it is."""

PASSED = {
    "load_bytes": ("vllm:kv_offload_load_bytes", "Bytes that pools got from the KV store"),
    "save_bytes": ("vllm:kv_offload_store_bytes", "Bytes that the KV store got from pools"),
}
"""Of host memory, through which all goes, by vLLM's names."""

_LABELS = ("model_name", "tier")
_VLLM_LABELS = ("model_name", "engine")


ENGINES = {
    "external_recomputed": ("tokenmill:kv_recomputed_tokens", "Tokens that were stored and computed all the same"),
    "external_missed": ("tokenmill:kv_missed_blocks", "Blocks that a store had said to have and did not give"),
    "fetch_s": ("tokenmill:kv_fetch_seconds", "Time that engines' fetches took"),
    "kv_written": ("tokenmill:kv_written_blocks", "Blocks that engines gave to a store"),
    "kv_unwritten": ("tokenmill:kv_unwritten_blocks", "Blocks that engines gave up before a store had them"),
}
"""Field of EngineStats -> the name of its series, and what it is."""


class EngineTierMetrics:
    """A collector of what engines do with their stores; nothing where none has a store with tiers."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model = model_name
        self._stats = stats

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if not stats.tier_hits:
            return
        fetched = CounterMetricFamily("tokenmill:kv_fetched_tokens", "Tokens whose KV came from a tier", labels=_LABELS)
        for tier, num_tokens in zip(TIERS, stats.tier_hits, strict=False):
            fetched.add_metric((self._model, tier), float(num_tokens))
        yield fetched
        for field, (name, text) in ENGINES.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS[:1])
            counter.add_metric((self._model,), float(getattr(stats, field)))
            yield counter


class TierMetrics:
    """A collector of what the store told of itself last: to be refreshed before it is read."""

    def __init__(self, model_name: str, ask: AskStore) -> None:
        self._model = model_name
        self._ask = ask
        self._stat: Mapping[str, Any] | None = None

    async def refresh(self) -> None:
        """A store that does not answer is down."""
        try:
            async with asyncio.timeout(LONGEST_S):
                self._stat = await self._ask("stat", {})
        except (TokenmillError, TimeoutError):
            self._stat = None

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        tiers: Mapping[str, Mapping[str, float]] = (self._stat or {}).get("tiers", {})
        up = GaugeMetricFamily("tokenmill:kv_store_up", "Whether the KV store answers", labels=("model_name",))
        up.add_metric((self._model,), float(self._stat is not None))
        yield up
        for key, (name, text) in PASSED.items():
            passed = CounterMetricFamily(name, text, labels=_VLLM_LABELS)
            passed.add_metric((self._model, "0"), float(tiers.get(HOST, {}).get(key, 0)))
            yield passed
        for key, (name, text) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for tier, counts in tiers.items():
                gauge.add_metric((self._model, tier), float(counts.get(key, 0)))
            yield gauge
        for key, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for tier, counts in tiers.items():
                counter.add_metric((self._model, tier), float(counts.get(key, 0)))
            yield counter
