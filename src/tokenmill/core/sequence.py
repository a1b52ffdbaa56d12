"""A request inside one engine: `num_computed` chasing `len(tokens)`.

There is no prefill phase and no decode phase. A sequence has tokens; some have their KV computed; the scheduler plans
the rest. Only EngineCore writes these fields; others read.

    tokens        t0 t1 t2 t3 t4 t5 t6 t7 | ?  ?        `?`: num_pending draws, planned but not yet known
                  |----------|                          num_computed: KV committed
                  |---------------|                     num_planned: KV committed or in a step in flight

    0 <= num_computed <= num_planned < len(tokens) + num_pending

How many tokens a row with drafts draws is not known before its commit. Until then nothing of the sequence is planned,
its draws are not in num_pending, its drafts not in num_planned, and num_planned = len(tokens) + num_pending.

    WAITING -> RUNNING -> FINISHED
    RUNNING -> WAITING              preempted: blocks released, num_computed = 0
    WAITING -> LOADING -> RUNNING   stored KV of its prefix is brought in
    LOADING -> WAITING              it could not be had: computed again
    RUNNING -> EXPORTING -> FINISHED   its KV is put in the store, for others to go on from
    any     -> FINISHED
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from enum import Enum

from .block import BlockKey, BlockTable
from .events import FINISH_LENGTH, Output
from .loop_guard import LOOP_TOKENS
from .request import Request
from .step import TokenLogprob


class Status(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    EXPORTING = "exporting"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one request in one engine.

    number          engine-scoped, in order of arrival: ties break by it
    arrived         the clock of work (core.work) as it arrived
    due             its place in the order of service (core.policy.Order)
    tokens          prompt, then output; grows only in EngineCore.commit
    num_computed    tokens whose KV is committed
    num_planned     tokens whose KV is committed or in a step in flight
    num_pending     draws in flight: tokens that will exist when their steps are committed
    tables          physical block ids in order, one table for each KV group; all are equally long
    keys            keys of the leading full blocks of `tokens`, computed once and kept
    num_cached      tokens served from the prefix cache before the first preemption (-1: never scheduled)
    num_sent        blocks of a table that the worker knows of (0: it holds nothing of this sequence)
    last_step       the last step that carries a row of this sequence (-1: none)
    rows_in_flight  rows in steps that are neither committed nor void
    pause           where a chunk ends, and the next one begins only after the rows in flight; 0: nowhere
    stop_ids        tokens that end it: stop_token_ids, and the end tokens unless they are ignored
    prompt_logprobs scores of the prompt so far, handed out with the first token
    encoded         blocks of the encoder's group that it has, one for each of its contents that differ
    unencoded       those of them that its first row is to fill
    slow_s          processor time of its slow masks, also before it was preempted
    is_predicted    the drafts of its last row with drafts are of its prediction
    last            its last output, while it is EXPORTING
    end_reason      with which it ends there
    max_len         tokens, of prompt and output, with which it ends
    loop_check      the same, from which on it may be a loop; for one without a loop guard, more than there can be
    """

    number: int
    request: Request
    tokens: list[int]
    arrived: int = 0
    due: float = 0
    status: Status = Status.WAITING
    num_computed: int = 0
    num_planned: int = 0
    num_pending: int = 0
    tables: tuple[BlockTable, ...] = field(default_factory=lambda: (BlockTable(),))
    keys: list[BlockKey] = field(default_factory=list)
    num_cached: int = -1
    num_sent: int = 0
    last_step: int = -1
    rows_in_flight: int = 0
    pause: int = 0
    stop_ids: frozenset[int] = frozenset()
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    encoded: tuple[int, ...] = ()
    unencoded: tuple[int, ...] = ()
    slow_s: float = 0.0
    is_predicted: bool = False
    first_scheduled_s: float = -1.0
    first_token_s: float = -1.0
    num_preemptions: int = 0
    last: Output | None = None
    end_reason: str = FINISH_LENGTH
    num_prompt: int = field(init=False)
    max_len: int = field(init=False)
    loop_check: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_tokens)
        self.max_len = self.num_prompt + self.request.max_tokens
        sampling = self.request.sampling
        is_guarded = sampling.loop_guard and not sampling.grammar
        self.loop_check = self.num_prompt + max(LOOP_TOKENS, sampling.min_tokens) if is_guarded else sys.maxsize

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt


def wants_scores(seq: Sequence) -> bool:
    """Whether prompt logprobs are still to be computed: then nothing may come from the prefix cache.

    They are handed out with the first token, so a sequence that has output has had them.
    """
    return seq.request.sampling.prompt_logprobs is not None and seq.num_output == 0
