"""What an engine tells of its prefix cache: which blocks it has published, and which no longer.

Of the blocks of layers that see everything. Messages of one life of an engine are numbered without gaps, so that who
misses one notices. A snapshot is such a message too: it begins with CLEARED, and is sent to all who listen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .block import BlockKey

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
