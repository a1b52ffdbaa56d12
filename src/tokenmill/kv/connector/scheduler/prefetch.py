"""Prefixes that are wanted later: brought from the tiers of the store into the pools, pinned or promoted there.

    Prefetch without a source   job FindBlocks
    it has ended                blocks for what is there are reserved; jobs FetchBlocks, one after the other
    the last has ended          what is in, as far as all before it is, was published; Prefetched

Reserve, fill, publish, as in `transfers`, but nobody waits for it: the blocks are left to the prefix cache. What the
pools have room for without preempting anybody is all that is taken. Jobs have numbers below zero, others have not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ....core.block import BlockKey, BlockMove, cut_moves, split_keys
from ....core.effects import FetchBlocks, FindBlocks, JobEnded, PinBlocks, PromoteBlocks
from ....core.kv_events import KeepKV, PromoteKV
from ....core.moves import Prefetch, Prefetched
from ....core.tiers import TierKey
from ...blocks.fetch import Claim, claim, is_intact, num_in, reach
from ...blocks.groups import Tables
from .port import EnginePort
from .tiers import CHUNK_BYTES, FIND_S
from .writes import Writes

NO_STORE = "It has no store with tiers."
NO_ROOM = "There is no room for it."
LOST = "It is not to be had."
MOST = 8
"""At once: more are refused."""

FETCH_S = 30.0
"""A job that takes longer has brought what it has."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    """chunks: to come; left: blocks that are not in."""

    answer: int
    keys: tuple[BlockKey, ...]
    made: Claim | None = None
    chunks: deque[tuple[BlockMove, ...]] = field(default_factory=deque)
    left: set[TierKey] = field(default_factory=set)


class StorePrefetch:
    """Does nothing until a store with tiers was opened."""

    def __init__(self, state: EnginePort) -> None:
        self._state = state
        self._by_job: dict[int, _Prefetch] = {}
        self._num_jobs = 0

    @property
    def has_work(self) -> bool:
        """Whether a job is under way."""
        return bool(self._by_job)

    def begin(self, event: Prefetch, now: float) -> None:
        state, one = self._state, _Prefetch(event.number, event.keys)
        groups = range(len(state.blocks.pools))
        pools = state.blocks.pools
        wanted = tuple((group, key) for key in event.keys for group in groups if pools[group].find(key) is None)
        if not state.has_tiers:
            self._answer(one, 0, NO_STORE)
        elif len(self._by_job) >= MOST:
            self._answer(one, 0, NO_ROOM)
        elif not wanted:
            self._answer(one, len(event.keys))
        else:
            state.outbox.jobs.append(FindBlocks(self._job_of(one), wanted, FIND_S))

    def end_lookup(self, event: JobEnded, now: float) -> None:
        assert isinstance(event.job, FindBlocks), event
        one = self._by_job.pop(event.job.number, None)
        if one is None:
            return
        state = self._state
        stored: list[set[BlockKey]] = [set() for _ in state.blocks.pools]
        for (group, key), digit in zip(event.job.wanted, event.result or "", strict=False):
            if digit != "0":
                stored[group].add(key)
        end = reach(state.blocks, stored, one.keys, len(one.keys))
        if not end:
            self._answer(one, 0, event.error or LOST)
            return
        unsettled = {published for step in state.in_flight for published in step.published}
        one.made = claim(state.blocks, one.keys, end, unsettled)
        if one.made is None:
            self._answer(one, 0, NO_ROOM)
            return
        one.left = {move[:2] for move in one.made.missing}
        order = {key: nth for nth, key in enumerate(one.keys)}
        moves = sorted(one.made.missing, key=lambda move: (order[move[1]], move[0]))
        one.chunks.extend(cut_moves(moves, [group.bytes_per_block for group in state.config.groups], CHUNK_BYTES))
        self._proceed(one)

    def end_fetch(self, event: JobEnded, now: float) -> None:
        assert isinstance(event.job, FetchBlocks), event
        one = self._by_job.pop(event.job.number, None)
        if one is None or one.made is None:
            return
        moves = event.job.moves
        result = "0" * len(moves) if event.error else event.result or "1" * len(moves)
        one.left.difference_update(move[:2] for move, digit in zip(moves, result, strict=True) if digit == "1")
        blocks, made = self._state.blocks, one.made
        is_whole = is_intact(blocks, made)
        if is_whole:
            blocks.publish(made.keys, made.tables, num_in(made, one.left))
            self._state.kv_events.flush()  # an engine without work has no step to tell it with
        if not is_whole or "0" in result:
            one.chunks.clear()
        self._proceed(one)

    def tables(self) -> Iterator[Tables]:
        """What is held."""
        yield from (one.made.tables for one in self._by_job.values() if one.made is not None)

    def _proceed(self, one: _Prefetch) -> None:
        """No job of it is under way: the next one, or the end."""
        assert one.made is not None
        if one.chunks:
            self._state.outbox.jobs.append(FetchBlocks(self._job_of(one), one.chunks.popleft(), FETCH_S))
            return
        blocks, made = self._state.blocks, one.made
        num_blocks = num_in(made, one.left) if is_intact(blocks, made) else 0
        blocks.release(made.tables, -1)
        self._answer(one, num_blocks, "" if num_blocks else LOST)

    def _job_of(self, one: _Prefetch) -> int:
        self._num_jobs += 1
        self._by_job[-self._num_jobs] = one
        return -self._num_jobs

    def _answer(self, one: _Prefetch, num_blocks: int, error: str = "") -> None:
        self._state.outbox.answers.append(Prefetched(one.answer, num_blocks, error))


class Hints:
    """Hands what front ends know of KV that is wanted later (`core.kv_events`) on to the store. Does nothing until a
    store with tiers was opened."""

    def __init__(self, state: EnginePort, writes: Writes) -> None:
        self._state = state
        self._writes = writes

    def keep(self, event: KeepKV, now: float) -> None:
        if self._state.has_tiers and event.keys:
            wanted = self._wanted(event.keys)
            self._state.outbox.jobs.append(PinBlocks(wanted, event.seconds, event.owner))
            if event.seconds:
                self._writes.want(wanted)

    def promote(self, event: PromoteKV, now: float) -> None:
        if self._state.has_tiers and event.keys:
            self._state.outbox.jobs.append(PromoteBlocks(self._wanted(event.keys)))

    def _wanted(self, keys: bytes) -> tuple[TierKey, ...]:
        """In the order of the prefix, as all that is said to a store."""
        num_groups = len(self._state.config.groups)
        return tuple((group, key) for key in split_keys(keys) for group in range(num_groups))
