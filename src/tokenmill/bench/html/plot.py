"""Plots as inline SVG text: axes with round ticks, lines, steps, dots, and estimates with their intervals.

Knows numbers, units and names, nothing of load or latency. A plot is drawn for a width of 420 units, so that its
12-unit text stays readable on a phone; names of series stand in a list above the drawing, where they can wrap. Colours
come from the page as the classes s0 to s5 (they must differ in light, dark and for the colour-blind; see page),
and lines also differ in their dashes. Every text passes through `escape`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TypeVar

WIDTH, HEIGHT = 420, 260
NUM_COLOURS = 6
MAX_TITLES = 500
"""Dots beyond this many carry no hover text: it would be most of the file."""

_TOP, _BOTTOM, _RIGHT = 24, 40, 14
_CHAR = 6.6
_ROW = 30
_BAR_ZONE = 10
"""Below a row's bar, until the name of the next begins."""
_LEAST, _MOST = 1e-100, 1e100
"""Beyond these, in size, a value counts as zero or infinite: no axis could show it."""

Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Axis:
    """`label` with its unit. `low`, `high`: must be inside the range. `ticks`: values and their texts, to replace the
    chosen ones."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Series:
    """`kind`: line, step (each value holds until the next x), dots, or marked (a line with dots). `titles`: hover texts
    of dots. `colour`: its class number, by default its place in the plot."""

    name: str
    points: Sequence[Point]
    kind: str = "line"
    titles: Sequence[str] = ()
    colour: int | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """One row of an interval plot. `values`: single measurements behind it, drawn small."""

    name: str
    value: float
    low: float
    high: float
    colour: int = 0
    values: Sequence[float] = ()


def plot(title: str, x: Axis, y: Axis, series: Sequence[Series], note: str = "") -> str:
    """A figure. Points that cannot be drawn (not finite, or not positive on a log axis) are left out; a figure without
    any point says so."""
    series = [
        replace(each, points=tuple(points), titles=tuple(titles), colour=i if each.colour is None else each.colour)
        for i, each in enumerate(series)
        for points, titles in [_drawable(each, x, y)]
    ]
    series = [each for each in series if each.points]
    if not series:
        return _figure(title, [], '<p class="none">Nothing to draw.</p>', note)
    xs = _Scale.fit(x, [point[0] for each in series for point in each.points])
    ys = _Scale.fit(y, [point[1] for each in series for point in each.points])
    left = max(len(text) for _, text in ys.ticks) * _CHAR + 12
    to_x, to_y = xs.mapper(left, WIDTH - _RIGHT), ys.mapper(HEIGHT - _BOTTOM, _TOP)
    parts = [*_grid(xs, ys, to_x, to_y, left, x.label, y.label)]
    parts += [_draw(each, to_x, to_y, HEIGHT - _BOTTOM) for each in series]
    return _figure(title, series, _svg(title, HEIGHT, parts), note)


def intervals(title: str, x: Axis, rows: Sequence[Estimate], reference: float | None = None, note: str = "") -> str:
    """A figure with one row per estimate: a dot, and a bar from low to high. `reference`: a value to compare with."""
    if not rows:
        return _figure(title, [], '<p class="none">Nothing to draw.</p>', note)
    values = [value for row in rows for value in (row.low, row.high, row.value, *row.values)]
    scale = _Scale.fit(x, [value for value in values if _fits(value, x)] + ([] if reference is None else [reference]))
    height = _TOP + _ROW * len(rows) + _BOTTOM
    # Names of rows stand above their bars: beside them they would take half of a phone's width.
    left, right, bottom = 14.0, WIDTH - _RIGHT - 8, height - _BOTTOM
    to_x = scale.mapper(left, right)
    parts = _x_axis(scale, to_x, _TOP - 8, bottom, x.label)
    for number, row in enumerate(rows):
        y = _TOP + _ROW * (number + 0.5) + 6
        if reference is not None:
            # Beside the bar only: the names above the bars would stand on the line.
            at, end = to_x(reference), bottom if number == len(rows) - 1 else y + _BAR_ZONE
            parts.append(f'<line class="reference" x1="{at:.1f}" x2="{at:.1f}" y1="{y - 4}" y2="{end}"/>')
        hover = f"{row.name}: {short(row.value)}, interval {short(row.low)} to {short(row.high)}"
        parts.append(f'<g class="s{row.colour % NUM_COLOURS}"><title>{escape(hover)}</title>')
        parts.append(f'<text class="row" x="{left}" y="{y - 7:.1f}">{escape(_fit(row.name))}</text>')
        if all(_fits(value, x) for value in (row.low, row.high)):
            parts.append(f'<line class="bar" x1="{to_x(row.low):.1f}" x2="{to_x(row.high):.1f}" y1="{y}" y2="{y}"/>')
        parts += [f'<circle class="small" cx="{to_x(v):.1f}" cy="{y}" r="2"/>' for v in row.values if _fits(v, x)]
        if _fits(row.value, x):
            parts.append(f'<circle cx="{to_x(row.value):.1f}" cy="{y}" r="4.5"/>')
        parts.append("</g>")
    return _figure(title, [], _svg(title, height, parts), note)


def short(value: float) -> str:
    """A number as an axis shows it: three figures, thousands as k and M."""
    size = abs(value)
    for limit, factor, letter in ((1e6, 1e-6, "M"), (1e4, 1e-3, "k")):
        if size >= limit:
            return f"{value * factor:.3g}{letter}"
    return f"{value:.0f}" if size >= 1000 else f"{value:.3g}"


def nice_ticks(low: float, high: float, num: int = 5) -> list[float]:
    """About `num` multiples of 1, 2 or 5 times a power of ten, the first at or below low and the last at or above
    high."""
    span = high - low
    if span <= max(_LEAST, 1e-9 * max(abs(low), abs(high))):
        span = abs(high) if abs(high) > _LEAST else 1.0
    raw = span / num
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten around [low, high], with more between where there are few."""
    start, end = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    factors = (1, 1.5, 2, 3, 5, 7) if high / low < 12 else (1, 2, 5) if end - start <= 2 else (1,)
    every = 1 + (end - start) // 7
    ticks = [factor * 10.0**power for power in range(start, end + 1, every) for factor in factors]
    inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
    below = [tick for tick in ticks if tick < low * (1 - 1e-9)][-1:]
    above = [tick for tick in ticks if tick > high * (1 + 1e-9)][:1]
    return below + inside + above


