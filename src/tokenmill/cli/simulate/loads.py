"""What `simulate` takes from `bench`: flags of loads, repeats, sweeps, the search for the goodput, and results.

What is simulated is handed in as a function of a sweep's settings; this file knows loads and results only.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import math
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar

from rich.console import Console

from ...bench.html.report import read_results, write_report
from ...bench.load import argument_types, goodput, options, show
from ...bench.load.body import CHAT_APIS
from ...bench.load.command import check_outputs, exit_code
from ...bench.load.giveup import hopeless_wait_s
from ...bench.load.load_file import LoadFile, settle
from ...bench.load.material import Vocabulary
from ...bench.load.run import Load
from ...bench.load.search_options import add_search_arguments, make_search
from ...bench.output import console_beside, write_json
from ...bench.result import Goodput, GoodputSweep, Probe, Result, Run, Sweep
from ...core.errors import ConfigError
from ...plan.play import About, Lives, simulate, simulate_repeats
from ...sim.loop import VirtualLoop
from .progress import Bar
from .trace import TraceWriter

Changes = Mapping[str, Any]
"""Dotted keys of the cluster's file -> what a sweep sets them to."""
Served = TypeVar("Served", bound=Lives)
T = TypeVar("T")
MAX_POINTS = 1000
MANY = 100_000
"""Requests from which on a run is lean unless --no-lean says otherwise."""


@dataclass(frozen=True, slots=True)
class Setting(Generic[Served]):
    """Something to simulate: how a service of it is begun on a loop, by a seed, and what results say of it."""

    begin: Callable[[VirtualLoop, int], Served]
    about: About


