"""Which computed blocks are written to a store with tiers, and when (core.effects.WRITES).

    write-through   once their step is committed
    write-back      once they are among the next to be evicted
    selective       once a second sequence has used them, and as with write-back

Blocks are dirty from their publication until they are written or evicted; what a store is known to have is not. After
the store was away they are dirty again as sequences use them: a store that still has them wants no copy. Those
that are due wait in a queue, as keys: nothing is held for them, and one that is evicted first is not written. So the
queue is no longer than the pools, and a prompt that is written late loses its end, not its head. A job copies blocks
where they lie, in batches, whoever holds them or nobody (`BlockManager.begin_copy`): no step waits, no sequence is kept
from ending, and the order of eviction stays as it is. What is written late costs at most its recomputing. When the
engine is drained all that is dirty is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ....core.block import BlockKey, BlockMove, BlockTable
from ....core.cost import UNKNOWN, Costs
from ....core.effects import SELECTIVE, WRITE_THROUGH, DropBlocks, JobEnded, NoteStepCosts, SaveBlocks, StoreOpened
from ....core.sequence import Sequence
from ....core.tiers import BlockFacts, TierKey
from ....core.units import MiB
from ...blocks.manager import BlockManager
from .port import EnginePort

BATCH_BYTES = 16 * MiB
"""Of one job, at most."""

SHARE = 8
"""Of a pool's blocks, one in so many is copied by one job at most."""

BATCH_BLOCKS, DELAY_S = 32, 0.1
"""A job is not worth less, unless it was waited for so long, or nothing runs."""

MOST_JOBS = 2
"""At once."""

PAUSE_S = 1.0
"""After a job that has failed: the store may have gone."""

LOOK_SHARE = 1 / 16
"""Of a pool's blocks, those next to be evicted that are to be clean, and no less than two steps may take."""

CHANGED = 0.1
"""Costs of steps are told anew when they differ by more."""


