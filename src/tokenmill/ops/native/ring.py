"""Where weights lie that a step takes in one order and that do not all fit into memory: some stay, the others share a
ring. Pure: sizes in, offsets out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_RING_BYTES = 12 * 2**20
"""What a disk needs to have under way and ahead to be busy, where there is as much."""
_LEAST_ITEMS = 3
"""Of the largest weights, that the ring holds at least: one in use, one that is complete, one on its way."""


class Place(NamedTuple):
    """Offset in the memory for weights; `stays`: the bytes are its own, else others' too."""

    offset: int
    stays: bool


def least_bytes(sizes: Sequence[int]) -> int:
    """The smallest budget there is a layout for."""
    return min(sum(sizes), _LEAST_ITEMS * max(sizes))


def lay_out(sizes: Sequence[int], num_bytes: int) -> list[Place]:
    """Places for weights of `sizes` bytes (multiples of the page size), in the order of their use, in `num_bytes`.

    Those that stay are spread evenly among the others, so that there is time to read while they are computed with."""
    assert num_bytes >= least_bytes(sizes), (num_bytes, least_bytes(sizes))
    total = sum(sizes)
    if total <= num_bytes:
        return _one_after_the_other(sizes)
    ring = max(_LEAST_ITEMS * max(sizes), min(_RING_BYTES, num_bytes // 4))
    room = num_bytes - ring
    places: list[Place] = []
    kept = at = passed = 0
    for size in sizes:
        passed += size
        if kept + size <= min(room, room * passed // total + size // 2):
            places.append(Place(ring + kept, True))
            kept += size
            continue
        at = 0 if at + size > ring else at
        places.append(Place(at, False))
        at += size
    return places


def _one_after_the_other(sizes: Sequence[int]) -> list[Place]:
    places, at = [], 0
    for size in sizes:
        places.append(Place(at, True))
        at += size
    return places
