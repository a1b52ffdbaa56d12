"""What the router is to know of the requests of a call: the keys of their blocks, and their session."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request as HttpRequest

from ..cluster.keys import num_keys, with_keys
from ..cluster.router import Router
from ..core.events import Ready
from ..core.request import Request

SESSION = "x-session-id"
_MAX_SESSION_CHARS = 256
_MANY = 2048
"""Keys that take a millisecond: more of them are made by a thread."""


async def routed(router: Router, requests: Sequence[Request], ready: Ready, call: HttpRequest | None) -> list[Request]:
    """The requests with what the router looks at, where there is a choice between engines."""
    session = "" if call is None else call.headers.get(SESSION, "")[:_MAX_SESSION_CHARS]
    if session:
        requests = [replace(each, session=session) for each in requests]
    if not router.has_keys:
        return list(requests)
    if num_keys(requests, ready) > _MANY:
        return await asyncio.to_thread(with_keys, requests, ready)
    return with_keys(requests, ready)
