"""The operator's views: /admin/load, /admin/requests and one request's timeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
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
from ...control.observe.requests import NUM_ENDED, Record, summary
from ...control.observe.timeline import timeline
from ...core.errors import InvalidRequest
from ...core.flight import NUM_STEPS, Flight, reading
from ...core.ports import Clock
from ...core.tenant import ADMIN
from ..client import EngineClient
from ..scopes import require_operator
from .load import load_body

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
        require_operator(request)
        by_tenant = ADMIN in request.state.scopes
        now = self._clock.now()
        return JSONReply(load_body(self._client, self._monitor, now, time.time(), by_tenant=by_tenant))

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


def _count(text: str, name: str, most: int) -> int:
    if text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most:
        return int(text)
    raise InvalidRequest(f"{name} must be between 1 and {most}, got {text[:100]!r}.", param=name)
