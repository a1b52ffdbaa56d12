"""The report of `kv_study`: tables of what each policy saves, and curves by size as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log10
from typing import NamedTuple

from tokenmill.sim.kv_traces import Load

_COLOURS = {"lru": "#0072b2", "cost": "#d55e00", "bound": "#666"}
_WIDE, _HIGH, _LEFT, _TOP = 360, 180, 40, 24


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


def draw(curves: Sequence[Curve], policies: Sequence[str], sizes: Sequence[float]) -> tuple[str, str]:
    """A page in Markdown, and the picture that it shows."""
    return "\n".join(_page(curves, policies)) + "\n", "\n".join(_picture(curves, sizes)) + "\n"


def _page(curves: Sequence[Curve], policies: Sequence[str]) -> Iterator[str]:
    yield "# What policies of KV tiers save"
    yield ""
    models = {curve.model for curve in curves}
    costs = f"--costs {models.pop()} " if len(models) == 1 else ""
    yield f"Made by `python scripts/kv_study.py TRACES {costs}--out docs/develop/reports`; how is said in"
    yield "`scripts/kv_study.py`, `kv_traces.py` and `kv_reuse.py`. Cells: recompute seconds saved, of all there is."
    yield "*Size*: blocks, and as a share of the working set, with which LRU saves 99 %. *Bound*: no policy saves more,"
    yield "whatever it knows of the future. *Closed*: what `cost` closes of LRU's gap to the bound. *Best*:"
    yield "`cost` as a share of the best of the others."
    yield ""
    yield "| trace, costs | closed, mean over sizes | least | best, least over sizes |"
    yield "|---|---|---|---|"
    for curve in curves:
        closed, best = [_closed(point) for point in curve.points], [_best(point) for point in curve.points]
        mean = sum(closed) / len(closed)
        yield f"| {curve.load.name}, {curve.model} | {mean:.0%} | {min(closed):.0%} | {min(best):.0%} |"
    yield ""
    yield "![Saved by size](kv-policies.svg)"
    for curve in curves:
        load = curve.load
        yield ""
        yield f"## {load.name}, costs of {curve.model}"
        yield ""
        yield (
            f"{len(load.requests):,} requests, {sum(len(one.blocks) for one in load.requests):,} blocks of"
            f" {load.block_size} tokens asked, {load.num_blocks:,} distinct; working set {curve.working_set:,};"
            f" endless room saves {curve.total_s:,.0f} s."
        )
        yield ""
        yield f"| size | {' | '.join(policies)} | bound | closed | best |"
        yield "|---|" + "---|" * (len(policies) + 3)
        for point in curve.points:
            cells = [f"{point.saved[policy]:.3f}" for policy in policies]
            cells += [f"{point.bound:.3f}", f"{_closed(point):.0%}", f"{_best(point):.0%}"]
            yield f"| {point.num_blocks:,} ({point.share:.0%}) | {' | '.join(cells)} |"


def _closed(point: Point) -> float:
    lru = point.saved["lru"]
    return (point.saved["cost"] - lru) / (point.bound - lru) if point.bound > lru else 1.0


def _best(point: Point) -> float:
    return point.saved["cost"] / max(saved for policy, saved in point.saved.items() if policy != "cost")


def _picture(curves: Sequence[Curve], sizes: Sequence[float]) -> Iterator[str]:
    columns = 2
    rows = -(-len(curves) // columns)
    width, height = columns * (_WIDE + 2 * _LEFT), rows * (_HIGH + 3 * _TOP)
    size = f'viewBox="0 0 {width} {height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    yield f'<rect width="{width}" height="{height}" fill="#fff"/>'
    for place, curve in enumerate(curves):
        x = (place % columns) * (_WIDE + 2 * _LEFT) + _LEFT
        y = (place // columns) * (_HIGH + 3 * _TOP) + _TOP
        yield f'<g transform="translate({x} {y})">'
        yield from _chart(curve, sizes)
        yield "</g>"
    yield "</svg>"


def _chart(curve: Curve, sizes: Sequence[float]) -> Iterator[str]:
    low = min(log10(sizes[0]), *(log10(point.num_blocks) for point in curve.points))
    high = log10(sizes[-1])

    def spot(num_blocks: float, share: float) -> str:
        return f"{_WIDE * (log10(num_blocks) - low) / (high - low):.1f},{_HIGH * (1 - share):.1f}"

    yield f'<text y="-8" font-weight="bold">{curve.load.name}, {curve.model}</text>'
    for tenths in (0, 5, 10):
        level = _HIGH * (1 - tenths / 10)
        yield f'<path d="M0,{level}H{_WIDE}" stroke="#ddd"/>'
        yield f'<text x="-6" y="{level + 4}" text-anchor="end">{tenths * 10} %</text>'
    for power in range(-(-int(low * 100) // 100), int(high) + 1):
        x = spot(10**power, 0).split(",")[0]
        yield f'<text x="{x}" y="{_HIGH + 14}" text-anchor="middle">{10**power:,}</text>'
    lines: dict[str, list[tuple[float, float]]] = {
        "bound": list(zip(sizes, curve.bound, strict=True)),
        "lru": [
            *((point.num_blocks, point.saved["lru"]) for point in curve.points),
            *zip(sizes, curve.lru, strict=True),
        ],
        "cost": [(point.num_blocks, point.saved["cost"]) for point in curve.points],
    }
    lines["bound"] += [(point.num_blocks, point.bound) for point in curve.points]
    for place, (name, spots) in enumerate(lines.items()):
        points = " ".join(spot(*one) for one in sorted(spots))
        yield f'<polyline points="{points}" fill="none" stroke="{_COLOURS[name]}" stroke-width="1.5"/>'
        y = _HIGH - 34 + 12 * place
        yield f'<text x="{_WIDE - 4}" y="{y}" text-anchor="end" fill="{_COLOURS[name]}">{name}</text>'
