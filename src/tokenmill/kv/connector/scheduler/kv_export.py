"""KV that peers may take from this engine, and requests that stop here to go on elsewhere.

    Offer of a request    its committed full blocks, as they grow   ->  jobs SendBlocks
    Offer of keys         published blocks of one prefix            ->  one job SendBlocks
    Yield                 the request ends when its draws in flight are committed, or at once where no row of it is in
                          flight; its last block, which may not be full, is sent too
    Release               job EndMove, and the offer is over when its jobs have ended

What was sent is held from before its job starts until the offer is over: when the peer has all, when it was released,
when a job has ended with an error (no peer came, or it went silent), or when the sequence has given its blocks back for
another reason than a Yield. Blocks that are not full are sent only after the sequence has stopped, when no step writes
them. Nothing of a request that wants prompt logprobs it has not had, or a vector, is offered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ....core.block import NO_BLOCK, BlockTable, num_hidden_blocks
from ....core.effects import JobEnded
from ....core.events import FINISH_MOVED
from ....core.moves import EndMove, Offer, Release, SendBlocks, Yield
from ....core.outputs import ended
from ....core.request import EXPORT
from ....core.sequence import Sequence, Status, wants_scores
from ....sched.admission import blocks_for
from ...blocks.groups import Tables
from .port import EnginePort, Entrance


@dataclass(slots=True, eq=False)
class _Export:
    """held      blocks of each KV group
    num_sent  leading blocks of the prefix that were sent, as far as they are held
    jobs      numbers of those under way
    seq       the sequence whose blocks are sent as they grow; None: no more will come
    is_last   all was sent
    is_over   the blocks go back when its jobs have ended
    """

    ticket: str
    held: tuple[list[int], ...]
    num_sent: int = 0
    jobs: set[int] = field(default_factory=set)
    seq: Sequence | None = None
    is_last: bool = False
    is_over: bool = False


class KVExports:
    """`grammars`: has requests that have not entered yet."""

    def __init__(self, state: EnginePort, grammars: Entrance) -> None:
        self._state = state
        self._grammars = grammars
        self._offers: dict[str, _Export] = {}
        self._by_seq: dict[int, _Export] = {}
        self._by_job: dict[int, _Export] = {}
        self._ending: list[_Export] = []
        self._next_number = 0
        state.departures.append(self._depart)
        state.borders.append(self._look)

    @property
    def has_work(self) -> bool:
        """Whether anything is offered, or was and is still held."""
        return bool(self._offers or self._ending)

    @property
    def tickets(self) -> tuple[str, ...]:
        """Of what is offered."""
        return tuple(self._offers)

    def offer(self, event: Offer, now: float) -> None:
        """What cannot be offered is not: a peer with the ticket is told that there is nothing."""
        if event.ticket in self._offers:
            return
        if not event.request_id:
            self._offer_published(event)
            return
        seq = self._state.by_id.get(event.request_id)
        if seq is not None and seq.status in (Status.WAITING, Status.RUNNING):
            self._begin(event.ticket, seq)

    def stop(self, event: Yield, now: float) -> None:
        state = self._state
        seq = state.by_id.get(event.request_id)
        if seq is None:
            self._grammars.give_up(event.request_id, event.attempt, now)
            return
        if seq.request.attempt != event.attempt or seq.status is Status.EXPORTING:
            return
        if seq.rows_in_flight:
            end = seq.num_planned + self._num_drafts_in_flight(seq)
            _stop_after(seq, max(1, end + 1 - len(seq.tokens)))  # those that are drawn in any case
            return
        _stop_after(seq, 0)
        state.leave(seq)
        state.outbox.outputs.append(ended(seq, FINISH_MOVED, now))

    def _num_drafts_in_flight(self, seq: Sequence) -> int:
        """Of them as many may be taken as are right: a state behind these cannot be taken back."""
        last = self._state.in_flight[-1]
        rows = zip(last.rows, last.sequences, strict=True) if last.num_drafts else ()
        return sum(len(row.drafts) for row, each in rows if each is seq)

    def release(self, event: Release, now: float) -> None:
        offer = self._offers.get(event.ticket)
        if offer is not None:
            self._end(offer)

    def end_send(self, event: JobEnded, now: float) -> None:
        """The peer has the blocks, or nothing more will be sent to it."""
        assert isinstance(event.job, SendBlocks), event
        offer = self._by_job.pop(event.job.number, None)
        if offer is None:
            return
        offer.jobs.discard(event.job.number)
        if (event.error or (offer.is_last and not offer.jobs)) and not offer.is_over:
            self._end(offer)
        else:
            self._settle(offer)

    def tables(self) -> Iterator[Tables]:
        """What offers hold."""
        for offer in (*self._offers.values(), *self._ending):
            yield tuple(BlockTable(held) for held in offer.held)

    def _look(self, now: float) -> None:
        """Blocks may have been committed, or a sequence entered that stops early."""
        state = self._state
        for seq in state.moving:
            if seq.request.yields and seq.status is not Status.FINISHED:
                _stop_after(seq, 1)
                self._begin(seq.request.yields, seq)
        for offer in self._by_seq.values():
            sent = offer.seq
            if sent is not None and sent.status is Status.RUNNING:
                num_full = sent.num_computed // state.config.block_size
                if num_full > offer.num_sent:
                    self._send(offer, sent, num_full, is_last=False)

    def _begin(self, ticket: str, seq: Sequence) -> None:
        request = seq.request
        is_fit = request.pooling is None and request.handoff != EXPORT and self._state.config.keeps_kv
        if ticket in self._offers or seq.number in self._by_seq or not is_fit or wants_scores(seq):
            return
        offer = self._offers[ticket] = self._by_seq[seq.number] = self._new(ticket)
        offer.seq = seq
        self._job(offer, (), 0, is_last=False)  # its peer may come before the first block

    def _offer_published(self, event: Offer) -> None:
        """As many leading blocks as every group has, as far as their end sees them, and of which all are written."""
        state = self._state
        blocks, size = state.blocks, state.config.block_size
        unwritten = {published for step in state.in_flight for published in step.published}
        matched = blocks.match(event.keys, blocks.new_tables(), len(event.keys)) if event.keys else blocks.no_match
        offer = self._offers[event.ticket] = self._new(event.ticket)
        groups = list(zip(blocks.pools, matched.blocks, strict=True))
        if any((pool, block) in unwritten for pool, found in groups for block in found):
            matched, groups = blocks.no_match, []
        moves: list[tuple[int, int, int]] = []
        for group, (pool, found) in enumerate(groups):
            pool.adopt(found)
            offer.held[group].extend(found)
            first = matched.num_blocks - len(found)
            moves += [(group, first + place, block) for place, block in enumerate(found)]
        offer.num_sent = matched.num_blocks
        self._job(offer, tuple(moves), matched.num_blocks * size, is_last=True)

    def _new(self, ticket: str) -> _Export:
        return _Export(ticket, tuple([] for _ in self._state.blocks.pools))

    def _send(self, offer: _Export, seq: Sequence, num_blocks: int, *, is_last: bool) -> None:
        """Up to `num_blocks`, all committed; hold them first. Of a group with a window, what its end sees."""
        state, size = self._state, self._state.config.block_size
        moves: list[tuple[int, int, int]] = []
        for group, (pool, table) in enumerate(zip(state.blocks.pools, seq.tables, strict=True)):
            hidden = num_hidden_blocks(len(seq.tokens) - 1, pool.window, size)
            first = max(offer.num_sent, table.num_released, hidden)
            ids = table.ids[first:num_blocks]
            held = [block for block in ids if block != NO_BLOCK]
            pool.hold(held)
            offer.held[group].extend(held)
            moves += [(group, place, block) for place, block in enumerate(ids, first) if block != NO_BLOCK]
        offer.num_sent = num_blocks
        num_tokens = seq.num_computed if is_last else num_blocks * size
        self._job(offer, tuple(moves), num_tokens, is_last=is_last)

    def _job(self, offer: _Export, moves: tuple[tuple[int, int, int], ...], num_tokens: int, *, is_last: bool) -> None:
        number = self._next_number
        self._next_number += 1
        offer.jobs.add(number)
        self._by_job[number] = offer
        offer.is_last |= is_last
        self._state.outbox.jobs.append(SendBlocks(number, offer.ticket, moves, num_tokens, is_last))

    def _depart(self, seq: Sequence) -> None:
        """It is about to give its blocks back."""
        offer = self._by_seq.pop(seq.number, None)
        if offer is None:
            return
        offer.seq = None
        has_stopped = seq.end_reason == FINISH_MOVED and len(seq.tokens) >= seq.max_len and not seq.rows_in_flight
        if not has_stopped:
            self._end(offer)
        elif seq.status is Status.RUNNING:
            self._send(offer, seq, blocks_for(seq.num_computed, self._state.config.block_size), is_last=True)
        else:
            self._job(offer, (), offer.num_sent * self._state.config.block_size, is_last=True)

    def _end(self, offer: _Export) -> None:
        if offer.seq is not None:
            del self._by_seq[offer.seq.number]
            offer.seq = None
        offer.is_over = True
        del self._offers[offer.ticket]
        self._ending.append(offer)
        self._state.outbox.jobs.append(EndMove(offer.ticket))
        self._settle(offer)

    def _settle(self, offer: _Export) -> None:
        """Give back what an offer that is over held, once nobody reads it."""
        if offer.is_over and not offer.jobs:
            for pool, held in zip(self._state.blocks.pools, offer.held, strict=True):
                pool.release(held, -1)
            self._ending.remove(offer)


def _stop_after(seq: Sequence, num_tokens: int) -> None:
    """It goes on elsewhere after so many more, unless it ends before."""
    if len(seq.tokens) + num_tokens < seq.max_len:
        seq.max_len = len(seq.tokens) + num_tokens
        seq.end_reason = FINISH_MOVED
