"""Flags of `tokenmill kv ...`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ...core.options import size
from ...node.options import KV_CACHE_DTYPES
from ..options import argument_type
from ..serve_options import KEY_VARIABLES

URL = "http://127.0.0.1:8000"
AS = ("prompt", "user", "system")

Command = Callable[..., argparse.ArgumentParser]


def add_commands(kinds: argparse._SubParsersAction, command: Command) -> None:
    warm = command(
        kinds, "warm", "compute the KV of documents, so that it is there for requests", "kv.documents", "warm"
    )
    _server(warm)
    _documents(warm)
    warm.add_argument("--pin", action="store_true", help="keep it whatever else is wanted")
    warm.add_argument("--again", action="store_true", help="also what is stored already")
    warm.add_argument("--quiet", "-q", action="store_true", help="the last line only")

    stat = command(kinds, "stat", "what a KV store has in each tier, and what passed through it", "kv.look", "stat")
    _store(stat)
    stat.add_argument("--json", action="store_true", help="all of it, as JSON")

    ls = command(kinds, "ls", "the blocks of a KV store, or how much of documents it has", "kv.look", "ls")
    _store(ls)
    _documents(ls, "*")
    ls.add_argument("--prefix", metavar="HEX", default="", help="only keys that begin so")
    ls.add_argument("--tier", metavar="TIER", help="only those in this tier")
    ls.add_argument("--limit", metavar="N", type=int, default=100, help="at most so many (default: 100)")
    ls.add_argument("--json", action="store_true", help="as JSON")

    verify = command(kinds, "verify", "read what a KV store has on disk and compare checksums", "kv.look", "verify")
    _store(verify)

    rm = command(kinds, "rm", "have a KV store forget documents, a tier, an owner or everything", "kv.look", "rm")
    _store(rm)
    _documents(rm, "*")
    rm.add_argument("--tier", metavar="TIER", help="forget what this tier has")
    rm.add_argument("--owner", metavar="SALT", help="forget what requests with this cache_salt left")
    rm.add_argument("--all", action="store_true", help="forget everything")

    fence = command(kinds, "fence", "let no other machine write to the remote store", "kv.look", "fence")
    _store(fence)

    export = command(kinds, "export", "write the KV of documents to a file, for other machines", "kv.archive", "export")
    _store(export)
    export.add_argument("--output", "-o", dest="file", metavar="FILE", required=True, help="the archive to write")
    _documents(export, "*")
    export.add_argument("--all", action="store_true", help="everything that the store has")
    export.add_argument("--most", metavar="SIZE", type=argument_type(size), help="end at this size")

    load = command(kinds, "import", "put the KV of an archive into a KV store", "kv.archive", "load")
    _store(load)
    load.add_argument("file", metavar="FILE", help="an archive that `kv export` wrote")
    load.add_argument("--pin", action="store_true", help="keep it whatever else is wanted")
    _add_plan(kinds, command)


def _add_plan(kinds: argparse._SubParsersAction, command: Command) -> None:
    plan = command(kinds, "plan", "how much host memory and disk a load is worth, from a trace", "kv.plan", "plan")
    plan.add_argument("--trace", metavar="FILE", required=True, help="a public trace, or request bodies as JSON lines")
    plan.add_argument("--model", metavar="MODEL", default="smollm2", help="whose KV it is (default: smollm2)")
    plan.add_argument("--kv-cache-dtype", choices=tuple(KV_CACHE_DTYPES), default="auto", help="of the KV")
    plan.add_argument("--bytes-per-token", metavar="N", type=int, help="of KV, instead of --model")
    plan.add_argument("--token-ms", metavar="MS", type=float, default=1.9, help="to compute a token (default: 1.9)")
    plan.add_argument(
        "--position-us", metavar="US", type=float, default=2.1, help="for each position it attends to (default: 2.1)"
    )
    for tier in ("host", "disk"):
        plan.add_argument(
            f"--{tier}", metavar="SIZE,...", type=argument_type(_sizes), help=f"sizes of {tier} to compare"
        )
    plan.add_argument("--json", action="store_true", help="as JSON")


def _sizes(text: str) -> list[int]:
    return [size(each) for each in text.split(",")]


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", default=None, help=f"of a running server (default: {URL})")
    parser.add_argument("--api-key", metavar="KEY", help=f"a key of scope admin (default: ${KEY_VARIABLES[0]})")


def _store(parser: argparse.ArgumentParser) -> None:
    _server(parser)
    parser.add_argument("--kv-store", metavar="SOCKET", help="of the KV store itself (default: that of --url)")


def _documents(parser: argparse.ArgumentParser, number: str = "+") -> None:
    parser.add_argument(
        "documents",
        nargs=number,
        metavar="DOCUMENT",
        help="text files, - for standard input, or .jsonl files with a request body in each line",
    )
    parser.add_argument(
        "--as",
        dest="form",
        choices=AS,
        default="prompt",
        help="how requests bring it: prompt, as a plain prompt that begins with it; user or system, as the beginning of"
        " that message (default: prompt)",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message before it, with --as user")
    parser.add_argument("--model", metavar="NAME", help="an adapter's name (default: the model itself)")
    parser.add_argument("--cache-salt", metavar="SALT", help="of the requests that will use it")
