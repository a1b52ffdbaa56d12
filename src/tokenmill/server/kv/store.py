"""The KV store of this machine, as the front end asks it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

FOR_EVER = -1.0

AskStore = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""(what, argument) -> the answer; both JSON. Besides what a store is asked by `core.tiers.Inquire`:

    find   {"keys": [hex]}                       {"digits": ["12", ...]}, one for each KV group
    pin    {"keys": [hex], "seconds", "owner"}   {}
    drop   {"keys": [hex]}                       {}

Raises Unavailable while there is none, and InvalidRequest for what it does not do."""


class StoredPrefix(NamedTuple):
    """Of a prompt: blocks that it has, and those of its beginning that are stored, by tier."""

    num_blocks: int
    num_stored: int
    by_tier: Mapping[str, int]


def stored_prefix(digits: Sequence[str], tiers: Sequence[str], num_blocks: int) -> StoredPrefix:
    """`digits` as `find` gives them. A block counts where all its groups have it, as of the farthest tier."""
    by_tier: dict[str, int] = {}
    num_stored = 0
    for each in zip(*digits, strict=True):
        if "0" in each:
            break
        tier = tiers[max(map(int, each)) - 1]
        by_tier[tier] = by_tier.get(tier, 0) + 1
        num_stored += 1
    return StoredPrefix(num_blocks, num_stored, by_tier)
