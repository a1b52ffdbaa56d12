"""What becomes of the KV of an answer that has ended: a client may have it kept for a while, and one that called tools
comes back with their results.

    "kv_hints": {"keep_s": 120}     keep the KV of this prompt and its answer so long; 0: keep nothing

Without a word of the client, answers that end in calls of tools are kept for as long as the server says. Kept is in the
tiers of the KV store that the engine uses, which bounds what may be pinned there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from ...cluster.events import Ended
from ...core.events import FINISH_ABORT, Output, StepOutputs
from ...core.request import Request
from ...text.choice import Choice
from .later import KVLater

T = TypeVar("T")
_MOST = 4096
"""Answers of which it is not known yet whether they are kept; older ones are forgotten."""


class Keeper:
    """An Observer. tools_s: for how long answers that end in calls of tools are kept; 0: they are not."""

    def __init__(self, later: KVLater, tools_s: float) -> None:
        self._later = later
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

    def opened(self, requests: Sequence[Request], client: str) -> None:
        pass

    def sending(self, outputs: Sequence[Output], step: StepOutputs | None) -> None:
        pass

    def ended(self, ended: Ended) -> None:
        name = ended.request.id
        if (seconds := self._wanted.pop(name, None)) is not None:
            self._keep(ended, seconds)
        elif name in self._wished:
            if ended.reason == FINISH_ABORT or ended.link is None or not self._later.has_store(ended.link):
                del self._wished[name]
            else:
                _note(self._ended, name, ended)

    def _keep(self, ended: Ended, seconds: float) -> None:
        link, request = ended.link, ended.request
        if not seconds or link is None or not self._later.has_store(link):
            return
        self._later.keep(link, self._later.keys_of(link, request, ended.tokens), seconds, request.cache_salt)


def _note(book: dict[str, T], name: str, what: T) -> None:
    book[name] = what
    if len(book) > _MOST:
        del book[next(iter(book))]
