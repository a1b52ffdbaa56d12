"""Which engine has KV of which prefix, as far as engines have told (`core.kv_events`) and as far as it is expected of
requests that they have. Pure.

A key names all that comes before it, so every fourth key of a prefix says nearly as much as all of them: only blocks at
depths 3, 7, 11... are kept, and looked up by bisection (`Holders`).

Events of an engine carry numbers without gaps. After a gap, or before the first snapshot, nothing that it says is taken
until a message begins with `cleared`.

The idea of a global index of prefixes kept by events: Mooncake's Conductor and llm-d (FAST'25); the stride is our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..core.block import KEY_BYTES, BlockKey, split_keys
from ..core.kv_events import CLEARED, REMOVED, KVEvents

# Who holds which blocks, by one key of several of each prefix.
#
# Who gives up blocks gives up what hangs below a block before the block, so whoever holds a deep key holds those above
# it. A look-up therefore finds by bisection the deepest key that anybody holds, then the next one that more hold, and
# so on.


class Level(NamedTuple):
    """Those that hold exactly the first `num_blocks` blocks of a prefix, as far as is known."""

    num_blocks: int
    links: frozenset[int] | set[int]


class Holders:
    """Holders by number. stride: one block in so many is kept, the last of each `stride`."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._of: dict[BlockKey, int | set[int]] = {}

    def __len__(self) -> int:
        """Keys that are kept."""
        return len(self._of)

    def add(self, link: int, key: BlockKey) -> None:
        there = self._of.get(key)
        if there is None:
            self._of[key] = link
        elif isinstance(there, int):
            if there != link:
                self._of[key] = {there, link}
        else:
            there.add(link)

    def strike(self, link: int, key: BlockKey) -> None:
        there = self._of.get(key)
        if isinstance(there, int):
            if there == link:
                del self._of[key]
        elif there is not None:
            there.discard(link)
            if len(there) == 1:
                (self._of[key],) = there

    def of(self, key: BlockKey) -> frozenset[int] | set[int]:
        there = self._of.get(key)
        if there is None:
            return frozenset()
        return frozenset((there,)) if isinstance(there, int) else there

    def of_last(self, keys: bytes) -> frozenset[int] | set[int]:
        """Who holds the last of these blocks that is kept, and so those before it."""
        end = len(keys) // (self._stride * KEY_BYTES) * self._stride * KEY_BYTES
        return self.of(keys[max(0, end - KEY_BYTES) : end])

    def num_held(self, keys: bytes) -> int:
        """Of a prefix, so many blocks somebody holds."""
        holders, span = self._of, self._stride * KEY_BYTES
        low, high = 0, len(keys) // span
        while low < high:  # the first `low` kept keys have holders
            middle = (low + high + 1) // 2
            if keys[middle * span - KEY_BYTES : middle * span] in holders:
                low = middle
            else:
                high = middle - 1
        return low * self._stride

    def levels(self, keys: bytes) -> list[Level]:
        """Who holds how much of a prefix, most first; each is in one level at most."""
        holders, span = self._of, self._stride * KEY_BYTES
        low = self.num_held(keys) // self._stride
        levels: list[Level] = []
        seen: frozenset[int] | set[int] = frozenset()
        while low:  # who holds the first `low`, and no more, are those that are not in `seen`
            there = holders[keys[low * span - KEY_BYTES : low * span]]
            links = frozenset((there,)) if isinstance(there, int) else there
            levels.append(Level(low * self._stride, links - seen))
            seen, high = links, low
            low = 0
            while high - low > 1:  # more hold the first `low`, and as many the first `high`
                middle = (low + high) // 2
                others = holders.get(keys[middle * span - KEY_BYTES : middle * span], 0)
                if (1 if isinstance(others, int) else len(others)) > len(seen):
                    low = middle
                else:
                    high = middle
        return levels

    def all(self) -> dict[BlockKey, set[int]]:
        """Slow, for tests."""
        return {key: {there} if isinstance(there, int) else set(there) for key, there in self._of.items()}


def kept(keys: bytes, depth: int, stride: int) -> Iterator[BlockKey]:
    """Those of the blocks `depth`, `depth` + 1, ... of a prefix that are kept."""
    first = (stride - 1 - depth) % stride
    step = stride * KEY_BYTES
    return (keys[at : at + KEY_BYTES] for at in range(first * KEY_BYTES, len(keys) - KEY_BYTES + 1, step))


STRIDE = 4
"""One block in so many is kept, of our own engines."""


