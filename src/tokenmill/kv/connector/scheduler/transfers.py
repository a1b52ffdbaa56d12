"""KV blocks that come from a store: which sequences wait for them, and what is held meanwhile.

    WAITING  what the store has of its prefix is asked for   ->  LOADING, and WAITING again with the answer
             blocks of its prefix are worth having           ->  jobs FetchBlocks, LOADING
    LOADING  the jobs have ended                             ->  its blocks are published, RUNNING
             a block is not to be had                        ->  WAITING: those before it are found in the pools

A store says what it has through a `Catalogue`, which also decides what is fetched. A long run comes in chunks, in the
order of the prefix, two jobs at a time; what is in is published, and when nobody waits for it any more no further chunk
is asked for. The layers of a block come together; to compute the first while others load, cut chunks by layer.

A transfer holds every block that it touches, from before its first job starts until the last one has ended, whatever
becomes of the sequences that wait for it. Blocks are published only when their bytes are in. A sequence that wants
blocks which are on their way already waits for the same transfer and then takes its turn again. The end of a job that
was heard of before is ignored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field
from itertools import count

from ....core.block import BlockKey, BlockMove
from ....core.effects import FetchBlocks, JobEnded, StoreOpened
from ....core.sequence import Sequence, Status
from ....core.tiers import TierKey
from ....sched.steps import Step
from ...blocks.fetch import Claim, claim, is_intact, num_in
from ...blocks.groups import Match, Tables
from .catalogue import Catalogue, FolderCatalogue, LoadChunk, parted
from .overlapped_load import OverlappedLoad
from .port import EnginePort
from .tiers import TierCatalogue

MOST_JOBS = 2
"""Of one transfer at once: while one is copied in, the next is on its way."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """sequences  those that wait for it; the first asked for it
    chunks        to come
    jobs          under way, by number
    left          blocks that are not in
    is_over       nothing more is asked for: a block was not to be had, or nobody waits for it
    """

    claim: Claim
    left: set[TierKey]
    chunks: deque[LoadChunk] = field(default_factory=deque)
    jobs: dict[int, LoadChunk] = field(default_factory=dict)
    sequences: list[Sequence] = field(default_factory=list)
    is_over: bool = False


class Transfers:
    """Does nothing until a store was opened."""

    def __init__(self, state: EnginePort) -> None:
        self._state = state
        self._catalogue: Catalogue | None = None
        self._fetches: dict[int, _Fetch] = {}  # by the number of a job
        self._coming: dict[tuple[int, BlockKey], _Fetch] = {}
        self._numbers = count()
        self._overlapped_load = OverlappedLoad(state, self._numbers)

    def open_store(self, event: StoreOpened, now: float) -> None:
        state = self._state
        if not state.config.caches_prefixes or state.has_tiers:
            return
        if event.tiers:
            state.has_tiers = True
            self._catalogue = TierCatalogue(state, event.tiers)
        else:
            assert len(event.keys) == len(state.config.groups), event
            state.stored = tuple(set(keys) for keys in event.keys)
            self._catalogue = FolderCatalogue(state)

    @property
    def has_work(self) -> bool:
        """Whether a job is under way."""
        return (
            bool(self._fetches)
            or self._overlapped_load.has_work
            or (self._catalogue is not None and self._catalogue.has_work)
        )

    def fetch(self, seq: Sequence, matched: Match, steps: List[Step], now: float = 0.0) -> bool:
        """Have stored blocks of a waiting sequence brought in, where they carry it further than `matched`; tells
        whether it is LOADING now. `steps`: those whose blocks are published and not yet written for certain."""
        state, catalogue = self._state, self._catalogue
        if catalogue is None:
            return False
        if catalogue.look_up(seq, matched, now):
            state.load(seq)
            return True
        if self._overlapped_load.begin(seq, catalogue, matched, now):
            return False
        end = catalogue.end(seq, matched, now)
        if end <= matched.num_blocks:
            return False
        under_way = self._under_way(seq.keys[:end])
        if under_way is None:
            unsettled = {published for step in steps for published in step.published}
            made = claim(state.blocks, seq.keys, end, unsettled, seq.num_prompt)
            if made is None:
                return False
            under_way = self._start(made)
            under_way.chunks.extend(catalogue.cut(seq, made.missing))
            self._proceed(under_way, now)
        under_way.sequences.append(seq)
        state.load(seq)
        return True

    def end_lookup(self, event: JobEnded, now: float) -> None:
        if self._catalogue is not None:
            self._catalogue.end_lookup(event, now)

    def end_fetch(self, event: JobEnded, now: float) -> None:
        """The bytes of a chunk are in, or are not to be had."""
        assert isinstance(event.job, FetchBlocks), event
        if self._overlapped_load.end_fetch(event, now):
            return
        fetch, catalogue = self._fetches.pop(event.job.number, None), self._catalogue
        if fetch is None or catalogue is None:
            return
        chunk = fetch.jobs.pop(event.job.number)
        came, lost = parted(chunk.moves, event)
        for group, key, _ in chunk.moves:
            del self._coming[group, key]
        fetch.left.difference_update(move[:2] for move in came)
        catalogue.came(event.job.number, came, now)
        self._count(fetch, chunk, came, lost)
        if lost:
            catalogue.lose(fetch.sequences, lost)
        is_wanted = any(seq.status is Status.LOADING for seq in fetch.sequences)
        if not is_intact(self._state.blocks, fetch.claim):
            fetch.is_over = True
        else:
            self._publish(fetch)
            fetch.is_over |= bool(lost) or not is_wanted
        self._proceed(fetch, now)
        if not fetch.jobs:
            self._end(fetch)

    def is_stored(self, seq: Sequence, block: TierKey) -> bool:
        """Whether the store is known to have this block of the sequence."""
        return self._catalogue is not None and self._catalogue.has(seq, block)

    def tables(self) -> Iterator[Tables]:
        """What transfers hold."""
        held = dict.fromkeys(self._fetches.values())
        yield from (fetch.claim.tables for fetch in held)
        yield from self._overlapped_load.tables()

    def _publish(self, fetch: _Fetch) -> None:
        """Publish the blocks that are in, up to the first that is not."""
        made = fetch.claim
        self._state.blocks.publish(made.keys, made.tables, num_in(made, fetch.left))

    def _end(self, fetch: _Fetch) -> None:
        state, made = self._state, fetch.claim
        first = fetch.sequences[0]
        if not fetch.left and not fetch.is_over and first.status is Status.LOADING:
            state.run_loaded(first, made.tables, len(made.keys) * state.config.block_size)
        else:
            state.blocks.release(made.tables, -1)
        for seq in fetch.sequences:
            if seq.status is Status.LOADING:
                state.stop_loading(seq)

    def _count(self, fetch: _Fetch, chunk: LoadChunk, came: List[BlockMove], lost: List[BlockMove]) -> None:
        counters = self._state.counters
        num_tokens = len({key for _, key, _ in came}) * self._state.config.block_size
        counters.external_missed += len(lost)
        if fetch.sequences[0].num_preemptions == 0:
            counters.external_hits += num_tokens
        if chunk.tier:
            counters.tier_hits[chunk.tier - 1] += num_tokens

    def _under_way(self, keys: List[BlockKey]) -> _Fetch | None:
        """The transfer that brings the first of these blocks which is under way."""
        if self._coming:
            for key in keys:
                for group in range(len(self._state.blocks.pools)):
                    if (group, key) in self._coming:
                        return self._coming[group, key]
        return None

    def _start(self, made: Claim) -> _Fetch:
        fetch = _Fetch(made, {move[:2] for move in made.missing})
        self._coming.update({block: fetch for block in fetch.left})
        return fetch

    def _proceed(self, fetch: _Fetch, now: float) -> None:
        """Start what may be; once it is over, what has not started is not on its way any more."""
        catalogue = self._catalogue
        assert catalogue is not None
        while fetch.chunks and (fetch.is_over or len(fetch.jobs) < MOST_JOBS):
            chunk = fetch.chunks.popleft()
            if fetch.is_over:
                for group, key, _ in chunk.moves:
                    del self._coming[group, key]
                continue
            number = next(self._numbers)
            self._fetches[number] = fetch
            fetch.jobs[number] = chunk
            within_s = catalogue.begin(number, chunk, now)
            self._state.outbox.jobs.append(FetchBlocks(number, chunk.moves, within_s))
