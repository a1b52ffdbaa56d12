"""What `kv_study` finds and `kv_report` draws."""

from __future__ import annotations

from typing import NamedTuple

from .kv_traces import Load

CURVE = tuple(10 ** (3 + step / 4) for step in range(17))
"""Blocks, 1,000 to 10 million."""


class Point(NamedTuple):
    """saved: policy -> share of what endless room would save. bound: no policy saves more."""

    share: float
    num_blocks: int
    saved: dict[str, float]
    bound: float


class Curve(NamedTuple):
    """points: of LRU and of the bound, at CURVE."""

    load: Load
    model: str
    total_s: float
    working_set: int
    points: tuple[Point, ...]
    lru: tuple[float, ...]
    bound: tuple[float, ...]
