"""What the server does now, and how it did in the last minute: the body of /admin/load."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

from ...control.observe.monitor import Monitor
from ...control.observe.requests import WAITING, state_of
from ...control.observe.window import WINDOW_S, End, First, spread
from ..client import EngineClient

RATE_S = 10.0
"""Over so many seconds tokens are counted for a rate."""
_RATES = (
    ("prompt_computed", "prompt_tokens_computed"),
    ("prompt_cached", "prefix_hits"),
    ("output", "generation_tokens"),
)


def load_body(client: EngineClient, monitor: Monitor, now: float, unix_s: float, *, by_tenant: bool) -> dict[str, Any]:
    stats, ready, window = client.stats, client.ready, monitor.window
    firsts, ends = window.firsts(now), window.ends(now)
    body: dict[str, Any] = {
        "object": "load",
        "time": unix_s,
        "ready": ready is not None,
        "running": stats.num_running,
        "waiting": stats.num_waiting + client.num_waiting,
        "waiting_in_engines": stats.num_waiting,
        "open": client.num_open,
        "max_num_seqs": 0 if ready is None else ready.max_num_seqs,
        "max_num_batched_tokens": 0 if ready is None else ready.max_num_batched_tokens,
        "predicted_wait_s": client.request_queue.usual_wait_s(now),
        "kv": {
            "usage": stats.kv_usage,
            "blocks": stats.num_blocks,
            "held": stats.num_held_blocks,
            "cached": stats.num_cached_blocks,
            "free": stats.num_free_blocks,
        },
        "steps": stats.num_steps,
        "last_step": {"tokens": stats.last_step_tokens, "duration_s": stats.last_step_s},
        "preemptions": stats.num_preemptions,
        "rate_s": RATE_S,
        "tokens_per_s": {name: window.rate(field, stats, now, RATE_S) for name, field in _RATES},
        "steps_per_s": window.rate("num_steps", stats, now, RATE_S),
        "window_s": WINDOW_S,
        **_group(firsts, ends),
        "classes": _groups(
            firsts, ends, ("priority_class", "profile", "ttft_target_s", "tpot_target_s"),
            lambda terms: (terms.priority_class, terms.profile, terms.ttft_s or None, terms.tpot_s or None),
        ),
        "history": [
            {
                "age_s": now - each.at_s,
                "running": each.stats.num_running,
                "waiting": each.stats.num_waiting,
                "kv_usage": each.stats.kv_usage,
                "kv_held": each.stats.num_held_blocks,
                "kv_cached": each.stats.num_cached_blocks,
                "prompt_tokens_computed": each.stats.prompt_tokens_computed,
                "prompt_tokens_cached": each.stats.prefix_hits,
                "output_tokens": each.stats.generation_tokens,
                "steps": each.stats.num_steps,
            }
            for each in window.history()
        ],
    }  # fmt: skip
    if by_tenant:
        body["tenants"] = _tenants(monitor, firsts, ends)
    return body


def _group(firsts: Iterable[First], ends: Iterable[End]) -> dict[str, Any]:
    """Of the requests among these: waits, and how they ended."""
    ended = list(ends)
    reasons: dict[str, int] = defaultdict(int)
    for each in ended:
        reasons[each.reason] += 1
    return {
        "ttft_s": spread(each.ttft_s for each in firsts),
        "tpot_s": spread(each.tpot_s for each in ended if each.tpot_s is not None),
        "queue_s": spread(each.queue_s for each in ended if each.queue_s is not None),
        "ended": dict(reasons),
        "slo": {
            "attained": sum(each.is_attained is True for each in ended),
            "missed": sum(each.is_attained is False for each in ended),
        },
    }


def _groups(firsts: Iterable[First], ends: Iterable[End], names: tuple[str, ...], key_of: Any) -> list[dict[str, Any]]:
    grouped: dict[tuple[Hashable, ...], tuple[list[First], list[End]]] = defaultdict(lambda: ([], []))
    for first in firsts:
        grouped[key_of(first.terms)][0].append(first)
    for end in ends:
        grouped[key_of(end.terms)][1].append(end)
    return [
        {**dict(zip(names, key, strict=True)), **_group(*grouped[key])}
        for key in sorted(grouped, key=lambda key: tuple(map(str, key)))
    ]


def _tenants(monitor: Monitor, firsts: list[First], ends: list[End]) -> list[dict[str, Any]]:
    """Of the last minute, those with the most tokens first, and what each has open now."""
    found = {group["tenant"]: group for group in _groups(firsts, ends, ("tenant",), lambda terms: (terms.tenant,))}
    running: dict[str, int] = defaultdict(int)
    waiting: dict[str, int] = defaultdict(int)
    for record in monitor.requests:
        counts = waiting if state_of(record) == WAITING else running
        counts[record.terms.tenant] += 1
    tokens: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for end in ends:
        sums = tokens[end.terms.tenant]
        for i, number in enumerate((end.num_prompt, end.num_cached, end.num_output)):
            sums[i] += number
    shown = []
    for tenant in dict.fromkeys((*found, *running, *waiting)):
        group = found.get(tenant) or {"tenant": tenant, **_group((), ())}
        num_prompt, num_cached, num_output = tokens[tenant]
        shown.append(
            {
                **group,
                "in_engines": running[tenant],
                "waiting": waiting[tenant],
                "prompt_tokens": num_prompt,
                "cached_tokens": num_cached,
                "output_tokens": num_output,
            }
        )
    return sorted(shown, key=lambda each: -(each["prompt_tokens"] + each["output_tokens"]))
