"""KV that this engine takes from others: of requests that go on here, and of prefixes that it is to have cached.

    Submit with a source   LOADING; blocks for what is known of it are reserved, and only then   ->  job PullBlocks
    job has ended          what came is kept; Staged, once it is all that was there; the next job follows
    Continue               its tokens are known: job PullBlocks of the rest, if there is one, and then RUNNING, or,
                           where nothing was to be had, WAITING, to be computed like any other; Moved
    Prefetch               the same without a request: what came is published, and the blocks are left to the cache

Reserve, fill, publish: blocks are published at the end, full ones alone. Where a pull fails, what came before is kept.
Blocks found in this engine's own cache are shared and not pulled. One job of each request at a time; its blocks are
held until it has ended, whatever becomes of the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from ....core.block import NO_BLOCK, BlockKey, BlockTable, num_hidden_blocks
from ....core.effects import JobEnded
from ....core.moves import Continue, EndMove, KVSource, Moved, Prefetch, Prefetched, PullBlocks, Pulled, Staged
from ....core.sequence import Sequence, Status, wants_scores
from ....sched.admission import blocks_for, max_running
from ...blocks.fetch import Claim, claim, is_intact
from ...blocks.groups import KVBlocks, Tables
from ...blocks.hashing import extend_seq_keys
from ...blocks.manager import BlockManager
from .port import EnginePort, Entrance

NO_ROOM = "There is no room for it."
NO_USE = "It computes its whole prompt here."
NO_CACHE = "No prefixes are cached here."


@dataclass(slots=True, eq=False)
class _Import:
    """One pull: how far it is, which blocks it wants, and what of it can be used.

    answer      number of the answer to a Prefetch
    made        what is reserved and shared; None: nothing yet
    number      of the job under way; -1: none
    num_shared  leading tokens whose KV was here before
    num_tokens  leading tokens whose KV is in
    is_last     the source has said that this is all
    holes       (group, block) that it did not have
    is_going    Continue has come
    is_failed   nothing more is asked for
    """

    source: KVSource
    keys: List[BlockKey]
    seq: Sequence | None
    answer: int = -1
    made: Claim | None = None
    number: int = -1
    num_shared: int = 0
    num_tokens: int = 0
    is_last: bool = False
    holes: set[tuple[int, int]] = field(default_factory=set)
    is_staged: bool = False
    is_going: bool = False
    is_failed: bool = False


class KVImports:
    """`grammars`: has requests that have not entered yet."""

    def __init__(self, state: EnginePort, grammars: Entrance) -> None:
        self._state = state
        self._grammars = grammars
        self._by_seq: dict[int, _Import] = {}
        self._by_job: dict[int, _Import] = {}
        self._unbegun: list[_Import] = []
        self._early: dict[tuple[str, int], Continue] = {}
        self._next_number = 0
        state.departures.append(self._depart)
        state.borders.append(self._look)

    @property
    def has_work(self) -> bool:
        """Whether a job is under way."""
        return bool(self._by_job)

    def go_on(self, event: Continue, now: float) -> None:
        """Of a request that has not entered yet, kept until it has."""
        seq = self._state.by_id.get(event.request_id)
        if seq is None:
            if event.request_id in self._grammars:
                self._early[event.request_id, event.attempt] = event
            return
        pull = self._by_seq.get(seq.number)
        if pull is None or pull.is_going or seq.request.attempt != event.attempt:
            return
        seq.tokens += event.tokens
        pull.is_going = True
        self._proceed(pull, now)

    def prefetch(self, event: Prefetch, now: float) -> None:
        assert event.source is not None, event
        pull = _Import(event.source, event.keys, None, event.number, is_going=True)
        if self._state.config.caches_prefixes:
            self._begin(pull, now)
        else:
            self._give_up(pull, NO_CACHE, now)

    def end_pull(self, event: JobEnded, now: float) -> None:
        """Some blocks are in, or none is to be had."""
        assert isinstance(event.job, PullBlocks), event
        pull = self._by_job.pop(event.job.number, None)
        if pull is None:
            return
        pull.number = -1
        if pull.seq is not None and pull.seq.status is not Status.LOADING:
            self._give_back(pull)
            return
        if event.error:
            self._fail(pull, event.error)
        else:
            pulled = Pulled(*json.loads(event.result))
            pull.num_tokens = max(pull.num_tokens, pulled.num_tokens)
            pull.is_last = pulled.is_last and pulled.num_tokens >= min(pulled.num_there, self._most_tokens(pull))
            pull.holes |= {(group, block) for group, block in pulled.holes}
            if pulled.num_tokens >= self._wanted(pulled):
                self._tell_staged(pull)
        self._proceed(pull, now)

    def tables(self) -> Iterator[Tables]:
        """What pulls hold."""
        of_jobs = (pull for pull in self._by_job.values() if pull.seq is None or pull.seq.number not in self._by_seq)
        for pull in (*self._by_seq.values(), *of_jobs):
            if pull.made is not None:
                yield pull.made.tables

    def _look(self, now: float) -> None:
        """A sequence may have entered that has a source; another may be able to begin now."""
        state = self._state
        unbegun, self._unbegun = self._unbegun, []
        moving, state.moving = state.moving, []
        for seq in moving:
            source = seq.request.source
            if source is not None and seq.status is Status.LOADING:
                pull = self._by_seq[seq.number] = _Import(source, seq.keys, seq)
                unbegun.append(pull)
        for pull in unbegun:
            if pull.seq is None or self._by_seq.get(pull.seq.number) is pull:
                self._begin(pull, now)
        if self._early:
            entered = [event for (name, _), event in self._early.items() if name not in self._grammars]
            for event in entered:
                del self._early[event.request_id, event.attempt]
                self.go_on(event, now)

    def _begin(self, pull: _Import, now: float) -> None:
        """Reserve what it takes and ask for it. Shared blocks of which it is not yet certain that they are written are
        waited for."""
        state, seq = self._state, pull.seq
        blocks, size = state.blocks, state.config.block_size
        if seq is not None and (error := self._refusal(seq)):
            return self._give_up(pull, error, now)
        if seq is not None:
            extend_seq_keys(seq, state.config)
        num_known = len(pull.keys) * size if seq is None else len(seq.tokens)
        end = len(pull.keys) if seq is None else (num_known - 1) // size
        more = blocks_for(num_known, size) - end
        unwritten = {published for step in state.in_flight for published in step.published}
        if end and state.config.caches_prefixes and unwritten and meets(blocks.pools, pull.keys[:end], unwritten):
            self._unbegun.append(pull)
            return None
        made = claim(blocks, pull.keys, end, set(), 0 if seq is None else seq.num_prompt)
        if made is None:
            return self._give_up(pull, NO_ROOM, now)
        pull.made = made
        if seq is not None:
            state.encoder.take(seq, self._recent())
        if blocks.num_extendable(blocks.no_match, len(state.running)) < more:
            self._give_back(pull)
            return self._give_up(pull, NO_ROOM, now)
        blocks.extend(made.tables, more)
        names = {key for _, key, _ in made.missing}
        pull.num_shared = next((index for index, key in enumerate(made.keys) if key in names), end) * size
        pull.num_tokens = pull.num_shared
        self._proceed(pull, now)
        return None

    def _recent(self) -> Iterator[list[tuple[BlockManager, int]]]:
        """What steps in flight published, which may fail."""
        return (step.published for step in self._state.in_flight)

    def _refusal(self, seq: Sequence) -> str:
        """Why nothing is pulled for it."""
        state = self._state
        if seq.request.pooling is not None or not state.config.keeps_kv or wants_scores(seq):
            return NO_USE
        num_rows = len(state.running) + len(state.loading)  # itself among them
        return "" if num_rows <= max_running(state.config) and state.encoder.can_take(seq, self._recent()) else NO_ROOM

    def _proceed(self, pull: _Import, now: float) -> None:
        """No job of it is under way, or it is to go on: ask for more, wait, or run."""
        if pull.number >= 0:
            return
        most = self._most_tokens(pull)
        is_in = pull.is_last or pull.num_tokens >= most
        if not pull.is_going:
            if not (pull.is_failed or pull.is_last or pull.made is None) and not self._ask(pull, is_final=False):
                self._tell_staged(pull)
        elif pull.is_failed or is_in or pull.made is None or not self._ask(pull, is_final=True):
            self._finish(pull, now)

    def _most_tokens(self, pull: _Import) -> int:
        """Tokens whose KV it can use: one is computed at least. Before Continue, more than the known ones will come."""
        if pull.seq is None:
            return len(pull.keys) * self._state.config.block_size
        return len(pull.seq.tokens) - 1 if pull.is_going else 2**62

    def _tell_staged(self, pull: _Import) -> None:
        if pull.seq is not None and not (pull.is_staged or pull.is_going):
            pull.is_staged = True
            request = pull.seq.request
            self._state.outbox.answers.append(Staged(request.id, request.attempt, pull.num_tokens))

    def _wanted(self, pulled: Pulled) -> int:
        """Of what was there, what is staged before Continue: full blocks, but for the end."""
        size = self._state.config.block_size
        return pulled.num_there if pulled.is_last else pulled.num_there // size * size

    def _ask(self, pull: _Import, *, is_final: bool) -> bool:
        """For what comes after what is in; False where there is no room for it."""
        assert pull.made is not None
        blocks, size, tables = self._state.blocks, self._state.config.block_size, pull.made.tables
        start = pull.num_tokens // size
        if pull.seq is None:
            num_blocks = len(tables[0])
        elif is_final:
            num_blocks = blocks_for(self._most_tokens(pull), size)
        else:
            num_blocks = max(start + 1, blocks_for(len(pull.seq.tokens), size))
        more = num_blocks - len(tables[0])
        if more > 0:
            if blocks.num_extendable(blocks.no_match) < more:
                return False
            blocks.extend(tables, more)
        ids = ids_wanted(pull.made, start, num_blocks)
        pull.number = self._next_number
        self._next_number += 1
        self._by_job[pull.number] = pull
        self._state.outbox.jobs.append(PullBlocks(pull.number, pull.source, start, ids, is_final))
        return True

    def _give_up(self, pull: _Import, error: str, now: float) -> None:
        self._fail(pull, error)
        self._proceed(pull, now)

    def _fail(self, pull: _Import, error: str) -> None:
        """Nothing more is asked for; the front end is told, unless it has said Continue and so cannot choose again."""
        pull.is_failed = True
        seq = pull.seq
        if seq is None:
            self._state.outbox.answers.append(Prefetched(pull.answer, 0, error))
        elif not pull.is_going:
            self._state.outbox.answers.append(Moved(seq.request.id, seq.request.attempt, 0, error))

    def _finish(self, pull: _Import, now: float) -> None:
        state, seq = self._state, pull.seq
        if seq is None:
            self._finish_prefetch(pull)
            return
        del self._by_seq[seq.number]
        num_tokens = num_usable(state.blocks, pull, seq)
        self._note_first(seq, num_tokens, now)
        if num_tokens:
            assert pull.made is not None
            tables, size = pull.made.tables, state.config.block_size
            num_blocks = blocks_for(num_tokens, size)
            for pool, table in zip(state.blocks.pools, tables, strict=True):
                pool.release([block for block in table.ids[num_blocks:] if block != NO_BLOCK], -1)
                del table.ids[num_blocks:]
            state.blocks.slide(tables, num_tokens, -1, keeps_states=False)
            state.run_loaded(seq, tables, num_tokens)
            state.publish(seq, num_tokens // size, None)
        else:
            self._give_back(pull)
            state.stop_loading(seq)
        state.outbox.answers.append(Moved(seq.request.id, seq.request.attempt, num_tokens))

    def _note_first(self, seq: Sequence, num_tokens: int, now: float) -> None:
        """It has left the queue."""
        if not num_tokens:
            return
        counters = self._state.counters
        seq.num_cached = 0
        seq.first_scheduled_s = now
        counters.prompt_tokens += seq.num_prompt
        counters.prefix_queries += len(seq.tokens)
        counters.external_queries += len(seq.tokens)
        counters.external_hits += num_tokens

    def _finish_prefetch(self, pull: _Import) -> None:
        state, made = self._state, pull.made
        if made is None:
            return
        num_blocks = min(pull.num_tokens // state.config.block_size, len(made.keys))
        is_whole = not pull.holes and (num_blocks == len(made.keys) or not state.blocks.has_windows)
        if not pull.is_failed:
            if is_whole and is_intact(state.blocks, made):
                state.blocks.publish(made.keys, made.tables, num_blocks)
                state.kv_events.flush()  # an engine without work has no step to tell it with
            else:
                num_blocks = 0
            state.outbox.answers.append(Prefetched(pull.answer, num_blocks))
        self._give_back(pull)

    def _give_back(self, pull: _Import) -> None:
        if pull.made is not None:
            self._state.blocks.release(pull.made.tables, -1)
            pull.made = None

    def _depart(self, seq: Sequence) -> None:
        """It ends while it is LOADING: its blocks go back when its job has ended."""
        pull = self._by_seq.pop(seq.number, None)
        if pull is None:
            return
        if pull.number >= 0:
            self._state.outbox.jobs.append(EndMove(pull.source.ticket))
        else:
            self._give_back(pull)


def ids_wanted(made: Claim, start: int, stop: int) -> tuple[tuple[int, ...], ...]:
    """Of each group, the reserved blocks [start, stop) of the tables; -1 for those that are shared or hidden."""
    missing = {(group, block) for group, _, block in made.missing}

    def is_wanted(group: int, index: int, table: BlockTable) -> bool:
        return index >= table.num_released and (index >= len(made.keys) or (group, table.ids[index]) in missing)

    return tuple(
        tuple(table.ids[index] if is_wanted(group, index, table) else -1 for index in range(start, stop))
        for group, table in enumerate(made.tables)
    )


def num_usable(blocks: KVBlocks, pull: _Import, seq: Sequence) -> int:
    """Leading tokens that the sequence can go on from, one being left to compute; 0 where nothing has come: what
    else is here is found by its keys."""
    num_tokens = min(pull.num_tokens, len(seq.tokens) - 1)
    if pull.made is None or num_tokens <= pull.num_shared or not is_intact(blocks, pull.made):
        return 0
    for group, (pool, table) in enumerate(zip(blocks.pools, pull.made.tables, strict=True)):
        hidden = num_hidden_blocks(num_tokens, pool.window, blocks.block_size)
        if table.checkpoints is not None and (num_tokens < pull.num_tokens or table.ids[hidden] == NO_BLOCK):
            return 0  # there is no state of this position
        if table.num_released > hidden or any(place == group and index >= hidden for place, index in pull.holes):
            return 0
    return num_tokens


def meets(pools: List[BlockManager], keys: List[BlockKey], unwritten: set[tuple[BlockManager, int]]) -> bool:
    """Whether one of these keys is that of a block which is published and not yet written for certain."""
    found = ((pool, pool.find(key)) for pool in pools for key in keys)
    return any(block is not None and (pool, block) in unwritten for pool, block in found)
