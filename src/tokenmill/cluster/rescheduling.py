"""Which running requests go to another engine: Llumnix's policy (Sun et al., OSDI 2024). Pure.

    freeness = (room - virtual usage) / requests that draw

is for how many more steps an engine has room, in tokens; what it shall do counts as if it did it already:

    a request that draws            what it holds
    one that waits                  what it will need, so that room is made for it where it waits (defragmentation)
    one of the best class           and a headroom beside it, so that others keep away (priorities)
    an engine that leaves           everything: all that it has goes elsewhere (drain, scale-in)

The engine with the least freeness gives to the one with the most: of its requests the one of the lowest class, and of
these the one with the fewest tokens, whose KV is moved soonest. A request that only waits is not moved but given to the
other engine. Two engines are balanced while they differ little or the better one has little room itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from .entry import Entry
from .links import EngineLink
from .pools import PREFILL, kind_of

DRAIN, BALANCE, ROOM = "drain", "balance", "room"
"""Why a request is moved: its engine leaves; another has more room; one that waits needs its room."""
POLICIES = ("on", "off")

_MOST_AT_ONCE = 2
"""Moves that an engine takes part in at a time, but when it leaves."""
_MOST_DRAINING = 8
_OUT, _GAP = 192.0, 1.5
"""An engine gives away below so many steps of room, to one that has this many times as much."""
_HEADROOM = 0.1
"""Of the room of an engine, shared by its requests of class P0."""
_WORTH = 48
"""A request that is expected to draw fewer tokens than this is not worth a move."""
_ENDLESS = 1e9


class Proposal(NamedTuple):
    """`is_waiting`: it is given to `target` without anything of it being moved."""

    entry: Entry
    target: EngineLink
    why: str
    is_waiting: bool


class Rescheduling(Protocol):
    """Which requests go elsewhere now. A policy."""

    def propose(self, view: View) -> Iterator[Proposal]: ...


class View(NamedTuple):
    """links      engines that may have requests
    may_take   whether an engine may get some now
    can_move   whether a request may be moved now
    num_moving moves that an engine takes part in
    """

    links: Sequence[EngineLink]
    may_take: Callable[[EngineLink], bool]
    can_move: Callable[[Entry], bool]
    num_moving: Callable[[EngineLink], int]


class Freeness:
    """See the module's text."""

    def propose(self, view: View) -> Iterator[Proposal]:
        targets = [link for link in view.links if view.may_take(link)]
        if not targets or len(view.links) < 2:
            return
        free = {link.number: freeness(link) for link in view.links}
        for source in sorted(view.links, key=lambda link: free[link.number]):
            others = [link for link in targets if link is not source and kind_of(link.pool) != PREFILL]
            if not others or (free[source.number] >= _OUT and not source.is_leaving):
                continue
            if source.is_leaving:
                yield from self._drain(source, others, free, view)
            elif view.num_moving(source) < _MOST_AT_ONCE and kind_of(source.pool) != PREFILL:
                yield from self._balance(source, others, free, view)

    def _drain(
        self, source: EngineLink, others: Sequence[EngineLink], free: dict[int, float], view: View
    ) -> Iterator[Proposal]:
        num_left = _MOST_DRAINING - view.num_moving(source)
        for entry in sorted(source.entries.values(), key=_ease):
            if not view.can_move(entry):
                continue
            is_waiting = not entry.has_progressed
            if not is_waiting:
                num_left -= 1
                if num_left < 0:
                    continue
            target = max(others, key=lambda link: free[link.number])
            _book(free, target, entry)
            yield Proposal(entry, target, DRAIN, is_waiting)

    def _balance(
        self, source: EngineLink, others: Sequence[EngineLink], free: dict[int, float], view: View
    ) -> Iterator[Proposal]:
        target = max(others, key=lambda link: free[link.number])
        if free[target.number] < max(_OUT, _GAP * free[source.number]) or view.num_moving(target) >= _MOST_AT_ONCE:
            return
        room = target.num_slots - virtual_usage(target)
        waiting = [entry for entry in source.entries.values() if not entry.has_progressed]
        if source.stats.num_waiting and waiting and source.num_drawing:
            last = waiting[-1]  # the first of them is next where it is
            if len(waiting) > 1 and view.can_move(last) and last.num_tokens < room:
                _book(free, target, last)
                yield Proposal(last, target, ROOM, True)
                return
        movable = [
            entry
            for entry in source.entries.values()
            if entry.has_progressed and entry.num_tokens < room and _num_left(entry) >= _WORTH and view.can_move(entry)
        ]
        if source.num_drawing > 1 and movable:
            entry = min(movable, key=_ease)
            _book(free, target, entry)
            yield Proposal(entry, target, ROOM if waiting else BALANCE, False)


def freeness(link: EngineLink) -> float:
    """Steps that all of an engine's requests can be drawn for in what room it has."""
    if link.is_leaving:
        return -_ENDLESS
    left = link.num_slots - virtual_usage(link)
    return left / max(1, link.num_drawing)


def virtual_usage(link: EngineLink) -> float:
    """Tokens that it holds, or is to hold."""
    size = max(1, link.ready.block_size)
    num_tokens = sum(link.arriving.values())
    best = 0
    for entry in link.entries.values():
        num_tokens += math.ceil(entry.num_tokens / size) * size
        best += entry.request.terms.priority_class == 0
    return num_tokens + (_HEADROOM * link.num_slots if best else 0.0)


def policy_named(name: str) -> Rescheduling | None:
    """One of POLICIES."""
    return {"on": Freeness(), "off": None}[name]


def _ease(entry: Entry) -> tuple[int, int]:
    """The lowest class first, then what is moved soonest."""
    return -entry.request.terms.priority_class, entry.num_tokens


def _num_left(entry: Entry) -> int:
    guess, num_drawn = entry.guess, len(entry.tokens)
    most = entry.request.max_tokens - len(entry.request.output_tokens)
    return most - num_drawn if guess is None or guess.num_tokens <= num_drawn else guess.num_tokens - num_drawn


def _book(free: dict[int, float], target: EngineLink, entry: Entry) -> None:
    free[target.number] -= entry.num_tokens / max(1, target.num_drawing)
