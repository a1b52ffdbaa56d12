"""KV blocks that move between the pools and a store: which sequences wait for them, and what is held meanwhile.

    WAITING  blocks of its prefix are stored  ->  job FetchBlocks, LOADING
    LOADING  the job has ended                ->  its blocks are published, RUNNING
             the job has failed               ->  WAITING: what was to come is computed
    drained  nothing is left to run           ->  jobs SaveBlocks, one after the other, of what is not stored

A transfer holds every block that it touches, from before its job starts until the job has ended, whatever becomes of
the sequences that wait for it. Blocks are published only when their bytes are in. A sequence that wants blocks which
are on their way already waits for the same transfer and then takes its turn again. The end of a job that was heard of
before is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from ..cache.fetch import Claim, claim, is_intact, pin_published, reach
from ..cache.groups import Match, Tables
from ..core.block import BlockKey, BlockMove, cut_moves
from ..core.effects import FetchBlocks, JobEnded, SaveBlocks, StoreOpened
from ..core.sequence import Sequence, Status
from ..core.units import MiB
from .state import EngineState, Step

SAVE_BYTES = 64 * MiB
"""Of one job that saves: what the executor copies aside at once."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """`sequences`: those that wait for it; the first asked for it."""

    claim: Claim
    sequences: list[Sequence] = field(default_factory=list)


class Transfers:
    """Does nothing until a store was opened."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._fetches: dict[int, _Fetch] = {}
        self._coming: dict[tuple[int, BlockKey], _Fetch] = {}
        self._next_number = 0
        self._pinned: Tables = ()
        self._unsaved: list[tuple[BlockMove, ...]] = []
        self._saving = -1  # the number of the job
        self._has_saved = False

    def open_store(self, event: StoreOpened, now: float) -> None:
        assert len(event.keys) == len(self._state.config.groups), event
        self._state.stored = tuple(set(keys) for keys in event.keys)

    @property
    def has_work(self) -> bool:
        """Whether a job is under way, or something is to be saved once the engine has nothing else to do."""
        return bool(self._fetches) or (bool(self._state.stored) and not self._has_saved)

    def fetch(self, seq: Sequence, matched: Match, steps: List[Step]) -> bool:
        """Have stored blocks of a waiting sequence brought in, where they carry it further than `matched`; tells
        whether it is LOADING now. `steps`: those whose blocks are published and not yet written for certain."""
        state = self._state
        if not state.stored:
            return False
        end = reach(state.blocks, state.stored, seq.keys, state.num_shareable(seq))
        if end <= matched.num_blocks:
            return False
        under_way = self._under_way(seq.keys[:end])
        if under_way is None:
            unsettled = {published for step in steps for published in step.published}
            made = claim(state.blocks, seq.keys, end, unsettled)
            if made is None:
                return False
            under_way = self._start(made)
        under_way.sequences.append(seq)
        state.load(seq)
        return True

    def end_fetch(self, event: JobEnded, now: float) -> None:
        """The bytes are in, or are not to be had."""
        assert isinstance(event.job, FetchBlocks), event
        fetch = self._fetches.pop(event.job.number, None)
        if fetch is None:
            return
        state, made = self._state, fetch.claim
        for group, key, _ in made.missing:
            del self._coming[group, key]
            if event.error:
                state.stored[group].discard(key)
        is_in = not event.error and is_intact(state.blocks, made)
        if is_in:
            state.blocks.publish(made.keys, made.tables, len(made.keys))
        first = fetch.sequences[0]
        if is_in and first.status is Status.LOADING:
            state.run_loaded(first, made.tables)
        else:
            state.blocks.release(made.tables, -1)
        for seq in fetch.sequences:
            if seq.status is Status.LOADING:
                state.stop_loading(seq)

    def save(self) -> None:
        """Have what is published and not stored written; the engine has nothing else to do any more."""
        state = self._state
        if not state.stored or self._fetches or self._pinned or self._has_saved:
            return
        self._pinned, moves = pin_published(state.blocks)
        block_bytes = [group.bytes_per_block for group in state.config.groups]
        unsaved = [move for move in moves if move[1] not in state.stored[move[0]]]
        self._unsaved = cut_moves(unsaved, block_bytes, SAVE_BYTES)[::-1]
        self._save_next()

    def end_save(self, event: JobEnded, now: float) -> None:
        """Blocks are written, or cannot be: then no further ones are tried."""
        assert isinstance(event.job, SaveBlocks), event
        if event.job.number != self._saving:
            return
        if event.error:
            self._unsaved.clear()
        else:
            for group, key, _ in event.job.moves:
                self._state.stored[group].add(key)
        self._save_next()

    def tables(self) -> Iterator[Tables]:
        """What transfers hold."""
        yield from (fetch.claim.tables for fetch in self._fetches.values())
        if self._pinned:
            yield self._pinned

    def _under_way(self, keys: List[BlockKey]) -> _Fetch | None:
        """The transfer that brings the first of these blocks which is under way."""
        if self._coming:
            for key in keys:
                for group in range(len(self._state.stored)):
                    if (group, key) in self._coming:
                        return self._coming[group, key]
        return None

    def _start(self, made: Claim) -> _Fetch:
        fetch = self._fetches[self._next_number] = _Fetch(made)
        self._coming.update({(group, key): fetch for group, key, _ in made.missing})
        self._state.outbox.jobs.append(FetchBlocks(self._next_number, made.missing))
        self._next_number += 1
        return fetch

    def _save_next(self) -> None:
        if self._unsaved:
            self._saving = self._next_number
            self._next_number += 1
            self._state.outbox.jobs.append(SaveBlocks(self._saving, self._unsaved.pop()))
            return
        self._saving = -1
        self._has_saved = True
        self._state.blocks.release(self._pinned, -1)
        self._pinned = ()
