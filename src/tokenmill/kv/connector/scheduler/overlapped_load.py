"""Compute the head of a prompt while the tail of its prefix loads (Cake, Jin et al. 2024).

    a prefix      0 ........ place ......... ............ end
    computed      ---------->|                 <----------|      loaded, the last chunk first

A sequence runs, and computes from the front, while blocks that nobody else sees yet are filled from the back. Once all
from where it has come to is in, these blocks are published behind its own, and its next turn finds them as it finds
anybody's. Where they hang on a block of a step in flight, they are withdrawn with that step. Until then its chunks end
where both are expected to meet (Sequence.pause), and it waits there for its own rows, so that no step is planned ahead
for what may come meanwhile. It never waits for a load: if that is late it computes on.

One sequence at a time, in pools of one KV group without a window, and only while nobody else waits: computing what
could be loaded takes the processor from others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from ....core.block import BlockTable
from ....core.effects import FetchBlocks, JobEnded
from ....core.sequence import Sequence
from ...blocks.groups import Match, Tables
from .catalogue import Catalogue, LoadChunk, parted
from .port import EnginePort

MOST_WAITING = 1
"""The sequence itself."""

LATER = 1.25
"""Where the load is late, so many times the share is computed next: soon it does without."""

MOST_JOBS = 2
TAIL_BYTES = 4 << 20
"""Of one job: the sequence can meet what is loaded between two of them."""


@dataclass(slots=True, eq=False)
class _Tail:
    """seq     who computes towards it
    end        of the prefix that is served together
    share      of what lies between both, how much the sequence is to compute until they meet
    last       all from this place on is in
    blocks     held, by their places in the prefix; places: the inverse
    digits     of the tiers that they come from
    left       places that are not in
    chunks     to come
    jobs       under way, by number
    is_over    nothing more is published
    """

    seq: Sequence
    end: int
    share: float
    last: int
    blocks: dict[int, int]
    places: dict[int, int]
    left: set[int]
    digits: dict[int, int] = field(default_factory=dict)
    chunks: deque[LoadChunk] = field(default_factory=deque)
    jobs: dict[int, LoadChunk] = field(default_factory=dict)
    is_over: bool = False


class OverlappedLoad:
    def __init__(self, state: EnginePort, numbers: count[int]) -> None:
        self._state = state
        self._numbers = numbers
        self._tail: _Tail | None = None
        self._catalogue: Catalogue | None = None
        state.borders.append(self._border)
        state.departures.append(self._depart)

    @property
    def has_work(self) -> bool:
        """Whether a job is under way."""
        return self._tail is not None and bool(self._tail.jobs)

    def begin(self, seq: Sequence, catalogue: Catalogue, matched: Match, now: float) -> bool:
        """Have the tail of a sequence's prefix loaded, where that is worth it; it is to run then."""
        state = self._state
        pools = state.blocks.pools
        if self._tail is not None or len(pools) > 1 or state.blocks.has_windows or len(state.waiting) > MOST_WAITING:
            return False
        meeting = catalogue.meeting(seq, matched, now)
        if meeting is None:
            return False
        (pool,), (shared,) = pools, matched.blocks
        start, (head, end) = matched.num_blocks, meeting
        if pool.num_available - pool.num_cached_among(shared) < len(seq.tokens) // state.config.block_size + 1 - start:
            return False
        pool.adopt(shared)
        places = range(head, end)
        blocks = dict(zip(places, pool.reserve(len(places)), strict=True))
        pool.release(shared, -1)
        tail = self._tail = _Tail(seq, end, (head - start) / (end - start), end, blocks, {}, set(places))
        tail.places = {block: place for place, block in blocks.items()}
        self._catalogue = catalogue
        moves = [(0, seq.keys[place], block) for place, block in blocks.items()]
        tail.chunks.extend(reversed(catalogue.cut(seq, moves, TAIL_BYTES)))
        tail.digits = {place: chunk.tier for chunk in tail.chunks for place in _places(tail, chunk)}
        seq.pause = head * state.config.block_size
        state.counters.external_recomputed += (head - start) * state.config.block_size
        self._proceed(tail, now)
        return True

    def end_fetch(self, event: JobEnded, now: float) -> bool:
        """The end of a job; False: it is not one of these."""
        tail, job = self._tail, event.job
        assert isinstance(job, FetchBlocks), event
        if tail is None or job.number not in tail.jobs:
            return False
        assert self._catalogue is not None
        chunk = tail.jobs.pop(job.number)
        came, lost = parted(chunk.moves, event)
        self._catalogue.came(job.number, came, now)
        tail.left.difference_update(_places(tail, chunk._replace(moves=tuple(came))))
        if lost:
            self._state.counters.external_missed += len(lost)
            self._catalogue.lose([tail.seq], lost)
            self._stop(tail)
        self._proceed(tail, now)
        self._settle(tail)
        return True

    def tables(self) -> Iterator[Tables]:
        """What is held."""
        if self._tail is not None:
            yield (BlockTable(list(self._tail.blocks.values())),)

    def _border(self, now: float) -> None:
        tail = self._tail
        if tail is not None and not tail.is_over:
            self._meet(tail)
            self._settle(tail)

    def _depart(self, seq: Sequence) -> None:
        tail = self._tail
        if tail is not None and tail.seq is seq:
            self._stop(tail)
            self._settle(tail)

    def _meet(self, tail: _Tail) -> None:
        seq, size = tail.seq, self._state.config.block_size
        place, num_beyond = divmod(seq.num_planned, size)
        if place >= tail.end or (not num_beyond and seq.tables[0].num_published < place):
            self._stop(tail)  # it has computed all, or goes on below blocks that others have published
            return
        while tail.last - 1 in tail.blocks and tail.last - 1 not in tail.left:
            tail.last -= 1
        while tail.chunks and _places(tail, tail.chunks[-1])[-1] < place:
            tail.chunks.pop()
        if not num_beyond and place >= tail.last:
            self._publish(tail, place)
            self._stop(tail)
        elif not tail.jobs and not tail.chunks:
            self._stop(tail)
        elif seq.num_planned >= seq.pause and not seq.rows_in_flight:
            tail.share = min(1.0, LATER * tail.share)
            seq.pause = (place + max(1, round((tail.last - place) * tail.share))) * size

    def _publish(self, tail: _Tail, place: int) -> None:
        """All from `place` on is in, which is where the sequence has come to."""
        state, seq = self._state, tail.seq
        (pool,), size = state.blocks.pools, state.config.block_size
        new = range(place, tail.end)
        ids = seq.tables[0].ids[:place] + [tail.blocks.pop(each) for each in new]
        end = pool.publish(seq.keys, ids, place, tail.end)
        step = next((each for each in state.in_flight if each.number == seq.last_step), None)
        if step is not None:
            step.published += [(pool, block) for block in ids[place:end]]
        pool.release(ids[place:], -1 if step is None else step.number)
        counters = state.counters
        if seq.num_preemptions == 0:
            counters.external_hits += (end - place) * size
        for each in range(place, end):
            if tail.digits[each]:
                counters.tier_hits[tail.digits[each] - 1] += size

    def _proceed(self, tail: _Tail, now: float) -> None:
        catalogue = self._catalogue
        assert catalogue is not None
        while tail.chunks and not tail.is_over and len(tail.jobs) < MOST_JOBS:
            chunk, number = tail.chunks.popleft(), next(self._numbers)
            tail.jobs[number] = chunk
            within_s = catalogue.begin(number, chunk, now)
            self._state.outbox.jobs.append(FetchBlocks(number, chunk.moves, within_s))

    def _stop(self, tail: _Tail) -> None:
        """The sequence goes on by itself; what is under way is waited for."""
        tail.is_over = True
        tail.chunks.clear()
        tail.seq.pause = 0

    def _settle(self, tail: _Tail) -> None:
        if tail.is_over and not tail.jobs:
            self._state.blocks.pools[0].release(list(tail.blocks.values()), -1)
            self._tail = None


def _places(tail: _Tail, chunk: LoadChunk) -> list[int]:
    return [tail.places[block] for _, _, block in chunk.moves]
