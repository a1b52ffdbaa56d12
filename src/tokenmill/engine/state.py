"""What one engine knows, and the moves between a sequence's states that keep all of it in step.

    enter      a request becomes a sequence that is WAITING
    admit      WAITING -> RUNNING
    send_back  RUNNING -> WAITING: everything but the tokens is computed again
    load       WAITING -> LOADING: KV of its prefix is on its way (`kv.connector.scheduler.transfers`)
    run_loaded    LOADING -> RUNNING: with the KV that has come
    stop_loading  LOADING -> WAITING: without them
    export     RUNNING -> EXPORTING: has ended, and its KV is on its way to the store (`kv.connector.scheduler.saves`)
    leave      any -> FINISHED

Only this package and the scheduler's side of the KV connector write it. Which move is due is decided elsewhere: by the
scheduler through `step_builder`, by results (`commit`), by events (`core`).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Protocol

from ..core.block import BlockKey, BlockTable, num_hidden_blocks
from ..core.config import EngineConfig
from ..core.cost import CostFitter
from ..core.effects import Outbox
from ..core.errors import EXPIRED, Overloaded
from ..core.events import FINISH_ERROR, Output, PoolChanged, SetPool
from ..core.kv_events import TokenEvent
from ..core.outputs import ended
from ..core.policy import Waiting
from ..core.request import Request
from ..core.sequence import Sequence, Status, wants_scores
from ..kv.blocks import eviction
from ..kv.blocks.allocator import unreferenced_for
from ..kv.blocks.encoder import EncoderLedger
from ..kv.blocks.groups import KVBlocks, Match, Tables
from ..kv.blocks.hashing import extend_seq_keys
from ..kv.connector.scheduler.saves import Saves
from ..kv.connector.scheduler.writes import Writes
from ..kv.events.publisher import KVEventPublisher, TokenEventPublisher
from ..sched.admission import blocks_for
from ..sched.policies import pick, slack
from ..sched.queue import WaitingQueue
from ..sched.service import Service, seniority
from ..sched.steps import Counters, Step
from .shared import AdapterRegistry, SharedSettings
from .speculation import Speculation

_FEW = 64
"""So many that have begun are kept in any case; beyond that, no more than are unfinished."""


class Deadlines:
    """By when sequences must have had their first step planned, where their requests say so: a heap of (time, number,
    sequence). Those that have begun are dropped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, seq: Sequence, num_open: int) -> None:
        """A sequence whose request bounds its wait has come; `num_open` are unfinished."""
        request = seq.request
        heappush(self._heap, (request.arrival_s + request.terms.queue_s, seq.number, seq))
        if len(self._heap) > 2 * num_open + _FEW:
            self._heap = [each for each in self._heap if _has_yet_to_begin(each[2])]
            heapify(self._heap)

    def take(self, now: float) -> list[Sequence]:
        """Those that have waited too long."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            seq = heappop(self._heap)[2]
            if _has_yet_to_begin(seq):
                late.append(seq)
        return late


def _has_yet_to_begin(seq: Sequence) -> bool:
    return seq.status is Status.WAITING and seq.num_cached < 0


class Membership:
    """In which pool an engine serves. It has no role: a pool says what front ends give it.

    pool    "" until a front end put it into one
    epoch   of that change
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self.pool = ""
        self.epoch = 0

    def set_pool(self, event: SetPool, now: float) -> None:
        """The highest epoch decides; of two front ends with the same one, who came first."""
        if event.epoch > self.epoch:
            self.pool, self.epoch = event.pool, event.epoch
        self._outbox.answers.append(PoolChanged(self.pool, self.epoch))