def thin(items: Sequence[T], most: int) -> list[T]:
    """At most `most` (2 or more) of the items, evenly by place, first and last among them; no chance in it."""
    assert most >= 2, most
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def cumulative(values: Sequence[float], most: int = 240) -> list[Point]:
    """(value, share of values at or below it) of the distribution, thinned evenly, the last hundredth more finely."""
    ranked = sorted(values)
    num = len(ranked)
    if not num:
        return []
    points = [(value, (i + 1) / num) for i, value in enumerate(ranked)]
    tail = num - max(num // 100, min(num, 10))
    return [(ranked[0], 0.0), *thin(points[:tail], most * 5 // 6), *thin(points[tail:], most // 6)]


# ---- drawing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]

    @classmethod
    def fit(cls, axis: Axis, values: Sequence[float]) -> _Scale:
        """The range of all values and of the axis's own bounds, widened to ticks."""
        known = [*values, *(value for value in (axis.low, axis.high) if value is not None and _fits(value, axis))]
        low, high = (min(known), max(known)) if known else (1.0, 10.0)
        if axis.ticks:
            marks = list(axis.ticks)
            low, high = min(low, marks[0][0]), max(high, marks[-1][0])
        else:
            places = log_ticks(low, high) if axis.log else nice_ticks(low, high)
            if len(places) < 2:
                places = [places[0] / 10, places[0], places[0] * 10]
            marks = [(place, short(place)) for place in places]
            low, high = min(low, places[0]), max(high, places[-1])
        return cls(low, high, axis.log, tuple(marks))

    def mapper(self, start: float, end: float) -> Callable[[float], float]:
        """Value -> coordinate, self.low at `start` and self.high at `end`."""
        bend: Callable[[float], float] = math.log10 if self.log else float
        low, high = bend(self.low), bend(self.high)
        per_unit = (end - start) / (high - low)
        return lambda value: start + (bend(value) - low) * per_unit


def _fits(value: float | None, axis: Axis) -> bool:
    return value is not None and abs(value) < _MOST and (value > _LEAST or not axis.log)


def _drawable(series: Series, x: Axis, y: Axis) -> tuple[list[Point], list[str]]:
    kept = [i for i, (a, b) in enumerate(series.points) if _fits(a, x) and _fits(b, y)]
    return [series.points[i] for i in kept], [series.titles[i] for i in kept] if series.titles else []


def _grid(
    xs: _Scale, ys: _Scale, to_x: Callable[[float], float], to_y: Callable[[float], float], left: float, *labels: str
) -> list[str]:
    parts = _x_axis(xs, to_x, None, HEIGHT - _BOTTOM, labels[0])
    for value, text in ys.ticks:
        at = to_y(value)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" text-anchor="end" x="{left - 6:.1f}" y="{at + 4:.1f}">{escape(text)}</text>')
    parts.append(f'<text class="label" x="2" y="12">{escape(labels[1])}</text>')
    return parts


def _x_axis(
    scale: _Scale, to_x: Callable[[float], float], grid_top: float | None, bottom: float, label: str
) -> list[str]:
    """Ticks, with lines up to grid_top where given, and the label. Texts that would touch the one before are left
    out."""
    parts, taken = [], -math.inf
    for value, text in scale.ticks:
        at, half = to_x(value), len(text) * _CHAR / 2
        top = bottom - 4 if grid_top is None else grid_top
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{bottom}"/>')
        middle = min(at, WIDTH - half - 1)
        if middle - half > taken + 4:
            parts.append(
                f'<text class="tick" text-anchor="middle" x="{middle:.1f}" y="{bottom + 15}">{escape(text)}</text>'
            )
            taken = middle + half
    parts.append(f'<text class="label" text-anchor="end" x="{WIDTH - _RIGHT}" y="{bottom + 32}">{escape(label)}</text>')
    return parts


def _draw(series: Series, to_x: Callable[[float], float], to_y: Callable[[float], float], bottom: float) -> str:
    assert series.colour is not None
    name = escape(series.name)
    places = [(f"{to_x(a):.1f}", f"{to_y(b):.1f}") for a, b in series.points]
    parts = [f'<g class="s{series.colour % NUM_COLOURS}"><title>{name}</title>']
    if series.kind in ("line", "marked"):
        parts.append('<path class="line" d="M' + "L".join(f"{x} {y}" for x, y in places) + '"/>')
    elif series.kind == "step":
        steps = places[0][0] + " " + places[0][1] + "".join(f"H{x}V{y}" for x, y in places[1:])
        parts.append(f'<path class="line" d="M{steps}"/>')
    if series.kind in ("dots", "marked"):
        radius = 3.5 if series.kind == "marked" else 2.2
        named = len(series.titles) <= MAX_TITLES
        for i, (x, y) in enumerate(places):
            hover = f"<title>{escape(series.titles[i])}</title>" if series.titles and named else ""
            circle = f'<circle cx="{x}" cy="{y}" r="{radius}"'
            parts.append(f"{circle}>{hover}</circle>" if hover else circle + "/>")
    parts.append("</g>")
    return "".join(parts)


def _fit(name: str) -> str:
    """At most as long as a plot is wide, losing its middle; the hover text has it whole."""
    most = int(WIDTH / _CHAR)
    return name if len(name) <= most else f"{name[: most // 2 - 1]}…{name[-(most // 2) :]}"


def _svg(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return head + "".join(parts) + "</svg>"


def _figure(title: str, series: Sequence[Series], drawing: str, note: str) -> str:
    legend = ""
    if len(series) > 1:
        keys = "".join(
            f'<li class="s{(each.colour or 0) % NUM_COLOURS}"><svg viewBox="0 0 22 10" aria-hidden="true">'
            + ('<circle cx="11" cy="5" r="3.5"/>' if each.kind == "dots" else '<path class="line" d="M1 5L21 5"/>')
            + f"</svg>{escape(each.name)}</li>"
            for each in series
        )
        legend = f'<ul class="legend">{keys}</ul>'
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{legend}{drawing}{below}</figure>"
