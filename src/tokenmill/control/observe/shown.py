"""A record of the book as JSON. Times of day are Unix seconds, lengths of time seconds; null: not yet, or never."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .book import Record

WAITING, HELD, PREFILL, DECODE, ENDED = "waiting", "held", "prefill", "decode", "ended"
"""No engine has it yet; its engine went and no other has it yet; no token yet; tokens come."""


def state_of(record: Record) -> str:
    if record.reason:
        return ENDED
    if not record.lives:
        return WAITING
    if record.lives[-1].lost_s >= 0:
        return HELD
    return PREFILL if record.first_s < 0 else DECODE


def summary(record: Record, now: float, unix_s: float, count_output: Callable[[str], int]) -> dict[str, Any]:
    """`unix_s`: of the moment `now`. `count_output`: tokens of an open request."""
    is_open = not record.reason
    num_output = count_output(record.id) if is_open else record.num_output
    first_given_s = record.lives[0].given_s if record.lives else -1.0
    queued_till_s = record.scheduled_s if record.scheduled_s >= 0 else first_given_s
    terms = record.terms
    return {
        "id": record.id,
        "object": "request",
        "call": record.root,
        "state": state_of(record),
        "tenant": terms.tenant,
        "client": record.client,
        "priority_class": terms.priority_class,
        "profile": terms.profile,
        "adapter": record.adapter,
        "engine": record.lives[-1].link if record.lives else None,
        "prompt_tokens": record.num_prompt,
        "cached_tokens": None if is_open else record.num_cached,
        "output_tokens": num_output,
        "max_tokens": record.max_tokens,
        "arrived": unix_s - (now - record.arrival_s),
        "age_s": (now if is_open else record.ended_s) - record.arrival_s,
        "queue_s": None if queued_till_s < 0 else queued_till_s - record.arrival_s,
        "ttft_s": record.ttft_s,
        "tpot_s": _running_tpot_s(record, num_output, now) if is_open else record.tpot_s,
        "ttft_target_s": terms.ttft_s or None,
        "tpot_target_s": terms.tpot_s or None,
        "attained": None if is_open else record.is_attained,
        "num_preemptions": None if is_open else record.num_preemptions,
        "num_resumptions": record.num_resumptions,
        "num_moves": record.num_moves,
        "lives": [
            {
                "engine": life.link,
                "start_s": life.given_s - record.arrival_s,
                "end_s": None if life.end_s < 0 else life.end_s - record.arrival_s,
                "ended_by": "loss" if life.lost_s >= 0 else "move" if life.left_s >= 0 else None,
                "why": life.why or None,
                "route": life.route or None,
                "copied_tokens": life.num_copied,
            }
            for life in record.lives
        ],
        "finish_reason": record.reason or None,
        "error": record.error or None,
    }


def _running_tpot_s(record: Record, num_output: int, now: float) -> float | None:
    if record.first_s < 0 or num_output < 2:
        return None
    return max(0.0, now - record.first_s) / (num_output - 1)
