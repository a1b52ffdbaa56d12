"""What the engines' prefix caches hold, asked of them when somebody wants to see it.

An engine answers between two steps, which costs it up to a few milliseconds. So it is asked again only after a while,
however many want to know; they get what it said last.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from ...core.events import CacheShown, ShowCache

FRESH_S = 0.5
"""So long an answer serves."""
LONGEST_S = 5.0
"""An engine that has not answered by then is left out."""
MOST_RUNS = 200


class CacheViews:
    """send: queues a message for one engine."""

    def __init__(self, send: Callable[[ShowCache, int], None]) -> None:
        self._send = send
        self._links: dict[int, None] = {}
        self._numbers = itertools.count()
        self._asked: dict[int, tuple[int, asyncio.Future[CacheShown]]] = {}  # the last of each engine
        self._asked_s: dict[int, float] = {}

    def join(self, link: int) -> None:
        """An engine has come."""
        self._links[link] = None

    def lose(self, link: int) -> None:
        self._links.pop(link, None)
        self._asked_s.pop(link, None)
        _, answer = self._asked.pop(link, (-1, None))
        if answer is not None:
            answer.cancel()

    def answer(self, link: int, message: CacheShown) -> None:
        number, answer = self._asked.get(link, (-1, None))
        if answer is not None and number == message.number and not answer.done():
            answer.set_result(message)

    async def ask(self) -> dict[int, CacheShown]:
        """By the engine's number. Those that go or do not answer in time are left out."""
        asked = {link: self._ask(link) for link in self._links}
        if asked:
            await asyncio.wait(asked.values(), timeout=LONGEST_S)
        return {link: said.result() for link, said in asked.items() if said.done() and not said.cancelled()}

    def _ask(self, link: int) -> asyncio.Future[CacheShown]:
        loop = asyncio.get_running_loop()
        number, answer = self._asked.get(link, (-1, None))
        if answer is None or (answer.done() and loop.time() - self._asked_s[link] >= FRESH_S):
            number, answer = next(self._numbers), loop.create_future()
            self._asked[link], self._asked_s[link] = (number, answer), loop.time()
            self._send(ShowCache(number, MOST_RUNS), link)
        return answer
