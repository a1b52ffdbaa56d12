"""A block in a tier, and who says which of them is given up first.

    TierBlock      a block as far as one tier holds it: one that is in host memory and on disk is two of these
    Replacement    the order in which a tier gives blocks up; one object per tier
    TierAdmission  which blocks are worth writing to a tier; one object per tier

A tier of terabytes holds ten million blocks, and what is known of one must stay below a thousandth of its bytes: few
hundred. So a block has places for what a policy wants to know of it, instead of a table in each policy: `before` and
`after` (lists through the blocks, `Ring`) and `rank`. They belong to the policy of the block's tier alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, final

from ...core.block import BlockKey
from ...core.tiers import BlockFacts, TierKey

_SUM_BITS, _DEPTH_BITS = 63, 24
_SUM, _DEPTH = (1 << _SUM_BITS) - 1, (1 << _DEPTH_BITS) - 1
_PLACE_AT = _SUM_BITS + _DEPTH_BITS

MOST_SUM = _SUM
"""Of checksums: 63 bits."""


@final
class Costs:
    """What blocks cost to compute: seconds of a token, and of each position that it attends to, as engines measure."""

    __slots__ = ("block_size", "position_s", "token_s")

    def __init__(self, block_size: int, token_s: float, position_s: float) -> None:
        self.block_size = block_size
        self.token_s = token_s
        self.position_s = position_s


@final
class BlockKind:
    """What the blocks of a KV group have in common. share: of a token's work, by bytes; all groups are computed at
    once."""

    __slots__ = ("costs", "group", "num_bytes", "share")

    def __init__(self, group: int, num_bytes: int, share: float, costs: Costs) -> None:
        self.group = group
        self.num_bytes = num_bytes
        self.share = share
        self.costs = costs


@final
class TierBlock:
    """Compared and hashed as an object.

    key, parent     its own, and of the block before it (b"": there is none)
    owner           whose quota it counts against
    num_uses        how often it was stored or fetched
    used_s          when it was last
    num_children    blocks of the tier that follow it; where it came back before they had gone, they are not counted
    holds           leases and moves under way: above 0 it stays where it is
    is_pinned       kept whatever else is wanted
    is_shared       was written to the tier that others share
    origin          the tier that its bytes were loaded from; "": none, they were written here
    before, after, rank   the policy's
    """

    __slots__ = (
        "_packed",
        "after",
        "before",
        "holds",
        "is_pinned",
        "is_shared",
        "key",
        "kind",
        "num_children",
        "num_uses",
        "origin",
        "owner",
        "parent",
        "rank",
        "used_s",
    )

    def __init__(self, kind: BlockKind, facts: BlockFacts, place: int, sum: int, now: float) -> None:
        self.key: BlockKey = facts.block[1]
        self.kind = kind
        self.parent: BlockKey = facts.parent
        self.owner = facts.owner
        self._packed = (place + 1) << _PLACE_AT | min(max(0, facts.depth), _DEPTH) << _SUM_BITS | sum
        self.num_uses = 1
        self.used_s = now
        self.num_children = 0
        self.holds = 0
        self.is_pinned = False
        self.is_shared = False
        self.origin = ""
        self.before: TierBlock | None = None
        self.after: TierBlock | None = None
        self.rank = 0.0

    @property
    def block(self) -> TierKey:
        return self.kind.group, self.key

    @property
    def num_bytes(self) -> int:
        return self.kind.num_bytes

    @property
    def place(self) -> int:
        """Where in the tier: of host memory the offset."""
        return (self._packed >> _PLACE_AT) - 1

    @property
    def sum(self) -> int:
        return self._packed & _SUM

    @property
    def depth(self) -> int:
        """Blocks before it in its prompt."""
        return self._packed >> _SUM_BITS & _DEPTH

    @property
    def facts(self) -> BlockFacts:
        return BlockFacts((self.kind.group, self.key), self.parent, self.depth, self.owner)

    @property
    def recompute_s(self) -> float:
        """What computing it takes, where all before it is there."""
        costs, size = self.kind.costs, self.kind.costs.block_size
        return self.kind.share * size * (costs.token_s + costs.position_s * (self.depth + 0.5) * size)

    def __repr__(self) -> str:
        return f"TierBlock({self.kind.group}, {self.key.hex()}, place={self.place}, holds={self.holds})"


class Replacement(Protocol):
    """Costs are a block's, O(1) or O(log n). `num_uses` and `used_s` are up to date when it is told."""

    def add(self, block: TierBlock, now: float) -> None:
        """It has come into the tier."""
        ...

    def use(self, block: TierBlock, now: float) -> None:
        """It was fetched or stored again. The blocks of a prompt come last to first."""
        ...

    def bare(self, block: TierBlock) -> None:
        """The last of the blocks that followed it has left the tier."""
        ...

    def remove(self, block: TierBlock) -> None:
        """It is not in the tier any more, or not to be given up."""
        ...

    def victim(self, may: Callable[[TierBlock], bool], now: float) -> TierBlock | None:
        """The block to give up first among those that `may` be; it stays until it is removed. None: there is none."""
        ...


class TierAdmission(Protocol):
    def admits(self, block: TierBlock, now: float) -> bool:
        """Whether to write this block to the tier. Asked as it comes into host memory, and at each use of it there as
        long as it is not in the tier; never twice for one use."""
        ...


@final
class Ring:
    """Blocks in an order, linked by their `before` and `after`: a block is in one ring at a time."""

    def __init__(self) -> None:
        self.first: TierBlock | None = None
        self.last: TierBlock | None = None

    def append(self, block: TierBlock) -> None:
        block.before = last = self.last
        if last is None:
            self.first = block
        else:
            last.after = block
        self.last = block

    def insert_first(self, block: TierBlock) -> None:
        block.after = first = self.first
        if first is None:
            self.last = block
        else:
            first.before = block
        self.first = block

    def remove(self, block: TierBlock) -> None:
        before, after = block.before, block.after
        if before is None:
            self.first = after
        else:
            before.after = after
        if after is None:
            self.last = before
        else:
            after.before = before
        block.before = block.after = None

    def __iter__(self) -> Iterator[TierBlock]:
        block = self.first
        while block is not None:
            yield block
            block = block.after


def block_kinds(block_bytes: Sequence[int], costs: Costs) -> tuple[BlockKind, ...]:
    total = sum(block_bytes)
    return tuple(BlockKind(group, size, size / total, costs) for group, size in enumerate(block_bytes))
