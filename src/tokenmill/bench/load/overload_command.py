"""`bench overload`, from parsed flags to tables and a written result."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from ...core.errors import ConfigError
from ..report import console_beside, write_json
from . import goodput, options, overload, show
from .command import check_outputs
from .http import parse_url
from .material import Vocabulary
from .run import Load, run_async
from .target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("endpoints", nargs="+", metavar="[NAME=]URL[#MODEL]", help="servers, one after another")
    group = parser.add_argument_group("overload")
    group.add_argument("--rate", type=float, default=0.0, metavar="R", help="1x, requests/s (default: it is searched)")
    group.add_argument("--factors", default="1,2,4", metavar="X,X", help="of that rate (default: 1,2,4)")
    group.add_argument("--run-s", type=float, default=60.0, metavar="S", help="length of a run (default: 60)")
    group.add_argument("--max-prompt-len", type=int, default=2048, metavar="N", help="cut prompts to N (default: 2048)")
    group.add_argument("--ttft-base", type=float, default=500.0, metavar="MS", help="of the TTFT objective (500)")
    group.add_argument("--ttft-factor", type=float, default=2.0, metavar="X", help="times the time alone (default: 2)")
    group.add_argument("--tpot", type=float, default=50.0, metavar="MS", help="objective (default: 50)")
    group.add_argument(
        "--refused-key", metavar="KEY", help="of a tenant that is always refused: it fills each run up to equal cost"
    )
    group.add_argument(
        "--returns", action="store_true", help="then 30 s of the most and 300 s of 0.5x; who is refused comes back"
    )
    group = parser.add_argument_group("search of the rate")
    group.add_argument("--attainment", type=float, default=0.9, metavar="X", help="share to meet them (default: 0.9)")
    group.add_argument("--start-rate", type=float, default=1.0, metavar="R", help="first rate tried (default: 1)")
    group.add_argument("--max-probes", type=int, default=10, metavar="N", help="(default: 10)")
    group.add_argument("--probe-s", type=float, default=60.0, metavar="S", help="length of a probe (default: 60)")
    group.add_argument("--min-requests", type=int, default=50, metavar="N", help="of a probe or run (default: 50)")
    group.add_argument("--tolerance", type=float, default=0.1, metavar="X", help="of the rate (default: 0.1)")
    options.add_target_arguments(parser)
    options.add_load_arguments(parser)
    options.add_output_arguments(parser)
    parser.set_defaults(timeout=120.0, dataset_name="trace", ignore_eos=True, max_error_rate=1.0)


def run(args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None) -> int:
    """Exit code 0, or 1 where a server held the objectives at no rate, or a request hung."""
    factors = _factors(args.factors)
    for name, value in (("ttft_base", args.ttft_base), ("ttft_factor", args.ttft_factor), ("rate", args.rate)):
        if not value >= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 0, got {value:g}.", param=name)
    for name in ("run_s", "probe_s", "tpot", "max_prompt_len", "min_requests", "start_rate", "tolerance", "max_probes"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name):g}.", param=name)
    if not 0 < args.attainment <= 1:
        raise ConfigError(f"--attainment is above 0 and at most 1, got {args.attainment:g}.", param="attainment")
    if args.request_rate is None:
        args.request_rate = args.start_rate  # a client mix wants one; each run sets its own
    load = options.make_load(args, argv, vocabulary)
    check_outputs(args)
    targets = []
    for text in args.endpoints:
        label, url, model = options.parse_endpoint(text)
        targets.append(options.make_target(args, url, label, model))
    search = goodput.Search(
        start_rate=args.start_rate,
        tolerance=args.tolerance,
        target_attainment=args.attainment,
        max_probes=args.max_probes,
    )
    settings = overload.OverloadSettings(
        search, args.min_requests, args.probe_s, args.run_s, factors, args.rate, measures_retries=args.returns
    )
    console = console_beside(args.json)
    servers = []
    with show.Status(Console(stderr=True), load.num_prompts) as status:
        objectives = _objectives(args, targets[0], load)
        for target in targets:
            status.label = f"{target.name}: "
            own = replace(settings, refused=_with_key(args, target))
            served = overload.measure_server(target, load, objectives, own, args.max_prompt_len, status.observe)
            servers.append(run_async(served))
    facts = {"name": args.dataset_name, "path": str(args.dataset_path), "max_prompt_len": args.max_prompt_len}
    result = overload.Overload(objectives, facts, servers, load.argv)
    print_result(console, result)
    write_json(args.json, result.to_json())
    levels = [level for served in servers for level in served.levels]
    return 0 if all(served.request_rate for served in servers) and not any(each.num_hung for each in levels) else 1


def _with_key(args: argparse.Namespace, target: Target) -> Target | None:
    """The same server for the tenant of --refused-key."""
    if args.refused_key is None:
        return None
    address = target.address
    url = address.root_url + address.base
    return replace(target, name="refused", address=parse_url(url, args.refused_key, args.header, address.tls))


def _objectives(args: argparse.Namespace, target: Target, load: Load) -> overload.Objectives:
    """Those of --goodput, equal for all requests; without, by what prompts take alone."""
    if load.objectives:
        if set(load.objectives) != {"ttft_s", "tpot_s"}:
            raise ConfigError("bench overload takes both, such as --goodput ttft:1000 tpot:100.", param="goodput")
        return overload.Objectives(load.objectives["ttft_s"], 0.0, load.objectives["tpot_s"], ())
    alone = run_async(overload.time_alone(target, load))
    return overload.Objectives(args.ttft_base / 1e3, args.ttft_factor, args.tpot / 1e3, alone)


def _factors(text: str) -> tuple[float, ...]:
    try:
        factors = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        factors = ()
    if not factors or not all(0 < factor <= 100 for factor in factors):
        raise ConfigError(f"--factors are numbers above 0 and at most 100, got {text}.", param="factors")
    return factors


def print_result(console: Console, result: overload.Overload) -> None:
    alone = ", ".join(f"{num}: {1e3 * seconds:.0f}" for num, seconds in result.objectives.alone)
    if alone:
        console.print(f"alone, ms by tokens of the prompt: {alone}")
    for served in result.servers:
        if served.levels:
            console.print(_table(served))
        else:
            console.print(f"{served.name}: no rate holds the objectives")
    for served in result.servers:
        for level in served.levels:
            if any(level.shadow.values()):
                told = ", ".join(f"{value:.0f} {name}" for name, value in sorted(level.shadow.items()))
                console.print(f"{served.name} {level.factor:g}x: of those that would have been refused {told}")
        if served.returning is not None:
            found = served.returning
            line = f"{found.num_returned} of {found.num_refused} refused came back after the overload, as told"
            console.print(f"{served.name}: {line}; {found.num_entered} of these got in", soft_wrap=True)
        for warning in served.warnings:
            console.print(f"{served.name}: {warning}")


def _table(served: overload.Served) -> Table:
    """A column for each load, so that it fits a narrow screen."""
    table = Table(title=f"overload: {served.name}")
    table.add_column("load")
    for level in served.levels:
        table.add_column(f"{level.factor:g}x", justify="right")
    figures: tuple[tuple[str, Callable[[overload.Level], str]], ...] = (
        ("requests/s", lambda level: f"{level.request_rate:.3g}"),
        ("met/s", lambda level: f"{level.goodput_per_s:.3g}"),
        ("of peak", lambda level: _share(level.peak_share)),
        ("met", lambda level: str(level.num_met)),
        ("missed", lambda level: str(level.num_missed)),
        ("refused", lambda level: str(level.num_refused)),
        ("hung", lambda level: str(level.num_hung)),
        ("failed", lambda level: str(level.num_failed)),
        ("ttft p50 ms", lambda level: _ms(level.ttft_s.p50)),
        ("ttft p99 ms", lambda level: _ms(level.ttft_s.p99)),
        ("predicted within 15 %", lambda level: _share(level.prediction_error.get("0.15"))),
        ("predicted within 40 %", lambda level: _share(level.prediction_error.get("0.4"))),
    )
    for name, show_it in figures:
        table.add_row(name, *map(show_it, served.levels))
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{1e3 * value:.0f}"
