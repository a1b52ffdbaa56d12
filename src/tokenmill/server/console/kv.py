"""/admin/kv: blocks of each engine's pools, and the largest prefixes that its cache holds."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...core.events import CacheShown
from ..cache_views import CacheViews
from ..http import JSONReply
from ..scopes import require_operator


class KVView:
    def __init__(self, views: CacheViews) -> None:
        self._views = views

    async def show(self, request: HttpRequest) -> Response:
        require_operator(request)
        found = await self._views.ask()
        return JSONReply({"object": "list", "data": [_shown(link, said) for link, said in sorted(found.items())]})


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
