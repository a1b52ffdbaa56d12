"""`tokenmill simulate CLUSTER.toml`: a load on a service that is not there, by the code that serves. Joins the file,
the load of `bench`, policies and results; prints what was simulated and what it costs."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...bench.html.fidelity import FIGURE_HEADER, REQUEST_HEADER, figure_rows, request_rows
from ...bench.html.report import write_report
from ...bench.load.command import check_outputs
from ...bench.load.fidelity import Fidelity
from ...bench.load.load_file import apply_load, given_flags
from ...bench.load.show import runs_of
from ...bench.report import console_beside, write_json
from ...bench.result import Result, Run, Sweep
from ...core.errors import ConfigError
from ...plan.config import Changes, Config, read_config, read_tables
from ...plan.evaluate import cost_usd, drafts_of, lines_of, warnings_of
from ...plan.fidelity import hold_against, on_deployment
from ...plan.load import add_load_arguments
from ...plan.play import digest_of
from ...plan.policies import NAMES, read_policies
from ...plan.prompts import chat_frame
from ...sim.service import Service, ServiceReport
from ..bench.commands import read_text, read_tokenizer
from ..parser import add_plugins
from . import loads

_OF_AGAINST = {"cluster", "policy", "plugins", "against", "speed_factor", "name", "tokenizer", "json", "html", "help"}
"""Flags that --against takes, by their destinations."""


def add_policy_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="[KIND=]NAME|FILE.py[:NAME]",
        help=f"use this policy, whatever the cluster file says: one of ours or a plug-in's by name, or one's own from a"
        f" file (repeatable); kinds: {', '.join(NAMES)}",
    )
    add_plugins(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cluster", type=Path, metavar="CLUSTER.toml", help="what is simulated: docs/operate/simulate.md"
    )
    add_policy_argument(parser)
    add_load_arguments(parser)
    group = parser.add_argument_group("fidelity")
    group.add_argument(
        "--against", nargs="+", type=Path, default=[], metavar="LIVE.json", help="simulate the loads of live results"
    )
    group.add_argument(
        "--speed-factor",
        nargs="+",
        type=float,
        default=[],
        metavar="X",
        help="by how much longer each step takes than calibrated; one, or one a live run (default: 1)",
    )
    group.add_argument(
        "--no-fast-path",
        action="store_true",
        help="make every step by itself: slower, with the same results to the last bit",
    )
    parser.set_defaults(parser=parser)


def simulate(args: argparse.Namespace) -> int:
    tables = read_tables(args.cluster)
    chosen = read_policies(args.policy)

    def make(changes: Changes) -> Config:
        fast_path = not args.no_fast_path
        return read_config(tables, path=args.cluster, changes=changes, policies=chosen, fast_path=fast_path)

    config = make({})
    console = console_beside(args.json)
    for name, text in config.deployment.facts:
        console.print(f"[bold]{name}[/bold]  {text}", highlight=False)
    if args.against:
        _check_against(args)
        with chosen.blamed():
            return _hold_against(args, config, console)
    if args.speed_factor:
        raise ConfigError("--speed-factor is of --against.", param="speed_factor")
    apply_load(args.parser, args, config.deployment.load, f"{args.cluster}: [load]", args.cluster.parent)
    model = None if args.tokenizer is None else read_text(args.tokenizer)
    began_s = time.perf_counter()
    result, services = loads.run(args, sys.argv, model, config, make)
    took_s = time.perf_counter() - began_s
    code = loads.finish(args, result)
    _tell(console, result, services, took_s)
    return code


def _check_against(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags of a load, and others that it has no use for."""
    for action in given_flags(args.parser, args):
        if action.dest not in _OF_AGAINST:
            name = next(name for name in action.option_strings if name.startswith("--"))
            raise ConfigError(f"{name} is not of --against: live results say their load.", param=action.dest)
    check_outputs(args)


