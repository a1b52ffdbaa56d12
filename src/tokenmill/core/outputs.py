"""What a client hears of its request: outputs made from a sequence. Changes nothing but when the first token came."""

from __future__ import annotations

from dataclasses import replace

from .errors import TokenmillError
from .events import FINISH_ABORT, FINISH_ERROR, FINISH_MOVED, Output, Timing, output_of
from .request import Request
from .sequence import Sequence
from .step import RowResult


def refused(request: Request, error: TokenmillError, now: float) -> Output:
    """The end of a request that was never let in."""
    return Output(
        request.id,
        finish_reason=FINISH_ERROR,
        num_output=len(request.output_tokens),
        error=error.message,
        error_kind=error.kind,
        error_param=error.param or "",
        timing=Timing(request.arrival_s, -1.0, -1.0, now),
        attempt=request.attempt,
    )


def aborted_before(request: Request, now: float) -> Output:
    """The end of a request that was let in and cancelled before it entered the queue."""
    return Output(
        request.id,
        finish_reason=FINISH_ABORT,
        num_output=len(request.output_tokens),
        timing=Timing(request.arrival_s, -1.0, -1.0, now),
        attempt=request.attempt,
    )


def moved_before(request: Request, now: float) -> Output:
    """The end of a request that goes on elsewhere and had not entered the queue."""
    return aborted_before(request, now)._replace(finish_reason=FINISH_MOVED)


def progressed(seq: Sequence, result: RowResult, num_output: int, now: float, num_drafted: int = 0) -> Output:
    """Tokens, up to the `num_output`th, of which none is the last."""
    if seq.first_token_s >= 0:
        request, num_cached = seq.request, seq.num_cached
        if num_cached > seq.num_prompt:
            num_cached = seq.num_prompt
        return output_of(
            (
                request.id,
                result.tokens,
                result.logprobs,
                (),
                None,
                None,
                num_output,
                num_cached,
                "",
                "",
                "",
                b"",
                None,
                False,
                request.attempt,
                num_drafted,
                seq.is_predicted,
            )
        )
    seq.first_token_s = now
    return Output(
        seq.request.id,
        result.tokens,
        result.logprobs,
        tuple(seq.prompt_logprobs),
        num_output=num_output,
        num_cached=_num_cached(seq),
        timing=_timing(seq, -1.0),
        attempt=seq.request.attempt,
        num_drafted=num_drafted,
        is_predicted=seq.is_predicted,
    )


def ended(
    seq: Sequence,
    reason: str,
    now: float,
    result: RowResult | None = None,
    *,
    stop_token: int | None = None,
    error: TokenmillError | None = None,
) -> Output:
    """The last output, with what `result` gives."""
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
        attempt=seq.request.attempt,
        is_predicted=seq.is_predicted,
    )


def aborted(seq: Sequence, now: float) -> Output:
    if seq.last is None:
        return ended(seq, FINISH_ABORT, now)
    return exported(seq, now, is_saved=False)._replace(finish_reason=FINISH_ABORT)


def exported(seq: Sequence, now: float, *, is_saved: bool) -> Output:
    """The last output of a sequence whose KV was on its way to the store until now."""
    last = seq.last
    assert last is not None and last.timing is not None, last
    return last._replace(is_saved=is_saved, timing=replace(last.timing, finished_s=now))


def _num_cached(seq: Sequence) -> int:
    num_cached = seq.num_cached
    return 0 if num_cached < 0 else num_cached if num_cached < seq.num_prompt else seq.num_prompt


def _timing(seq: Sequence, finished_s: float) -> Timing:
    return Timing(seq.request.arrival_s, seq.first_scheduled_s, seq.first_token_s, finished_s, seq.num_preemptions)
