"""What `simulate` makes of its flags of a load: one run, repeats, sweeps, the search for the goodput, and results.

What is simulated is handed in as a function of a sweep's settings; `plan` evaluates it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console

from ...bench.html.report import read_results, write_report
from ...bench.load import goodput, show
from ...bench.load.command import check_outputs, exit_code
from ...bench.load.load_file import settle
from ...bench.load.options import make_search
from ...bench.load.player import Progress
from ...bench.load.run import Load
from ...bench.load.show import Status
from ...bench.report import console_beside, write_json
from ...bench.result import Goodput, GoodputSweep, Result, Run, Sweep
from ...core.errors import ConfigError
from ...plan.config import Changes, Config
from ...plan.evaluate import ATTAINMENT, Evaluation, evaluate
from ...plan.load import about_of, make_load
from ...plan.play import About
from ...plan.sweep import Evaluate, Point, load_at, points_of, repeats, search, settings_of
from ...sim.service import Service
from ...text.text_model import TextModel
from .trace import TraceWriter

Make = Callable[[Changes], Config]


PAUSE_S = 0.2


class Bar(Status):
    """Rewritten in place at most every PAUSE_S of real time."""

    def __init__(self, console: Console, num_requests: int) -> None:
        super().__init__(console, num_requests)
        self._shown_s = 0.0
        self._began_s = time.perf_counter()

    def expect(self, num_requests: int, label: str = "") -> None:
        """A further run begins."""
        self.label, self._num_requests, self._began_s = label, num_requests, time.perf_counter()

    def observe(self, progress: Progress) -> None:
        now_s = time.perf_counter()
        if self._live is None or now_s < self._shown_s + PAUSE_S:
            return
        self._shown_s = now_s
        text = line_of(progress, self._num_requests, now_s - self._began_s)
        self._show(self.label + text)


def line_of(progress: Progress, num_requests: int, took_s: float) -> str:
    """took_s: of real time since the run began."""
    per_s = 1.0 / max(1e-3, took_s)
    minutes, seconds = divmod(int(progress.elapsed_s), 60)
    hours, minutes = divmod(minutes, 60)
    share = progress.num_ended / max(1, num_requests)
    return (
        f"simulated {hours}:{minutes:02}:{seconds:02}  {progress.num_ended:,}/{num_requests:,} requests ({share:.0%})"
        f"  {progress.num_in_flight:,} in flight  {progress.num_failed:,} failed"
        f"  {(progress.num_tokens + progress.num_ended) * per_s:,.0f} events/s  {progress.elapsed_s * per_s:,.1f}x"
    )


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
    load = make_load(args, argv, vocabulary, is_judged=args.find_goodput)
    with Bar(Console(stderr=True), load.num_prompts) as bar:
        if args.find_goodput:
            return _searches(args, load, about, make, bar) if args.sweep else _search(args, load, about, config, bar)
        if by_rate or by_concurrency or args.sweep:
            return _sweep(args, load, about, config, make, bar)
        if args.repeats > 1:
            return repeats(config, load, args.repeats, _evaluate(about, bar))
        return _once(args, load, about, config, bar)


def _evaluate(about: About, bar: Bar, attainment: float = ATTAINMENT) -> Evaluate:
    def once(config: Config, load: Load, repeat: int) -> Evaluation:
        return evaluate(config, load, attainment=attainment, about=about, observe=bar.observe, repeat=repeat)

    return once


def _once(
    args: argparse.Namespace, load: Load, about: About, config: Config, bar: Bar
) -> tuple[Run, list[Service]]:  # fmt: skip
    trace = TraceWriter() if args.trace is not None else None
    about = about if trace is None else replace(about, ended=trace.ended)
    found = evaluate(config, load, about=about, observe=bar.observe, trace=trace)
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
        found = evaluate(setting, chosen, name=name, about=about, observe=bar.observe)
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
    limits = make_search(args)
    once = _evaluate(about, bar, limits.target_attainment)
    return search(config, load, limits, num_requests, once, num_searches=args.repeats, price=price)


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
