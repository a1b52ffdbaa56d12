"""/admin/kv: blocks of each engine's pools, the largest prefixes that its cache holds, and what tiers below have."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...api.json_reply import JSONReply
from ...control.kv_store import LONGEST_S, AskStore
from ...control.observe.cache_views import CacheViews
from ...core.errors import TokenmillError
from ...core.events import CacheShown
from ..scopes import require_operator


class KVView:
    """ask: of the KV store; None: there is none."""

    def __init__(self, views: CacheViews, ask: AskStore | None = None) -> None:
        self._views = views
        self._ask = ask

    async def show(self, request: HttpRequest) -> Response:
        require_operator(request)
        found = await self._views.ask()
        data = [_shown(link, said) for link, said in sorted(found.items())]
        return JSONReply({"object": "list", "data": data, "tiers": await self._tiers()})

    async def _tiers(self) -> dict[str, Any] | None:
        """By name; None while the store does not answer."""
        if self._ask is None:
            return None
        try:
            async with asyncio.timeout(LONGEST_S):
                told: dict[str, Any] = (await self._ask("stat", {}))["tiers"]
        except (TokenmillError, TimeoutError):
            return None
        return told


def _shown(link: int, said: CacheShown) -> dict[str, Any]:
    """The tree is that of the first pool that sees everything; there is none where all have a window."""
    pools = [
        {"window": pool.window, "blocks": pool.num_blocks, "free": pool.num_free, "cached": pool.num_cached,
         "held": pool.num_held}
        for pool in said.pools
    ]  # fmt: skip
    first = next((pool for pool in pools if not pool["window"]), pools[0] if pools else {})
    return {
        "object": "kv",
        "engine": link,
        "block_size": said.block_size,
        **first,
        "pools": pools,
        "num_published": said.summary.num_published,
        "num_seen": said.summary.num_seen,
        "runs": [run._asdict() | {"parent": None if run.parent < 0 else run.parent} for run in said.summary.runs],
    }
