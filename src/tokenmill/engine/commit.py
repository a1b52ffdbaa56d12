"""What the end of a step does to its sequences. Steps end in the order in which they were planned.

A result appends tokens, publishes the blocks that they fill, and says so to clients. When a step fails,

    its own sequences      end with an error
    later steps in flight  are void: they were planned on top of it, and their results are dropped when they arrive
    their sequences        go back to WAITING and are recomputed; draws depend on (seed, choice, position) alone, so
                           the client sees the same tokens
    blocks they published  are withdrawn

Of a row with drafts, the tokens up to the first that ends the sequence are appended. KV is computed of its input token
and of the drafts that were accepted; the next row begins behind these, over what was written for the others.

A row whose mask was not made (lacks_mask) sends its sequence back to WAITING: it draws the same token in another step.

A row with an error ends its sequence alone, and so does one whose logits are not finite. What that sequence holds in
the prefix cache is forgotten, with all that was computed from it, and not fetched again: a retry starts from nothing,
in case a fault lies there.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from copy import copy

from ..core.effects import StepFailed
from ..core.errors import EngineFailed, InvalidRequest, TokenmillError
from ..core.events import FINISH_ERROR, FINISH_LENGTH, FINISH_MOVED, FINISH_STOP, Output
from ..core.loop_guard import REPETITION, tokens_to_loop
from ..core.outputs import ended, progressed
from ..core.request import EXPORT
from ..core.sequence import Sequence, Status
from ..core.step import RowResult, StepResult
from ..kv.connector.scheduler.saves import Saves
from ..sched.steps import Step
from .state import EngineState

_RUNNING = Status.RUNNING
"""A member of an Enum is slow to get at, and this one is compared with for every row."""

CORRUPTED = (
    "The model's values for this request were not finite numbers. If it happens again, the model file or the machine's "
    "memory may be damaged."
)


def commit_step(state: EngineState, saves: Saves, result: StepResult, now: float) -> None:
    """Apply the result of the oldest step in flight."""
    step = _take_oldest(state, result.step)
    before_s, state.last_commit_s = state.last_commit_s, now
    if not step.is_void:
        assert len(result.rows) == len(step.rows), f"step {step.number}: {len(result.rows)} results"
        _count(state, step, result.duration_s, result.late_s)
        if state.speculation is not None and _is_measured(step):
            has_waited = not (step.num_drafts or step.is_ahead)
            costs = state.costs.costs
            seconds = now - before_s - result.late_s
            state.speculation.note_step(step.work, step.num_drafts, costs, seconds, has_waited=has_waited)
        _commit_rows(state, saves, step, result.rows, now)
    state.blocks.end_step(step.number)
    state.kv_events.flush()


def fail_step(state: EngineState, event: StepFailed, now: float) -> None:
    """The oldest step in flight had no effect."""
    step = _take_oldest(state, event.step)
    if not step.is_void:
        for seq in step.sequences:
            seq.rows_in_flight -= 1
        error = EngineFailed(f"A step of the engine failed: {event.message}")
        for later in (*reversed(state.in_flight), step):
            state.blocks.withdraw(later.published)
        running = [seq for seq in step.sequences if seq.status is _RUNNING]
        state.outbox.outputs += [_fail(state, seq, error, now) for seq in running]
        unsent = list(step.released)
        for later in state.in_flight:
            later.is_void = True
            unsent += later.released
            for seq in later.sequences:
                if seq.status is _RUNNING:
                    state.send_back(seq)
        state.released = unsent + state.released
    state.blocks.end_step(step.number)
    state.kv_events.flush()


def _take_oldest(state: EngineState, step_number: int) -> Step:
    step = state.in_flight.popleft()
    assert step.number == step_number, f"step {step_number} ended before step {step.number}"
    return step


def _count(state: EngineState, step: Step, duration_s: float, late_s: float) -> None:
    counters = state.counters
    counters.num_steps += 1
    counters.last_step_tokens = step.num_tokens
    counters.last_step_s = duration_s
    if not step.num_drafts:
        state.costs.note(step.work, duration_s - late_s)


def _is_measured(step: Step) -> bool:
    """Whether the time since the last commit tells what steps with drafts take, or without: it computed no prompt, and
    its sequences ran before, so that it was planned at once."""
    if step.num_more_tokens != step.num_drafts:
        return False
    return all([row[5] is None for row in step.rows])  # row.intro


def _commit_rows(state: EngineState, saves: Saves, step: Step, results: Many[RowResult], now: float) -> None:
    tell, size, num_drawn = state.outbox.outputs.append, state.config.block_size, 0
    speculation, has_states = state.speculation, state.blocks.has_states
    for row, seq, end, result in zip(step.rows, step.sequences, step.ends, results, strict=True):
        number, drawn, _, prompt_logprobs, _, is_corrupted, error, _, spent_s, lacks_mask, slow_s, drafts = result
        assert number == row[0], f"step {step.number}: result of {number} for row {row.seq}"
        if spent_s:
            state.service.note_masks(seq, spent_s)
            seq.slow_s = slow_s
        if seq.status is not _RUNNING:
            continue
        seq.num_computed = end
        seq.rows_in_flight -= 1
        if lacks_mask:
            _put_off(state, seq)
            continue
        if is_corrupted or error:
            tell(_fail_row(state, seq, result, now))
            continue
        if has_states:
            state.settle_states(seq, step.number)
        if row[7]:  # not row.score, of which there are many
            seq.prompt_logprobs += prompt_logprobs
        last: Output | None = None
        if drawn:
            tokens = seq.tokens
            if row[8]:  # not row.drafts
                _count_drafts(state, seq, len(row[8]), len(drawn) - 1)
                result = _accept(state, seq, result)
                token, end = tokens[-1], seq.num_computed
                num_drawn += len(result.tokens)
            else:
                (token,) = drawn
                tokens.append(token)
                seq.num_pending -= 1
                num_drawn += 1
            num_tokens = len(tokens)
            num_output = num_tokens - seq.num_prompt
            num_full = (end if end < num_tokens else num_tokens) // size
            if num_full > seq.tables[-1].num_published:
                last_step = state.in_flight[seq.last_step - step.number - 1] if seq.rows_in_flight else None
                state.publish(seq, num_full, last_step)
            if token in seq.stop_ids and _may_stop(seq, num_output):
                last = ended(seq, FINISH_STOP, now, _without_last(result), stop_token=token)
            elif num_tokens >= seq.loop_check and _is_loop(seq):
                last = ended(seq, FINISH_LENGTH, now, result)._replace(error=REPETITION)
            elif num_tokens >= seq.max_len:
                last = ended(seq, seq.end_reason, now, result)
            else:
                tell(progressed(seq, result, num_output, now, len(row[8])))
                if speculation is not None:
                    speculation.note_tokens(number, result.tokens, drafts, seq.num_pending)
        elif row.sample:
            last = ended(seq, FINISH_STOP, now, result)  # a vector
        if last is not None and row[8]:
            last = last._replace(num_drafted=len(row[8]))
        if last is not None and (output := _finish(state, saves, seq, last, now)) is not None:
            tell(output)
    state.counters.generation_tokens += num_drawn


def _accept(state: EngineState, seq: Sequence, result: RowResult) -> RowResult:
    """Append what a row with drafts drew; of its result, what the sequence takes."""
    num_before, num_taken = len(seq.tokens), 0
    for token in result.tokens:
        seq.tokens.append(token)
        num_taken += 1
        num_tokens = num_before + num_taken
        is_stop = token in seq.stop_ids and _may_stop(seq, num_tokens - seq.num_prompt)
        if is_stop or (num_tokens >= seq.loop_check and _is_loop(seq)) or num_tokens >= seq.max_len:
            break
    seq.num_computed = seq.num_planned = len(seq.tokens) - 1
    state.blocks.slide(seq.tables, seq.num_planned, seq.last_step)
    return result._replace(tokens=result.tokens[:num_taken], logprobs=result.logprobs[:num_taken])


def _count_drafts(state: EngineState, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
    """A row has verified drafts."""
    counters = state.counters
    state.service.note_rejected(seq, num_drafts - num_accepted)
    counters.num_drafts += 1
    counters.num_draft_tokens += num_drafts
    counts = counters.accepted_per_pos
    counts += [0] * (num_accepted - len(counts))
    for position in range(num_accepted):
        counts[position] += 1


def _without_last(result: RowResult) -> RowResult:
    """A token that ends a sequence is not part of its output."""
    return result._replace(tokens=result.tokens[:-1], logprobs=result.logprobs[:-1])


def _may_stop(seq: Sequence, num_output: int) -> bool:
    """A stop token drawn before min_tokens outputs exist is one that the worker had no other token for: what has a
    grammar is whole then, and ends."""
    sampling = seq.request.sampling
    return num_output > sampling.min_tokens or bool(sampling.grammar)


def _is_loop(seq: Sequence) -> bool:
    """Whether its output repeats itself; when that is to be asked again."""
    num_more = tokens_to_loop(seq.tokens, seq.num_prompt)
    seq.loop_check = len(seq.tokens) + num_more
    return num_more == 0


def _put_off(state: EngineState, seq: Sequence) -> None:
    """It draws in another step. Rows that it has in flight are of no use: in them its place is taken by a copy that has
    ended, so that it may be planned again before they come back."""
    if seq.rows_in_flight:
        gone = copy(seq)
        gone.status = Status.FINISHED
        for later in state.in_flight:
            later.sequences[:] = [gone if each is seq else each for each in later.sequences]
    state.counters.num_preemptions += 1
    state.send_back(seq)


def _fail_row(state: EngineState, seq: Sequence, result: RowResult, now: float) -> Output:
    if result.is_corrupted:
        state.counters.num_corrupted += 1
        state.forget(seq)
        return _fail(state, seq, EngineFailed(CORRUPTED), now)
    state.counters.num_grammar_failures += 1
    kind = InvalidRequest if result.is_invalid else EngineFailed
    return _fail(state, seq, kind(result.error), now)


def _finish(state: EngineState, saves: Saves, seq: Sequence, last: Output, now: float) -> Output | None:
    """The last output, unless it is sent later."""
    is_export = seq.request.handoff == EXPORT and last.finish_reason != FINISH_MOVED
    if is_export and saves.export(seq, last, now):
        return None
    state.leave(seq)
    return last


def _fail(state: EngineState, seq: Sequence, error: TokenmillError, now: float) -> Output:
    state.leave(seq)
    return ended(seq, FINISH_ERROR, now, error=error)
