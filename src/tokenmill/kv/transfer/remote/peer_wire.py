"""What the KV stores of two machines say to each other, in frames of `kv.transfer.peer.frames`, after the door:

the one that asks                                        the one that has
hello  version, numerics_id, block_bytes             ->
                                                     <-  nothing more, or an error: it is another model's
look   wanted [[group, key in hex]]                  ->
                                                     <-  found "0110..": a digit for each
load   wanted                                        ->
                                                     <-  nth, num_bytes; then the block, sealed; and so on
                                                     <-  is_last
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....core.block import KEY_BYTES
from ....core.tiers import TierKey
from ..peer.frames import BadPeer

VERSION = 1
MOST_WANTED = 4096
PURPOSE = "kv peer"
"""Of the seals."""


def hello(numerics_id: str, block_bytes: Sequence[int]) -> dict[str, Any]:
    return {"ask": "hello", "version": VERSION, "numerics_id": numerics_id, "block_bytes": list(block_bytes)}


def name_of(block: TierKey, epoch: int = 0) -> str:
    group, key = block
    return f"{group}:{key.hex()}"


def asked(ask: str, names: Sequence[str]) -> dict[str, Any]:
    return {"ask": ask, "wanted": names}


def read_wanted(message: dict[str, Any], num_groups: int) -> tuple[TierKey, ...]:
    """The blocks that a message asks for. Raises BadPeer."""
    wanted = message.get("wanted")
    if not isinstance(wanted, list) or len(wanted) > MOST_WANTED:
        raise BadPeer("It asks for no blocks, or for too many.")
    try:
        blocks = tuple((int(group), bytes.fromhex(key)) for group, _, key in (name.partition(":") for name in wanted))
    except (AttributeError, ValueError) as error:
        raise BadPeer("It asks for what is no block.") from error
    if not all(0 <= group < num_groups and len(key) == KEY_BYTES for group, key in blocks):
        raise BadPeer("It asks for what is no block.")
    return blocks
