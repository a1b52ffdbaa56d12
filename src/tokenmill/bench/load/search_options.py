"""Flags of the search for the goodput."""

from __future__ import annotations

import argparse

from ...core.errors import ConfigError
from .goodput import Search


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument("--attainment", type=float, default=0.9, metavar="X", help="share to meet --goodput (0.9)")
    group.add_argument("--start-rate", type=float, default=1.0, metavar="R", help="first rate tried (default: 1)")
    group.add_argument("--min-rate", type=float, default=0.01, metavar="R")
    group.add_argument("--max-rate", type=float, default=10_000.0, metavar="R")
    group.add_argument(
        "--tolerance", type=float, default=0.05, metavar="X", help="stop sooner if the interval is so narrow (0.05)"
    )
    group.add_argument("--max-probes", type=int, default=20, metavar="N", help="of one search (default: 20)")
    group.add_argument("--probe-s", type=float, default=60.0, metavar="S", help="length of a probe (default: 60)")
    group.add_argument("--min-requests", type=int, default=50, metavar="N", help="of a probe (default: 50)")
    group.add_argument("--num-cores", type=int, metavar="N", help="of the server (default: ours, if it is local)")
    group.add_argument("--num-gpus", type=int, metavar="N", help="of the server")
    group.add_argument("--cost-per-hour", type=float, metavar="X", help="dollars, for requests per dollar")


def make_search(args: argparse.Namespace) -> Search:
    """What the flags of a search say. Raises ConfigError."""
    if not 0 < args.attainment <= 1 or args.tolerance <= 0 or args.repeats < 1:
        raise ConfigError("--attainment is from 0 to 1, --tolerance above 0 and --repeats at least 1.")
    return Search(
        start_rate=args.start_rate,
        min_rate=args.min_rate,
        max_rate=args.max_rate,
        tolerance=args.tolerance,
        target_attainment=args.attainment,
        max_probes=args.max_probes,
    )
