"""What front ends ask of engines about KV that is wanted later (`core.kv_events`), and which engine is to be asked.

Most of it is not answered. A prefetch into an engine's pool is; its numbers are below zero, as those of the gateway's
own copies are not.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence

from ...cluster.gateway import Gateway
from ...cluster.keys import keys_of
from ...core.block import split_keys
from ...core.errors import Unavailable
from ...core.events import ToEngine
from ...core.kv_events import KeepKV, PromoteKV
from ...core.moves import Prefetch, Prefetched
from ...core.request import Request

LONGEST_S = 60.0
"""A prefetch that takes longer goes on; nobody waits for it."""


class KVLater:
    """send: queues a message for one engine; gateway: knows engines and stores; links: engines, by number."""

    def __init__(self, send: Callable[[ToEngine, int], None], gateway: Gateway, links: Iterable[int]) -> None:
        self._send = send
        self._gateway = gateway
        self._links = links
        self._numbers = itertools.count(-1, -1)
        self._asked: dict[int, tuple[int, asyncio.Future[Prefetched]]] = {}

    def has_store(self, link: int) -> bool:
        engine = self._gateway.link(link)
        return engine is not None and bool(engine.ready.worker.kv_store)

    def find(self, keys: bytes) -> int | None:
        """The engine to which loading this prefix is least work: of the store that has most of it, as far as is known,
        the one with the fewest requests open. None: no engine has a store."""
        stores = self._gateway.router.stores
        able = [number for number in self._links if self.has_store(number)]
        for level in stores.levels(keys):
            if there := [number for number in able if stores.store_of(number) in level.links]:
                able = there
                break
        return min(able, key=lambda number: (self._gateway.num_open_at(number), number), default=None)

    def keys_of(self, link: int, request: Request, drawn: Sequence[int]) -> bytes:
        """Of the full blocks of its prompt and of the tokens drawn, but for the last, whose KV nobody computed."""
        engine = self._gateway.link(link)
        if engine is None:
            return b""
        tokens = (*request.prompt_tokens, *request.output_tokens, *drawn)
        return keys_of(tokens[:-1], engine.ready, request.adapter, request.cache_salt, request.embeds)

    def keep(self, link: int, keys: bytes, seconds: float, owner: str) -> None:
        if keys and self.has_store(link):
            self._send(KeepKV(keys, seconds, owner), link)

    def promote(self, link: int, keys: bytes) -> None:
        self._send(PromoteKV(keys), link)

    async def prefetch(self, link: int, keys: bytes) -> Prefetched:
        """Raises Unavailable where the engine goes or does not answer in time."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._asked[number] = link, answer
        self._send(Prefetch(number, tuple(split_keys(keys))), link)
        try:
            async with asyncio.timeout(LONGEST_S):
                return await answer
        except TimeoutError:
            raise Unavailable("The engine has not said in time what it has; it goes on.") from None
        finally:
            del self._asked[number]

    def takes(self, message: object) -> bool:
        """Whether this answers something that was asked here."""
        if not isinstance(message, Prefetched) or message.number >= 0:
            return False
        _, answer = self._asked.get(message.number, (-1, None))
        if answer is not None and not answer.done():
            answer.set_result(message)
        return True

    def lose(self, link: int) -> None:
        for number, answer in self._asked.values():
            if number == link and not answer.done():
                answer.set_exception(Unavailable("The engine has gone."))
