"""/admin/workers: who works, and how one is taken out or put into another pool while all others serve on."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from ...api.fields import Fields
from ...api.json_reply import JSONReply
from ...api.sandbox import parse_small
from ...control.workers.roster import POOL_NAME, POOL_RULE, READY, Worker
from ...core.errors import InvalidRequest, NotFound
from ..callers import require_local_admin, require_operator
from ..client import EngineClient
from ..limits import Limits


def routes(client: EngineClient, limits: Limits) -> list[Route]:
    views = _Views(client, limits)
    return [
        Route("/admin/workers", views.workers, methods=["GET"]),
        Route("/admin/workers/{worker}/drain", views.drain, methods=["POST"]),
        Route("/admin/workers/{worker}/pool", views.pool, methods=["POST"]),
    ]


class _Views:
    def __init__(self, client: EngineClient, limits: Limits) -> None:
        self._client = client
        self._limits = limits

    async def workers(self, request: HttpRequest) -> Response:
        require_operator(request)
        return JSONReply({"object": "list", "workers": [self._shown(each) for each in self._client.roster.shown()]})

    async def drain(self, request: HttpRequest) -> Response:
        """?restart=true: a fresh process follows."""
        require_local_admin(request)
        worker = self._ready(request)
        restart = request.query_params.get("restart", "false")
        if restart not in ("true", "false"):
            raise InvalidRequest(f"restart must be true or false, got {restart[:100]!r}.", param="restart")
        comes_back, owner = restart == "true", worker.owner
        if comes_back and owner is None:
            raise InvalidRequest(
                f"Worker {worker.facts.id} was not started by this server: whoever runs it starts it again.",
                param="restart",
            )
        others = [each for each in self._client.roster.shown() if each.state == READY and each is not worker]
        if not others and not comes_back:
            raise InvalidRequest(
                f"Worker {worker.facts.id} is the only one that serves: give restart=true, or stop the server.",
                param="worker",
            )
        assert worker.link is not None
        if owner is not None:
            owner.will_end(comes_back)
        self._client.drain(worker.link)
        return JSONReply(self._shown(worker), status_code=202)

    async def pool(self, request: HttpRequest) -> Response:
        """{"pool": name}"""
        require_local_admin(request)
        async with self._limits.body(request) as data:
            fields = Fields(parse_small(data or b"{}"))
        pool = fields.required_text("pool")
        if rest := fields.unread():
            raise InvalidRequest(f"{rest[0][:100]} is not known here.", param=rest[0][:100])
        if not POOL_NAME.fullmatch(pool):
            raise InvalidRequest(f"pool {POOL_RULE}.", param="pool")
        worker = self._ready(request)
        assert worker.link is not None
        self._client.put_into_pool(worker.link, pool)
        self._client.roster.pool(worker, pool)
        return JSONReply(self._shown(worker))

    def _ready(self, request: HttpRequest) -> Worker:
        """The worker that the path names. Raises NotFound, and InvalidRequest where it does not serve."""
        name = request.path_params["worker"]
        worker = self._client.roster.find(name)
        if worker is None:
            raise NotFound(f"There is no worker {name[:100]!r}.", param="worker")
        if worker.state != READY:
            raise InvalidRequest(f"Worker {name} is {worker.state}; it must be ready.", param="worker")
        return worker

    def _shown(self, worker: Worker) -> dict[str, Any]:
        facts = worker.facts
        link = None if worker.link is None else self._client.gateway.link(worker.link)
        stats = None if link is None else link.stats
        return {
            "id": facts.id,
            "pid": facts.pid or None,
            "pool": facts.pool,
            "state": worker.state,
            "since": worker.since_s,
            "incarnation": facts.incarnation or None,
            "address": worker.address or None,
            "host": facts.host or None,
            "is_local": worker.owner is not None,
            "engine": worker.link,
            "num_open": 0 if link is None else len(link.entries),
            "num_running": 0 if stats is None else stats.num_running,
            "num_waiting": 0 if stats is None else stats.num_waiting,
            "num_steps": 0 if stats is None else stats.num_steps,
            "kv_usage": 0.0 if stats is None else stats.kv_usage,
        }
