"""`bench report`: results measured earlier, drawn as one HTML page or written as CSV."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...bench.html.report import read_results, requests_csv, summary_csv, write_report
from ...core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json", help="of bench serve, goodput, ...")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page with tables and plots")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write one line per run")
    parser.add_argument("--requests-csv", type=Path, metavar="FILE", help="write one line per request")


def report(args: argparse.Namespace) -> int:
    if not (args.html or args.csv or args.requests_csv):
        raise ConfigError("Say what to write: --html, --csv or --requests-csv.", param="html")
    results = read_results(args.results)
    try:
        if args.html:
            write_report(results, args.html)
        if args.csv:
            args.csv.write_text(summary_csv(results), encoding="utf8")
        if args.requests_csv:
            args.requests_csv.write_text(requests_csv(results), encoding="utf8")
    except OSError as error:
        raise ConfigError(f"The report cannot be written: {error}.", param="html") from None
    return 0
