"""Loads by the names of their options, as files and tables say them, and what a model's text adds to them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..bench.load import options
from ..bench.load import options as argument_types
from ..bench.load.body import CHAT_APIS
from ..bench.load.load_file import LoadFile, apply_load
from ..bench.load.material import Vocabulary
from ..bench.load.options import add_search_arguments
from ..bench.load.run import Load
from ..core.errors import ConfigError
from ..text.text_model import TextModel, fetch_text
from .play import About
from .prompts import chat_frame

MANY = 100_000
"""Requests from which on a run is lean unless --no-lean says otherwise."""


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """All of `tokenmill simulate` but what is simulated: of a load, of several runs and of results. A table takes what
    the command line takes."""
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
    _add_several_runs(parser)
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


def _add_several_runs(parser: argparse.ArgumentParser) -> None:
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


def about_of(args: argparse.Namespace, model: TextModel | None, name: str) -> About:
    """How the clients of these options call. Raises ConfigError for a model without a chat template that needs one."""
    is_framed = model is not None and args.endpoint in CHAT_APIS
    frame = chat_frame(model, args.tokenizer) if model is not None and is_framed else None
    return About(name=name, timeout_s=args.timeout, real_replies=args.real_replies, api=args.endpoint, frame=frame)


def make_load(args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None, *, is_judged: bool) -> Load:
    """The load of the flags, lean where it is large and nobody looks at its requests. is_judged: by its objectives and
    goals, which takes requests. Raises ConfigError where --lean keeps too little."""
    load = options.make_load(args, argv, vocabulary, is_search=is_judged)
    takes_requests = args.warmup or args.cooldown or args.repeats > 1 or args.find_goodput or args.csv
    if args.lean is None:
        takes_requests = takes_requests or (is_judged and (load.objectives or load.goals))
        return replace(load, is_lean=load.num_prompts >= MANY and not takes_requests)
    if args.lean and takes_requests:
        raise ConfigError("--lean has no --warmup, --cooldown, --repeats, --find-goodput or --csv.", param="lean")
    return replace(load, is_lean=args.lean)


def read_load(
    table: Mapping[str, Any], folder: Path = Path(), name: str = "simulation", goodput: Sequence[str] | None = None
) -> tuple[Load, About, float]:
    """From options by their names, such as {"request_rate": 4, "random_input_len": 512}. With the share of requests
    that must meet the objectives. Paths are taken from `folder`. Options of several runs, of a search and of what is
    printed do nothing here, but those that choose the rate are refused: one run has one. name: of the run, unless the
    table has one; goodput: objectives and goals, before the table's. A tokenizer is fetched if need be. Raises
    ConfigError, which names the key."""
    parser = argparse.ArgumentParser()
    add_load_arguments(parser)
    args = parser.parse_args([])
    apply_load(parser, args, table, "load", folder)
    for key in ("sweep_rates", "sweep_concurrency", "find_goodput"):
        if getattr(args, key):
            flag = key.replace("_", "-")
            raise ConfigError(f"load: {flag} is of several runs, and this is one: say its request-rate.", param=key)
    if goodput is not None:
        args.goodput = goodput
    model = None if args.tokenizer is None else fetch_text(args.tokenizer)
    load = make_load(args, (), None if model is None else model.tokenizer, is_judged=True)
    return load, about_of(args, model, args.name or name), args.attainment