class Writes:
    """Does nothing until a store with tiers was opened. numbers: of jobs that save. is_stored: whether the store is
    known to have a block of a sequence."""

    def __init__(
        self, state: EnginePort, numbers: Iterator[int], is_stored: Callable[[Sequence, TierKey], bool]
    ) -> None:
        self._state = state
        self._numbers = numbers
        self._is_stored = is_stored
        self._policy = ""
        self._dirty: dict[TierKey, BlockFacts] = {}
        self._queue: dict[TierKey, None] = {}
        self._jobs: dict[int, tuple[BlockMove, ...]] = {}
        self._copied: set[TierKey] = set()  # of the jobs under way
        self._suspect: set[TierKey] = set()  # of those, the ones to be dropped again
        self._forgotten: list[TierKey] | None = None
        self._unsure: set[TierKey] = set()  # published, and clean for a store that may have lost them
        self._begun_s = 0.0  # when a job was started last
        self._paused_s = 0.0  # until when none is: one has failed
        self._num_changed = 0  # blocks that were published or evicted since the pools were looked through
        self._is_draining = False
        self._costs = UNKNOWN
        self._told = (0.0, 0.0)

    @property
    def is_open(self) -> bool:
        """Whether it is to be told what is published and used."""
        return bool(self._policy)

    def open_store(self, event: StoreOpened, now: float) -> None:
        state = self._state
        if not event.tiers or not state.config.caches_prefixes:
            return
        if self._policy:
            self._open_anew()
            return
        self._policy = event.writes or WRITE_THROUGH
        state.borders.append(self._look)
        for group, pool in enumerate(state.blocks.pools):
            pool.listeners.append(_Evictions(self, group))

    @property
    def has_work(self) -> bool:
        """Whether a job is under way, or something is to be written once the engine has nothing else to do."""
        return bool(self._jobs) or bool(self._policy and not self._is_draining) or (self._is_draining and self._has_due)

    def published(self, seq: Sequence, firsts: list[int]) -> None:
        """Blocks of the sequence were, in each KV group those from these places on."""
        keys = seq.keys
        for group, table in enumerate(seq.tables):
            for index in range(firsts[group], table.num_published):
                if table.checkpoints is None or self._stays(group, table, keys, index):
                    self._note(seq, group, index)

    def left(self, seq: Sequence) -> None:
        """It is about to give its blocks back: a state that would have made room for the next one stays."""
        for group, table in enumerate(seq.tables):
            latest = None if table.checkpoints is None else table.checkpoints.latest
            if latest is not None and self._state.blocks.pools[group].find(seq.keys[latest[0]]) == latest[1]:
                self._note(seq, group, latest[0])

    def _stays(self, group: int, table: BlockTable, keys: list[BlockKey], index: int) -> bool:
        """Whether there is a state behind this block which makes room for no other."""
        checkpoints = table.checkpoints
        assert checkpoints is not None
        return checkpoints.keeps(index + 1) and self._state.blocks.pools[group].find(keys[index]) is not None

    def _note(self, seq: Sequence, group: int, index: int) -> None:
        """A block of the sequence was published."""
        keys, block = seq.keys, (group, seq.keys[index])
        if block in self._dirty or self._is_stored(seq, block):
            return
        self._num_changed += 1
        self._dirty[block] = BlockFacts(block, keys[index - 1] if index else b"", index, seq.request.cache_salt)
        if self._policy == WRITE_THROUGH:
            self._queue[block] = None

    def used(self, seq: Sequence, first: int, end: int) -> None:
        """Its tables were carried on by blocks that were here."""
        if self._unsure:
            self._tell_anew(seq, first, end)
        if self._policy == SELECTIVE:
            for key in seq.keys[first:end]:
                for group in range(len(seq.tables)):
                    if (group, key) in self._dirty:
                        self._queue[group, key] = None

    def want(self, blocks: Iterable[TierKey]) -> None:
        """They are to be written soon, whatever the policy."""
        self._queue.update((block, None) for block in blocks if block in self._dirty)

    def evicted(self, group: int, key: BlockKey) -> None:
        """It is not published any more."""
        self._num_changed += 1
        block = (group, key)
        self._unsure.discard(block)
        if self._forgotten is not None:
            self._forgotten.append(block)
        if self._dirty.pop(block, None) is not None and block not in self._copied:
            self._state.counters.kv_unwritten += 1
            self._queue.pop(block, None)

    def forget(self, seq: Sequence, unpublish: Callable[[], None]) -> None:
        """What the sequence holds, and what was computed from it, may be wrong: the store is to drop it, with what is
        on its way there."""
        wanted = [(group, key) for key in seq.keys for group in range(len(seq.tables))]
        self._forgotten = []
        unpublish()
        wanted += self._forgotten
        self._forgotten = None
        if wanted:
            self._suspect.update(self._copied.intersection(wanted))
            self._state.outbox.jobs.append(DropBlocks(tuple(dict.fromkeys(wanted))))

    def save_rest(self, now: float) -> None:
        """Have all that is dirty written; the engine has nothing else to do any more."""
        if self._policy and not self._is_draining:
            self._is_draining = True
            self._queue = dict.fromkeys(self._dirty)
            self._start(now)

    def end_save(self, event: JobEnded, now: float) -> bool:
        """Tells whether the job was of this part. Blocks whose job has failed stay dirty."""
        assert isinstance(event.job, SaveBlocks), event
        moves = self._jobs.pop(event.job.number, None)
        if moves is None:
            return False
        state = self._state
        if event.error:
            self._paused_s = now + PAUSE_S
            if self._is_draining:
                self._queue.clear()
        for group, key, block in moves:
            state.blocks.pools[group].end_copy((block,))
            self._copied.remove((group, key))
            if not event.error:
                self._dirty.pop((group, key), None)
                state.counters.kv_written += 1
        suspect = tuple(move[:2] for move in moves if move[:2] in self._suspect)
        if suspect:
            self._suspect.difference_update(suspect)
            state.outbox.jobs.append(DropBlocks(suspect))
        return True

    def _open_anew(self) -> None:
        """The store has been joined again: what was in its memory may be gone."""
        pools = self._state.blocks.pools
        here = {(group, key) for group, pool in enumerate(pools) for key, _ in pool.published()}
        self._unsure = here.difference(self._dirty)

    def _tell_anew(self, seq: Sequence, first: int, end: int) -> None:
        keys, owner = seq.keys, seq.request.cache_salt
        for index in range(first, end):
            for group in range(len(seq.tables)):
                block = (group, keys[index])
                if block in self._unsure:
                    self._unsure.remove(block)
                    self._num_changed += 1
                    self._dirty[block] = BlockFacts(block, keys[index - 1] if index else b"", index, owner)
                    if self._policy == WRITE_THROUGH:
                        self._queue[block] = None

    def _look(self, now: float) -> None:
        """After an event or a commit."""
        if self._state.costs.costs is not self._costs:
            self._tell_costs(self._state.costs.costs)
        if self._policy != WRITE_THROUGH:
            self._clean()
        if self._queue and (now >= self._paused_s or self._is_draining):
            is_due = len(self._queue) >= BATCH_BLOCKS or now - self._begun_s >= DELAY_S or not self._state.running
            if is_due or self._policy != WRITE_THROUGH:
                self._start(now)

    @property
    def _has_due(self) -> bool:
        return any(block in self._dirty for block in self._queue)

    def _clean(self) -> None:
        """What will be evicted next is to be clean by then."""
        config = self._state.config
        step = 2 * config.max_num_batched_tokens // config.block_size
        if self._num_changed <= step // 4:
            return
        self._num_changed = 0
        for group, pool in enumerate(self._state.blocks.pools):
            most = max(step, int(pool.num_blocks * LOOK_SHARE))
            if pool.num_free < most:
                for key in pool.upcoming(most - pool.num_free):
                    if (group, key) in self._dirty:
                        self._queue[group, key] = None

    def _start(self, now: float) -> None:
        """Jobs of what is due and committed."""
        state = self._state
        unsettled: set[tuple[BlockManager, int]] = {each for step in state.in_flight for each in step.published}
        while len(self._jobs) < MOST_JOBS and (moves := self._take(unsettled)):
            number = next(self._numbers)
            self._jobs[number] = moves
            self._begun_s = now
            facts = tuple(self._dirty[move[:2]] for move in moves)
            state.outbox.jobs.append(SaveBlocks(number, moves, facts=facts))

    def _take(self, unsettled: set[tuple[BlockManager, int]]) -> tuple[BlockMove, ...]:
        """The next of the queue, which are being copied from now on. One that a step in flight is to write may turn out
        never to have been written: it stays for later."""
        state, moves, left = self._state, list[BlockMove](), BATCH_BYTES
        most = max(1, min(pool.num_blocks for pool in state.blocks.pools) // SHARE)
        groups = state.config.groups
        for group, key in list(self._queue):
            if moves and (left < groups[group].bytes_per_block or len(moves) >= most):
                break
            pool = state.blocks.pools[group]
            block = pool.find(key)
            if block is None or (group, key) not in self._dirty:
                del self._queue[group, key]
            elif (pool, block) not in unsettled and (group, key) not in self._copied:
                del self._queue[group, key]
                self._copied.add((group, key))
                pool.begin_copy((block,))
                moves.append((group, key, block))
                left -= groups[group].bytes_per_block
        return tuple(moves)

    def _tell_costs(self, costs: Costs) -> None:
        """What a token takes in a full step, and a position."""
        self._costs = costs
        most = self._state.config.max_num_batched_tokens
        token_s = costs.token_s + costs.weights_s(most) / most
        told = (token_s, costs.position_s)
        if any(abs(new - old) > CHANGED * old for new, old in zip(told, self._told, strict=True)):
            self._told = told
            self._state.outbox.jobs.append(NoteStepCosts(*told))


class _Evictions:
    """kv.blocks.radix.Listener of one KV group."""

    def __init__(self, writes: Writes, group: int) -> None:
        self._writes = writes
        self._group = group

    def stored(self, key: BlockKey, parent: BlockKey, depth: int) -> None:
        """Heard of by `published`, with the sequence."""

    def removed(self, key: BlockKey) -> None:
        self._writes.evicted(self._group, key)
