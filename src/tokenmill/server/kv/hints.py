"""What front ends ask of engines about KV that is wanted later (`core.kv_events`), and which engine is to be asked; and
what becomes of the KV of an answer that has ended: a client may have it kept for a while, and one that called tools
comes back with their results.

    "kv_hints": {"keep_s": 120}     keep the KV of this prompt and its answer so long; 0: keep nothing

Without a word of the client, answers that end in calls of tools are kept for as long as the server says. Kept is in the
tiers of the KV store that the engine uses, which bounds what may be pinned there.

Most of what is asked is not answered. A prefetch into an engine's pool is; its numbers are below zero, as those of the
gateway's own copies are not.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ...cluster.events import Ended
from ...cluster.gateway import Gateway
from ...cluster.keys import keys_of
from ...control.observe.observers import Observer
from ...core.block import split_keys
from ...core.errors import Unavailable
from ...core.events import FINISH_ABORT, ToEngine
from ...core.kv_events import KeepKV, PromoteKV
from ...core.moves import Prefetch, Prefetched
from ...core.request import Request
from ...text.choice import Choice

LONGEST_S = 60.0
"""A prefetch that takes longer goes on; nobody waits for it."""


class KVHints:
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


T = TypeVar("T")
_MOST = 4096
"""Answers of which it is not known yet whether they are kept; older ones are forgotten."""


class KVRetention(Observer):
    """An Observer. tools_s: for how long answers that end in calls of tools are kept; 0: they are not."""

    def __init__(self, hints: KVHints, tools_s: float) -> None:
        self._hints = hints
        self._tools_s = tools_s
        self._wished: dict[str, float | None] = {}
        self._wanted: dict[str, float] = {}
        self._ended: dict[str, Ended] = {}

    def __len__(self) -> int:
        """Answers of which it waits to hear more."""
        return len(self._wished.keys() | self._wanted.keys() | self._ended.keys())

    def watch(self, requests: Sequence[Request], keep_s: float | None) -> None:
        """A call has been opened, which wants its KV kept so long; None: it does not say."""
        if keep_s or (keep_s is None and self._tools_s):
            for request in requests:
                _note(self._wished, request.id, keep_s)

    def finish(self, choice: Choice) -> None:
        """Its client has seen its end; the engine may still be drawing."""
        name = choice.request.id
        if name not in self._wished:
            return
        wish = self._wished.pop(name)
        seconds = (self._tools_s if choice.has_calls else 0.0) if wish is None else wish
        ended = self._ended.pop(name, None)
        if ended is not None:
            self._keep(ended, seconds)
        elif seconds:
            _note(self._wanted, name, seconds)

    def forget(self, choices: Iterable[Choice]) -> None:
        """Their client asks for nothing more; those that it has seen the end of are kept all the same."""
        for choice in choices:
            self._wished.pop(choice.request.id, None)
            self._ended.pop(choice.request.id, None)

    def ended(self, ended: Ended) -> None:
        name = ended.request.id
        if (seconds := self._wanted.pop(name, None)) is not None:
            self._keep(ended, seconds)
        elif name in self._wished:
            if ended.reason == FINISH_ABORT or ended.link is None or not self._hints.has_store(ended.link):
                del self._wished[name]
            else:
                _note(self._ended, name, ended)

    def _keep(self, ended: Ended, seconds: float) -> None:
        link, request = ended.link, ended.request
        if not seconds or link is None or not self._hints.has_store(link):
            return
        self._hints.keep(link, self._hints.keys_of(link, request, ended.tokens), seconds, request.cache_salt)


def _note(notes: dict[str, T], name: str, what: T) -> None:
    notes[name] = what
    if len(notes) > _MOST:
        del notes[next(iter(notes))]
