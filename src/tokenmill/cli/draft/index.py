"""`draft index MODEL FILE... --out PATH`: one index of texts, from which a server drafts (--speculative-config)."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ...core.errors import ConfigError
from ...core.units import format_bytes, visible
from ...draft.index import Progress, build_index
from ...draft.texts import read_texts
from ...text.text_model import fetch_text
from ..models import progress_bar

_TOLD_EVERY_S = 10.0


def add_arguments(index: argparse.ArgumentParser) -> None:
    index.add_argument("files", nargs="+", metavar="FILE", help="texts, folders of such, JSON lines; .gz, too")
    index.add_argument(
        "--template",
        default="{text}",
        metavar="TEXT",
        help="the text made of a row of JSON lines, in Python's format, such as '{prompt}{canonical_solution}';"
        " \\n is a line break (default: {text})",
    )
    index.add_argument("--out", "-o", type=Path, required=True, metavar="PATH", help="the index to write")


def index(args: argparse.Namespace) -> int:
    paths = [Path(name) for name in args.files]
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} is not there.", param="files")
    began_s = time.perf_counter()
    with progress_bar(f"fetching {args.model}") as fetching:
        tokenizer = fetch_text(args.model, fetching).tokenizer
    header = build_index(tokenizer, read_texts(paths, args.template), args.out, _teller())
    took_s = time.perf_counter() - began_s
    print(
        f"{visible(str(args.out))}: {header.num_texts:,} texts, {header.num_tokens - header.num_texts - 1:,} tokens,"
        f" {format_bytes(header.num_bytes)}, {took_s:.1f} s"
    )
    return 0


def _teller() -> Progress:
    """Says now and then how far it has come."""
    told_s = time.perf_counter()

    def tell(num_texts: int, num_tokens: int) -> None:
        nonlocal told_s
        if time.perf_counter() - told_s >= _TOLD_EVERY_S:
            told_s = time.perf_counter()
            print(f"tokenmill: read {num_texts:,} texts, {num_tokens:,} tokens", file=sys.stderr, flush=True)

    return tell
