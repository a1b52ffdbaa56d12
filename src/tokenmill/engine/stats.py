"""The snapshot of the engine's state that is sent with each step."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.events import EngineStats
from ..core.sequence import Sequence
from .state import EngineState


def snapshot(state: EngineState, num_held: int) -> EngineStats:
    """num_held: requests that are yet to enter the queue."""
    num_free, num_cached, num_blocks, kv_usage = count_blocks(state)
    counters = state.counters
    return EngineStats(
        num_running=len(state.running),
        num_waiting=len(state.waiting) + len(state.loading) + num_held,
        num_free_blocks=num_free,
        num_cached_blocks=num_cached,
        num_held_blocks=num_blocks - num_free - num_cached,
        num_blocks=num_blocks,
        kv_usage=kv_usage,
        num_steps=counters.num_steps,
        num_preemptions=counters.num_preemptions,
        prefix_queries=counters.prefix_queries,
        prefix_hits=counters.prefix_hits,
        prompt_tokens=counters.prompt_tokens,
        prompt_tokens_computed=counters.prompt_tokens_computed,
        generation_tokens=counters.generation_tokens,
        last_step_tokens=counters.last_step_tokens,
        last_step_s=counters.last_step_s,
        running_adapters=_adapters_of(state.running) if state.adapters else (),
        waiting_adapters=_adapters_of((*state.waiting, *state.loading.values())) if state.adapters else (),
        num_corrupted=counters.num_corrupted,
        num_constrained=counters.num_constrained,
        num_grammar_failures=counters.num_grammar_failures,
        num_expired=counters.num_expired,
        num_prompt_left=_num_prompt_left(state),
        in_flight_s=sum([state.costs.costs.predict(step.work) for step in state.in_flight]),
        costs=state.costs.costs,
        cost_error=state.costs.error,
        external_queries=counters.external_queries,
        external_hits=counters.external_hits,
        tier_hits=tuple(counters.tier_hits) if state.has_tiers else (),
        external_recomputed=counters.external_recomputed,
        external_missed=counters.external_missed,
        fetch_s=counters.fetch_s,
        kv_written=counters.kv_written,
        kv_unwritten=counters.kv_unwritten,
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
