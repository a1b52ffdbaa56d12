"""The checksum that a block of KV has in every tier: made by the worker that computed it, compared by the one that
takes it.

XXH3 of the bytes, seeded from the block's group and key: sound bytes of another block are as wrong as damaged ones, and
so is a run of zeros. It finds accidents. Whoever may write to a tier can forge it; against that, see `seal`.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from ...core.tiers import TierKey

_BITS = (1 << 63) - 1


def block_sum(block: TierKey, data: bytes | bytearray | memoryview) -> int:
    """Never negative. The interpreter is free meanwhile."""
    group, key = block
    return xxh3_64_intdigest(data, xxh3_64_intdigest(key, group)) & _BITS
