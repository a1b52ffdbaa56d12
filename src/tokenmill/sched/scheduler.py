"""Composes one step: which sequences get a row, and how many tokens each.

What belongs here: the order of service, the token budget, who gives way when blocks run out, who is let in. What never
does: changing a sequence. Decisions are carried out at once through the `Ledger` (the engine core), because a later one
depends on an earlier one: a leader's blocks are matchable as soon as they are planned.

    running sequences, best rank first: each decode takes one token, prefills share what the decodes leave
    then waiting sequences, best rank first, while budget, seats and blocks last

Every running decode gets its token before a prefill gets its first, however long the prompt; and no sequence is passed
over for one of a worse rank that needs the same blocks.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import Protocol

from ..core.config import EngineConfig
from ..core.sequence import Sequence, Status
from .admission import blocks_for
from .queue import WaitingQueue


class Ledger(Protocol):
    """What the scheduler asks of the engine core, which owns every sequence and block."""

    @property
    def num_available_blocks(self) -> int: ...

    def find_match(self, seq: Sequence) -> list[int]:
        """Published blocks that would carry the sequence's planned part on from a block border; changes nothing."""
        ...

    def num_cached_among(self, blocks: List[int]) -> int:
        """How many of them nobody holds: adopting those makes fewer blocks available."""
        ...

    def admit(self, seq: Sequence) -> None:
        """WAITING -> RUNNING: the head of the queue joins the running list at its rank."""
        ...

    def adopt(self, seq: Sequence, blocks: List[int]) -> None:
        """Carry the planned part on over matched blocks."""
        ...

    def preempt(self, seq: Sequence) -> None:
        """RUNNING -> WAITING: leaves the running list and gives its blocks back. It has no row in flight."""
        ...

    def add_row(self, seq: Sequence, num_tokens: int) -> None:
        """Plan the next tokens of the sequence in this step; the blocks they need are available."""
        ...


def num_wanted(seq: Sequence) -> int:
    """Tokens that may be planned now. None when the draws in flight make the end certain."""
    if seq.num_pending and seq.num_output + seq.num_pending >= seq.request.max_tokens:
        return 0
    return len(seq.tokens) + seq.num_pending - seq.num_planned


def chunk_size(start: int, num_left: int, budget: int, block_size: int, first: bool) -> int:
    """Tokens of a prefill from position `start` with `num_left` tokens to go, under `budget`.

    A chunk that does not reach the end stops at a block border, so that the next one, and sequences with the same
    prefix, go on from a published block. Where no border is in reach, only the first prefill of a step takes the rest
    of the budget (it must progress); others wait, rather than compute what a leader is about to publish.
    """
    if num_left <= budget:
        return num_left
    border = (start + budget) // block_size * block_size
    if border > start:
        return border - start
    return budget if first else 0


def compose_step(running: List[Sequence], waiting: WaitingQueue, config: EngineConfig, ledger: Ledger) -> None:
    """Add the rows of one step. `running` is in rank order and follows the ledger's admissions and preemptions."""
    wanted = [(seq, num_wanted(seq)) for seq in running]
    budget = config.max_num_batched_tokens - sum(1 for _, num_tokens in wanted if num_tokens == 1)
    draining: set[int] = set()
    squeezed = False
    first = True
    for seq, num_tokens in wanted:
        if not num_tokens or seq.status is not Status.RUNNING or seq.number in draining:
            continue
        if num_tokens == 1:
            if _fit(seq, 1, running, config, ledger, draining):
                ledger.add_row(seq, 1)
            else:
                squeezed = True
            continue
        ledger.adopt(seq, ledger.find_match(seq))
        planned = chunk_size(seq.num_planned, num_wanted(seq), budget, config.block_size, first)
        if planned:
            fitting = _fit(seq, planned, running, config, ledger, draining)
            squeezed = squeezed or fitting < planned
            if fitting:
                ledger.add_row(seq, fitting)
                budget -= fitting
                first = False
    if not squeezed and len(running) == len(wanted):
        _admit(running, waiting, config, ledger, budget, first)


def _fit(
    seq: Sequence,
    num_tokens: int,
    running: List[Sequence],
    config: EngineConfig,
    ledger: Ledger,
    draining: set[int],
) -> int:
    """How many of `num_tokens` there are blocks for, after preempting sequences of a worse rank if need be.

    The worst one gives way first. If it has a row in flight it cannot be preempted yet: it gets no row in this step
    (`draining`) and is preempted in a later one, unless blocks come free before.
    """
    size = config.block_size
    missing = blocks_for(seq.num_planned + num_tokens, size) - len(seq.table)
    while missing > ledger.num_available_blocks:
        victim = running[-1]
        if victim.rows_in_flight and victim is not seq:
            draining.add(victim.number)
        if victim.rows_in_flight or victim is seq:
            room = (len(seq.table) + ledger.num_available_blocks) * size - seq.num_planned
            return min(num_tokens, room)
        ledger.preempt(victim)
    return num_tokens


def _admit(
    running: List[Sequence],
    waiting: WaitingQueue,
    config: EngineConfig,
    ledger: Ledger,
    budget: int,
    first: bool,
) -> None:
    """Let waiting sequences in while their whole present length fits beside what the running ones still need: the rest
    of their prompts, and one block of growth each, so that an admission does not cause the next preemption."""
    size = config.block_size
    promised = 0
    if len(waiting):
        promised = sum(max(0, blocks_for(len(seq.tokens), size) - len(seq.table)) for seq in running)
    while budget > 0 and len(running) < max_running(config):
        seq = waiting.peek()
        if seq is None:
            return
        matched = ledger.find_match(seq)
        start = len(matched) * size
        num_tokens = chunk_size(start, len(seq.tokens) - start, budget, size, first)
        missing = blocks_for(len(seq.tokens), size) - len(matched) + ledger.num_cached_among(matched)
        if not num_tokens or missing + promised + len(running) > ledger.num_available_blocks:
            return
        ledger.admit(seq)
        ledger.adopt(seq, matched)
        ledger.add_row(seq, num_tokens)
        promised += blocks_for(len(seq.tokens), size) - len(seq.table)
        budget -= num_tokens
        first = False


def max_running(config: EngineConfig) -> int:
    """Most sequences running at once: every one of them must get a token in a step."""
    return min(config.max_num_seqs, config.max_num_batched_tokens)
