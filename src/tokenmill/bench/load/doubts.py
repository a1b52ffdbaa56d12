"""What to know before believing a run's figures: each doubt is a warning of the result.

Pure, as `measure` is.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..result import ClientCost, RequestRow
from .body import CHAT_APIS, POOLING_APIS
from .context import Context
from .histogram import describe
from .player import Played

LATENESS_LIMIT_S = 0.005
LOOP_LAG_LIMIT_S = 0.001


def warnings_of(context: Context, played: Played, rows: Sequence[RequestRow], cost: ClientCost) -> list[str]:
    """One text for each."""
    warnings = []
    late = describe(row.sent_s - row.due_s for row in rows if row.sent_s is not None)
    if late.p99 is not None and late.p99 > LATENESS_LIMIT_S:
        cap = context.schedule.get("max_concurrency")
        cause = f"--max-concurrency {cap} held requests back" if cap else "the client could not keep the schedule"
        warnings.append(
            f"Sends were late: p99 {late.p99 * 1e3:.1f} ms ({cause}). Latencies count from when a request was due."
        )
    if cost.loop_lag_s.p99 is not None and cost.loop_lag_s.p99 > LOOP_LAG_LIMIT_S:
        lag_ms = cost.loop_lag_s.p99 * 1e3
        warnings.append(
            f"The client did not always get the processor in time: its event loop woke up to {lag_ms:.1f} ms late"
            " (p99); latencies may be that much too long."
        )
    if retries := sum(row.num_retries for row in rows):
        warnings.append(f"{retries} sends met a kept connection that the server had just closed, and were repeated.")
    if refused := sum(row.num_refused for row in rows):
        warnings.append(
            f"{refused} sends were refused (429 or 503) and asked again: latencies count from when a request was due."
        )
    good = [row for row in rows if row.ok]
    if 0 < len(good) < len(rows):
        warnings.append(
            f"{len(rows) - len(good)} of {len(rows)} requests failed: latencies are of those that succeeded."
        )
    is_pooling = context.endpoint.get("api") in POOLING_APIS
    whole = sum(row.first_s is None for row in good)
    if whole and not is_pooling:
        warnings.append(f"{whole} of {len(good)} answers came as a whole: they have no TTFT, TPOT or ITL.")
    if any(row.has_usage is False for row in good):
        if context.counts_tokens:
            how = "tokens are counted by --tokenizer, prompts without their template"
        else:
            events = "" if is_pooling else "output tokens are counted from events, "
            how = f"{events}input tokens are not known"
        warnings.append(f"The server sent no usage: {how}.")
    early = [row for row in good if row.output_tokens is not None and row.output_tokens < row.wanted_output_tokens]
    short = sum(row.finish_reason != "length" for row in early) if not is_pooling else 0
    if short:
        warnings.append(
            f"{short} of {len(good)} answers ended before their wanted length"
            " (--ignore-eos, where the server knows it, keeps lengths exact)."
        )
    # A chat template adds what it adds; elsewhere a server may add a beginning-of-text token, and no more.
    off = [row for row in good if row.input_tokens is not None and row.wanted_input_tokens is not None]
    wanted, got = sum(row.wanted_input_tokens or 0 for row in off), sum(row.input_tokens or 0 for row in off)
    if context.endpoint.get("api") not in CHAT_APIS and abs(got - wanted) > len(off):
        warnings.append(
            f"The server counted {got} input tokens where {wanted} were meant; --tokenizer makes text of exact length."
        )
    if played.was_interrupted:
        warnings.append("The run was interrupted; requests in flight were given up.")
    if played.given_up is not None:
        warnings.append(f"The run was given up: {played.given_up}.")
    return warnings
