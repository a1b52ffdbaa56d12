"""What an engine tells of its prefix cache: which blocks it has published, which no longer, and a summary; and what
front ends tell it of KV that is wanted later.

Of the blocks of layers that see everything. Messages of one life of an engine are numbered without gaps, so that who
misses one notices. A snapshot is such a message too: it begins with CLEARED, and is sent to all who listen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from .block import BlockKey

E = TypeVar("E")

# What a front end knows of KV that is wanted later, and tells the engine that has it, or whose store has it.
#
# A tool runs between two turns, a session comes back, somebody says what will be asked: none of it is a promise, and
# none changes an answer. An engine without a store with tiers passes it over.


@dataclass(frozen=True, slots=True)
class KeepKV:
    """Have the store keep the blocks with these keys, joined, the leading ones of one prefix, for so many seconds; -1:
    for ever, 0: as any others. owner: the salt of the requests that use them."""

    keys: bytes
    seconds: float
    owner: str = ""


@dataclass(frozen=True, slots=True)
class PromoteKV:
    """Have the store bring these blocks into host memory: they are wanted soon."""

    keys: bytes


class PrefixRun(NamedTuple):
    """Published blocks in a row, of which only the last has another number of blocks below it than one.

    id            in its summary; parent: the run it hangs below, or -1
    start         blocks before it in its prompt
    num_blocks    of its own; num_held: those of them that sequences hold
    total_blocks  with all runs below it, also those left out
    num_uses      sequences that computed its first block or had a hit on it
    num_children  blocks below its last one
    """

    id: int
    parent: int
    start: int
    num_blocks: int
    num_held: int
    total_blocks: int
    num_uses: int
    num_children: int


class PoolCounts(NamedTuple):
    """Blocks of one pool. window: positions that its layers see at most; 0: all."""

    window: int
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int


class PrefixSummary(NamedTuple):
    """runs: the largest, with what is below them; parents come before children. num_published: blocks of the tree;
    num_seen: so many of these, the oldest, were looked at."""

    runs: tuple[PrefixRun, ...] = ()
    num_published: int = 0
    num_seen: int = 0


BlockName = int | bytes
"""Of a block, as the one that has it calls it: our own engines by BlockKey, vLLM by a hash of its own."""

STORED = "stored"
REMOVED = "removed"
CLEARED = "cleared"


class KVEvent(NamedTuple):
    """kind: STORED, REMOVED or CLEARED. keys: of the blocks, joined, KEY_BYTES each. STORED: the blocks follow each
    other in one prompt; `parent` is the key of the block before the first of them, b"" where there is none, and `depth`
    tells how many blocks are before it."""

    kind: str
    keys: bytes = b""
    parent: BlockKey = b""
    depth: int = 0


class EventRuns(Generic[E]):
    """Events in the making: blocks that follow each other in one tier are one event. make: an event of its kind, tier,
    keys, parent and depth."""

    def __init__(self, make: Callable[[str, str, bytes, BlockKey, int], E]) -> None:
        self.events: list[E] = []
        self._make = make
        self._kind = self._tier = ""
        self._keys = bytearray()
        self._last = self._parent = b""
        self._depth = 0

    @property
    def is_empty(self) -> bool:
        return not self.events and not self._keys

    def store(self, tier: str, key: BlockKey, parent: BlockKey, depth: int) -> None:
        if (self._kind, self._tier) != (STORED, tier) or parent != self._last:
            self._close()
            self._kind, self._tier, self._parent, self._depth = STORED, tier, parent, depth
        self._add(key)

    def remove(self, tier: str, key: BlockKey) -> None:
        if (self._kind, self._tier) != (REMOVED, tier):
            self._close()
            self._kind, self._tier = REMOVED, tier
        self._add(key)

    def take(self) -> tuple[E, ...]:
        self._close()
        events, self.events = tuple(self.events), []
        return events

    def _add(self, key: BlockKey) -> None:
        self._keys += key
        self._last = key

    def _close(self) -> None:
        if self._keys:
            is_stored = self._kind == STORED
            parent, depth = (self._parent, self._depth) if is_stored else (b"", 0)
            self.events.append(self._make(self._kind, self._tier, bytes(self._keys), parent, depth))
            self._keys = bytearray()
        self._kind = self._tier = ""


@dataclass(frozen=True, slots=True)
class WatchKV:
    """Tell of the cache from now on, at first all that it holds; or no more. Asked again, an engine tells all again."""

    is_wanted: bool


@dataclass(frozen=True, slots=True)
class KVEvents:
    """What has happened since the message numbered one less."""

    seq: int
    events: tuple[KVEvent, ...]


class TokenEvent(NamedTuple):
    """An event for others than front ends of ours, with what the blocks are of: anyone can make names of their own.

    kind        STORED, REMOVED or CLEARED
    blocks      names; STORED: of blocks that follow each other in one prompt
    parent      the block before the first of them; None: there is none
    tokens      STORED: of these blocks, `block_size` each; (), where `tier` is not "": of blocks told of before
    adapter     digest or name of the LoRA adapter that they were computed with; "": none
    tier        where they are besides (`core.tiers.TIERS`); "": in the memory that is computed in
    """

    kind: str
    blocks: tuple[BlockName, ...] = ()
    parent: BlockName | None = None
    tokens: tuple[int, ...] = ()
    block_size: int = 0
    adapter: str = ""
    tier: str = ""
