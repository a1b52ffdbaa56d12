"""The operator's views of the work: /admin/load (now, and in the last minute), /admin/requests and one request's
timeline, /admin/decisions and /admin/flight.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Hashable, Iterable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ...api.json_encoder import encode_json
from ...api.json_reply import JSONReply
from ...api.pieces import in_turns
from ...control.observe.monitor import NUM_KEPT, Monitor
from ...control.observe.perfetto import facts_of, trace_parts
from ...control.observe.requests import NUM_ENDED, WAITING, Record, state_of, summary
from ...control.observe.timeline import timeline
from ...control.observe.window import HISTORY_S, WINDOW_S, End, First, Sample, spread
from ...core.errors import InvalidRequest
from ...core.flight import NUM_STEPS, Flight, reading
from ...core.ports import Clock
from ...core.tenant import ADMIN
from ..callers import require_operator
from ..client import EngineClient

RATE_S = 10.0
"""Over so many seconds tokens are counted for a rate."""
_RATES = (
    ("prompt_computed", "prompt_tokens_computed"),
    ("prompt_cached", "prefix_hits"),
    ("output", "generation_tokens"),
)


def load_body(
    client: EngineClient, monitor: Monitor, now: float, unix_s: float, *, by_tenant: bool, history_s: float
) -> dict[str, Any]:
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
        "history": [_sample(each, now) for each in window.history(now, history_s)],
    }  # fmt: skip
    if by_tenant:
        body["tenants"] = _tenants(monitor, firsts, ends)
    return body


def _sample(sample: Sample, now: float) -> dict[str, Any]:
    stats = sample.stats
    ttft_p50_s, ttft_p90_s = sample.ttft_s or (None, None)
    tpot_p50_s, tpot_p90_s = sample.tpot_s or (None, None)
    return {
        "age_s": now - sample.at_s,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv_usage": stats.kv_usage,
        "kv_held": stats.num_held_blocks,
        "kv_cached": stats.num_cached_blocks,
        "prompt_tokens_computed": stats.prompt_tokens_computed,
        "prompt_tokens_cached": stats.prefix_hits,
        "output_tokens": stats.generation_tokens,
        "steps": stats.num_steps,
        "last_step_s": stats.last_step_s,
        "ttft_p50_s": ttft_p50_s,
        "ttft_p90_s": ttft_p90_s,
        "tpot_p50_s": tpot_p50_s,
        "tpot_p90_s": tpot_p90_s,
    }


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


_STATES = ("open", "ended", "all")


def routes(client: EngineClient, monitor: Monitor, clock: Clock) -> list[Route]:
    views = _Views(client, monitor, clock)
    return [
        Route("/admin/load", views.load),
        Route("/admin/requests", views.requests),
        Route("/admin/requests/{id}", views.request),
        Route("/admin/decisions", views.decisions),
        Route("/admin/flight", views.flight),
    ]


class _Views:
    def __init__(self, client: EngineClient, monitor: Monitor, clock: Clock) -> None:
        self._client = client
        self._monitor = monitor
        self._clock = clock

    async def load(self, request: HttpRequest) -> Response:
        """?history_s=: how far back `history` goes."""
        require_operator(request)
        by_tenant = ADMIN in request.state.scopes
        now = self._clock.now()
        history_s = _count(request.query_params.get("history_s", "60"), "history_s", int(HISTORY_S), least=0)
        body = load_body(self._client, self._monitor, now, time.time(), by_tenant=by_tenant, history_s=history_s)
        return JSONReply(body)

    async def requests(self, request: HttpRequest) -> Response:
        """Newest first. ?state=open|ended|all, ?tenant=, ?limit=."""
        require_operator(request)
        asked = request.query_params
        state = asked.get("state", "all")
        if state not in _STATES:
            raise InvalidRequest(f"state must be one of {', '.join(_STATES)}, got {state[:100]!r}.", param="state")
        limit = _count(asked.get("limit", "200"), "limit", 10_000)
        requests = self._monitor.requests
        found = [*(requests.ended if state != "open" else ()), *(requests if state != "ended" else ())]
        if (tenant := asked.get("tenant")) is not None:
            found = [each for each in found if each.terms.tenant == tenant]
        found.sort(key=lambda each: each.arrival_s, reverse=True)
        shown = [self._summary(each) for each in found[:limit]]
        return JSONReply({"object": "list", "data": shown, "has_more": len(found) > limit})

    async def request(self, request: HttpRequest) -> Response:
        """One request by its id, or all choices of a call by the call's: the first, with the ids of all."""
        require_operator(request)
        name = request.path_params["id"]
        record = self._monitor.requests.find(name)
        choices = self._monitor.requests.of_call(record.root if record is not None else name)
        record = record or next(iter(choices), None)
        if record is None:
            raise HTTPException(404, f"No such request is open or among the last {NUM_ENDED} that ended")
        body = self._summary(record)
        body["choices"] = [each.id for each in choices]
        body["timeline"] = timeline(record, self._monitor.rings)
        return JSONReply(body)

    async def decisions(self, request: HttpRequest) -> Response:
        """What was decided about workers and moves of late, newest first. ?limit=."""
        require_operator(request)
        limit = _count(request.query_params.get("limit", "100"), "limit", NUM_KEPT)
        return JSONReply({"object": "list", "data": self._monitor.decisions.shown(limit)})

    async def flight(self, request: HttpRequest) -> Response:
        """An engine's last steps as a trace for ui.perfetto.dev: ?steps=, ?engine= (a number of a life; default: the
        last that came)."""
        require_operator(request)
        asked, rings = request.query_params, self._monitor.rings
        num_steps = _count(asked.get("steps", "1000"), "steps", NUM_STEPS)
        links = rings.links
        if not links:
            raise HTTPException(404, "No engine on this machine is recorded (see --flight-recorder)")
        number = asked.get("engine", str(links[-1]))
        ring = rings.get(int(number)) if number.isascii() and number.isdigit() and len(number) < 9 else None
        if ring is None:
            raise InvalidRequest(
                f"engine must be one of {', '.join(map(str, links))}, got {number[:100]!r}.", param="engine"
            )
        found = await in_turns(reading(bytes(ring.data), num_steps))
        name = f'attachment; filename="tokenmill-flight-{number}.json"'
        body = _written(found, f"engine {number}")
        return StreamingResponse(body, media_type="application/json", headers={"content-disposition": name})

    def _summary(self, record: Record) -> dict[str, Any]:
        return summary(record, self._clock.now(), time.time(), self._client.num_output)


async def _written(flight: Flight, name: str) -> AsyncIterator[bytes]:
    """The trace as JSON, piece by piece: it may come to megabytes."""
    comma = b'{"traceEvents":['
    for part in trace_parts(flight, name):
        if part:
            yield comma + encode_json(part)[1:-1]
            comma = b","
        await asyncio.sleep(0)
    yield b"]," + encode_json(facts_of(flight))[1:]


def _count(text: str, name: str, most: int, least: int = 1) -> int:
    if text.isascii() and text.isdigit() and len(text) < 9 and least <= int(text) <= most:
        return int(text)
    raise InvalidRequest(f"{name} must be between {least} and {most}, got {text[:100]!r}.", param=name)
