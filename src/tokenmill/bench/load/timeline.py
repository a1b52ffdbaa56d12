"""A run in slices of time."""

from __future__ import annotations

from collections.abc import Sequence

from ..result import Bucket, RequestRow
from .histogram import quantile
from .tally import BIN_S, Tally

NUM_BUCKETS = 100
BUCKET_SIZES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)


def make_timeline(
    rows: Sequence[RequestRow], begin_s: float, end_s: float, tally: Tally | None = None
) -> tuple[float, list[Bucket]]:
    """Slices of a round width, about NUM_BUCKETS of them at most. tally: has the tokens, where rows do not; slices
    have no ITL then."""
    span_s = end_s - begin_s
    sizes = BUCKET_SIZES_S if tally is None else [size for size in BUCKET_SIZES_S if size >= BIN_S]
    width = next((size for size in sizes if span_s / size <= NUM_BUCKETS), span_s / NUM_BUCKETS)
    num = int(span_s / width) + 1 if rows else 0
    due, sent, good, bad, tokens = ([0] * num for _ in range(5))
    busy = [0.0] * num
    firsts: list[list[float]] = [[] for _ in range(num)]
    gaps: list[list[float]] = [[] for _ in range(num)]

    def slot(at_s: float) -> int:
        return min(num - 1, max(0, int((at_s - begin_s) / width)))

    for row in rows:
        due[slot(row.due_s)] += 1
        if row.sent_s is not None:
            sent[slot(row.sent_s)] += 1
        if row.end_s is not None:
            (good if row.ok else bad)[slot(row.end_s)] += 1
        if row.sent_s is not None and row.end_s is not None:
            for i in range(slot(row.sent_s), slot(row.end_s) + 1):
                left = max(row.sent_s, begin_s + i * width)
                busy[i] += max(0.0, min(row.end_s, begin_s + (i + 1) * width) - left)
        first = None if row.first_s is None else row.first_s - row.due_s
        if first is not None and row.first_s is not None:
            firsts[slot(row.first_s)].append(first)
        times = (row.event_s or []) if tally is None else []
        for i, at_s in enumerate(times):
            where = slot(row.due_s + at_s)
            tokens[where] += row.event_tokens[i] if row.event_tokens is not None else 1
            if i:
                gaps[where].append(at_s - times[i - 1])
    if tally is not None:
        tokens = tally.tokens(begin_s, width, num)
    return width, [
        Bucket(
            t_s=i * width,
            num_due=due[i],
            num_sent=sent[i],
            num_ok=good[i],
            num_failed=bad[i],
            output_tokens=tokens[i],
            in_flight=busy[i] / width,
            ttft_p50_s=quantile(sorted(firsts[i]), 0.5) if firsts[i] else None,
            itl_p50_s=quantile(sorted(gaps[i]), 0.5) if gaps[i] else None,
        )
        for i in range(num)
    ]


def offered_rate(rows: Sequence[RequestRow]) -> float | None:
    """Requests per second as they were due, the first being at the span's edge. None for fewer than two moments."""
    due = [row.due_s for row in rows]
    span_s = max(due, default=0.0) - min(due, default=0.0)
    return (len(due) - 1) / span_s if span_s > 0 else None


def in_flight(rows: Sequence[RequestRow], duration_s: float) -> tuple[float, int]:
    """Mean and most requests sent and not yet ended."""
    spans = [(row.sent_s, row.end_s) for row in rows if row.sent_s is not None and row.end_s is not None]
    edges = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    level = most = 0
    for _, step in edges:
        level += step
        most = max(most, level)
    return (sum(end - start for start, end in spans) / duration_s if duration_s > 0 else 0.0), most