class EngineState:
    """costs      what steps take
    blocks        the block ids of all KV groups
    stored        of each KV group, keys of the blocks that may be fetched; empty where there is no store that told them
    has_tiers     there is a store with tiers
    kv_events     what front ends are told of published blocks
    token_events     tells others than front ends, with tokens; None: nobody asks
    writes        hears which blocks are computed and used, for a store with tiers; None: there is none
    by_id         unfinished sequences by the id of their request
    running       those that run, by seniority; the others are in `waiting`, or in `loading` by number
    in_flight     steps that were planned and not committed, oldest first
    deadlines     when first steps must have been planned
    speculation   how many drafts are verified; None: nothing is drafted
    released      numbers of sequences that the worker is to forget with the next plan
    work_done     the clock of work (core.work)
    service       what tenants and adapters have received
    last_commit_s   when a step was last committed
    num_targeted  unfinished sequences that have a target for a time
    moving        sequences that have entered to go on from another engine (LOADING), or to go on in one, not looked at
    arrivals      hear of a sequence that has entered and waits
    departures    hear of a sequence before it gives its blocks back
    borders       hear the time after each event and each commit, with blocks and sequences in step
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.policies = pick(config)
        self.costs = CostFitter(config.block_size, config.chosen_experts)
        new_unreferenced = partial(unreferenced_for, eviction.pick(config.eviction_policy), self.costs)
        self.blocks = KVBlocks(
            config.groups, config.block_size, new_unreferenced, config.encoder, caches_prefixes=config.caches_prefixes
        )
        self.encoder = EncoderLedger(config, self.blocks.encoder)
        self.stored: tuple[set[BlockKey], ...] = ()
        self.has_tiers = False
        self.outbox = Outbox()
        self.kv_events = KVEventPublisher(self.blocks, self.outbox)
        self.token_events: TokenEventPublisher | None = None
        self.writes: Writes | None = None
        self.adapters = AdapterRegistry(self.outbox)
        self.settings = SharedSettings()
        self.membership = Membership(self.outbox)
        self.counters = Counters()
        self.by_id: dict[str, Sequence] = {}
        self.service = Service(config.max_num_batched_tokens)
        self.waiting = WaitingQueue(self.service)
        self.running: list[Sequence] = []
        self.loading: dict[int, Sequence] = {}
        self.in_flight: deque[Step] = deque()
        self.speculation = None if config.speculation is None else Speculation(config.speculation)
        self.released: list[int] = []
        self.work_done = 0
        self.last_commit_s = 0.0
        self.num_targeted = 0
        self.deadlines = Deadlines()
        self.moving: list[Sequence] = []
        self.arrivals: list[Callable[[Sequence, float], None]] = []
        self.departures: list[Callable[[Sequence], None]] = []
        self.borders: list[Callable[[float], None]] = []
        self._next_number = 0

    @property
    def has_store(self) -> bool:
        return bool(self.stored) or self.has_tiers

    def enter(self, request: Request, now: float) -> None:
        request, stop_ids = self.settings.begin(request)
        tokens = [*request.prompt_tokens, *request.output_tokens]
        seq = Sequence(self._next_number, request, tokens, tables=self._new_tables(request), stop_ids=stop_ids)
        self._next_number += 1
        seq.arrived = self.work_done
        self.reconsider(seq, now)
        self.by_id[request.id] = seq
        self.num_targeted += _is_targeted(request)
        if request.adapter:
            self.adapters.begin(request.adapter)
        self.service.open(seq)
        if self.service.is_shared:
            self.service.settle(self.running)
        if request.source is not None or request.yields:
            self.moving.append(seq)
        if request.source is not None:
            seq.status = Status.LOADING
            self.loading[seq.number] = seq
            return
        self.waiting.push(seq)
        for hear in self.arrivals:
            hear(seq, now)
        if request.terms.queue_s and not request.is_resumed:
            self.deadlines.add(seq, len(self.by_id))

    def expire(self, now: float) -> None:
        """End those that have waited for their first step longer than they wanted to."""
        for seq in self.deadlines.take(now):
            self.leave(seq)
            self.counters.num_expired += 1
            self.outbox.outputs.append(ended(seq, FINISH_ERROR, now, error=Overloaded(EXPIRED)))

    def admit(self, seq: Sequence) -> None:
        self.waiting.take(seq)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=seniority)

    def load(self, seq: Sequence) -> None:
        self.waiting.take(seq)
        seq.status = Status.LOADING
        self.loading[seq.number] = seq

    def run_loaded(self, seq: Sequence, tables: tuple[BlockTable, ...], num_tokens: int) -> None:
        """Its tables hold KV of `num_tokens` tokens."""
        del self.loading[seq.number]
        seq.status = Status.RUNNING
        seq.tables = tables
        self.begin_after(seq, num_tokens)
        seq.num_computed = seq.num_planned
        insort(self.running, seq, key=seniority)

    def stop_loading(self, seq: Sequence) -> None:
        del self.loading[seq.number]
        self.encoder.release(seq)
        seq.status = Status.WAITING
        self.waiting.push(seq)

    def begin_after(self, seq: Sequence, num_tokens: int) -> None:
        """Its tables were carried on by KV of so many tokens that it need not compute."""
        if self.writes is not None:
            size = self.config.block_size
            self.writes.used(seq, seq.num_planned // size, (seq.num_planned + num_tokens) // size)
        seq.num_planned += num_tokens
        if seq.num_preemptions == 0:
            seq.num_cached += num_tokens
            self.counters.prefix_hits += num_tokens

    def send_back(self, seq: Sequence) -> None:
        self._depart(seq)
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_computed = seq.num_planned = seq.num_pending = 0
        seq.rows_in_flight = 0
        seq.num_preemptions += 1
        if wants_scores(seq):
            seq.prompt_logprobs.clear()
        self.waiting.push(seq)

    def export(self, seq: Sequence, last: Output) -> tuple[BlockTable, ...]:
        """Rows it has in flight are dropped when they come back. Returns its tables, for the caller to release."""
        self._depart(seq)
        tables, seq.tables = seq.tables, self._new_tables(seq.request)
        self._release(seq)
        seq.status = Status.EXPORTING
        seq.last = last
        return tables

    def leave(self, seq: Sequence) -> None:
        """Rows it has in flight are dropped when they come back."""
        self._depart(seq)
        if seq.status is Status.WAITING:
            self.waiting.discard(seq)
        elif seq.status is Status.LOADING:
            del self.loading[seq.number]
            self.encoder.release(seq)
        elif seq.status is Status.RUNNING:
            self._release(seq)
        seq.status = Status.FINISHED
        self.service.close(seq)
        del self.by_id[seq.request.id]
        self.num_targeted -= _is_targeted(seq.request)
        self.settings.end(seq.request)
        if seq.request.adapter:
            self.adapters.end(seq.request.adapter)

    def _depart(self, seq: Sequence) -> None:
        for hear in self.departures:
            hear(seq)
        if self.speculation is not None:
            self.speculation.forget(seq.number)

    def _release(self, seq: Sequence) -> None:
        """Leave the running list; blocks and the worker's state are given up."""
        self.running.remove(seq)
        if self.writes is not None:
            self.writes.left(seq)
        self.blocks.release(seq.tables, seq.last_step)
        self.encoder.release(seq)
        seq.tables = self._new_tables(seq.request)
        if seq.num_sent or not self.config.keeps_kv:
            self.released.append(seq.number)
            seq.num_sent = 0

    def _new_tables(self, request: Request) -> tuple[BlockTable, ...]:
        return self.blocks.new_tables(len(request.prompt_tokens))

    def find_match(self, seq: Sequence) -> Match:
        """Published blocks that would carry the sequence's planned part on from a block border; changes nothing."""
        if seq.num_planned % self.config.block_size or not (stop := self.num_shareable(seq)):
            return self.blocks.no_match
        return self.blocks.match(seq.keys, seq.tables, stop)

    def num_shareable(self, seq: Sequence) -> int:
        """Leading blocks that it may take from others, whose keys are known then."""
        if not self.config.caches_prefixes or wants_scores(seq) or _pools_all(seq):
            return 0
        extend_seq_keys(seq, self.config)
        return (len(seq.tokens) - 1) // self.config.block_size

    def reconsider(self, seq: Sequence, now: float) -> None:
        """Ask the order of service when a waiting sequence is due."""
        num_cached = self.find_match(seq).num_blocks * self.config.block_size
        order, costs = self.policies.order, self.costs.costs
        waiting = Waiting(seq.request, len(seq.tokens), num_cached, seq.arrived, now, self.work_done, costs)
        most = self.config.max_num_batched_tokens
        seq.due = slack.due(order, waiting, most) if seq.request.terms.ttft_s else order.due(waiting)

    def publish(self, seq: Sequence, num_full: int, step: Step | None, num_written: int | None = None) -> None:
        """Make the first `num_full` blocks matchable; they are withdrawn if `step`, the last one in flight that carries
        a row of the sequence, fails. num_written: of states, see KVBlocks.publish."""
        if not self.config.caches_prefixes:
            return
        extend_seq_keys(seq, self.config)
        writes = self.writes
        firsts = [max(each.num_published, each.num_released) for each in seq.tables] if writes is not None else []
        published = self.blocks.publish(seq.keys, seq.tables, num_full, num_written)
        if writes is not None:
            writes.published(seq, firsts)
        if step is not None:
            step.published += published
        if self.token_events is not None:
            self.token_events.published(seq)

    def settle_states(self, seq: Sequence, step_number: int) -> None:
        """What the sequence has computed by this step, whose rows are committed, is written: its states are matchable,
        and those that it needs no longer go back."""
        num_full = min(seq.num_computed, len(seq.tokens)) // self.config.block_size
        last_step = self.in_flight[seq.last_step - step_number - 1] if seq.rows_in_flight else None
        self.publish(seq, num_full, last_step)
        self.blocks.slide(seq.tables, seq.num_planned, seq.last_step)

    def tell_tokens(self, hear: Callable[[tuple[TokenEvent, ...]], None]) -> None:
        """`hear` is told from now on, after each event and commit, which blocks are published, and of which tokens."""
        self.token_events = TokenEventPublisher(self.blocks, hear)
        self.borders.append(self.token_events.flush)

    def forget(self, seq: Sequence) -> None:
        """What the sequence holds may be wrong: it is neither matched nor fetched from now on."""
        unpublish = partial(self.blocks.forget, seq.keys, seq.tables, [other.tables for other in self.running])
        if self.writes is None:
            unpublish()
        else:
            self.writes.forget(seq, unpublish)
        self.encoder.forget(seq)
        for stored in self.stored:
            stored.difference_update(seq.keys)


