"""Load benchmarks: hand the bench room the tokenizer that --tokenizer names."""

from __future__ import annotations

import argparse
import sys

from ...bench.load import command, overload_command
from ...bench.load.fairness import run as run_fairness
from ...text.text_model import TextModel, fetch_text
from ...text.tokenizer import Tokenizer
from ..models import progress_bar


def serve(args: argparse.Namespace) -> int:
    return command.serve(args, sys.argv, tokenizer_of(args))


def goodput(args: argparse.Namespace) -> int:
    return command.search_goodput(args, sys.argv, tokenizer_of(args))


def fairness(args: argparse.Namespace) -> int:
    return run_fairness(args, sys.argv, tokenizer_of(args))


def compare(args: argparse.Namespace) -> int:
    return command.compare_endpoints(args, sys.argv, tokenizer_of(args))


def overload(args: argparse.Namespace) -> int:
    return overload_command.run(args, sys.argv, tokenizer_of(args))


def tokenizer_of(args: argparse.Namespace) -> Tokenizer | None:
    """Of --tokenizer; None where none is named."""
    return None if args.tokenizer is None else read_tokenizer(args.tokenizer)


def read_tokenizer(model: str) -> Tokenizer:
    """Of a model, fetched if need be."""
    return read_text(model).tokenizer


def read_text(model: str) -> TextModel:
    """Of a model, fetched if need be."""
    with progress_bar(f"fetching {model}") as progress:
        return fetch_text(model, progress)
