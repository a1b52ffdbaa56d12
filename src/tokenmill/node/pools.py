"""How KV memory is split between the layers that see everything and those that see a window.

Let f and v be the bytes of a token's KV in the two pools, and let a sequence of the longest context M hold c of its
tokens in the second. Short sequences want as many slots in both pools; the longest want c / M as many in the second.
With

    r = (f + v * c / M) / (f + v)      slots in the second for each slot in the first

both lose the same share of what a split made for them alone would hold. The second pool never gets more than
`max_num_seqs` sequences and the chunks of their prompts can use; the first takes the rest.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolSplit:
    """Blocks of the pool of layers that see everything, and of the pool of layers that see `window` positions, where
    what a query sees fits. A `window` of 0: all layers are in the first pool; no blocks in the first: all are in the
    second."""

    num_blocks: int
    window: int = 0
    num_window_blocks: int = 0

    def longest(self, block_size: int, max_context: int) -> int:
        """Tokens of the longest sequence that the pools can hold alone, `max_context` where they can hold that."""
        if self.window and not self.num_blocks:
            return max_context
        return min(max_context, self.num_blocks * block_size)


def fewest_window_blocks(window: int, block_size: int) -> int:
    """Blocks that hold what one query sees, wherever the borders of blocks fall."""
    return 1 + -(-(window - 1) // block_size)


def split_pools(
    pool_bytes: int,
    *,
    full_block_bytes: int,
    window_block_bytes: int,
    window: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    num_in_flight: int,
) -> PoolSplit:
    """Split `pool_bytes`. Block bytes: of the layers that see everything, and of the others (0: there are none).
    num_in_flight: most tokens that steps in flight write."""
    one_pool = PoolSplit(pool_bytes // (full_block_bytes + window_block_bytes))
    if not window_block_bytes or window >= max_model_len:
        return one_pool
    held = fewest_window_blocks(window, block_size)
    if not full_block_bytes:
        return PoolSplit(0, window, one_pool.num_blocks) if one_pool.num_blocks >= held else one_pool
    long_blocks = -(-max_model_len // block_size)
    flying = min(long_blocks, -(-num_in_flight // block_size))
    share = (full_block_bytes + window_block_bytes * min(1, held / long_blocks)) / (
        full_block_bytes + window_block_bytes
    )
    left = max(0, pool_bytes - flying * window_block_bytes)
    balanced = flying + int(share * left / (full_block_bytes + share * window_block_bytes))
    num_window_blocks = max(held, min(balanced, flying + max_num_seqs * held))
    num_blocks = (pool_bytes - num_window_blocks * window_block_bytes) // full_block_bytes
    split = PoolSplit(num_blocks, window, num_window_blocks)
    # A pool so small that no sequence outgrows the window is better not split.
    return split if num_blocks * block_size > max(window, one_pool.num_blocks * block_size) else one_pool
