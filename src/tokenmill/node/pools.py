"""How KV memory is split between the layers that see everything and those that see a window.

Let f and v_i be the bytes of a token's KV in the pool of layers that see everything and in that of window i, and let a
sequence of the longest context M hold c_i of its tokens in the latter. Short sequences want as many slots in all pools;
the longest want c_i / M as many in pool i. With

    r = (f + sum of v_i * c_i / M) / (f + sum of v_i)      slots in a window's pool for each slot in the first

both lose the same share of what a split made for them alone would hold. A window's pool never gets more than
`max_num_seqs` sequences and the chunks of their prompts can use; the first takes the rest. Where no layer sees
everything, the widest window takes its place: M is what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.block import KVGroupSpec, full_groups, window_group


def longest(groups: Sequence[KVGroupSpec], block_size: int, max_context: int) -> int:
    """Tokens of the longest sequence that the pools can hold alone, `max_context` where they can hold that."""
    bounds = (group.num_blocks * block_size for group in groups if not group.window)
    return min((max_context, *bounds))


def fewest_window_blocks(window: int, block_size: int) -> int:
    """Blocks that hold what one query sees, wherever the borders of blocks fall."""
    return 1 + -(-(window - 1) // block_size)


def split_pools(
    pool_bytes: int,
    *,
    full_block_bytes: int,
    windows: Sequence[tuple[int, int]],
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    num_in_flight: int,
) -> tuple[KVGroupSpec, ...]:
    """Split `pool_bytes`: one group for the layers that see everything, if there are such, and one for each window that
    hides something. full_block_bytes: of the former. windows: (positions seen, block bytes) of each of the others, the
    smallest first. num_in_flight: most tokens that steps in flight write."""
    all_bytes = full_block_bytes + sum(block_bytes for _, block_bytes in windows)
    one_pool = full_groups(pool_bytes // all_bytes, all_bytes)
    full_block_bytes += sum(block_bytes for window, block_bytes in windows if window >= max_model_len)
    windows = [(window, block_bytes) for window, block_bytes in windows if window < max_model_len and block_bytes]
    if not windows:
        return one_pool
    needs = [fewest_window_blocks(window, block_size) for window, _ in windows]
    if full_block_bytes:
        first_bytes, long_blocks, others = full_block_bytes, -(-max_model_len // block_size), windows
    else:
        first_bytes, long_blocks, others = windows[-1][1], needs[-1], windows[:-1]
    flying = min(-(-max_model_len // block_size), -(-num_in_flight // block_size))
    held_bytes = (size * min(1, need / long_blocks) for need, (_, size) in zip(needs, others, strict=False))
    share = (first_bytes + sum(held_bytes)) / all_bytes
    other_bytes = all_bytes - first_bytes
    left = max(0, pool_bytes - flying * other_bytes)
    balanced = flying + int(share * left / (first_bytes + share * other_bytes))
    sizes = [max(need, min(balanced, flying + max_num_seqs * need)) for need in needs[: len(others)]]
    first = (pool_bytes - sum(n * size for n, (_, size) in zip(sizes, others, strict=True))) // first_bytes
    local = [window_group(n, window, size) for n, (window, size) in zip(sizes, others, strict=True)]
    if not full_block_bytes:
        return (*local, window_group(first, *windows[-1])) if first >= long_blocks else one_pool
    # A pool so small that no sequence outgrows the windows is better not split.
    if first * block_size <= max(windows[-1][0], one_pool[0].num_blocks * block_size):
        return one_pool
    return (*full_groups(first, full_block_bytes), *local)
