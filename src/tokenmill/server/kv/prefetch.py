"""POST /admin/kv/prefetch: bring what is stored of a prompt nearer, before it is asked for.

{"prompt" or "messages", ...}      as a request that will come
"to": "host" (default)             into host memory of the machine's KV store; not waited for
      "pool"                       into an engine's own pool; the answer says how much of it is there
"worker"                           which engine; without: the one to which it is least work
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...api.fields import Fields
from ...api.json_reply import JSONReply
from ...control.workers.roster import READY
from ...core.errors import InvalidRequest, NotFound
from ..client import EngineClient
from ..scopes import require_local_admin
from .wanted import WantedKV

HOST, POOL = PLACES = ("host", "pool")
_NO_STORE = "No engine here has a KV store with tiers: start it with --kv-host, --kv-disk, --kv-remote or --kv-store."

ReadWanted = Callable[..., Awaitable[tuple[WantedKV, Fields]]]


class PrefetchView:
    """read: the KV that a body names, and its fields besides."""

    def __init__(self, client: EngineClient, read: ReadWanted) -> None:
        self._client = client
        self._read = read

    async def prefetch(self, request: HttpRequest) -> Response:
        require_local_admin(request)
        wanted, fields = await self._read(request, "to", "worker")
        to, name = fields.text("to") or HOST, fields.text("worker")
        if to not in PLACES:
            raise InvalidRequest(f"to must be host or pool, got {to[:100]!r}.", param="to")
        later = self._client.kv_later
        link = later.find(wanted.keys) if name is None else self._link(name)
        if link is None or not later.has_store(link):
            raise NotFound(_NO_STORE)
        reply: dict[str, Any] = {
            "object": "kv.prefetch",
            "num_tokens": len(wanted.tokens),
            "num_blocks": wanted.num_blocks,
            "worker": self._name(link),
            "to": to,
        }
        if to == POOL:
            said = await later.prefetch(link, wanted.keys)
            reply |= {"num_cached": said.num_blocks, "error": said.error or None}
        elif wanted.keys:
            later.promote(link, wanted.keys)
        return JSONReply(reply, status_code=200 if to == POOL else 202)

    def _link(self, name: str) -> int:
        worker = self._client.roster.find(name)
        if worker is None:
            raise NotFound(f"There is no worker {name[:100]!r}.", param="worker")
        if worker.state != READY or worker.link is None:
            raise InvalidRequest(f"Worker {name} is {worker.state}; it must be ready.", param="worker")
        return worker.link

    def _name(self, link: int) -> str:
        engine = self._client.gateway.link(link)
        return "" if engine is None else engine.ready.worker.id
