"""What an engine tells of itself: the snapshot that is sent with each step, and what its prefix cache holds. Changes
nothing."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.events import CacheShown, EngineStats, ShowCache
from ..core.kv_events import PoolCounts
from ..core.sequence import Sequence
from .state import EngineState


def snapshot(state: EngineState, num_held: int) -> EngineStats:
    """num_held: requests that are yet to enter the queue."""
    num_free, num_cached, num_blocks, kv_usage = count_blocks(state)
    counters, costs = state.counters, state.costs.costs
    return EngineStats(  # by place: by name, thirty-eight of them cost three times as much
        len(state.running),
        len(state.waiting) + len(state.loading) + num_held,
        num_free,
        num_cached,
        num_blocks - num_free - num_cached,
        num_blocks,
        kv_usage,
        counters.num_steps,
        counters.num_preemptions,
        counters.prefix_queries,
        counters.prefix_hits,
        counters.prompt_tokens,
        counters.prompt_tokens_computed,
        counters.generation_tokens,
        counters.last_step_tokens,
        counters.last_step_s,
        _adapters_of(state.running) if state.adapters else (),
        _adapters_of((*state.waiting, *state.loading.values())) if state.adapters else (),
        counters.num_corrupted,
        counters.num_constrained,
        counters.num_grammar_failures,
        counters.num_expired,
        _num_prompt_left(state),
        sum([costs.predict(step.work) for step in state.in_flight]),
        costs,
        state.costs.error,
        counters.external_queries,
        counters.external_hits,
        tuple(counters.tier_hits) if state.has_tiers else (),
        counters.external_recomputed,
        counters.external_missed,
        counters.fetch_s,
        counters.kv_written,
        counters.kv_unwritten,
        counters.num_drafts,
        counters.num_draft_tokens,
        tuple(counters.accepted_per_pos),
        None if state.speculation is None else state.speculation.stats,
    )


def count_blocks(state: EngineState) -> tuple[int, int, int, float]:
    """Blocks that are free, cached, and all, in all pools together, and the share that is held of the fullest pool."""
    num_free = num_cached = num_blocks = 0
    kv_usage = 0.0
    for pool in state.blocks.pools:
        num_free += pool.num_free
        num_cached += pool.num_cached
        num_blocks += pool.num_blocks
        kv_usage = max(kv_usage, pool.num_held / max(1, pool.num_blocks))
    return num_free, num_cached, num_blocks, kv_usage


def _num_prompt_left(state: EngineState) -> int:
    """Of those that run: what is planned counts as computed."""
    running = sum([left for seq in state.running if (left := len(seq.tokens) - seq.num_planned) > 1])
    waiting = sum([len(seq.tokens) for seq in state.waiting]) if len(state.waiting) else 0
    return running + waiting + sum([len(seq.tokens) - seq.num_planned for seq in state.loading.values()])


def _adapters_of(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(seq.request.adapter for seq in sequences if seq.request.adapter))


def shown_cache(state: EngineState, event: ShowCache) -> CacheShown:
    """What the prefix cache holds, for whoever asks."""
    blocks = state.blocks
    pools = tuple(
        PoolCounts(pool.window, pool.num_blocks, pool.num_free, pool.num_cached, pool.num_held) for pool in blocks.pools
    )
    return CacheShown(event.number, blocks.block_size, pools, blocks.summary(event.most_runs))
