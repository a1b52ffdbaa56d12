"""Loads by the names of their options, as files and tables say them, and what a model's text adds to them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..bench.load import options
from ..bench.load.body import CHAT_APIS
from ..bench.load.load_file import apply_load
from ..bench.load.run import Load
from ..text.load import TextModel, fetch_text
from .chat_frame import chat_frame
from .play import About


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Of a load that is played to a simulated service."""
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


def about_of(args: argparse.Namespace, model: TextModel | None, name: str) -> About:
    """How the clients of these options call. Raises ConfigError for a model without a chat template that needs one."""
    is_framed = model is not None and args.endpoint in CHAT_APIS
    frame = chat_frame(model, args.tokenizer) if model is not None and is_framed else None
    return About(name=name, timeout_s=args.timeout, real_replies=args.real_replies, api=args.endpoint, frame=frame)


def read_load(table: Mapping[str, Any], folder: Path = Path(), name: str = "simulation") -> tuple[Load, About]:
    """From options by their names, such as {"request_rate": 4, "random_input_len": 512}; paths are taken from `folder`.
    name: of the run. A tokenizer is fetched if need be. Raises ConfigError, which names the key."""
    parser = argparse.ArgumentParser()
    add_load_arguments(parser)
    options.add_output_arguments(parser)
    args = parser.parse_args([])
    apply_load(parser, args, table, "load", folder)
    model = None if args.tokenizer is None else fetch_text(args.tokenizer)
    load = options.make_load(args, (), None if model is None else model.tokenizer, is_search=True)
    return load, about_of(args, model, name)