def _is_targeted(request: Request) -> bool:
    return request.terms.ttft_s > 0 or request.terms.tpot_s > 0


def _pools_all(seq: Sequence) -> bool:
    """Whether its vector takes positions that a prefix hit would not compute."""
    return seq.request.pooling is not None and seq.request.pooling.needs_all


class Holder(Protocol):
    """What holds blocks beside the sequences that run."""

    def tables(self) -> Iterator[Tables]: ...


def check_state(state: EngineState, saves: Saves, holders: Iterable[Holder]) -> None:
    """Assert that sequences, blocks, steps and transfers in flight and counts agree. Slow: for tests and
    simulations."""
    state.blocks.check(
        (*(seq.tables for seq in state.running), *chain.from_iterable(each.tables() for each in holders))
    )
    assert state.running == sorted(state.running, key=seniority), "running is out of order"
    in_flight: dict[int, int] = {}
    drafting: set[int] = set()
    for step in state.in_flight:
        for row, seq in zip(step.rows, step.sequences, strict=True):
            if not step.is_void and seq.status is not Status.FINISHED:
                assert seq.number not in drafting, seq
                in_flight[seq.number] = in_flight.get(seq.number, 0) + 1
                if row.drafts:
                    drafting.add(seq.number)
    num_waiting = num_exporting = 0
    for seq in state.by_id.values():
        if seq.status is Status.EXPORTING:
            assert not len(seq.tables[0]) and saves.has(seq), seq
            num_exporting += 1
            continue
        num_known = len(seq.tokens) + seq.num_pending
        assert 0 <= seq.num_computed <= seq.num_planned < num_known + (seq.number in drafting), seq
        assert seq.rows_in_flight == in_flight.get(seq.number, 0), seq
        assert seq.num_output + seq.num_pending <= seq.request.max_tokens, seq
        assert len({len(table) for table in seq.tables}) == 1, seq
        assert all(max(table.num_published, table.num_released) <= len(table) for table in seq.tables), seq
        if seq.status is Status.RUNNING:
            _check_running(state, seq)
        else:
            num_waiting += seq.status is Status.WAITING
            assert (seq.status is Status.LOADING) == (seq.number in state.loading), seq
            assert seq.status is not Status.FINISHED and not len(seq.tables[0]) and not seq.rows_in_flight, seq
    assert num_waiting == len(state.waiting)
    state.encoder.check((*state.running, *state.loading.values()))
    state.service.check(state.by_id.values())
    assert state.by_id or not len(state.settings)
    adapters = [seq.request.adapter for seq in state.by_id.values() if seq.request.adapter]
    state.adapters.check({digest: adapters.count(digest) for digest in adapters})
    assert num_waiting + len(state.running) + len(state.loading) + num_exporting == len(state.by_id)


def _check_running(state: EngineState, seq: Sequence) -> None:
    config = state.config
    assert seq.rows_in_flight or seq.num_computed == seq.num_planned, seq
    num_blocks = blocks_for(seq.num_planned, config.block_size) if config.keeps_kv else 0
    num_spare = 0 if state.speculation is None else 1  # taken for drafts that were wrong
    assert num_blocks <= len(seq.tables[0]) <= num_blocks + num_spare, seq
    for group, table in zip(config.groups, seq.tables, strict=True):
        num_hidden = num_hidden_blocks(seq.num_planned, group.window, config.block_size)
        if table.checkpoints is None:
            assert table.num_released == num_hidden, seq
        else:  # what hides it may be planned before its key is known
            assert table.num_released <= num_hidden, seq
