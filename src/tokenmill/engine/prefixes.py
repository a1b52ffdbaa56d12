"""What the engine's prefix cache holds, for whoever asks. Changes nothing."""

from __future__ import annotations

from ..core.events import CacheShown, ShowCache
from ..core.prefixes import PoolCounts
from .state import EngineState


def shown_cache(state: EngineState, event: ShowCache) -> CacheShown:
    blocks = state.blocks
    pools = tuple(
        PoolCounts(pool.window, pool.num_blocks, pool.num_free, pool.num_cached, pool.num_held) for pool in blocks.pools
    )
    return CacheShown(event.number, blocks.block_size, pools, blocks.summary(event.most_runs))