Make = Callable[[Changes], Setting[Served]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All of a load, of several runs and of results."""
    parser.add_argument(
        "--load", action=LoadFile, metavar="FILE", help="flags of the load in TOML; the same file serves bench serve"
    )
    parser.add_argument("--name", metavar="TEXT", help="label of the result")
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="model whose tokenizer counts quoted text, and chat template its own tokens",
    )
    parser.add_argument(
        "--endpoint",
        choices=("completions", *CHAT_APIS),
        default="completions",
        help="API that the load is of: one of %(choices)s (default: completions)",
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one request (default: 600)")
    parser.set_defaults(vocab_range="1000:30000", url="")
    options.add_load_arguments(parser)
    group = parser.add_argument_group("several runs")
    group.add_argument("--repeats", type=int, default=1, metavar="N", help="with seeds counting up (default: 1)")
    group.add_argument("--sweep-rates", type=argument_types.numbers, metavar="R,R", help="a run at each request rate")
    group.add_argument(
        "--sweep-concurrency", type=argument_types.counts, metavar="N,N", help="a run at each concurrency"
    )
    group.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V,V",
        help="a run at each value of a setting, such as engine.max_num_seqs=8,16; several: each combination",
    )
    group.add_argument(
        "--find-goodput", action="store_true", help="search the highest rate that meets --goodput, as bench goodput"
    )
    add_search_arguments(parser)
    options.add_output_arguments(parser)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a trace of the run for ui.perfetto.dev (JSON)"
    )
    parser.add_argument(
        "--lean",
        action=argparse.BooleanOptionalAction,
        help=f"keep figures and no requests, for loads beyond memory (default: from {MANY:,} requests on)",
    )
    parser.add_argument(
        "--beside", nargs="+", type=Path, default=[], metavar="RESULT.json", help="results to draw in the same --html"
    )
    options.add_failure_argument(parser)


@dataclass(frozen=True, slots=True)
class Point:
    """Of a sweep: what it changes, and what it is called."""

    changes: dict[str, Any]
    label: str
    value: float


def run(
    args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None, make: Make[Served]
) -> tuple[Result, list[Served]]:
    """What the flags ask for, and the services that it was made on, in the order of the runs. Raises ConfigError."""
    settle(args)
    by_rate, by_concurrency = bool(args.sweep_rates), bool(args.sweep_concurrency)
    if sum([by_rate, by_concurrency, bool(args.sweep), args.repeats > 1 and not args.find_goodput]) > 1:
        raise ConfigError(
            "--sweep, --sweep-rates, --sweep-concurrency and --repeats exclude one another.", param="sweep"
        )
    if args.find_goodput and (by_rate or by_concurrency):
        raise ConfigError("--find-goodput takes no sweep of rates: it chooses them.", param="find_goodput")
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {args.repeats}.", param="repeats")
    check_outputs(args)
    if args.trace is not None and (by_rate or by_concurrency or args.sweep or args.repeats > 1 or args.find_goodput):
        raise ConfigError("--trace is of one run: it takes no sweep, --repeats or --find-goodput.", param="trace")
    load = _lean(args, options.make_load(args, argv, vocabulary, is_search=args.find_goodput))
    with Bar(Console(stderr=True), load.num_prompts) as bar:
        if args.find_goodput:
            return _searches(args, load, make, bar) if args.sweep else _search(args, load, make({}), bar)
        if by_rate or by_concurrency or args.sweep:
            return _sweep(args, load, make, bar)
        setting = make({})
        if args.repeats > 1:
            return simulate_repeats(setting.begin, load, _named(setting.about, args), args.repeats, observe=bar.observe)
        return _once(args, load, setting, bar)


def _once(
    args: argparse.Namespace, load: Load, setting: Setting[Served], bar: Bar
) -> tuple[Run, list[Served]]:  # fmt: skip
    about, trace = _named(setting.about, args), TraceWriter() if args.trace is not None else None
    about = about if trace is None else replace(about, ended=trace.ended)
    found = simulate(setting.begin, load, about, observe=bar.observe, trace=trace)
    if trace is not None:
        trace.write(args.trace, found.service.report.queues, {"name": about.name, "dataset": found.run.dataset})
    return found.run, [found.service]


def finish(args: argparse.Namespace, result: Result) -> int:
    """Print the result, write the files asked for; the exit code of `bench serve`."""
    console = console_beside(args.json)
    show.print_result(console, result, args.percentile_metrics, args.metric_percentiles)
    plain = result.to_json()
    write_json(args.json, plain)
    if args.csv is not None:
        args.csv.write_text(show.to_csv(result))
    if args.html is not None:
        write_report([plain, *read_results(args.beside)], args.html)
    return exit_code(show.runs_of(result), args.fail_above)


def _lean(args: argparse.Namespace, load: Load) -> Load:
    """What is kept of a large load. Raises ConfigError where that is too little."""
    is_lean = args.lean if args.lean is not None else load.num_prompts >= MANY
    if is_lean and (args.warmup or args.cooldown or args.repeats > 1 or args.find_goodput or args.csv):
        if args.lean is None:
            return load
        raise ConfigError("--lean has no --warmup, --cooldown, --repeats, --find-goodput or --csv.", param="lean")
    return replace(load, is_lean=is_lean)


def _named(about: About, args: argparse.Namespace) -> About:
    return replace(about, name=args.name or about.name, timeout_s=args.timeout, real_replies=args.real_replies)


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


_STEP = re.compile(r"([A-Za-z0-9_-]+)((?:\[\d+\])*)")


def with_changes(tables: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """A copy of a file's tables with the values of dotted keys set: "engine.max_num_seqs", "workers[0].count". Tables
    on the way that are not there are made: whoever reads the file knows which keys there are. Raises ConfigError."""
    changed = copy.deepcopy(dict(tables))
    for key, value in changes.items():
        path: list[str | int] = []
        for part in key.split("."):
            found = _STEP.fullmatch(part)
            if found is None:
                raise ConfigError(
                    f"--sweep: {key} is no key such as engine.max_num_seqs or workers[0].count.", param=key
                )
            path.append(found[1])
            if path[0] == "load":
                raise ConfigError(
                    f"--sweep: {key} is of the load, and all runs of a sweep have the very same.", param=key
                )
            path += [int(index) for index in re.findall(r"\d+", found[2])]
        _set(changed, path, value, key)
    return changed


def _set(table: Any, path: Sequence[str | int], value: Any, key: str) -> None:
    """Sets one value in nested tables."""
    for step, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(step, int):
            if not isinstance(table, list) or step >= len(table):
                raise ConfigError(f"--sweep: there is no {key}: it counts from 0.", param=key)
        elif not isinstance(table, dict):
            raise ConfigError(f"--sweep: {key} is in a list: say which, as in workers[0].count.", param=key)
        if following is None:
            table[step] = value
        elif isinstance(step, int):
            table = table[step]
        else:
            table = table.setdefault(step, {})


def _sweep(
    args: argparse.Namespace, load: Load, make: Make[Served], bar: Bar
) -> tuple[Sweep, list[Served]]:  # fmt: skip
    if args.sweep:
        by, points = points_of(args.sweep)
    else:
        by = "request_rate" if args.sweep_rates else "concurrency"
        points = [Point({}, f"{value:g}", value) for value in args.sweep_rates or args.sweep_concurrency]
    settings, points, left_out = _settings(points, make)
    runs: list[Run] = []
    services: list[Served] = []
    for i, (point, setting) in enumerate(zip(points, settings, strict=True)):
        # A setting is tried on the very same load; rates have text of their own, as they have live.
        chosen = load if args.sweep else replace(load, seed=load.seed + i)
        if by == "request_rate":
            chosen = chosen.with_rate(point.value)
        elif by == "concurrency":
            schedule = replace(load.schedule, concurrency=int(point.value), max_concurrency=None)
            chosen = replace(chosen, schedule=schedule)
        about = _named(setting.about, args)
        bar.expect(load.num_prompts, f"{point.label}: ")
        found = simulate(setting.begin, chosen, about, observe=bar.observe, name=f"{about.name} @ {point.label}")
        runs.append(found.run)
        services.append(found.service)
        if found.run.given_up and not args.sweep:
            break
    labels = [point.label for point in points] if args.sweep else []
    return Sweep(by, [point.value for point in points[: len(runs)]], runs, labels, left_out), services


def _settings(points: Sequence[Point], make: Make[Served]) -> tuple[list[Setting[Served]], list[Point], dict[str, str]]:
    """All are made before the first is run. Those that cannot be are left out, by label and why; raises ConfigError
    where none can be."""
    settings, able, left_out = list[Setting[Served]](), list[Point](), dict[str, str]()
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


def _searches(args: argparse.Namespace, load: Load, make: Make[Served], bar: Bar) -> tuple[GoodputSweep, list[Served]]:
    """The goodput of each setting, by the same rates, seeds and objectives."""
    by, points = points_of(args.sweep)
    settings, points, left_out = _settings(points, make)
    found, services = list[Goodput](), list[Served]()
    for setting in settings:
        goodput_there, served = _search(args, load, setting, bar)
        found.append(goodput_there)
        services += served
    return GoodputSweep(by, [point.label for point in points], found, left_out), services


def _search(args: argparse.Namespace, load: Load, setting: Setting[Served], bar: Bar) -> tuple[Goodput, list[Served]]:
    """The highest rate that meets the objectives, by bench's own search; a probe is a service of its own."""
    bounds = goodput.limits_of(load.objectives, load.goals)
    if not bounds:
        raise ConfigError("--find-goodput needs objectives, such as --goodput ttft:500 tpot:50.", param="goodput")
    if args.max_wait is None:
        load = replace(load, give_up=replace(load.give_up, max_wait_s=hopeless_wait_s(bounds)))
    limits = make_search(args)
    services, seed = list[Served](), load.seed
    about = _named(setting.about, args)

    async def attempt(rate: float) -> Probe:
        nonlocal seed
        seed += 1
        num = args.num_prompts or max(args.min_requests, round(rate * args.probe_s))
        bar.expect(num, f"{rate:.3f} requests/s: ")
        seeded = replace(load.with_rate(rate), seed=seed, num_prompts=num)
        found = simulate(setting.begin, seeded, about, observe=bar.observe)
        services.append(found.service)
        return goodput.judge(rate, found.run, args.attainment, load.goals)

    searches = [_finish_at_once(goodput.search(attempt, limits)) for _ in range(args.repeats)]
    price = goodput.Price(args.num_cores, args.num_gpus, args.cost_per_hour)
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
