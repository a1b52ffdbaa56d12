"""Which prefixes are copied to a further engine before a request needs them there. Pure.

    rate   requests a second whose longest cached prefix it is, of late
    load   of an engine's time, what such requests take at that rate: what is left of their prompts to compute, or,
           where that is more, the rows that their answers are drawn in
    hot    the load is more than a part of the time of all engines that have it, or are being sent it

Hot prefixes are copied, the hottest first, from the engine that has least to do to the one that would begin first with
a prompt, if that is sooner than any that has it, has room to spare, and computing the prefix takes longer than to copy
it. An engine that gets it sooner from the tiers of its KV store gets it from there. What was copied is the prefix
cache's to keep: nothing is ever taken back, and an engine that gave a copy up gets no other of it for a while.

Copies of hot prefixes: Mooncake's scheduler (Qin et al., FAST'25); the measure of load is our own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import NamedTuple, Protocol

from ..core.block import KEY_BYTES, BlockKey
from ..core.own_policy import OwnPolicy
from .links import EngineLink
from .load import pace, positions
from .pools import predicted_load

POLICIES = ("on", "off")

_LATELY_S = 5.0
_FEW = 4
"""Requests before a rate is known."""
_FULL = 0.15
"""Of its time, the most that an engine should have to do with one prefix: steps as such are not counted, which requests
share as far as they come together."""
_ROOM = 0.125
"""Of the target's room, the most that a prefix may take."""
_USED = 0.75
"""Of the target's room, the most that may be used with it, by requests and their predicted answers."""
_WORTH = 2.0
"""Computing a prefix takes so many times as long as copying it, or it is not copied."""
_REST_S = 30.0
_MOST = 512
"""Prefixes that are counted."""


class CopyProposal(NamedTuple):
    """keys: of all blocks of the prefix, joined. source: None: the tiers of the target's store."""

    keys: bytes
    source: EngineLink | None
    target: EngineLink


class CopyView(NamedTuple):
    """links     engines that compute prompts
    holders   who of them has the blocks with these keys, is expected to, or is being sent them
    may_send  whether an engine has them for certain, and can send them now
    may_take  whether an engine can be sent something now
    copy_s    what it takes to copy so many tokens
    load_s    what it takes an engine to load a prefix from the tiers of its store; inf: they do not have it
    """

    links: Sequence[EngineLink]
    holders: Callable[[bytes], set[int]]
    may_send: Callable[[EngineLink, bytes], bool]
    may_take: Callable[[EngineLink], bool]
    copy_s: Callable[[int], float]
    load_s: Callable[[EngineLink, bytes], float]


class Replication(Protocol):
    """Which prefixes are copied where. A policy."""

    def note(self, keys: bytes, num_new: int, now: float) -> None:
        """A request comes that begins with these blocks, which some engine has cached, and with so many tokens more."""
        ...

    @property
    def is_wanted(self) -> bool:
        """Whether `propose` could have something to say."""
        ...

    def propose(self, view: CopyView, now: float) -> Iterator[CopyProposal]: ...


@dataclass(slots=True)
class _Heat:
    """weight    requests, those long ago less
    begun_s   when the first one came
    num_new   tokens that a request has beside the prefix, on average
    """

    keys: bytes
    weight: float
    begun_s: float
    at_s: float
    num_new: float

    def faded(self, now: float) -> float:
        return self.weight * exp((self.at_s - now) / _LATELY_S)

    def rate(self, now: float) -> float:
        """Requests a second."""
        return self.faded(now) / (_LATELY_S * (1 - exp(min(-1e-3, (self.begun_s - now) / _LATELY_S))))


