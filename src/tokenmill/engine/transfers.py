"""KV blocks that come from a store: which sequences wait for them, and what is held meanwhile.

    WAITING  another engine stored its prefix  ->  job FindBlocks, LOADING, and WAITING again when it has ended
             blocks of its prefix are stored   ->  job FetchBlocks, LOADING
    LOADING  the job has ended                 ->  its blocks are published, RUNNING
             the job has failed                ->  WAITING: what was to come is computed

A transfer holds every block that it touches, from before its job starts until the job has ended, whatever becomes of
the sequences that wait for it. Blocks are published only when their bytes are in. A sequence that wants blocks which
are on their way already waits for the same transfer and then takes its turn again. The end of a job that was heard of
before is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from ..cache.fetch import Claim, claim, is_intact, reach
from ..cache.groups import Match, Tables
from ..core.block import BlockKey
from ..core.effects import FetchBlocks, FindBlocks, JobEnded, StoreOpened
from ..core.request import IMPORT
from ..core.sequence import Sequence, Status
from .state import EngineState
from .steps import Step


@dataclass(slots=True, eq=False)
class _Fetch:
    """`sequences`: those that wait for it; the first asked for it."""

    claim: Claim
    sequences: list[Sequence] = field(default_factory=list)


class Transfers:
    """Does nothing until a store was opened."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._lookups: dict[int, Sequence] = {}
        self._fetches: dict[int, _Fetch] = {}
        self._coming: dict[tuple[int, BlockKey], _Fetch] = {}
        self._next_number = 0

    def open_store(self, event: StoreOpened, now: float) -> None:
        assert len(event.keys) == len(self._state.config.groups), event
        if self._state.config.caches_prefixes:
            self._state.stored = tuple(set(keys) for keys in event.keys)

    @property
    def has_work(self) -> bool:
        """Whether a job is under way."""
        return bool(self._fetches or self._lookups)

    def fetch(self, seq: Sequence, matched: Match, steps: List[Step]) -> bool:
        """Have stored blocks of a waiting sequence brought in, where they carry it further than `matched`; tells
        whether it is LOADING now. `steps`: those whose blocks are published and not yet written for certain."""
        state = self._state
        if not state.stored:
            return False
        if seq.request.handoff == IMPORT and seq.num_cached < 0 and self._look(seq):
            return True
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
            if first.num_preemptions == 0:
                num_blocks = len({key for _, key, _ in made.missing})
                state.counters.external_hits += num_blocks * state.config.block_size
            state.run_loaded(first, made.tables, len(made.keys) * state.config.block_size)
        else:
            state.blocks.release(made.tables, -1)
        for seq in fetch.sequences:
            if seq.status is Status.LOADING:
                state.stop_loading(seq)

    def tables(self) -> Iterator[Tables]:
        """What transfers hold."""
        yield from (fetch.claim.tables for fetch in self._fetches.values())

    def _look(self, seq: Sequence) -> bool:
        """Before the first turn of a sequence whose prefix another engine may have stored; tells whether there is
        anything to look for."""
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
        state.load(seq)
        return True

    def end_look(self, event: JobEnded, now: float) -> None:
        """What is there is fetched at the sequence's next turn; where the look failed, nothing more is known."""
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
