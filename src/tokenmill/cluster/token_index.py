"""Which servers of others have KV of which prompts, as they tell of it with tokens (`core.kv_events.TokenEvent`). Pure.

Servers name blocks as they like and may divide prompts differently, so blocks are known here by keys of our own, made
of tokens and the size of a block. A block whose parent was not told of is passed over, with all that hangs below it.
A block counts as long as a server has it anywhere: where it computes, or in a slower tier that it loads from.
Memory is bounded: a server that tells of more than `most_blocks` is not believed to have those beyond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..core.block import BlockKey
from ..core.kv_events import CLEARED, REMOVED, STORED, BlockName, KVEvent, KVEvents, TokenEvent
from ..kv.blocks.hashing import extend_keys, root_key
from .index import PrefixIndex

MOST_BLOCKS = 250_000
"""Of each server: about 100 MB where all are used."""


class _Block(NamedTuple):
    """where: the tiers that have it, "" among them."""

    key: BlockKey
    depth: int
    size: int
    where: frozenset[str] = frozenset(("",))


class TokenIndex:
    """Servers by number."""

    def __init__(self, num_servers: int, most_blocks: int = MOST_BLOCKS) -> None:
        self._index = PrefixIndex(stride=1)
        self._most = most_blocks
        self._blocks: list[dict[BlockName, _Block]] = [{} for _ in range(num_servers)]
        self._sizes = [0] * num_servers
        self._num_heard = [0] * num_servers
        for server in range(num_servers):
            self._index.join(server)
            self._apply(server, [KVEvent(CLEARED)])

    def num_blocks(self, server: int) -> int:
        return len(self._blocks[server])

    @property
    def sizes(self) -> set[int]:
        """Of the blocks of servers that have told of any."""
        return {size for size in self._sizes if size}

    def hear(self, server: int, events: Sequence[TokenEvent]) -> None:
        made: list[KVEvent] = []
        for event in events:
            if event.kind == CLEARED:
                self._blocks[server].clear()
                made.append(KVEvent(CLEARED))
            elif event.kind == REMOVED:
                keys = self._removed(server, event)
                if keys:
                    made.append(KVEvent(REMOVED, b"".join(keys)))
            elif event.tier and not event.tokens:
                self._also_in(server, event)
            elif (stored := self._stored(server, event)) is not None:
                made.append(stored)
        if made:
            self._apply(server, made)

    def _removed(self, server: int, event: TokenEvent) -> list[BlockKey]:
        """Blocks that are nowhere now."""
        blocks, keys = self._blocks[server], []
        for name in event.blocks:
            found = blocks.get(name)
            if found is None:
                continue
            where = found.where - {event.tier}
            if where:
                blocks[name] = found._replace(where=where)
            else:
                del blocks[name]
                keys.append(found.key)
        return keys

    def _also_in(self, server: int, event: TokenEvent) -> None:
        """Blocks that were told of before are in a slower tier, too."""
        blocks = self._blocks[server]
        for name in event.blocks:
            if (found := blocks.get(name)) is not None:
                blocks[name] = found._replace(where=found.where | {event.tier})

    def _stored(self, server: int, event: TokenEvent) -> KVEvent | None:
        blocks, size = self._blocks[server], event.block_size
        above = None if event.parent is None else blocks.get(event.parent)
        is_known = event.parent is None or (above is not None and above.size == size)
        if not is_known or len(blocks) + len(event.blocks) > self._most or not event.blocks:
            return None
        self._sizes[server] = size
        keys: list[BlockKey] = []
        extend_keys(keys, _root(size) if above is None else above.key, event.tokens, size)
        depth = 0 if above is None else above.depth + 1
        for at, (name, key) in enumerate(zip(event.blocks, keys, strict=True), depth):
            before = blocks.get(name)
            where = frozenset((event.tier,)) if before is None else before.where | {event.tier}
            blocks[name] = _Block(key, at, size, where)
        return KVEvent(STORED, b"".join(keys), b"" if above is None else above.key, depth)

    def _apply(self, server: int, events: list[KVEvent]) -> None:
        is_well = self._index.apply(server, KVEvents(self._num_heard[server], tuple(events)))
        assert is_well
        self._num_heard[server] += 1

    def keys(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """Of a prompt's full blocks, joined, by the size of a block: what the other calls want to know of it."""
        made: dict[int, bytes] = {}
        for size in self.sizes:
            keys: list[BlockKey] = []
            extend_keys(keys, _root(size), tokens, size)
            made[size] = b"".join(keys)
        return made

    def hits(self, keys: dict[int, bytes]) -> dict[int, int]:
        """Tokens of a prompt that servers have; those that have none are left out."""
        found: dict[int, int] = {}
        for size, joined in keys.items():
            for level in self._index.levels(joined):
                found.update((server, level.num_blocks * size) for server in level.links if self._sizes[server] == size)
        return found

    def expect(self, server: int, call: str, keys: dict[int, bytes]) -> None:
        """The server was given a call with this prompt: it will have its KV. Another that was given it before will
        not."""
        joined = keys.get(self._sizes[server], b"")
        if joined:
            self._index.expect(server, call, joined)

    def settle(self, call: str) -> None:
        """The call is over: what the server tells counts."""
        self._index.settle(call)


def _root(size: int) -> BlockKey:
    return root_key(f"tokens in blocks of {size}", "", "")