class HotPrefixes:
    """See the module's text."""

    def __init__(self) -> None:
        self._heats: dict[BlockKey, _Heat] = {}
        self._rests: dict[tuple[BlockKey, int], float] = {}

    @property
    def is_wanted(self) -> bool:
        return bool(self._heats)

    def note(self, keys: bytes, num_new: int, now: float) -> None:
        key = keys[-KEY_BYTES:]
        heat = self._heats.get(key)
        if heat is None:
            if len(self._heats) >= _MOST:
                self._forget(sorted(self._heats, key=lambda each: self._heats[each].faded(now))[: _MOST // 2])
            self._heats[key] = _Heat(keys, 1.0, now, now, num_new)
            return
        heat.weight = heat.faded(now) + 1
        heat.at_s = now
        heat.num_new += (num_new - heat.num_new) / heat.weight

    def propose(self, view: CopyView, now: float) -> Iterator[CopyProposal]:
        if not any([link.costs.is_known for link in view.links]):
            return
        self._forget([key for key, heat in self._heats.items() if heat.faded(now) < 0.1])
        self._rests = {name: until_s for name, until_s in self._rests.items() if until_s > now}
        hot: list[tuple[float, BlockKey, set[int]]] = []
        for key, heat in self._heats.items():
            if heat.faded(now) < _FEW:
                continue
            holders = view.holders(heat.keys)
            loads = [_load(link, heat, now) for link in view.links if link.number in holders]
            if loads and sum(loads) / len(loads) > _FULL * len(holders):
                hot.append((-sum(loads) / len(loads) / len(holders), key, holders))
        for _, key, holders in sorted(hot):
            proposal = self._copy(self._heats[key], holders, view)
            if proposal is not None:
                self._rests[key, proposal.target.number] = now + _REST_S
                yield proposal

    def _copy(self, heat: _Heat, holders: set[int], view: CopyView) -> CopyProposal | None:
        sources = [link for link in view.links if link.number in holders and view.may_send(link, heat.keys)]
        copy_s = view.copy_s(_num_tokens(heat, view.links[0])) if sources else inf
        targets: list[tuple[float, int, EngineLink, bool]] = []
        for link in view.links:
            if link.number in holders or not view.may_take(link):
                continue
            load_s = view.load_s(link, heat.keys)
            if self._is_worth(link, heat, min(copy_s, load_s)):
                targets.append((_pace(link)[0], link.number, link, load_s < copy_s))
        if not targets:
            return None
        base_s, _, target, is_loaded = min(targets, key=lambda each: each[:2])
        if base_s >= min(_pace(link)[0] for link in view.links if link.number in holders):
            return None
        source = None if is_loaded else min(sources, key=lambda link: (link.num_tokens, link.number))
        return CopyProposal(heat.keys, source, target)

    def _is_worth(self, link: EngineLink, heat: _Heat, took_s: float) -> bool:
        num_tokens = _num_tokens(heat, link)
        if (heat.keys[-KEY_BYTES:], link.number) in self._rests:
            return False
        if num_tokens > _ROOM * link.num_slots or predicted_load(link) + num_tokens / link.num_slots > _USED:
            return False
        _, token_s, position_s, _ = _pace(link)
        return token_s * num_tokens + position_s * positions(num_tokens, 0) > _WORTH * took_s

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            del self._heats[key]


def replication_named(name: str) -> Replication | None:
    """One of POLICIES, or one's own."""
    if isinstance(name, OwnPolicy):
        own: Replication = name.make()
        return own
    return HotPrefixes() if name == "on" else None


def _pace(link: EngineLink) -> tuple[float, float, float, float]:
    ready = link.ready
    return pace(link.load, link.costs, ready.max_num_batched_tokens, ready.max_num_seqs, link.num_slots)


def _num_tokens(heat: _Heat, link: EngineLink) -> int:
    return len(heat.keys) // KEY_BYTES * link.ready.block_size


def _load(link: EngineLink, heat: _Heat, now: float) -> float:
    """Of the engine's time, what requests for the prefix would take there."""
    _, token_s, position_s, each_s = _pace(link)
    num_hit = _num_tokens(heat, link)
    prompt_s = token_s * heat.num_new + position_s * positions(round(heat.num_new), num_hit)
    rows_s = link.load.num_output * each_s / max(1, link.ready.max_num_seqs)
    return heat.rate(now) * max(prompt_s, rows_s)
