"""`bench serve`, `bench goodput` and `bench compare`, from parsed flags to written results."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from ...core.errors import ConfigError
from ..report import STANDARD_OUTPUT, console_beside, write_json
from ..result import Probe, Result, Run, Sweep
from . import compare, goodput, options, show
from .load_file import settle
from .material import Vocabulary
from .options import make_search
from .retries import hopeless_wait_s
from .run import Load, run_async, run_load, run_repeats
from .target import Target

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def serve(args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None) -> int:
    """Measure one endpoint: once, repeatedly, or over a sweep. The exit code is exit_code's."""
    settle(args)
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
    return exit_code(show.runs_of(result), args.fail_above)


def exit_code(runs: Sequence[Run], fail_above: float) -> int:
    """0 where all was well: no run was given up, and no greater share of requests than fail_above failed. Requests cut
    off by an interrupt have not failed. 1 otherwise, or if nothing succeeded."""
    cut_off = sum(error.num for run in runs for error in run.errors if error.kind == "interrupted")
    num_failed = sum(run.num_failed for run in runs) - cut_off
    num_ok = sum(run.num_ok for run in runs)
    is_well = num_ok and num_failed <= fail_above * (num_ok + num_failed) and not any(run.given_up for run in runs)
    return 0 if is_well else 1


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
        if runs[-1].given_up:
            break
    return Sweep(by, list(points[: len(runs)]), runs)


def search_goodput(args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None) -> int:
    """Find the highest rate that meets the objectives. Exit code 0, or 1 if none does."""
    load = options.make_load(args, argv, vocabulary, is_search=True)
    bounds = goodput.limits_of(load.objectives, load.goals)
    if args.max_wait is None:
        load = replace(load, give_up=replace(load.give_up, max_wait_s=hopeless_wait_s(bounds)))
    if not bounds:
        raise ConfigError("bench goodput needs objectives, such as --goodput ttft:500 tpot:50.", param="goodput")
    limits = make_search(args)
    check_outputs(args)
    target = options.make_target(args, args.url, args.name, None)
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
            run = await run_load(target, seeded, observe=status.observe)
            return goodput.judge(rate, run, args.attainment, load.goals)

        for _ in range(args.repeats):
            searches.append(run_async(goodput.search(attempt, limits)))
    num_cores = args.num_cores or (os.cpu_count() if target.address.host in LOCAL_HOSTS else None)
    price = goodput.Price(num_cores, args.num_gpus, args.cost_per_hour)
    result = goodput.conclude(searches, load.objectives, limits, price, load.argv, load.goals)
    finish(args, result)
    return 0 if result.request_rate > 0 else 1


def compare_endpoints(args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None) -> int:
    """Measure several endpoints in turns. The exit code is exit_code's."""
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
        args.markdown.write_text(show.to_markdown(result.to_json()))
    return exit_code(result.runs, args.fail_above)


def check_outputs(args: argparse.Namespace) -> None:
    """A run of an hour must not end in a folder that does not exist."""
    for name in ("json", "csv", "html", "markdown", "trace"):
        path = getattr(args, name, None)
        if path is None or path == STANDARD_OUTPUT:
            continue
        if not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"The folder of {path} does not exist.", param=name)
        if Path(path).is_dir():
            raise ConfigError(f"--{name} {path} is a folder.", param=name)


def finish(args: argparse.Namespace, result: Result) -> None:
    """Print the result and write the files asked for."""
    console = console_beside(args.json)
    show.print_result(console, result, args.percentile_metrics, args.metric_percentiles)
    write_json(args.json, result.to_json())
    if args.csv is not None:
        args.csv.write_text(show.to_csv(result))
    if args.html is not None:
        from ..html.report import write_report

        write_report(result.to_json(), args.html)
