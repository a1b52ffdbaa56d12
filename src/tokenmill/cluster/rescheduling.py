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

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ..core.config import OwnPolicy
from .entry import Entry
from .links import EngineLink
from .pools import PREFILL, kind_of

DRAIN, BALANCE, ROOM = "drain", "balance", "room"
"""Why a request is moved: its engine leaves; another has more room; one that waits needs its room."""
POLICIES = ("on", "off")

_MOST_AT_ONCE = 2
"""Moves that an engine takes part in at a time, but when it leaves."""
_MOST_DRAINING = 8
_OUT = 160.0
"""An engine gives away while it has room for fewer steps."""
_GAP, _TIMES = 40.0, 1.5
"""To one that has room for so many steps more, and so many times as much."""
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
        targets = [link for link in view.links if view.may_take(link) and kind_of(link.pool) != PREFILL]
        if not targets or len(view.links) < 2:
            return
        rooms = {link.number: _Room(link) for link in view.links}
        for source in sorted(view.links, key=lambda link: rooms[link.number].freeness):
            others = [rooms[link.number] for link in targets if link is not source]
            if not others:
                continue
            if source.is_leaving:
                yield from _drain(source, others, view)
            elif rooms[source.number].freeness < _OUT and kind_of(source.pool) != PREFILL:
                yield from _hand_out(source, others, view)
                yield from _balance(rooms[source.number], others, view)


class _Room:
    """What an engine has left, with what was proposed already.

    left      tokens beside its virtual usage
    freeness  steps that all of its requests can be drawn for in that
    """

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self.left = link.num_slots - virtual_usage(link)

    @property
    def freeness(self) -> float:
        return -_ENDLESS if self.link.is_leaving else self.left / max(1, self.link.num_drawing)


def _drain(source: EngineLink, others: Sequence[_Room], view: View) -> Iterator[Proposal]:
    num_left = _MOST_DRAINING - view.num_moving(source)
    for entry in sorted(source.entries.values(), key=_ease):
        if not view.can_move(entry):
            continue
        is_waiting = not entry.has_progressed
        if not is_waiting:
            num_left -= 1
            if num_left < 0:
                continue
        target = max(others, key=lambda room: room.freeness)
        target.left -= entry.num_tokens
        yield Proposal(entry, target.link, DRAIN, is_waiting)


def _hand_out(source: EngineLink, others: Sequence[_Room], view: View) -> Iterator[Proposal]:
    """What waits because there is no room for it, to where there is."""
    stats = source.stats
    if not stats.num_waiting:
        return
    left = (stats.num_free_blocks + stats.num_cached_blocks) * source.ready.block_size
    for entry in source.entries.values():
        if entry.has_progressed:
            continue
        left -= entry.num_tokens
        target = max(others, key=lambda room: room.freeness)
        fits = _GAP * max(1, target.link.num_drawing) + entry.num_tokens < target.left
        if left < 0 and fits and view.can_move(entry):
            target.left -= entry.num_tokens
            yield Proposal(entry, target.link, ROOM, True)


def _balance(source: _Room, others: Sequence[_Room], view: View) -> Iterator[Proposal]:
    """One request that draws, to the engine with the most room."""
    link = source.link
    target = max(others, key=lambda room: room.freeness)
    has_more = target.freeness > max(source.freeness + _GAP, _TIMES * source.freeness)
    is_busy = max(view.num_moving(link), view.num_moving(target.link)) >= _MOST_AT_ONCE
    if not has_more or is_busy or link.num_drawing < 2:
        return
    movable = [entry for entry in link.entries.values() if _may_gain(entry, target) and view.can_move(entry)]
    if movable:
        entry = min(movable, key=_ease)
        target.left -= entry.num_tokens
        why = ROOM if len(link.entries) > link.num_drawing else BALANCE
        yield Proposal(entry, target.link, why, False)


def _may_gain(entry: Entry, target: _Room) -> bool:
    return entry.has_progressed and entry.num_tokens < target.left and _num_left(entry) >= _WORTH


def virtual_usage(link: EngineLink) -> float:
    """Tokens that it holds, or is to hold."""
    spare = max(1, link.ready.block_size) / 2  # of a last block that is not full
    num_tokens = link.num_arriving + spare * len(link.entries)
    best = 0
    for entry in link.entries.values():
        num_tokens += entry.num_tokens
        best += entry.request.terms.priority_class == 0
    return num_tokens + (_HEADROOM * link.num_slots if best else 0.0)


def policy_named(name: str) -> Rescheduling | None:
    """One of POLICIES, or one's own."""
    return name.make() if isinstance(name, OwnPolicy) else {"on": Freeness(), "off": None}[name]


def _ease(entry: Entry) -> tuple[int, int]:
    """The lowest class first, then what is moved soonest."""
    return -entry.request.terms.priority_class, entry.num_tokens


def _num_left(entry: Entry) -> int:
    guess, num_drawn = entry.guess, len(entry.tokens)
    most = entry.request.max_tokens - len(entry.request.output_tokens)
    return most - num_drawn if guess is None or guess.num_tokens <= num_drawn else guess.num_tokens - num_drawn
