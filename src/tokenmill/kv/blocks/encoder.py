"""Which block of the encoder's group has what of which sequence (`core.embeds`, `core.block.CROSS`).

A block holds what the encoder makes of one content, whole, and is known by the content's digest alone: whatever prompt
it comes in, and wherever. A sequence has the blocks of all its contents while it is LOADING or RUNNING; blocks that
nobody has stay cached until they are evicted. Blocks that are new are filled in the step of the sequence's first row,
and others may share them from that row on.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from ...core.block import KEY_BYTES, BlockKey
from ...core.config import EngineConfig
from ...core.sequence import Sequence
from .hashing import root_key
from .manager import BlockManager

Published = Iterable[tuple[BlockManager, int]]
"""What a step published, which is withdrawn if it fails."""


class EncoderLedger:
    """pool: of the encoder's group; None: what an encoder makes is not kept."""

    def __init__(self, config: EngineConfig, pool: BlockManager | None) -> None:
        self._config = config
        self._pool = pool

    def can_take(self, seq: Sequence, recent: Iterable[Published]) -> bool:
        """Whether there are the blocks that `take` would take."""
        pool = self._pool
        if pool is None or not seq.request.embeds:
            return True
        keys, found = self._find(pool, seq, recent)
        return len(keys) - len(found) <= pool.num_available - pool.num_cached_among(found.values())

    def take(self, seq: Sequence, recent: Iterable[Published]) -> None:
        """Give it its blocks. What was published in one of the steps of `recent`, which may fail, is not shared."""
        pool = self._pool
        if pool is None or not seq.request.embeds:
            return
        keys, blocks = self._find(pool, seq, recent)
        pool.adopt(blocks.values())
        new = [key for key in keys if key not in blocks]
        seq.unencoded = tuple(pool.reserve(len(new)))
        blocks.update(zip(new, seq.unencoded, strict=True))
        seq.encoded = tuple(blocks[key] for key in keys)

    def begin(self, seq: Sequence) -> list[tuple[BlockManager, int]]:
        """Its first row is planned: others may share the blocks that its step fills, which are returned."""
        pool = self._pool
        if pool is None or not seq.unencoded:
            return []
        published = []
        for key, block in zip(self._keys(seq), seq.encoded, strict=True):
            if block in seq.unencoded and pool.find(key) is None:
                pool.publish([key], [block], 0, 1)
                published.append((pool, block))
        return published

    def blocks_of(self, seq: Sequence) -> tuple[int, ...]:
        """Of each of its contents."""
        if not seq.encoded:
            return ()
        of = dict(zip(self._keys(seq), seq.encoded, strict=True))
        return tuple(of[key] for key in self._keys_of_all(seq))

    def release(self, seq: Sequence) -> None:
        if self._pool is not None and seq.encoded:
            self._pool.release(seq.encoded, seq.last_step)
            seq.encoded = seq.unencoded = ()

    def forget(self, seq: Sequence) -> None:
        """What its blocks hold may be wrong."""
        if self._pool is not None:
            self._pool.forget([block for block in seq.encoded if self._pool.is_published(block)])

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that these are who has blocks; slow, for tests."""
        if self._pool is not None:
            self._pool.check([list(seq.encoded) for seq in sequences])

    def _keys_of_all(self, seq: Sequence) -> list[BlockKey]:
        request = seq.request
        root = root_key(self._config.numerics_id, request.adapter, request.cache_salt)
        return [blake2b(root + one.digest, digest_size=KEY_BYTES).digest() for one in request.embeds]

    def _keys(self, seq: Sequence) -> list[BlockKey]:
        """Each once."""
        return list(dict.fromkeys(self._keys_of_all(seq)))

    def _find(
        self, pool: BlockManager, seq: Sequence, recent: Iterable[Published]
    ) -> tuple[list[BlockKey], dict[BlockKey, int]]:
        """The keys of its contents, and blocks that it may share."""
        unsettled = {published for step in recent for published in step}
        keys = self._keys(seq)
        blocks = {key: block for key in keys if (block := pool.find(key)) is not None}
        return keys, {key: block for key, block in blocks.items() if (pool, block) not in unsettled}
