"""EngineCore: events in, plans and outputs out.

What belongs here: every change to a sequence, and the bookkeeping of steps in flight. What never does: clocks, I/O,
randomness, order of service (`sched`), block ids (`cache`). Features are plan rows or policies, never branches here.

A step's life: `plan` hands out a StepPlan and remembers its rows; `commit` applies the StepResult, in order; `fail`
tells that the step had no effect. When a step fails,

    its own sequences      end with an error
    later steps in flight  are void: they were planned on top of it, and their results are dropped when they arrive
    their sequences        go back to WAITING and are recomputed; draws depend on (seed, choice, position) alone, so
                           the client sees the same tokens
    blocks they published  are withdrawn

A row whose logits are not finite ends its sequence alone, with an error. What the sequence holds in the prefix cache is
forgotten, with all that was computed from it: a retry starts from nothing, in case a fault lies there.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..cache.groups import KVBlocks, Match
from ..cache.hashing import extend_keys, root_key
from ..cache.manager import BlockManager
from ..core.block import num_hidden_blocks
from ..core.config import EngineConfig
from ..core.errors import EngineFailed, InvalidRequest, TokenmillError, Unavailable
from ..core.events import (
    FINISH_ABORT,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_STOP,
    EngineStats,
    Output,
    Timing,
)
from ..core.policy import Waiting
from ..core.request import Request
from ..core.sequence import Sequence, Status
from ..core.step import Introduction, PlanRow, RowResult, StepPlan, StepResult
from ..core.work import step_work
from ..sched.admission import blocks_for, refusal
from ..sched.policies import pick
from ..sched.queue import WaitingQueue
from ..sched.rank import seniority
from ..sched.scheduler import compose_step
from .adapters import AdapterLedger
from .settings import SettingsLedger

CORRUPTED = (
    "The model's values for this request were not finite numbers. If it happens again, the model file or the machine's "
    "memory may be damaged."
)


@dataclass(slots=True)
class _Step:
    """A step in flight. `ends[i]`: num_computed of `sequences[i]` once the step is committed."""

    number: int
    rows: list[PlanRow] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    published: list[tuple[BlockManager, int]] = field(default_factory=list)
    released: tuple[int, ...] = ()
    num_tokens: int = 0
    is_void: bool = False


class EngineCore:
    """All state of one engine. Deterministic: the same calls give the same plans and outputs."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._policies = pick(config)
        self._blocks = KVBlocks(config.groups, config.block_size)
        self._adapters = AdapterLedger()
        self._settings = SettingsLedger()
        self._by_id: dict[str, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._in_flight: deque[_Step] = deque()
        self._composing = _Step(0)
        self._released: list[int] = []
        self._next_number = 0
        self._work_done = 0
        self._is_draining = False
        self._now = 0.0
        self._num_steps = 0
        self._num_preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._prompt_tokens = 0
        self._prompt_tokens_computed = 0
        self._generation_tokens = 0
        self._num_corrupted = 0
        self._last_step_tokens = 0
        self._last_step_s = 0.0

    # ---- events ----

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step in flight."""
        return bool(self._by_id or self._in_flight)

    def add(self, request: Request, now: float) -> list[Output]:
        """Queue a request, or return the Output that refuses it."""
        error: TokenmillError | None
        if self._is_draining:
            error = Unavailable("The engine is shutting down. Try again shortly.")
        elif request.id in self._by_id:
            error = InvalidRequest(f"A request with the id {request.id!r} is running already.", param="request_id")
        elif request.adapter and not self._adapters.takes(request.adapter):
            error = InvalidRequest("The adapter that this request names is not loaded any more.", param="model")
        else:
            error = refusal(request, self.config, len(self._waiting))
        if error is not None:
            return [_refuse(request, error, now)]
        request, stop_ids = self._settings.begin(request)
        tokens = [*request.prompt_tokens, *request.output_tokens]
        seq = Sequence(self._next_number, request, tokens, tables=self._blocks.new_tables(), stop_ids=stop_ids)
        self._next_number += 1
        seq.arrived = self._work_done
        self._now = now
        self.reconsider(seq)
        self._by_id[request.id] = seq
        if request.adapter:
            self._adapters.begin(request.adapter)
        self._waiting.push(seq)
        return []

    def abort(self, request_id: str, now: float) -> list[Output]:
        """End a request; an unknown or finished id is ignored."""
        seq = self._by_id.get(request_id)
        return [] if seq is None else [self._finish(seq, FINISH_ABORT, now)]

    def load_adapter(self, digest: str) -> None:
        """From now on requests may name this adapter."""
        self._adapters.load(digest)

    def unload_adapter(self, digest: str) -> None:
        """No further request may name it; those that do run to their end."""
        self._adapters.unload(digest)

    def take_unused_adapters(self) -> list[str]:
        """Unloaded adapters whose last request has ended: the executor may forget them, after the steps it has."""
        return self._adapters.take_unused()

    def drain(self) -> None:
        """Take no further requests; finish those admitted."""
        self._is_draining = True

    def plan(self, now: float) -> StepPlan | None:
        """The next step to execute; None when there is nothing to run, or enough is in flight."""
        if len(self._in_flight) >= self.config.steps_in_flight or not self._by_id:
            return None
        self._now = now
        step = self._composing
        compose_step(self._running, self._waiting, self.config, self._policies, self)
        if not step.rows:
            return None
        step.released = tuple(self._released)
        self._released.clear()
        self._in_flight.append(step)
        self._composing = _Step(step.number + 1)
        self._work_done += step_work(step.num_tokens, self.config.max_num_batched_tokens)
        return StepPlan(step.number, tuple(step.rows), step.released)

    def commit(self, result: StepResult, now: float) -> list[Output]:
        """Apply the result of the oldest step in flight."""
        step = self._end_oldest(result.step)
        outputs: list[Output] = []
        if not step.is_void:
            assert len(result.rows) == len(step.rows), f"step {step.number}: {len(result.rows)} results"
            self._num_steps += 1
            self._last_step_tokens = step.num_tokens
            self._last_step_s = result.duration_s
            for row, seq, end, row_result in zip(step.rows, step.sequences, step.ends, result.rows, strict=True):
                assert row_result.seq == row.seq, f"step {step.number}: result of {row_result.seq} for row {row.seq}"
                if seq.status is Status.RUNNING:
                    output = self._commit_row(seq, row, end, row_result, step.number, now)
                    if output is not None:
                        outputs.append(output)
        self._blocks.end_step(step.number)
        return outputs

    def fail(self, step_number: int, message: str, now: float) -> list[Output]:
        """The oldest step in flight had no effect: see the charter for what becomes of its sequences."""
        step = self._end_oldest(step_number)
        outputs: list[Output] = []
        if not step.is_void:
            error = EngineFailed(f"A step of the engine failed: {message}")
            for later in (*reversed(self._in_flight), step):
                self._blocks.withdraw(later.published)
            outputs = [self._finish_failed(s, error, now) for s in step.sequences if s.status is Status.RUNNING]
            unsent = list(step.released)
            for later in self._in_flight:
                later.is_void = True
                unsent += later.released
                for seq in later.sequences:
                    if seq.status is Status.RUNNING:
                        self._send_back(seq)
            self._released = unsent + self._released
        self._blocks.end_step(step.number)
        return outputs

    def stats(self) -> EngineStats:
        num_free = num_cached = num_blocks = 0
        kv_usage = 0.0
        for pool in self._blocks.pools:
            num_free += pool.num_free
            num_cached += pool.num_cached
            num_blocks += pool.num_blocks
            kv_usage = max(kv_usage, pool.num_held / max(1, pool.num_blocks))
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_free_blocks=num_free,
            num_cached_blocks=num_cached,
            num_held_blocks=num_blocks - num_free - num_cached,
            num_blocks=num_blocks,
            kv_usage=kv_usage,
            num_steps=self._num_steps,
            num_preemptions=self._num_preemptions,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_computed=self._prompt_tokens_computed,
            generation_tokens=self._generation_tokens,
            last_step_tokens=self._last_step_tokens,
            last_step_s=self._last_step_s,
            running_adapters=_adapters_of(self._running) if self._adapters else (),
            waiting_adapters=_adapters_of(self._waiting) if self._adapters else (),
            num_corrupted=self._num_corrupted,
        )

    # ---- the scheduler's ledger ----

    @property
    def no_match(self) -> Match:
        return self._blocks.no_match

    def num_available_blocks(self, matched: Match) -> list[int]:
        return self._blocks.num_available(matched)

    def find_match(self, seq: Sequence) -> Match:
        size = self.config.block_size
        if seq.num_planned % size or not self.config.caches_prefixes or _wants_scores(seq) or _pools_all(seq):
            return self.no_match
        self._extend_keys(seq)
        return self._blocks.match(seq.keys, seq.tables, (len(seq.tokens) - 1) // size)

    def reconsider(self, seq: Sequence) -> None:
        num_cached = self.find_match(seq).num_blocks * self.config.block_size
        waiting = Waiting(seq.request, len(seq.tokens), num_cached, seq.arrived, self._now)
        seq.due = self._policies.order.due(waiting)

    def admit(self, seq: Sequence) -> None:
        popped = self._waiting.pop()
        assert popped is seq, (popped.number, seq.number)
        seq.status = Status.RUNNING
        insort(self._running, seq, key=seniority)
        if seq.num_cached < 0:
            seq.num_cached = 0
            seq.first_scheduled_s = self._now
            self._prompt_tokens += seq.num_prompt
            self._prefix_queries += len(seq.tokens)

    def adopt(self, seq: Sequence, matched: Match) -> None:
        if not matched.num_blocks:
            return
        self._blocks.adopt(seq.tables, matched, seq.last_step)
        num_tokens = matched.num_blocks * self.config.block_size
        seq.num_planned += num_tokens
        if seq.num_preemptions == 0:
            seq.num_cached += num_tokens
            self._prefix_hits += num_tokens

    def preempt(self, seq: Sequence) -> None:
        assert seq.rows_in_flight == 0, f"sequence {seq.number} has a row in flight"
        self._num_preemptions += 1
        self._send_back(seq)

    def add_row(self, seq: Sequence, num_tokens: int) -> None:
        step, tables, size = self._composing, seq.tables, self.config.block_size
        start = seq.num_planned
        end = start + num_tokens
        num_blocks = len(tables[0].ids)
        if end > num_blocks * size and self.config.keeps_kv:
            num_blocks = blocks_for(end, size)
            self._blocks.extend(tables, num_blocks - len(tables[0].ids))
        num_known_tokens = len(seq.tokens)
        is_drawing = end == num_known_tokens + seq.num_pending
        blocks = _unsent(seq) if num_blocks > seq.num_sent else ()
        if start >= num_known_tokens:
            row = PlanRow(seq.number, start, (), seq.last_step, blocks, None, is_drawing)
        else:
            row = PlanRow(
                seq=seq.number,
                start=start,
                tokens=tuple(seq.tokens[start:end]),
                blocks=blocks,
                intro=None if seq.num_sent else _introduce(seq),
                sample=is_drawing,
                score=start < seq.num_prompt - 1 and _wants_scores(seq),
            )
            self._prompt_tokens_computed += max(0, min(end, seq.num_prompt) - start)
        seq.num_planned = end
        seq.num_pending += is_drawing
        seq.num_sent = num_blocks
        seq.last_step = step.number
        seq.rows_in_flight += 1
        step.rows.append(row)
        step.sequences.append(seq)
        step.ends.append(end)
        step.num_tokens += num_tokens
        num_full = min(end, num_known_tokens) // size
        if num_full > tables[-1].num_published:
            self._publish(seq, num_full, step)
        if self._blocks.has_windows:
            self._blocks.slide(tables, end, step.number)

    # ---- changes of state ----

    def _end_oldest(self, step_number: int) -> _Step:
        step = self._in_flight.popleft()
        assert step.number == step_number, f"step {step_number} ended before step {step.number}"
        if not step.is_void:
            for seq in step.sequences:
                seq.rows_in_flight -= 1
        return step

    def _commit_row(
        self, seq: Sequence, row: PlanRow, end: int, result: RowResult, step_number: int, now: float
    ) -> Output | None:
        seq.num_computed = end
        if result.is_corrupted:
            self._num_corrupted += 1
            self._blocks.forget(seq.tables, [other.tables for other in self._running])
            return self._finish_failed(seq, EngineFailed(CORRUPTED), now)
        if row.score:
            seq.prompt_logprobs += result.prompt_logprobs
        if not row.sample:
            return None
        if seq.request.pooling is not None:
            return self._finish(seq, FINISH_STOP, now, result)
        (token,) = result.tokens
        tokens = seq.tokens
        tokens.append(token)
        seq.num_pending -= 1
        self._generation_tokens += 1
        num_output = len(tokens) - seq.num_prompt
        num_full = min(end, len(tokens)) // self.config.block_size
        if num_full > seq.tables[-1].num_published:
            self._publish(
                seq, num_full, self._in_flight[seq.last_step - step_number - 1] if seq.rows_in_flight else None
            )
        # A stop token drawn before min_tokens outputs exist is one that the worker had no other token for.
        if token in seq.stop_ids and num_output > seq.request.sampling.min_tokens:
            return self._finish(seq, FINISH_STOP, now, stop_token=token)
        if len(tokens) >= seq.max_len:
            return self._finish(seq, FINISH_LENGTH, now, result)
        if seq.first_token_s < 0:
            seq.first_token_s = now
            return Output(
                seq.request.id,
                result.tokens,
                result.logprobs,
                tuple(seq.prompt_logprobs),
                num_output=num_output,
                num_cached=_num_cached(seq),
                timing=_timing(seq, -1.0),
            )
        num_cached = _num_cached(seq)
        return Output(seq.request.id, result.tokens, result.logprobs, (), None, None, num_output, num_cached)

    def _publish(self, seq: Sequence, num_full: int, step: _Step | None) -> None:
        """Make the first `num_full` blocks matchable; they are withdrawn if `step`, the last one in flight that carries
        a row of the sequence, fails."""
        if not self.config.caches_prefixes:
            return
        self._extend_keys(seq)
        published = self._blocks.publish(seq.keys, seq.tables, num_full)
        if step is not None:
            step.published += published

    def _extend_keys(self, seq: Sequence) -> None:
        size = self.config.block_size
        if (len(seq.keys) + 1) * size <= len(seq.tokens):
            request = seq.request
            root = root_key(self.config.numerics_id, request.adapter, request.cache_salt)
            extend_keys(seq.keys, root, seq.tokens, size)

    def _finish(
        self,
        seq: Sequence,
        reason: str,
        now: float,
        result: RowResult | None = None,
        *,
        stop_token: int | None = None,
        error: TokenmillError | None = None,
    ) -> Output:
        """End a sequence in any state. Rows it has in flight are dropped when they come back."""
        if seq.status is Status.WAITING:
            self._waiting.discard(seq)
        else:
            self._release(seq)
        seq.status = Status.FINISHED
        del self._by_id[seq.request.id]
        self._settings.end(seq.request)
        if seq.request.adapter:
            self._adapters.end(seq.request.adapter)
        is_first = seq.first_token_s < 0 and seq.num_output > len(seq.request.output_tokens)
        if is_first:
            seq.first_token_s = now
        return Output(
            request_id=seq.request.id,
            tokens=() if result is None else result.tokens,
            logprobs=() if result is None else result.logprobs,
            prompt_logprobs=tuple(seq.prompt_logprobs) if is_first else (),
            finish_reason=reason,
            stop_token=stop_token,
            num_output=seq.num_output,
            num_cached=_num_cached(seq),
            error="" if error is None else error.message,
            error_kind="" if error is None else error.kind,
            error_param="" if error is None else error.param or "",
            vector=b"" if result is None else result.vector,
            timing=_timing(seq, now),
        )

    def _finish_failed(self, seq: Sequence, error: TokenmillError, now: float) -> Output:
        return self._finish(seq, FINISH_ERROR, now, error=error)

    def _send_back(self, seq: Sequence) -> None:
        """RUNNING -> WAITING: everything but the tokens is computed again."""
        self._release(seq)
        seq.status = Status.WAITING
        seq.num_computed = seq.num_planned = seq.num_pending = 0
        seq.rows_in_flight = 0
        seq.num_preemptions += 1
        if _wants_scores(seq):
            seq.prompt_logprobs.clear()
        self._waiting.push(seq)

    def _release(self, seq: Sequence) -> None:
        """Leave the running list; blocks and the worker's state are given up."""
        self._running.remove(seq)
        self._blocks.release(seq.tables, seq.last_step)
        seq.tables = self._blocks.new_tables()
        if seq.num_sent or not self.config.keeps_kv:
            self._released.append(seq.number)
            seq.num_sent = 0

    def check(self) -> None:
        """Assert what must hold between calls; slow, for tests."""
        self._blocks.check(seq.tables for seq in self._running)
        assert self._running == sorted(self._running, key=seniority), "running is out of order"
        in_flight: dict[int, int] = {}
        for step in self._in_flight:
            for seq in step.sequences:
                if not step.is_void:
                    in_flight[seq.number] = in_flight.get(seq.number, 0) + 1
        num_waiting = 0
        for seq in self._by_id.values():
            assert 0 <= seq.num_computed <= seq.num_planned < len(seq.tokens) + seq.num_pending, seq
            assert seq.rows_in_flight == in_flight.get(seq.number, 0), seq
            assert seq.num_output + seq.num_pending <= seq.request.max_tokens, seq
            assert len({len(table) for table in seq.tables}) == 1, seq
            assert all(max(table.num_published, table.num_released) <= len(table) for table in seq.tables), seq
            if seq.status is Status.RUNNING:
                assert seq.rows_in_flight or seq.num_computed == seq.num_planned, seq
                num_blocks = blocks_for(seq.num_planned, self.config.block_size) if self.config.keeps_kv else 0
                assert len(seq.tables[0]) == num_blocks, seq
                for group, table in zip(self.config.groups, seq.tables, strict=True):
                    num_hidden = num_hidden_blocks(seq.num_planned, group.window, self.config.block_size)
                    assert table.num_released == num_hidden, seq
            else:
                num_waiting += 1
                assert seq.status is Status.WAITING and not len(seq.tables[0]) and not seq.rows_in_flight, seq
        assert num_waiting == len(self._waiting)
        assert self._by_id or not len(self._settings)
        adapters = [seq.request.adapter for seq in self._by_id.values() if seq.request.adapter]
        self._adapters.check({digest: adapters.count(digest) for digest in adapters})
        assert num_waiting + len(self._running) == len(self._by_id)


def _wants_scores(seq: Sequence) -> bool:
    """Whether prompt logprobs are still to be computed: then nothing may come from the prefix cache.

    They are handed out with the first token, so a sequence that has output has had them.
    """
    return seq.request.sampling.prompt_logprobs is not None and seq.num_output == 0


def _pools_all(seq: Sequence) -> bool:
    """Whether its vector takes positions that a prefix hit would not compute."""
    return seq.request.pooling is not None and seq.request.pooling.needs_all


def _unsent(seq: Sequence) -> tuple[int, ...]:
    """Table entries that the worker does not know of, group after group."""
    return tuple(block for table in seq.tables for block in table.ids[seq.num_sent :])


def _introduce(seq: Sequence) -> Introduction:
    request = seq.request
    num_prompt = seq.num_prompt
    return Introduction(
        prompt_tokens=request.prompt_tokens,
        output_tokens=tuple(seq.tokens[num_prompt:]),
        sampling=request.sampling,
        seed=request.seed,
        choice=request.choice,
        eos_token_ids=() if request.sampling.ignore_eos else request.eos_token_ids,
        pooling=request.pooling,
        adapter=request.adapter,
        bad_words=request.bad_words,
    )


def _adapters_of(sequences: Iterable[Sequence]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(seq.request.adapter for seq in sequences if seq.request.adapter))


def _num_cached(seq: Sequence) -> int:
    num_cached = seq.num_cached
    return 0 if num_cached < 0 else num_cached if num_cached < seq.num_prompt else seq.num_prompt


def _timing(seq: Sequence, finished_s: float) -> Timing:
    return Timing(seq.request.arrival_s, seq.first_scheduled_s, seq.first_token_s, finished_s)


def _refuse(request: Request, error: TokenmillError, now: float) -> Output:
    return Output(
        request.id,
        finish_reason=FINISH_ERROR,
        num_output=len(request.output_tokens),
        error=error.message,
        error_kind=error.kind,
        error_param=error.param or "",
        timing=Timing(request.arrival_s, -1.0, -1.0, now),
    )
