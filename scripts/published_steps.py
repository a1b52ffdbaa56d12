"""Published durations of steps against the cost model of `tokenmill.sim.roofline`: its coefficients for each software,
fitted to some of them, and how far off it is on the others.

`cost_model_page` shows them, with the coefficients of `sim/tables/coefficients.toml`. Points are in
`published_steps.toml`, each with its source. Loads of peak throughput have all their requests from the start. The
engine admits a request when its whole length fits (`GUARANTEED_NO_EVICT` of TensorRT-LLM), and a step has a token of
each running request and as many prompt tokens as its limit allows. Requests of one load have one length, so that those
admitted in one step stay together and a step's work follows from the groups: nothing is simulated one by one.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenmill.core.cost import Work
from tokenmill.sim.fields import Fields
from tokenmill.sim.hardware import Hardware, hardware_named
from tokenmill.sim.models import ModelShape, model_named
from tokenmill.sim.roofline import (
    USUAL,
    Coefficients,
    Parallel,
    Precision,
    Roofline,
    Variant,
    coefficients_named,
    variant_of,
)

POINTS = Path(__file__).with_suffix(".toml")
PEAK = "peak"
KINDS = {"prompts": 3, "decodes": 3, "answers": 4, PEAK: 4}
"""Of points, with how many numbers each."""
_SHARES = ("compute", "compute_8bit", "attention", "memory", "kv", "link")
_SHARES_4BIT = ("compute_4bit", "memory_4bit")
OF_ALL = (*_SHARES, "overlap", "link_s", "step_s", "layer_s", "row_s")
OF_4BIT = (*_SHARES_4BIT, "experts_4bit_s")
FITTED = (*OF_ALL, *OF_4BIT)
"""Coefficients that are fitted, those of 4 bits where points have such weights; the others of Reached are assumed."""
INTERVAL = ("error_low", "error_high", "num_held_out")
_LIMITS = {
    **dict.fromkeys((*_SHARES, *_SHARES_4BIT), (0.2, 0.95)),
    "overlap": (1.0, 8.0),
    "link_s": (2e-6, 1e-4),
    "step_s": (1e-4, 4e-2),
    "layer_s": (1e-6, 5e-4),
    "row_s": (1e-6, 3e-4),
    "experts_4bit_s": (1e-6, 1e-3),
}
_PEAK_ROWS, _PEAK_TOKENS = 4096, 8192
"""Of one copy of the model: most requests, and most tokens of a step, of loads of peak throughput."""
_PEAK_MEMORY_SHARE, _PEAK_RESERVE_BYTES = 0.95, 3 * 2**30
_PRIOR = 0.003
"""What a coefficient that is off its usual value by a factor of e counts, beside a mean squared log error."""


class Series(NamedTuple):
    """Points of one table: of kind `prompts`, `decodes` or `answers`, each with its milliseconds last, or of kind
    `peak`, each with its output tokens a second last. cell: of the coefficients that belong to it."""

    serves: str
    kind: str
    model: ModelShape
    hardware: Hardware
    parallel: Parallel
    precision: Precision
    is_fitted: bool
    points: tuple[tuple[float, ...], ...]
    source: str
    note: str
    variant: Variant

    @property
    def coefficients(self) -> Coefficients:
        """The coefficients of the table."""
        return coefficients_named(self.serves, self.variant)

    def cost_model(self, coefficients: Coefficients) -> Roofline:
        return Roofline(self.model, self.hardware, self.parallel, self.precision, coefficients)

    @property
    def name(self) -> str:
        """Model, devices and precision."""
        tensor, pipeline, data, _, _ = self.parallel
        parts = [f"TP{tensor}"] * (tensor > 1) + [f"PP{pipeline}"] * (pipeline > 1) + [f"EP{data}"] * (data > 1)
        weights = [self.precision.weights] * (self.precision.weights != "bf16")
        return " ".join((self.model.title, "on", self.hardware.name, *parts, *weights))

    def predicted(self, coefficients: Coefficients) -> list[float]:
        """Milliseconds of each point, or tokens a second."""
        cost_model = self.cost_model(coefficients)
        if self.kind == PEAK:
            return [point[1] * point[2] / _peak_seconds(cost_model, point) for point in self.points]
        return [1e3 * _seconds(cost_model, self.kind, point) for point in self.points]

    def errors(self, coefficients: Coefficients) -> list[float]:
        """The time that is predicted over the one that is published, less 1, of each point."""
        pairs = zip(self.predicted(coefficients), self.points, strict=True)
        if self.kind == PEAK:
            return [point[-1] / ours - 1 for ours, point in pairs]
        return [ours / point[-1] - 1 for ours, point in pairs]


def _seconds(cost_model: Roofline, kind: str, point: Sequence[float]) -> float:
    num_rows, num_tokens = point[:2]
    prompts = Work(num_rows, num_rows * num_tokens, num_rows * num_tokens * (num_tokens - 1) / 2, 0, num_rows)
    if kind == "prompts":
        return cost_model.predict(prompts)
    if kind == "decodes":
        return cost_model.predict(_decodes(num_rows, num_tokens))
    num_drawn = point[2]
    # The cost model is linear in positions, so that all decodes take what as many at the mean position do.
    return cost_model.predict(prompts) + (num_drawn - 1) * cost_model.predict(
        _decodes(num_rows, num_tokens + num_drawn / 2)
    )


def _peak_seconds(cost_model: Roofline, point: Sequence[float]) -> float:
    """Of all requests, whose whole lengths are reserved in the KV that memory holds."""
    num_prompt, num_output, num_requests = map(round, point[:3])
    num_copies, length = cost_model.parallel.data, num_prompt + num_output
    num_fit = cost_model.num_kv_blocks(1, _PEAK_MEMORY_SHARE, _PEAK_RESERVE_BYTES) // length
    num_rows = min(num_fit, num_copies * _PEAK_ROWS)
    load = PeakLoad(num_prompt, num_output, num_requests, num_rows, num_copies * _PEAK_TOKENS)
    return sum(num * cost_model.predict(work) for num, work in works_of(load))


def _decodes(num_rows: float, num_positions: float) -> Work:
    read = num_rows * num_positions
    return Work(num_rows, num_rows, read, read, num_rows)


@cache
def published() -> tuple[Series, ...]:
    """All of `published_steps.toml`."""
    return read_series(POINTS.read_text(encoding="utf8"))


def read_series(text: str) -> tuple[Series, ...]:
    """Of a TOML text as in `published_steps.toml`. Raises ConfigError, which names the field."""
    tables = tomllib.loads(text).get("series", [])
    return tuple(each for i, table in enumerate(tables) for each in _series(table, Fields(table, f"series[{i}]")))


def _series(raw: Mapping[str, Any], fields: Fields) -> list[Series]:
    """One, or two where its points are halved: those that are fitted, and those that are held out."""
    kind = fields.text("kind", among=list(KINDS))
    model = model_named(fields.text("model"), fields.at("model"))
    hardware = hardware_named(fields.text("hardware"), fields.at("hardware"))
    is_halved = fields.flag("is_halved")
    whole = Series(
        fields.text("serves"),
        kind,
        model,
        hardware,
        Parallel(
            fields.count("tensor", 1),
            fields.count("pipeline", 1),
            fields.count("data", 1),
            fields.flag("is_expert"),
            fields.flag("is_overlapped"),
        ),
        Precision(fields.text("weights", "bf16"), fields.text("kv", "bf16")),
        fields.flag("is_fitted"),
        _points(raw.get("points"), fields, KINDS[kind]),
        fields.text("source"),
        fields.text("note", ""),
        variant_of(hardware, model) if is_halved else Variant(),
    )
    fields.end()
    if not is_halved:
        return [whole]
    halves = {
        is_fitted: tuple(point for point in whole.points if _is_of_fit(whole, point) is is_fitted)
        for is_fitted in (True, False)
    }
    return [whole._replace(is_fitted=is_fitted, points=points) for is_fitted, points in halves.items() if points]


def _is_of_fit(series: Series, point: Sequence[float]) -> bool:
    """A half of all points, by a hash of what was measured, so that nobody chooses them."""
    name = f"{series.model.name}|{series.hardware.name}|{point[0]:.0f}|{point[1]:.0f}"
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def _points(points: Any, fields: Fields, num: int) -> tuple[tuple[float, ...], ...]:
    fields.has("points")
    rows = points if isinstance(points, list) else []
    if not rows or not all(isinstance(row, list) and len(row) == num and all(map(_is_more, row)) for row in rows):
        raise fields.error("points", f"a list of lists, each of {num} numbers above 0, is needed")
    return tuple(tuple(map(float, row)) for row in rows)


def _is_more(value: Any) -> bool:
    return isinstance(value, (int, float)) and value > 0


def fit(series: Iterable[Series], start: Coefficients = USUAL, num_rounds: int = 60) -> Coefficients:
    """Coefficients of least squared log error over points, each held near `start` by a little. One is moved at a time,
    by a factor that shrinks when none helps."""
    fitted = list(series)
    num_points = sum(len(each.points) for each in fitted)
    names = FITTED if any(each.cost_model(start).is_unpacked for each in fitted) else OF_ALL

    def loss(coefficients: Coefficients) -> float:
        off = sum(math.log(1 + error) ** 2 for each in fitted for error in each.errors(coefficients))
        far = sum(math.log(getattr(coefficients, name) / getattr(start, name)) ** 2 for name in names)
        return off / num_points + _PRIOR * far / len(names)

    best, least, step = start, loss(start), 1.5
    for _ in range(num_rounds):
        before = least
        for name in names:
            low, high = _LIMITS[name]
            for factor in (step, 1 / step):
                value = min(high, max(low, getattr(best, name) * factor))
                moved = best._replace(**{name: value})
                found = loss(moved)
                if found < least:
                    best, least = moved, found
        if before - least < 1e-7:
            step = 1 + (step - 1) / 2
        if step < 1.003:
            break
    return best


def fit_all() -> dict[tuple[str, Variant], Coefficients]:
    """Of each software, and each of its cells, with the interval of its errors; usual ones are not fitted."""
    found = {}
    for name, variant in dict.fromkeys((each.serves, each.variant) for each in published()):
        points = [each for each in published() if (each.serves, each.variant) == (name, variant)]
        fitted = [each for each in points if each.is_fitted]
        coefficients = fit(fitted) if fitted else USUAL
        errors = [error for each in points if not each.is_fitted for error in each.errors(coefficients)]
        found[name, variant] = with_interval(coefficients, errors)
    return found


def with_interval(coefficients: Coefficients, errors: Sequence[float]) -> Coefficients:
    """errors: of predictions that nothing was fitted to, whose 10th and 90th percentile it is given."""
    if len(errors) < 2:
        return coefficients
    deciles = statistics.quantiles(errors, n=10, method="inclusive")
    return coefficients._replace(error_low=deciles[0], error_high=deciles[-1], num_held_out=len(errors))


def as_table(found: Mapping[tuple[str, Variant], Coefficients]) -> str:
    """The TOML of `tables/coefficients.toml`."""
    head = (
        "# Coefficients of roofline.Coefficients by software, of some by generation and family of models, with their\n"
        "# errors on what is held out: `python scripts/cost_model_page.py --fit` prints this file.\n"
    )
    parts = [head]
    for (name, variant), coefficients in found.items():
        quoted = f'"{name}"' if "." in name else name
        names = INTERVAL if name == "usual" else (*FITTED, *INTERVAL)
        lines = "".join(f"{each} = {getattr(coefficients, each):.4g}\n" for each in names)
        parts.append(f"[{'.'.join(filter(None, (quoted, *variant)))}]\n{lines}")
    return "\n".join(parts)


def summary(errors: Sequence[float]) -> tuple[float, float, float]:
    """Median and largest absolute error, and the mean with its sign."""
    return statistics.median(map(abs, errors)), max(map(abs, errors)), statistics.fmean(errors)


_MOST_WORKS = 300
"""Of one load; neighbouring steps are averaged beyond that, since a cost model is nearly linear between them."""


class PeakLoad(NamedTuple):
    """num_requests of num_prompt and num_output tokens each, all at once; at most max_rows run, and a step has at most
    max_tokens."""

    num_prompt: int
    num_output: int
    num_requests: int
    max_rows: int
    max_tokens: int


@cache
def works_of(load: PeakLoad) -> tuple[tuple[float, Work], ...]:
    """The works of all steps, in order, each with the number of steps that it stands for."""
    assert min(load) > 0, load
    steps: list[tuple[float, Work]] = []
    groups: list[list[int]] = []  # requests, output tokens still to draw, positions of each
    num_waiting, num_running, num_begun = load.num_requests, 0, 0  # num_begun: tokens computed of the next prompt
    while num_waiting or groups:
        num_decodes = sum(num for num, _, _ in groups)
        room = min(num_waiting, load.max_rows - num_running) * load.num_prompt - num_begun
        num_tokens = max(0, min(load.max_tokens - num_decodes, room))
        num_new, num_begun = divmod(num_begun + num_tokens, load.num_prompt)
        # Until a group ends or another begins, steps differ by their context alone.
        num_steps = 1 if num_tokens else min(left for _, left, _ in groups)
        context = sum(num * (length + (num_steps - 1) / 2) for num, _, length in groups)
        drawn = num_decodes + num_new
        positions = num_tokens * load.num_prompt / 2 + context
        steps.append((num_steps, Work(drawn, num_decodes + num_tokens, positions, context, drawn)))
        for group in groups:
            group[1] -= num_steps
            group[2] += num_steps
        num_waiting -= num_new
        num_running += num_new - sum(num for num, left, _ in groups if not left)
        groups = [group for group in groups if group[1]]
        if num_new and load.num_output > 1:
            groups.append([num_new, load.num_output - 1, load.num_prompt + 1])
        elif num_new:
            num_running -= num_new
    return _averaged(steps)


def _averaged(steps: list[tuple[float, Work]]) -> tuple[tuple[float, Work], ...]:
    size = math.ceil(len(steps) / _MOST_WORKS)
    found = []
    for start in range(0, len(steps), size):
        some = steps[start : start + size]
        num = sum(each for each, _ in some)
        columns = zip(*([each * value for value in work] for each, work in some), strict=True)
        found.append((num, Work(*(sum(column) / num for column in columns))))
    return tuple(found)
