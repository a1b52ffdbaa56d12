"""The story of one request: spans, one after the other, and what happened in them. Times are seconds since it arrived.

    queue | (engine: prefill | decode)  one engine
    queue | prefill | decode | held | prefill | decode  where the first engine went

A span: {"name", "start_s", "end_s" (null: it goes on), "engine", "events"}; an event: {"name", "at_s", ...}.
"""

from __future__ import annotations

from typing import Any

from .book import Life, Record


def timeline(record: Record, now: float) -> list[dict[str, Any]]:
    """`now`: ends nothing, but cuts what goes on."""
    spans: list[dict[str, Any]] = []
    since = record.arrival_s

    def span(name: str, start_s: float, end_s: float, engine: int | None = None) -> None:
        ended = None if end_s < 0 else max(start_s, end_s) - since
        spans.append({"name": name, "start_s": start_s - since, "end_s": ended, "engine": engine, "events": []})

    scheduled_s = record.scheduled_s if record.scheduled_s >= 0 else -1.0
    begun_s = record.lives[0].given_s if record.lives else -1.0
    queued_till_s = scheduled_s if scheduled_s >= 0 else begun_s
    span("queue", since, queued_till_s if queued_till_s >= 0 else record.ended_s)
    for i, life in enumerate(record.lives):
        is_last = i == len(record.lives) - 1
        end_s = life.lost_s if life.lost_s >= 0 else record.ended_s
        start_s = max(life.given_s, queued_till_s) if i == 0 else life.given_s
        _life(record, life, start_s, end_s, is_first=i == 0, add=span)
        if life.lost_s >= 0:
            next_s = record.ended_s if is_last else record.lives[i + 1].given_s
            span("held", life.lost_s, next_s)
    return spans


def _life(record: Record, life: Life, start_s: float, end_s: float, *, is_first: bool, add: Any) -> None:
    """The spans of one engine: up to its first token of the request, and from there on."""
    first_s = record.first_s if life.num_output == 0 or is_first else -1.0
    if first_s >= 0 and (end_s < 0 or first_s <= end_s) and first_s >= life.given_s:
        add("prefill", start_s, first_s, life.link)
        add("decode", first_s, end_s, life.link)
    else:
        add("prefill" if life.num_output == 0 else "decode", start_s, end_s, life.link)
