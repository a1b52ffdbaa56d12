"""`usage`: what was handed to whom, in tokens. Reads the folder that servers write, whether or not one runs."""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ..core.errors import ConfigError, InvalidRequest
from .keys import duration
from .options import argument_type
from .state import OFF, state_path, usage_file

if TYPE_CHECKING:
    from ..control.usage.question import Question, Sum
    from .parser import Parser

_COLUMNS = {"tenant": "tenant_id", "key": "api_key_id", "model": "model"}
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def moment(text: str) -> int:
    """Seconds since the epoch: a day as 2026-01-31 (in UTC), or so long ago, as 12h. Raises ValueError."""
    if _DAY.fullmatch(text):
        return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())
    try:
        return int(time.time()) - duration(text)
    except ValueError:
        raise ValueError(f"must be a day such as 2026-01-31 or so long ago as 12h or 30d, got {text!r}.") from None


def add_arguments(parser: Parser) -> None:
    parser.add_argument("--usage-dir", metavar="DIR", help="the folder (default: usage in the user's state folder)")
    parser.add_argument("--since", type=argument_type(moment), metavar="WHEN", help="a day, or 12h, 30d (default: 7d)")
    parser.add_argument("--until", type=argument_type(moment), metavar="WHEN", help="(default: now)")
    parser.add_argument("--bucket", choices=("1m", "1h", "1d"), default="1d", help="width of a row (default: 1d)")
    parser.add_argument(
        "--by", action="append", choices=tuple(_COLUMNS), help="a row for each (repeatable; default: tenant and model)"
    )
    parser.add_argument("--tenant", action="append", metavar="ID", help="of these alone (repeatable)")
    parser.add_argument("--json", action="store_true", help="print JSON, a line each")


def show(args: argparse.Namespace) -> int:
    from ..control.usage.ledger import Ledger, cannot_open

    if args.usage_dir == OFF:
        raise ConfigError("--usage-dir off keeps no account; name a folder.", param="usage_dir")
    folder = state_path(args.usage_dir, "usage")
    if not folder.is_dir():
        raise ConfigError(f"Nothing has been counted: there is no folder {folder}.", param="usage_dir")
    columns = [name for name in _COLUMNS if name in (args.by or ("tenant", "model"))]
    path = usage_file(args.usage_dir)
    try:
        ledger = Ledger(folder, path)
        try:
            ledger.fold()
            sums = ledger.ask(_question(args, tuple(columns)))
        finally:
            ledger.close()
    except (sqlite3.Error, OSError) as error:
        raise cannot_open(folder, path, error) from error
    for line in _as_json(sums, columns) if args.json else _as_table(sums, columns):
        print(line)
    return 0


def _question(args: argparse.Namespace, columns: tuple[str, ...]) -> Question:
    from ..control.usage.question import WIDTHS, Question

    width_s, now_s = WIDTHS[args.bucket], int(time.time())
    until_s = now_s + 1 if args.until is None else args.until
    since_s = now_s - 7 * 86400 if args.since is None else args.since
    if since_s >= until_s:
        raise InvalidRequest("--since must be before --until.", param="since")
    wanted = (("tenant", tuple(args.tenant)),) if args.tenant else ()
    return Question(since_s // width_s * width_s, -(-until_s // width_s) * width_s, width_s, columns, wanted, 0)


def _when(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%MZ")


def _as_json(sums: Sequence[Sum], columns: Sequence[str]) -> list[str]:
    return [
        json.dumps(
            {"start_time": each.bucket_s}
            | {_COLUMNS[name]: getattr(each, name) for name in columns}
            | {
                "num_model_requests": each.calls,
                "input_tokens": each.prompt,
                "input_cached_tokens": each.cached,
                "output_tokens": each.output,
            }
        )
        for each in sums
    ]


def _as_table(sums: Sequence[Sum], columns: Sequence[str]) -> list[str]:
    rows = [["from", *columns, "calls", "prompt", "cached", "output"]]
    for each in sums:
        named = [getattr(each, name) or "-" for name in columns]
        rows.append([_when(each.bucket_s), *named, *map(str, (each.calls, each.prompt, each.cached, each.output))])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    num_words = 1 + len(columns)
    return [
        "  ".join(
            cell.ljust(width) if place < num_words else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