def _hold_against(args: argparse.Namespace, config: Config, console: Console) -> int:
    model = None if args.tokenizer is None else read_text(args.tokenizer)
    frame = None if model is None or model.chat is None else chat_frame(model, args.tokenizer)
    simulated = on_deployment(config.deployment, dict(config.facts), config.policies.set_up, warnings_of, frame)
    name = args.name or args.cluster.stem
    fidelity = hold_against(args.against, simulated, args.speed_factor, name, read_tokenizer)
    show_fidelity(fidelity, console)
    plain = fidelity.to_json()
    write_json(args.json, plain)
    if args.html is not None:
        write_report([plain], args.html)
    return 0


def show_fidelity(fidelity: Fidelity, console: Console) -> None:
    """Two tables: figures, and errors of single requests."""
    result = fidelity.to_json()
    for header, rows in ((FIGURE_HEADER, figure_rows(result)), (REQUEST_HEADER, request_rows(result))):
        table = Table(title=fidelity.name if header is FIGURE_HEADER else None)
        for i, column in enumerate(header):
            table.add_column(column, justify="right" if i else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for queue in fidelity.queues:
        if queue.distance is not None:
            console.print(f"requests {queue.name}: {queue.distance:.1%} of the live mean apart, on average")
    if fidelity.num_left_out:
        console.print(f"{fidelity.num_left_out} requests that failed in either run are left out.")


def _tell(console: Console, result: Result, services: Sequence[Service], took_s: float) -> None:
    """What became of the workers, the price, and how fast it was simulated."""
    runs = runs_of(result)
    for service in services[-1:]:
        for line in (*_lines(service.report), *lines_of(service)):
            console.print(line, highlight=False)
    for service, run in zip(services, runs, strict=True) if isinstance(result, Sweep) else ():
        if told := drafts_of(service):
            console.print(f"{run.name}: {told}", highlight=False)
    for run in runs:
        cost = cost_of(run)
        if cost:
            console.print(f"{run.name}: {cost}", highlight=False)
    num_steps = sum(sum(service.report.steps.values()) for service in services)
    num_requests = sum(run.num_requests for run in runs)
    num_s = sum(service.report.duration_s for service in services)
    console.print(
        f"simulated {num_s:.1f} s, {num_requests} requests and {num_steps} steps in {took_s:.1f} s: "
        f"{num_steps / took_s:.0f} steps and {num_requests / took_s:.0f} requests a second",
        highlight=False,
    )
    if len(runs) == 1 and runs[0].requests:  # of a lean run there are none to take it of
        console.print(f"digest {digest_of(runs[0].requests)}", highlight=False)


def _lines(report: ServiceReport) -> list[str]:
    busy = [share / report.duration_s for share in report.busy_s.values()] if report.duration_s else []
    lines = []
    if busy:
        mean = sum(busy) / len(busy)
        lines.append(f"workers busy {mean:.1%} of the time, the busiest {max(busy):.1%}")
    counts = {
        "moved from worker to worker": report.num_moved,
        "moves that failed": report.num_unmoved,
        "preempted": report.num_preemptions,
        "gone on elsewhere after a fault": report.num_resumed,
        "blocks from KV stores": report.num_fetched,
        "refused": sum(report.refused.values()),
    }
    told = ", ".join(f"{name} {num}" for name, num in counts.items() if num)
    return [*lines, told] if told else lines


def cost_of(run: Run) -> str:
    """Dollars for the hardware's hours that the run took; "" where no price is known."""
    dollars = cost_usd(run)
    if dollars is None or not run.output_tokens:
        return ""
    num_tokens = run.input_tokens + run.output_tokens
    return (
        f"{run.endpoint['price_hour_usd']:.2f} $ an hour: "
        f"{1e6 * dollars / run.output_tokens:.3f} $ per million tokens of output, "
        f"{1e6 * dollars / num_tokens:.3f} $ of all"
    )