class PrefixIndex:
    """Engines by number. Memory: about 50 bytes for each block that an engine holds. stride: one block in so many is
    kept."""

    def __init__(self, stride: int = STRIDE) -> None:
        self._stride = stride
        self._holders = Holders(stride)
        self._told: dict[int, set[BlockKey]] = {}
        self._expected: dict[int, dict[BlockKey, int]] = {}
        self._next: dict[int, int | None] = {}
        self._requests: dict[str, tuple[int, bytes]] = {}

    def __len__(self) -> int:
        """Keys that are kept."""
        return len(self._holders)

    def __contains__(self, link: int) -> bool:
        return link in self._next

    @property
    def links(self) -> tuple[int, ...]:
        return tuple(self._next)

    @property
    def given(self) -> dict[str, int]:
        """Of the requests that are expected to leave their blocks in an engine, which one; slow, for tests."""
        return {name: link for name, (link, _) in self._requests.items()}

    def num_blocks_of(self, link: int) -> int:
        """About so many blocks it has told of."""
        return self._stride * len(self._told.get(link, ()))

    def join(self, link: int) -> None:
        """It will be asked for a snapshot."""
        self._next[link], self._told[link], self._expected[link] = None, set(), {}

    def leave(self, link: int) -> None:
        """It has gone, or tells nothing any more."""
        if link in self._next:
            for key in {*self._told.pop(link), *self._expected.pop(link)}:
                self._holders.strike(link, key)
            del self._next[link]

    def apply(self, link: int, message: KVEvents) -> bool:
        """Whether all is well; False, once for each gap: it must be asked for a snapshot."""
        if link not in self._next:
            return True
        if message.events and message.events[0].kind == CLEARED:
            self._next[link] = message.seq
        expected = self._next[link]
        if expected is None:
            return True
        if message.seq != expected:
            self._next[link] = None
            return False
        self._next[link] = message.seq + 1
        told = self._told[link]
        for event in message.events:
            if event.kind == CLEARED:
                gone, told = told, set()
                self._told[link] = told
                self._drop(link, gone)
            elif event.kind == REMOVED:
                self._drop(link, told.intersection(split_keys(event.keys)))
            else:
                for key in kept(event.keys, event.depth, self._stride):
                    told.add(key)
                    self._holders.add(link, key)
        return True

    def has_told(self, link: int, keys: bytes, num_blocks: int) -> bool:
        """Whether an engine has told that it has so many blocks of a prefix, and not just is expected to."""
        end = num_blocks // self._stride * self._stride * KEY_BYTES
        return keys[max(0, end - KEY_BYTES) : end] in self._told.get(link, ())

    def num_held(self, keys: bytes) -> int:
        """Of a prefix, so many blocks somebody holds, as far as is known."""
        return self._holders.num_held(keys)

    def holders(self, keys: bytes) -> frozenset[int] | set[int]:
        """Who holds the last of these blocks that is kept, and so those before it."""
        return self._holders.of_last(keys)

    def expect(self, link: int, request_id: str, keys: bytes) -> None:
        """The engine was given a request with these keys: it will have them. Another that was given it before will
        not."""
        self.settle(request_id)
        expected = self._expected.get(link)
        if expected is not None:
            self._requests[request_id] = link, keys
            for key in kept(keys, 0, self._stride):
                expected[key] = expected.get(key, 0) + 1
                self._holders.add(link, key)

    def settle(self, request_id: str) -> None:
        """The request is over: from now on only what its engine has told counts."""
        link, keys = self._requests.pop(request_id, (-1, b""))
        expected = self._expected.get(link)
        if expected is None:
            return
        told = self._told[link]
        for key in kept(keys, 0, self._stride):
            left = expected.get(key, 0) - 1
            if left > 0:
                expected[key] = left
            elif left == 0:
                del expected[key]
                if key not in told:
                    self._holders.strike(link, key)

    def levels(self, keys: bytes) -> list[Level]:
        """Who holds how much of a prefix, most first; an engine is in one level at most."""
        return self._holders.levels(keys)

    def check(self) -> None:
        """Assert what must hold between calls; slow, for tests."""
        wanted: dict[BlockKey, set[int]] = {}
        for link, told in self._told.items():
            for key in {*told, *self._expected[link]}:
                wanted.setdefault(key, set()).add(link)
        assert self._holders.all() == wanted

    def _drop(self, link: int, keys: set[BlockKey]) -> None:
        told, expected = self._told[link], self._expected[link]
        for key in keys:
            told.discard(key)
            if key not in expected:
                self._holders.strike(link, key)
