"""What a store with tiers has of the prefixes that wait here, and how much of it is worth fetching.

    a sequence enters            job FindBlocks for what the pools lack; it stays WAITING
    the answer comes, it waits   what lies far away and would be fetched is asked for early: job PromoteBlocks
    its turn comes               without an answer it waits for that, LOADING; else what is fetched is decided
                                 (`load_or_recompute`)

An answer is kept until the sequence departs. It may be out of date: blocks that are not to be had any more are missed
by the fetch, are computed, and are not asked for again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as List
from dataclasses import dataclass, field

from ....core.block import BlockMove, cut_moves, num_hidden_blocks
from ....core.cost import Work
from ....core.effects import FindBlocks, JobEnded, PromoteBlocks
from ....core.request import IMPORT
from ....core.sequence import Sequence, Status
from ....core.tiers import HOST, TIERS, TierFacts, TierKey
from ....core.units import MiB
from ....sched.budget import num_wanted
from ...blocks.groups import Match
from .catalogue import LoadChunk
from .load_or_recompute import Computing, Place, Rates, Run, Speed, best_run, ends, meeting
from .port import EnginePort

CHUNK_BYTES = 16 * MiB
"""Size of one job that fetches: it is published, and can be cancelled, as a whole."""

FIND_S = 0.25
"""A lookup that takes longer has found nothing."""

LATE, UNASKED_S = 0.9, 2.0
"""After a lookup that took so much of this time in vain, nobody asks for so long: the store may hang."""

MOST_KNOWN = 1 << 18
"""Blocks that answers are kept of. Beyond that a sequence asks when its turn has come."""

PATIENCE, LEAST_WAIT_S = 8.0, 1.0
"""A fetch ends after so many times what is expected of it, and not before that long, with what there is."""

MOST_LOST = 3
"""After so many fetches that missed blocks a sequence is computed."""

_HOST = TIERS.index(HOST) + 1
_DIGITS = range(1, len(TIERS) + 1)


@dataclass(slots=True)
class _Known:
    """What is known for one sequence. num_matched: leading blocks that the pools had as it asked. digits: of the blocks
    that it asked for; promoted_s: when those far away were asked for, -1: they were not; num_lost: fetches that missed
    blocks."""

    seq: Sequence
    wanted: tuple[TierKey, ...]
    num_matched: int
    is_answered: bool = False
    digits: dict[TierKey, int] = field(default_factory=dict)
    promoted_s: float = -1.0
    num_lost: int = 0


class TierCatalogue:
    """transfers.Catalogue."""

    def __init__(self, state: EnginePort, facts: tuple[TierFacts, ...]) -> None:
        self._state = state
        self._rates = Rates(facts)
        self._known: dict[int, _Known] = {}  # by the number of the sequence
        self._lookups: dict[int, tuple[int, float]] = {}  # number of the job -> of the sequence, and when it asked
        self._unasked_until_s = -math.inf
        self._begun: dict[int, float] = {}  # of fetches, by the number of the job
        self._num_known = 0
        self._next_number = 0
        self._block_bytes = [group.bytes_per_block for group in state.config.groups]
        state.arrivals.append(self._enter)
        state.departures.append(self._depart)

    @property
    def has_work(self) -> bool:
        return bool(self._lookups)

    def look_up(self, seq: Sequence, matched: Match, now: float) -> bool:
        """Whether an answer is to be waited for. Where the pools have lost blocks since it asked, it asks anew."""
        known = self._known.get(seq.number)
        if known is None or (known.is_answered and matched.num_blocks < known.num_matched):
            self._depart(seq)
            known = self._ask(seq, matched.num_blocks, now)
        return known is not None and not known.is_answered

    def end_lookup(self, event: JobEnded, now: float) -> None:
        assert isinstance(event.job, FindBlocks), event
        number, asked_s = self._lookups.pop(event.job.number, (-1, now))
        if now - asked_s >= FIND_S * LATE and not event.result.strip("0"):
            self._unasked_until_s = now + UNASKED_S
        known = self._known.get(number)
        if known is None:
            return
        known.is_answered = True
        if not event.error:
            digits = map(int, event.result)
            known.digits = {block: digit for block, digit in zip(known.wanted, digits, strict=True) if digit}
        self._num_known += len(known.digits) - len(known.wanted)
        known.wanted = ()
        if known.seq.status is Status.LOADING:
            self._state.stop_loading(known.seq)
        elif known.seq.status is Status.WAITING:
            self._promote(known, now)

    def end(self, seq: Sequence, matched: Match, now: float) -> int:
        """How far the blocks reach that are worth having."""
        known = self._known.get(seq.number)
        if known is None or not known.digits:
            return matched.num_blocks
        places = self._places(seq, known)
        most = max(ends(places, matched.num_blocks), default=matched.num_blocks)
        if most == matched.num_blocks or seq.request.handoff == IMPORT or not self._state.costs.costs.is_known:
            return most
        end = self._best(seq, known, places, matched.num_blocks, now).end
        if end < most:
            self._state.counters.external_recomputed += (most - end) * self._state.config.block_size
            self._rates.relax((digit for place in places for digit in place.digits[end:most]), now)
        return end

    def meeting(self, seq: Sequence, matched: Match, now: float) -> tuple[int, int] | None:
        """Only of tiers that loads were measured of, and while nothing else is to be computed first."""
        known, config = self._known.get(seq.number), self._state.config
        if known is None or not known.digits or known.promoted_s >= 0 or seq.request.handoff == IMPORT:
            return None
        start, places = matched.num_blocks, self._places(seq, known)
        end = max(ends(places, start), default=start)
        if not all(map(self._rates.is_learnt, {*places[0].digits[start:end]})) or end < start + 2:
            return None
        computing, speed = self._computing(seq, start * config.block_size), self._speed(known, now)
        if computing.ahead_s or not computing.costs.is_known:
            return None
        run = best_run(places, start, config.block_size, computing, speed)
        head = meeting(places[0], run, end, config.block_size, computing, speed)
        return (head, end) if head else None

    def cut(self, seq: Sequence, moves: List[BlockMove], most_bytes: int = 0) -> list[LoadChunk]:
        """Of one tier each, in the order of the prefix."""
        known = self._known[seq.number]
        order = {key: index for index, key in enumerate(seq.keys)}
        runs: list[tuple[int, list[BlockMove]]] = []
        for move in sorted(moves, key=lambda move: (order[move[1]], move[0])):
            digit = known.digits[move[:2]]
            if not runs or runs[-1][0] != digit:
                runs.append((digit, []))
            runs[-1][1].append(move)
        is_moving = known.promoted_s >= 0  # it may be nearer by now: nothing is to be learnt
        return [
            LoadChunk(chunk, digit, is_measured=digit == _HOST or not is_moving)
            for digit, run in runs
            for chunk in cut_moves(run, self._block_bytes, most_bytes or CHUNK_BYTES)
        ]

    def begin(self, number: int, chunk: LoadChunk, now: float) -> float:
        self._begun[number] = now
        if not chunk.is_measured:
            return LEAST_WAIT_S
        return max(LEAST_WAIT_S, PATIENCE * self._rates.begin(number, chunk.tier, self._num_bytes(chunk.moves), now))

    def came(self, number: int, moves: List[BlockMove], now: float) -> None:
        self._state.counters.fetch_s += now - self._begun.pop(number)
        self._rates.end(number, self._num_bytes(moves), now)

    def has(self, seq: Sequence, block: TierKey) -> bool:
        known = self._known.get(seq.number)
        return known is not None and block in known.digits

    def lose(self, sequences: List[Sequence], moves: List[BlockMove]) -> None:
        for seq in sequences:
            known = self._known.get(seq.number)
            if known is None:
                continue
            known.num_lost += 1
            if known.num_lost >= MOST_LOST:
                self._num_known -= len(known.digits)
                known.digits = {}
            for move in moves:
                self._num_known -= known.digits.pop(move[:2], None) is not None

    def _enter(self, seq: Sequence, now: float) -> None:
        if self._num_known < MOST_KNOWN:
            self._ask(seq, self._state.find_match(seq).num_blocks, now)

    def _depart(self, seq: Sequence) -> None:
        known = self._known.pop(seq.number, None)
        if known is not None:
            self._num_known -= len(known.digits) + len(known.wanted)

    def _ask(self, seq: Sequence, num_matched: int, now: float) -> _Known | None:
        """None: it takes nothing from others."""
        state = self._state
        keys = seq.keys[: state.num_shareable(seq)]
        pools = state.blocks.pools
        wanted = tuple((group, key) for key in keys for group, pool in enumerate(pools) if pool.find(key) is None)
        if now < self._unasked_until_s:
            wanted = ()
        known = self._known[seq.number] = _Known(seq, wanted, num_matched, is_answered=not wanted)
        if not keys:
            return None
        if wanted:
            self._num_known += len(wanted)
            self._lookups[self._next_number] = (seq.number, now)
            state.outbox.jobs.append(FindBlocks(self._next_number, wanted, FIND_S))
            self._next_number += 1
        return known

    def _promote(self, known: _Known, now: float) -> None:
        """It waits: have in host memory what will be fetched."""
        if not any(digit > _HOST for digit in known.digits.values()):
            return
        seq, state = known.seq, self._state
        num_matched = state.find_match(seq).num_blocks
        run = self._best(seq, known, self._places(seq, known), num_matched, now)
        groups = range(len(state.blocks.pools))
        wanted = [(group, key) for key in seq.keys[num_matched : run.end] for group in groups]
        far = tuple(block for block in wanted if known.digits.get(block, 0) > _HOST)
        if far:
            known.promoted_s = now
            state.outbox.jobs.append(PromoteBlocks(far))

    def _places(self, seq: Sequence, known: _Known) -> list[Place]:
        state = self._state
        size, stop = state.config.block_size, state.num_shareable(seq)
        places = []
        for group, pool in enumerate(state.blocks.pools):
            find, digit_of = pool.find, known.digits.get
            digits = [0 if find(key) is not None else digit_of((group, key), -1) for key in seq.keys[:stop]]
            hidden = None
            if pool.window:
                hidden = [num_hidden_blocks(end * size, pool.window, size) for end in range(stop + 1)]
            places.append(Place(digits, self._block_bytes[group], hidden))
        return places

    def _best(self, seq: Sequence, known: _Known, places: List[Place], num_matched: int, now: float) -> Run:
        config = self._state.config
        computing = self._computing(seq, num_matched * config.block_size)
        return best_run(places, num_matched, config.block_size, computing, self._speed(known, now))

    def _computing(self, seq: Sequence, start: int) -> Computing:
        """Beside those that draw, after the prompts that are begun."""
        state = self._state
        costs, running = state.costs.costs, state.running
        wanted = [num_wanted(each) for each in running]
        num_drawing = wanted.count(1)
        num_positions = sum(each.num_planned for each, num in zip(running, wanted, strict=True) if num == 1)
        num_ahead = sum(num for num in wanted if num > 1)
        chunk = max(state.config.block_size, state.policies.chunks.most_tokens(state.config, num_drawing))
        step_s = costs.predict(Work(num_drawing + 1, num_drawing, num_positions, num_positions))
        if costs.chosen:  # the chunk has more experts read than those that draw
            step_s += costs.weights_s(num_drawing + chunk) - costs.weights_s(num_drawing)
        ahead_s = num_ahead * costs.token_s + -(-num_ahead // chunk) * step_s
        return Computing(costs, start, len(seq.tokens), chunk, step_s, ahead_s)

    def _speed(self, known: _Known, now: float) -> Speed:
        """What was asked for early has come nearer since."""
        rates = self._rates
        latency_s = [0.0, *map(rates.latency_s, _DIGITS)]
        byte_s = [0.0, *map(rates.byte_s, _DIGITS)]
        if known.promoted_s >= 0:
            for digit in _DIGITS[1:]:
                num_bytes = sum(self._block_bytes[group] for (group, _), at in known.digits.items() if at == digit)
                whole_s = latency_s[digit] + num_bytes * byte_s[digit]
                left = max(0.0, 1.0 - (now - known.promoted_s) / whole_s)
                latency_s[digit] = latency_s[_HOST] + left * latency_s[digit]
                byte_s[digit] = byte_s[_HOST] + left * byte_s[digit]
        return Speed(latency_s, byte_s)

    def _num_bytes(self, moves: List[BlockMove]) -> int:
        return sum(self._block_bytes[group] for group, _, _ in moves)
