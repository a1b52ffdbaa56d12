"""Several evaluations: settings or loads one after the other, repeats, and the search for the goodput, which is that of
`bench`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

from ..bench.load import goodput
from ..bench.load.retries import hopeless_wait_s
from ..bench.load.run import Load, intervals, pool
from ..bench.result import Goodput, Probe, Repeats
from ..core.errors import ConfigError
from ..sim.service import Service
from .config import Changes, Config
from .evaluate import Evaluation

MAX_POINTS = 1000
T = TypeVar("T")
Evaluate = Callable[[Config, Load, int], Evaluation]
"""(what, by which load, how often before) -> what comes of it; `evaluate` with all else that it takes."""


@dataclass(frozen=True, slots=True)
class Point:
    """Of a sweep: what it changes, and what it is called."""

    changes: dict[str, Any]
    label: str
    value: float


def points_of(sweeps: Sequence[str]) -> tuple[str, list[Point]]:
    """["a.b=1,2", "c=x,y"] -> what is swept, and all combinations. Raises ConfigError."""
    keys: list[str] = []
    values: list[list[Any]] = []
    for text in sweeps:
        key, equals, listed = text.partition("=")
        found = [value_of(each.strip()) for each in listed.split(",") if each.strip()]
        if not (key and equals and found) or key in keys:
            raise ConfigError(f"--sweep takes KEY=VALUE,VALUE with each key once, got {text}.", param="sweep")
        keys.append(key)
        values.append(found)
    if math.prod(map(len, values)) > MAX_POINTS:
        raise ConfigError(f"--sweep has more than {MAX_POINTS} combinations.", param="sweep")
    is_number = len(values) == 1 and all(isinstance(each, int | float) for each in values[0])
    points = []
    for number, chosen in enumerate(product(*values)):
        label = ", ".join(f"{key} {value}" for key, value in zip(keys, chosen, strict=True))
        value = float(chosen[0]) if is_number else float(number + 1)
        points.append(Point(dict(zip(keys, chosen, strict=True)), label, value))
    return " x ".join(keys), points


def value_of(text: str) -> Any:
    """A number, true, false, or the text itself."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("\"'")


def settings_of(
    points: Sequence[Point], make: Callable[[Changes], Config]
) -> tuple[list[Config], list[Point], dict[str, str]]:
    """All are made before the first is run. Those that cannot be are left out, by label and why; raises ConfigError
    where none can be."""
    settings, able, left_out = list[Config](), list[Point](), dict[str, str]()
    for point in points:
        try:
            settings.append(make(point.changes))
        except ConfigError as error:
            if point is points[-1] and not able:
                raise
            left_out[point.label] = error.message
        else:
            able.append(point)
    return settings, able, left_out


def load_at(load: Load, by: str, number: int, value: float) -> Load:
    """The load of a point of a sweep by `request_rate` or `concurrency`: each has text of its own, as it has live."""
    seeded = replace(load, seed=load.seed + number)
    if by == "request_rate":
        return seeded.with_rate(value)
    return replace(seeded, schedule=replace(load.schedule, concurrency=int(value), max_concurrency=None))


def repeats(config: Config, load: Load, num_repeats: int, evaluate: Evaluate) -> tuple[Repeats, list[Service]]:
    """The load num_repeats times, each on a service of its own, seeds counting up. With these services."""
    runs, services = [], list[Service]()
    for repeat in range(num_repeats):
        found = evaluate(config, replace(load, seed=load.seed + repeat, keep_event_times=True), repeat)
        runs.append(found.run)
        services.append(found.service)
        if found.run.given_up:
            break
    pooled = pool(runs, load.percentiles)
    if not load.keep_event_times:
        runs = [replace(run, requests=[replace(row, event_s=None) for row in run.requests]) for run in runs]
    return Repeats(pooled, intervals(runs), runs), services


def search(
    config: Config,
    load: Load,
    limits: goodput.Search,
    num_requests: Callable[[float], int],
    evaluate: Evaluate,
    *,
    num_searches: int = 1,
    price: goodput.Price,
) -> tuple[Goodput, list[Service]]:
    """The highest rate that meets the load's objectives and goals, by bench's own search; a probe is a service of its
    own. num_requests: of a probe at a rate. With the services of the probes."""
    bounds = goodput.limits_of(load.objectives, load.goals)
    if not bounds:
        raise ConfigError("--find-goodput needs objectives, such as --goodput ttft:500 tpot:50.", param="goodput")
    if load.give_up.max_wait_s is None:
        load = replace(load, give_up=replace(load.give_up, max_wait_s=hopeless_wait_s(bounds)))
    services, seed = list[Service](), load.seed

    async def attempt(rate: float) -> Probe:
        nonlocal seed
        seed += 1
        found = evaluate(config, replace(load.with_rate(rate), seed=seed, num_prompts=num_requests(rate)), 0)
        services.append(found.service)
        probe = found.probe
        assert probe is not None
        return probe

    searches = [_finish_at_once(goodput.search(attempt, limits)) for _ in range(num_searches)]
    return goodput.conclude(searches, load.objectives, limits, price, load.argv, load.goals), services


def _finish_at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing: a simulation's loop runs inside it."""
    assert asyncio._get_running_loop() is None, "a loop runs already"
    try:
        work.send(None)
    except StopIteration as done:
        found: T = done.value
        return found
    raise AssertionError("it waits for something")
