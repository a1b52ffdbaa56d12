"""What the router is told of the requests of a call."""

from __future__ import annotations

import asyncio

from starlette.requests import Request as HttpRequest

from tokenmill.cluster.router import Router
from tokenmill.core.events import Ready
from tokenmill.core.request import Request, SamplingParams
from tokenmill.kv.blocks.hashing import prompt_keys
from tokenmill.server.generation import routed

READY = Ready("m", 2**20, 100, (), "id", 4, 40)


def call(**headers: str) -> HttpRequest:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return HttpRequest({"type": "http", "headers": named})


def test_requests_carry_keys_where_there_is_a_choice_and_their_session() -> None:
    """Also those of a prompt so long that a thread makes them; choices of one prompt share them."""

    async def check() -> None:
        router = Router()
        made = [Request(f"r{at}", tuple(range(10)), SamplingParams(), 1, 0, cache_salt="s") for at in range(2)]
        (plain, _) = await routed(router, made, READY, call(x_session_id="me"))
        assert (plain.session, plain.keys) == ("me", b""), "one engine: nothing to choose"
        router.has_keys = True
        assert (await routed(router, made, READY, None))[0].keys == prompt_keys("id", "", "s", tuple(range(10)), 4)
        long = tuple(range(12_000))
        twins = [Request(f"l{at}", long, SamplingParams(), 1, 0) for at in range(2)]
        one, two = await routed(router, twins, READY, None)
        assert one.keys is two.keys and one.keys == prompt_keys("id", "", "", long, 4)
        short = Request("s", (1, 2), SamplingParams(), 1, 0)
        assert await routed(router, [short], READY, None) == [short]

    asyncio.run(check())
