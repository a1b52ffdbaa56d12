"""What a store has of prefixes, and the chunks in which they are fetched."""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from ....core.block import BlockMove
from ....core.effects import FindBlocks, JobEnded
from ....core.request import IMPORT
from ....core.sequence import Sequence, Status
from ....core.tiers import TierKey
from ...blocks.fetch import reach
from ...blocks.groups import Match
from .port import EnginePort


class LoadChunk(NamedTuple):
    """Blocks of one job. tier: the digit of where they lie, 0: of a store without tiers. is_measured: how long it takes
    says what that tier gives."""

    moves: tuple[BlockMove, ...]
    tier: int = 0
    is_measured: bool = False


def parted(moves: tuple[BlockMove, ...], event: JobEnded) -> tuple[List[BlockMove], List[BlockMove]]:
    """Those that are in, and those that are not."""
    if event.error:
        return (), moves
    if not event.result:
        return moves, ()
    marked = list(zip(moves, event.result, strict=True))
    return [move for move, digit in marked if digit == "1"], [move for move, digit in marked if digit != "1"]


class Catalogue(Protocol):
    """What a store has: one that told its keys (`folder`), or one with tiers (`tiers`)."""

    @property
    def has_work(self) -> bool:
        """Whether an answer is to come."""
        ...

    def look_up(self, seq: Sequence, matched: Match, now: float) -> bool:
        """At its turn: whether the sequence has to wait for an answer."""
        ...

    def end_lookup(self, event: JobEnded, now: float) -> None: ...

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

    def begin(self, number: int, chunk: LoadChunk, now: float) -> float:
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


class FolderCatalogue:
    """Of a store that told its keys when it was opened (`--kv-save`). They are in the engine's state."""

    def __init__(self, state: EnginePort) -> None:
        self._state = state
        self._lookups: dict[int, Sequence] = {}
        self._next_number = 0

    @property
    def has_work(self) -> bool:
        return bool(self._lookups)

    def look_up(self, seq: Sequence, matched: Match, now: float) -> bool:
        """Before the first turn of a sequence whose prefix another engine may have stored; tells whether there is
        anything to look for."""
        if seq.request.handoff != IMPORT or seq.num_cached >= 0:
            return False
        state = self._state
        keys = seq.keys[: state.num_shareable(seq)]
        pools = list(zip(state.blocks.pools, state.stored, strict=True))
        wanted = tuple(
            (group, key)
            for key in keys
            for group, (pool, stored) in enumerate(pools)
            if key not in stored and pool.find(key) is None
        )
        if not wanted:
            return False
        self._lookups[self._next_number] = seq
        state.outbox.jobs.append(FindBlocks(self._next_number, wanted))
        self._next_number += 1
        return True

    def end_lookup(self, event: JobEnded, now: float) -> None:
        """What is there is fetched at the sequence's next turn; where the lookup failed, nothing more is known."""
        assert isinstance(event.job, FindBlocks), event
        seq = self._lookups.pop(event.job.number, None)
        if seq is None:
            return
        if not event.error:
            for (group, key), digit in zip(event.job.wanted, event.result, strict=True):
                if digit == "1":
                    self._state.stored[group].add(key)
        if seq.status is Status.LOADING:
            self._state.stop_loading(seq)

    def end(self, seq: Sequence, matched: Match, now: float) -> int:
        return reach(self._state.blocks, self._state.stored, seq.keys, self._state.num_shareable(seq))

    def meeting(self, seq: Sequence, matched: Match, now: float) -> None:
        """What it would take is not known."""

    def cut(self, seq: Sequence, moves: List[BlockMove], most_bytes: int = 0) -> list[LoadChunk]:
        return [LoadChunk(tuple(moves))]

    def begin(self, number: int, chunk: LoadChunk, now: float) -> float:
        return 0.0

    def came(self, number: int, moves: List[BlockMove], now: float) -> None:
        """Nothing is learnt from how long it took."""

    def has(self, seq: Sequence, block: TierKey) -> bool:
        return block[1] in self._state.stored[block[0]]

    def lose(self, sequences: List[Sequence], moves: List[BlockMove]) -> None:
        for group, key, _ in moves:
            self._state.stored[group].discard(key)
