"""Engines in the order of how soon they would begin with a prompt, kept up to date as their loads change. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from ..core.cost import Costs
from .links import EngineLink
from .load import pace

_ASSUMED = Costs(step_s=1e-2, row_s=1e-5, token_s=1e-4)
"""While no engine has told what its steps take."""
_AGAIN = 64


class Ranked(NamedTuple):
    """What a prompt may expect of an engine (`load.pace`)."""

    base_s: float
    number: int
    token_s: float
    position_s: float
    each_s: float

    def cost_s(self, num_new: int, num_positions: float) -> float:
        """Seconds to the first token of a prompt that has so much to compute."""
        return self.base_s + self.token_s * num_new + self.position_s * num_positions


class Ranking:
    """order  by base_s, then by number
    floor_s, floor_position_s   no engine's token or position takes less
    """

    def __init__(self) -> None:
        self.order: list[Ranked] = []
        self.floor_s = self.floor_position_s = 0.0
        self._of: dict[int, Ranked] = {}
        self._links: dict[int, EngineLink] = {}
        self._changed: set[int] = set()
        self._left = 0

    def __getitem__(self, number: int) -> Ranked:
        return self._of[number]

    @property
    def unsettled(self) -> set[int]:
        """Those that have changed since."""
        return self._changed

    def settle(self, links: Mapping[int, EngineLink]) -> None:
        """Take in what has changed; these are known from now on."""
        if not links.keys() <= self._links.keys():
            for number in [number for number in links if number not in self._links]:
                self._links[number] = links[number]
                self._changed.add(number)
                links[number].load.watch(partial(self._changed.add, number))
        if self._changed:
            for number in self._changed:
                if number in self._links:
                    self._put(number, self._links[number])
            self._changed.clear()
        self._left -= 1
        if self._left < 0 and self.order:
            self._left = _AGAIN
            self.floor_s = min([each.token_s for each in self.order])
            self.floor_position_s = min([each.position_s for each in self.order])

    def leave(self, number: int) -> None:
        if number in self._of:
            self._take(number)
            del self._links[number]

    def _put(self, number: int, link: EngineLink) -> None:
        ready, costs = link.ready, link.costs if link.costs.is_known else _ASSUMED
        num_kv_tokens = ready.num_blocks * ready.block_size
        made = pace(link.load, costs, ready.max_num_batched_tokens, ready.max_num_seqs, num_kv_tokens)
        if number in self._of:
            self._take(number)
        ranked = self._of[number] = Ranked(made[0], number, *made[1:])
        insort(self.order, ranked)
        self.floor_s = min(self.floor_s, ranked.token_s)
        self.floor_position_s = min(self.floor_position_s, ranked.position_s)

    def _take(self, number: int) -> None:
        at = bisect_left(self.order, self._of.pop(number))
        del self.order[at]
