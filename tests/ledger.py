"""A stand-in for the engine core under the scheduler: policies are tried on it by hand, step by step.

It keeps sequences, counts blocks of one pool, and says what the prefix cache would serve as it was told; there are no
block ids, no tokens worth reading and no executor.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from tokenmill.core.config import EngineConfig
from tokenmill.core.cost import UNKNOWN, Costs
from tokenmill.core.policy import Waiting
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.sequence import Sequence, Status
from tokenmill.core.terms import USUAL, Terms
from tokenmill.core.work import step_work
from tokenmill.kv.blocks.groups import Match
from tokenmill.sched.admission import blocks_for
from tokenmill.sched.policies import Policies, slack
from tokenmill.sched.queue import WaitingQueue
from tokenmill.sched.scheduler import compose_step
from tokenmill.sched.service import Service, seniority


def queue_with(*sequences: Sequence) -> WaitingQueue:
    """They have arrived in this order."""
    queue = WaitingQueue(Service())
    for seq in sequences:
        arrive(queue, seq)
    return queue


def arrive(queue: WaitingQueue, seq: Sequence) -> None:
    queue.service.open(seq)
    queue.push(seq)


def take_next(queue: WaitingQueue) -> Sequence:
    seq = queue.peek()
    assert seq is not None, "nothing waits"
    queue.take(seq)
    return seq


class FakeLedger:
    """sched.ledger.Ledger.

    num_free  blocks that nobody holds
    work      the clock of work (core.work)
    now       seconds; for the test to move
    costs     of steps; for the test to set
    cached    tokens that the prefix cache would serve, in whole blocks, by a sequence's number; for the test to change
    """

    def __init__(self, config: EngineConfig, policies: Policies) -> None:
        self.config = config
        self.policies = policies
        self.service = Service(config.max_num_batched_tokens)
        self.waiting = WaitingQueue(self.service)
        self.running: list[Sequence] = []
        self.num_free = config.groups[0].num_blocks
        self.work = 0
        self.now = 0.0
        self.costs: Costs = UNKNOWN
        self.step_number = 0
        self.num_targeted = 0
        self.cached: dict[int, int] = {}
        self._num_sequences = 0
        self._rows: list[tuple[Sequence, int]] = []

    # ---- for tests ----

    def add(
        self,
        num_prompt: int,
        max_tokens: int = 4,
        *,
        num_cached: int = 0,
        priority: int = 0,
        terms: Terms = USUAL,
        adapter: str = "",
    ) -> Sequence:
        """A request arrives."""
        number = self._num_sequences
        self._num_sequences += 1
        request = Request(
            f"r{number}",
            (7,) * num_prompt,
            SamplingParams(),
            max_tokens,
            0,
            priority=priority,
            terms=terms,
            adapter=adapter,
            arrival_s=self.now,
        )
        self.num_targeted += terms.ttft_s > 0 or terms.tpot_s > 0
        seq = Sequence(number, request, list(request.prompt_tokens), arrived=self.work)
        self.cached[number] = num_cached
        self.reconsider(seq)
        self.service.open(seq)
        self.service.settle(self.running)
        self.waiting.push(seq)
        return seq

    def step(self) -> list[tuple[int, int]]:
        """Plan a step and have it end; returns its rows as (number of the sequence, number of tokens)."""
        rows = self.plan()
        self.end()
        return rows

    def plan(self) -> list[tuple[int, int]]:
        compose_step(self.running, self.waiting, self.config, self.policies, self)
        return [(seq.number, num_tokens) for seq, num_tokens in self._rows]

    def end(self) -> None:
        """The planned step ends: whoever has computed all it knew draws a token, and leaves with its last one."""
        self.work += step_work(sum(num_tokens for _, num_tokens in self._rows), self.config.max_num_batched_tokens)
        for seq, _ in self._rows:
            seq.rows_in_flight = 0
            seq.last_step = self.step_number
            seq.num_computed = seq.num_planned
            if seq.num_pending:
                seq.num_pending = 0
                seq.tokens.append(7)
                if seq.first_token_s < 0:
                    seq.first_token_s = self.now
                if len(seq.tokens) == seq.max_len:
                    self._leave(seq)
                    seq.status = Status.FINISHED
                    self.service.close(seq)
        self._rows.clear()
        self.step_number += 1

    def serve(self) -> list[int]:
        """Step until nobody is left; returns the numbers in the order of their first rows."""
        order: dict[int, None] = {}
        while self.running or len(self.waiting):
            rows = self.step()
            assert rows, "nobody goes on"
            order.update(dict.fromkeys(number for number, _ in rows))
        return list(order)

    # ---- the ledger ----

    def can_encode(self, seq: Sequence) -> bool:
        return True

    def add_drafts(self, most: int) -> None:
        """Nothing is proposed."""

    @property
    def no_match(self) -> Match:
        return Match(0, ([],))

    def find_match(self, seq: Sequence) -> Match:
        num_blocks = 0 if seq.num_planned else self.cached[seq.number] // self.config.block_size
        return Match(num_blocks, ([0] * num_blocks,))

    def num_available_blocks(self, matched: Match) -> list[int]:
        return [self.num_free - matched.num_blocks]

    def num_extendable(self, matched: Match) -> int:
        return min(self.num_available_blocks(matched))

    def reconsider(self, seq: Sequence) -> None:
        cached = self.cached[seq.number]
        waiting = Waiting(seq.request, len(seq.tokens), cached, seq.arrived, self.now, self.work, self.costs)
        seq.due = slack.due(self.policies.order, waiting, self.config.max_num_batched_tokens)

    def begins_s(self) -> float:
        return self.now

    num_loading = 0

    def fetch(self, seq: Sequence, matched: Match) -> bool:
        """There is no store."""
        return False

    def admit(self, seq: Sequence) -> None:
        self.waiting.take(seq)
        seq.status = Status.RUNNING
        insort(self.running, seq, key=seniority)

    def adopt(self, seq: Sequence, matched: Match) -> None:
        self._extend(seq, matched.num_blocks)
        seq.num_planned += matched.num_blocks * self.config.block_size

    def preempt(self, seq: Sequence) -> None:
        assert not seq.rows_in_flight
        self._leave(seq)
        seq.status = Status.WAITING
        seq.num_planned = seq.num_computed = 0
        seq.num_preemptions += 1
        self.waiting.push(seq)

    def add_decodes(self, sequences: Iterable[Sequence]) -> None:
        for seq in sequences:
            self.add_row(seq, 1)

    def add_row(self, seq: Sequence, num_tokens: int) -> None:
        self.service.note_prompt(seq, seq.num_planned, seq.num_planned + num_tokens)
        seq.num_planned += num_tokens
        seq.rows_in_flight += 1
        seq.num_pending += seq.num_planned == len(seq.tokens) + seq.num_pending
        self._extend(seq, blocks_for(seq.num_planned, self.config.block_size) - len(seq.tables[0]))
        self._rows.append((seq, num_tokens))

    def _extend(self, seq: Sequence, num_blocks: int) -> None:
        self.num_free -= num_blocks
        assert self.num_free >= 0, "more blocks than there are"
        seq.tables[0].ids += [0] * num_blocks

    def _leave(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.num_free += len(seq.tables[0])
        seq.tables[0].ids.clear()
