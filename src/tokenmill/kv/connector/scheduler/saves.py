"""KV blocks that go to a store: what is held until they are written, and which sequences end only then.

    RUNNING    has ended, and another engine will go on from it  ->  jobs SaveBlocks of its blocks, EXPORTING
    EXPORTING  the last of them has ended, or one has failed     ->  FINISHED, and its last output is sent
    drained    nothing is left to run                            ->  jobs SaveBlocks of what is published and not stored

Jobs go one after the other, each of at most SAVE_BYTES. What a save is of is held from before its first job until its
last one has ended, also if its sequence is cancelled. The end of a job that was heard of before is ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass

from ....core.block import BlockMove, cut_moves
from ....core.effects import JobEnded, SaveBlocks
from ....core.events import Output
from ....core.outputs import exported
from ....core.sequence import Sequence, Status
from ....core.tiers import BlockFacts
from ....core.units import MiB
from ...blocks.fetch import gather, pin_published
from ...blocks.groups import Tables
from .port import EnginePort

SAVE_BYTES = 64 * MiB
"""Of one job that saves: what the executor copies aside at once."""


@dataclass(slots=True, eq=False)
class _Save:
    """tables     what is held
    last_step  the last step that reads or writes it
    jobs       the blocks of each job to come, last first
    seq        the sequence that ends with it; None: what is saved is of no sequence
    """

    tables: Tables
    last_step: int
    jobs: list[tuple[BlockMove, ...]]
    seq: Sequence | None = None
    has_failed: bool = False


class Saves:
    """Does nothing until a store was opened. numbers: of jobs that save."""

    def __init__(self, state: EnginePort, numbers: Iterator[int]) -> None:
        self._state = state
        self._numbers = numbers
        self._saves: deque[_Save] = deque()  # a job of the first is under way
        self._number = -1  # of that job
        self._has_saved_rest = False

    @property
    def has_work(self) -> bool:
        """Whether a job is under way, or something is to be saved once the engine has nothing else to do."""
        return bool(self._saves) or (bool(self._state.stored) and not self._has_saved_rest)

    def has(self, seq: Sequence) -> bool:
        return any(save.seq is seq for save in self._saves)

    def export(self, seq: Sequence, last: Output, now: float) -> bool:
        """Have the KV of a sequence that has ended saved, and `last` sent after that; False where there is no store."""
        state = self._state
        if not state.has_store:
            return False
        tables = state.export(seq, last)
        unsettled = {published for step in state.in_flight for published in step.published}
        moves = gather(state.blocks, seq.keys, tables, seq.num_computed // state.config.block_size, unsettled)
        self._add(_Save(tables, seq.last_step, self._cut(moves), seq), now)
        return True

    def save_rest(self, now: float) -> None:
        """Have what is published and not stored written, once; the engine has nothing else to do any more."""
        state = self._state
        if not state.stored or self._saves or self._has_saved_rest:
            return
        self._has_saved_rest = True
        tables, moves = pin_published(state.blocks)
        unsaved = [move for move in moves if move[1] not in state.stored[move[0]]]
        self._add(_Save(tables, -1, self._cut(unsaved)), now)

    def end_save(self, event: JobEnded, now: float) -> None:
        """Blocks are written, or cannot be: then no further ones of the same save are tried."""
        assert isinstance(event.job, SaveBlocks), event
        if not self._saves or event.job.number != self._number:
            return
        save = self._saves[0]
        if event.error:
            save.has_failed = True
            save.jobs.clear()
        else:
            state = self._state
            for group, key, _ in event.job.moves if state.stored else ():
                if state.blocks.pools[group].find(key) is not None:  # else it may have been forgotten: see state.forget
                    state.stored[group].add(key)
        self._proceed(now)

    def tables(self) -> Iterator[Tables]:
        """What saves hold."""
        yield from (save.tables for save in self._saves)

    def _cut(self, moves: List[BlockMove]) -> list[tuple[BlockMove, ...]]:
        block_bytes = [group.bytes_per_block for group in self._state.config.groups]
        return cut_moves(moves, block_bytes, SAVE_BYTES)[::-1]

    def _add(self, save: _Save, now: float) -> None:
        self._saves.append(save)
        if len(self._saves) == 1:
            self._proceed(now)

    def _proceed(self, now: float) -> None:
        """No job is under way: start the next, and end the saves that have none left."""
        state = self._state
        while self._saves:
            if self._saves[0].jobs:
                moves, seq = self._saves[0].jobs.pop(), self._saves[0].seq
                self._number = next(self._numbers)
                if state.has_tiers:
                    facts = () if seq is None else facts_of(seq, moves)
                    state.outbox.jobs.append(SaveBlocks(self._number, moves, (), facts, is_shared=True))
                    return
                new = tuple(move for move in moves if move[1] not in state.stored[move[0]])
                others = tuple(move for move in moves if move[1] in state.stored[move[0]])
                state.outbox.jobs.append(SaveBlocks(self._number, new, others))
                return
            self._end(self._saves.popleft(), now)

    def _end(self, save: _Save, now: float) -> None:
        state, seq = self._state, save.seq
        state.blocks.release(save.tables, save.last_step)
        if seq is not None and seq.status is Status.EXPORTING:
            state.leave(seq)
            state.outbox.outputs.append(exported(seq, now, is_saved=not save.has_failed))


def facts_of(seq: Sequence, moves: List[BlockMove]) -> tuple[BlockFacts, ...]:
    """Of blocks of the sequence."""
    places = {key: index for index, key in enumerate(seq.keys)}
    owner = seq.request.cache_salt
    return tuple(
        BlockFacts((group, key), seq.keys[places[key] - 1] if places[key] else b"", places[key], owner)
        for group, key, _ in moves
    )
