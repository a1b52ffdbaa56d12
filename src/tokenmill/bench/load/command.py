"""`bench serve`, `bench goodput` and `bench compare`, from parsed flags to written results."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ...core.errors import ConfigError
from .. import side_by_side
from ..result import Probe, Result, Run, Sweep
from . import compare, goodput, options, show
from .material import Vocabulary
from .run import Load, run_async, run_load, run_repeats
from .target import Target

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def serve(args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None) -> int:
    """Measure one endpoint: once, repeatedly, or over a sweep. Exit code 0, or 1 if every request failed."""
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {args.repeats}.", param="repeats")
    if sum([bool(args.sweep_rates), bool(args.sweep_concurrency), args.repeats > 1]) > 1:
        raise ConfigError("--sweep-rates, --sweep-concurrency and --repeats exclude one another.", param="sweep_rates")
    load = options.make_load(args, argv, vocabulary)
    check_outputs(args)
    target = options.make_target(args, args.url, args.name, None)
    with show.Status(Console(stderr=True), load.num_prompts) as status:
        result: Result
        if args.sweep_rates or args.sweep_concurrency:
            result = _sweep(args, target, load, status)
        elif args.repeats > 1:
            result = run_async(run_repeats(target, load, args.repeats, observe=status.observe))
        else:
            result = run_async(run_load(target, load, observe=status.observe))
    finish(args, result)
    return 0 if any(run.num_ok for run in show.runs_of(result)) else 1


def _sweep(args: argparse.Namespace, target: Target, load: Load, status: show.Status) -> Sweep:
    points = args.sweep_rates or args.sweep_concurrency
    by = "request_rate" if args.sweep_rates else "concurrency"
    runs: list[Run] = []
    for i, point in enumerate(points):
        # Each point has text of its own: the prefix cache must not remember the point before.
        seeded = replace(load, seed=load.seed + i)
        if by == "request_rate":
            seeded = seeded.with_rate(point)
        else:
            seeded = replace(seeded, schedule=replace(load.schedule, concurrency=int(point), max_concurrency=None))
        status.label = f"{by.replace('_', ' ')} {point:g}: "
        runs.append(run_async(run_load(target, seeded, observe=status.observe, name=f"{target.name} @ {point:g}")))
    return Sweep(by, list(points), runs)


def search_goodput(args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None) -> int:
    """Find the highest rate that meets the objectives. Exit code 0, or 1 if none does."""
    load = options.make_load(args, argv, vocabulary)
    if not load.objectives:
        raise ConfigError("bench goodput needs objectives, such as --goodput ttft:500 tpot:50.", param="goodput")
    if not 0 < args.attainment <= 1 or args.tolerance <= 0 or args.repeats < 1:
        raise ConfigError("--attainment is from 0 to 1, --tolerance above 0 and --repeats at least 1.")
    check_outputs(args)
    target = options.make_target(args, args.url, args.name, None)
    limits = goodput.Search(
        start_rate=args.start_rate,
        min_rate=args.min_rate,
        max_rate=args.max_rate,
        tolerance=args.tolerance,
        target_attainment=args.attainment,
        max_probes=args.max_probes,
    )
    seed = load.seed
    searches: list[list[Probe]] = []
    with show.Status(Console(stderr=True), load.num_prompts) as status:

        async def attempt(rate: float) -> Probe:
            nonlocal seed
            seed += 1
            num = args.num_prompts or max(args.min_requests, round(rate * args.probe_s))
            status.label = f"{rate:.3f} requests/s: "
            status.expect(num)
            seeded = replace(load.with_rate(rate), seed=seed, num_prompts=num)
            return goodput.judge(rate, await run_load(target, seeded, observe=status.observe), args.attainment)

        for _ in range(args.repeats):
            searches.append(run_async(goodput.search(attempt, limits)))
    num_cores = args.num_cores or (os.cpu_count() if target.address.host in LOCAL_HOSTS else None)
    price = goodput.Price(num_cores, args.num_gpus, args.cost_per_hour)
    result = goodput.conclude(searches, load.objectives, limits, price, load.argv)
    finish(args, result)
    return 0 if result.request_rate > 0 else 1


def compare_endpoints(args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None) -> int:
    """Measure several endpoints in turns. Exit code 0."""
    if len(args.endpoints) < 2 or args.repeats < 1:
        raise ConfigError("bench compare needs two endpoints or more, and at least one repeat.", param="endpoints")
    load = options.make_load(args, argv, vocabulary)
    primary = compare.choose_primary(load.schedule, load.objectives, args.primary_metric)
    check_outputs(args)
    targets = []
    for text in args.endpoints:
        name, url, model = options.parse_endpoint(text)
        targets.append(options.make_target(args, url, name, model))
    if len({target.name for target in targets}) < len(targets):
        raise ConfigError("The endpoints need different names: NAME=URL.", param="endpoints")
    if len({target.body.prompt_format for target in targets}) > 1:
        # What one of them cannot take, none gets: the load must be equal.
        targets = [replace(target, body=replace(target.body, prompt_format="text")) for target in targets]
    with show.Status(Console(stderr=True), load.num_prompts) as status:
        result = run_async(compare.compare(targets, load, args.repeats, status.observe, args.warm, primary))
    finish(args, result)
    if args.markdown is not None:
        args.markdown.write_text(side_by_side.to_markdown(result.to_json()))
    return 0


def check_outputs(args: argparse.Namespace) -> None:
    """A run of an hour must not end in a folder that does not exist."""
    for path in (args.json, args.csv, args.html, getattr(args, "markdown", None)):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"The folder of {path} does not exist.", param="json")


def finish(args: argparse.Namespace, result: Result) -> None:
    """Print the result and write the files asked for."""
    show.print_result(Console(), result, args.percentile_metrics, args.metric_percentiles)
    if args.json is not None:
        args.json.write_text(json.dumps(result.to_json(), allow_nan=False) + "\n")
    if args.csv is not None:
        args.csv.write_text(show.to_csv(result))
    if args.html is not None:
        from ..html import write_report

        write_report(result.to_json(), args.html)
