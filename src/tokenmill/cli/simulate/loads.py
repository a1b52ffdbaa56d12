"""What `simulate` takes from `bench`: flags of loads, repeats, sweeps, the search for the goodput, and results.

What is simulated is handed in as a function of a sweep's settings; `plan` evaluates it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ...bench.html.report import read_results, write_report
from ...bench.load import argument_types, goodput, options, show
from ...bench.load.command import check_outputs, exit_code
from ...bench.load.load_file import LoadFile, settle
from ...bench.load.run import Load
from ...bench.load.search_options import add_search_arguments, make_search
from ...bench.output import console_beside, write_json
from ...bench.result import Goodput, GoodputSweep, Result, Run, Sweep
from ...core.errors import ConfigError
from ...plan.config import Changes, Config
from ...plan.evaluate import Evaluation, evaluate
from ...plan.load import about_of, add_load_arguments
from ...plan.play import About
from ...plan.sweep import Evaluate, Point, load_at, points_of, repeats, search, settings_of
from ...sim.service import Service
from ...text.load import TextModel
from .progress import Bar
from .trace import TraceWriter

Make = Callable[[Changes], Config]
MANY = 100_000
"""Requests from which on a run is lean unless --no-lean says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All of a load, of several runs and of results."""
    parser.add_argument(
        "--load", action=LoadFile, metavar="FILE", help="flags of the load in TOML; the same file serves bench serve"
    )
    parser.add_argument("--name", metavar="TEXT", help="label of the result")
    add_load_arguments(parser)
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


def run(
    args: argparse.Namespace, argv: Sequence[str], model: TextModel | None, config: Config, make: Make
) -> tuple[Result, list[Service]]:
    """What the flags ask for, and the services that it was made on, in the order of the runs. make: a configuration of
    a sweep; config: the one without changes. Raises ConfigError."""
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
    about = about_of(args, model, args.name or config.name)
    vocabulary = None if model is None else model.tokenizer
    load = _lean(args, options.make_load(args, argv, vocabulary, is_search=args.find_goodput))
    with Bar(Console(stderr=True), load.num_prompts) as bar:
        if args.find_goodput:
            return _searches(args, load, about, make, bar) if args.sweep else _search(args, load, about, config, bar)
        if by_rate or by_concurrency or args.sweep:
            return _sweep(args, load, about, config, make, bar)
        if args.repeats > 1:
            return repeats(config, load, args.repeats, _evaluate(args, about, bar))
        return _once(args, load, about, config, bar)


def _evaluate(args: argparse.Namespace, about: About, bar: Bar) -> Evaluate:
    def once(config: Config, load: Load, repeat: int) -> Evaluation:
        return evaluate(config, load, attainment=args.attainment, about=about, observe=bar.observe, repeat=repeat)

    return once


def _once(
    args: argparse.Namespace, load: Load, about: About, config: Config, bar: Bar
) -> tuple[Run, list[Service]]:  # fmt: skip
    trace = TraceWriter() if args.trace is not None else None
    about = about if trace is None else replace(about, ended=trace.ended)
    found = evaluate(config, load, attainment=args.attainment, about=about, observe=bar.observe, trace=trace)
    if trace is not None:
        trace.write(args.trace, found.service.report.queues, {"name": about.name, "dataset": found.run.dataset})
    return found.run, [found.service]


def _sweep(
    args: argparse.Namespace, load: Load, about: About, config: Config, make: Make, bar: Bar
) -> tuple[Sweep, list[Service]]:  # fmt: skip
    """A setting is tried on the very same load; rates have text of their own, as they have live."""
    left_out = dict[str, str]()
    if args.sweep:
        by, points = points_of(args.sweep)
        settings, points, left_out = settings_of(points, make)
    else:
        by = "request_rate" if args.sweep_rates else "concurrency"
        points = [Point({}, f"{value:g}", value) for value in args.sweep_rates or args.sweep_concurrency]
        settings = [config] * len(points)
    runs, services = list[Run](), list[Service]()
    for number, (point, setting) in enumerate(zip(points, settings, strict=True)):
        chosen = load if args.sweep else load_at(load, by, number, point.value)
        bar.expect(load.num_prompts, f"{point.label}: ")
        name = f"{about.name} @ {point.label}"
        found = evaluate(setting, chosen, attainment=args.attainment, name=name, about=about, observe=bar.observe)
        runs.append(found.run)
        services.append(found.service)
        if found.run.given_up and not args.sweep:
            break
    labels = [point.label for point in points] if args.sweep else []
    return Sweep(by, [point.value for point in points[: len(runs)]], runs, labels, left_out), services


def _searches(
    args: argparse.Namespace, load: Load, about: About, make: Make, bar: Bar
) -> tuple[GoodputSweep, list[Service]]:  # fmt: skip
    """The goodput of each setting, by the same rates, seeds and objectives."""
    by, points = points_of(args.sweep)
    settings, points, left_out = settings_of(points, make)
    found, services = list[Goodput](), list[Service]()
    for setting in settings:
        goodput_there, served = _search(args, load, about, setting, bar)
        found.append(goodput_there)
        services += served
    return GoodputSweep(by, [point.label for point in points], found, left_out), services


def _search(
    args: argparse.Namespace, load: Load, about: About, config: Config, bar: Bar
) -> tuple[Goodput, list[Service]]:  # fmt: skip
    def num_requests(rate: float) -> int:
        num: int = args.num_prompts or max(args.min_requests, round(rate * args.probe_s))
        bar.expect(num, f"{rate:.3f} requests/s: ")
        return num

    price = goodput.Price(args.num_cores, args.num_gpus, args.cost_per_hour)
    once = _evaluate(args, about, bar)
    return search(config, load, make_search(args), num_requests, once, num_searches=args.repeats, price=price)


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
