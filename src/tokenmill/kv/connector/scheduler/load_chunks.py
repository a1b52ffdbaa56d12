"""What a store says of prefixes, and the parts in which they are fetched."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from ....core.block import BlockMove
from ....core.effects import JobEnded
from ....core.sequence import Sequence
from ....core.tiers import TierKey
from ...blocks.groups import Match


class LoadChunk(NamedTuple):
    """Blocks of one job. tier: the digit of where they lie, 0: of a store without tiers. is_measured: how long it takes
    says what that tier gives."""

    moves: tuple[BlockMove, ...]
    tier: int = 0
    is_measured: bool = False


class Catalogue(Protocol):
    """What a store has: one that told its keys (`folder`), or one with tiers (`tiers`)."""

    @property
    def has_work(self) -> bool:
        """Whether an answer is to come."""
        ...

    def look(self, seq: Sequence, matched: Match, now: float) -> bool:
        """At its turn: whether the sequence has to wait for an answer."""
        ...

    def end_look(self, event: JobEnded, now: float) -> None: ...

    def end(self, seq: Sequence, matched: Match, now: float) -> int:
        """Up to which block of the sequence's prefix to fetch what the pools lack."""
        ...

    def meeting(self, seq: Sequence, matched: Match, now: float) -> tuple[int, int] | None:
        """Where it is best to compute the first blocks after `matched` while others load: those from the first up to
        the second are to be loaded then."""
        ...

    def cut(self, seq: Sequence, moves: List[BlockMove], most_bytes: int = 0) -> list[LoadChunk]:
        """Blocks of its prefix as jobs, in order, of so many bytes at most (0: as many as suit)."""
        ...

    def begin(self, number: int, piece: LoadChunk, now: float) -> float:
        """A job starts; within how many seconds it is to end, 0: it may take its time."""
        ...

    def came(self, number: int, moves: List[BlockMove], now: float) -> None:
        """It has ended, and these of its blocks are in."""
        ...

    def has(self, seq: Sequence, block: TierKey) -> bool:
        """Whether it is known to have this block of the sequence."""
        ...

    def lose(self, sequences: List[Sequence], moves: List[BlockMove]) -> None:
        """These blocks, which the sequences wanted, are not to be had."""
        ...


def parted(moves: tuple[BlockMove, ...], event: JobEnded) -> tuple[List[BlockMove], List[BlockMove]]:
    """Those that are in, and those that are not."""
    if event.error:
        return (), moves
    if not event.result:
        return moves, ()
    marked = list(zip(moves, event.result, strict=True))
    return [move for move, digit in marked if digit == "1"], [move for move, digit in marked if digit != "1"]
