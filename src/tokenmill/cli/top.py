"""`top`: a page about a running server, drawn again and again: workers, queues, KV, streams, moves, decisions and why.

All of it is read from the server's own views. The page is plain text; on a terminal it is drawn over itself, elsewhere
one page follows another, so that it can be piped.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any

from ..core.errors import TokenmillError, Unavailable
from ..core.units import format_bytes
from .serve_options import KEY_VARIABLES
from .server_url import read_url

_TIMEOUT_S = 10.0
_NUM_STREAMS, _NUM_DECISIONS = 12, 8
_HEADS = r"(?m)^(tokenmill top|WORKER|REQUEST|DECISIONS).*$"
VIEWS = {
    "load": "/admin/load",
    "workers": "/admin/workers",
    "requests": f"/admin/requests?state=open&limit={_NUM_STREAMS}",
    "decisions": f"/admin/decisions?limit={_NUM_DECISIONS}",
}
MAYBE = {"tiers": "/admin/kv/tiers"}
"""Views that not every server has."""

View = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="of the server "
                        "(default: http://127.0.0.1:8000)")  # fmt: skip
    parser.add_argument("--url", dest="url", metavar="URL", default=argparse.SUPPRESS, help="the same")
    parser.add_argument("--api-key", metavar="KEY", help=f"a key of scope admin (default: ${KEY_VARIABLES[0]})")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="between two pages (default: 1)")
    parser.add_argument("--once", action="store_true", help="one page, then end")
    parser.add_argument("--json", action="store_true", help="what the server says, a line of JSON for each page")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be from 0.1 to 3600")
    return value


def top(args: argparse.Namespace) -> int:
    server = Server(args.url, args.api_key or os.environ.get(KEY_VARIABLES[0], ""))
    first = server.read()
    if args.once:
        print(json.dumps(first) if args.json else page(args.url, first, shutil.get_terminal_size().columns))
        return 0
    pages = _pages(server, first, args.interval)
    with suppress(KeyboardInterrupt):
        if sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown") and not args.json:
            _draw(args.url, pages)
        for seen in pages:
            print(
                json.dumps(seen) if args.json else page(args.url, seen, shutil.get_terminal_size().columns) + "\n",
                flush=True,
            )
    return 0


def _draw(url: str, pages: Iterator[View]) -> None:
    """Each page over the one before, on a screen of its own, until Ctrl-C or SIGTERM."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        for seen in pages:
            text = Text(page(url, seen, *live.console.size), no_wrap=True, overflow="crop")
            text.highlight_regex(_HEADS, "bold")
            live.update(text, refresh=True)


def _pages(server: Server, first: View, interval_s: float) -> Iterator[View]:
    """A server that is away for a while is said to be."""
    yield first
    while True:
        time.sleep(interval_s)
        try:
            yield server.read()
        except TokenmillError as error:
            yield {"error": error.message}


class Server:
    """Reads the views of the server at `url`. Raises ConfigError for what is no address."""

    def __init__(self, url: str, key: str) -> None:
        self._url = read_url(url, "URL", "http://127.0.0.1:8000")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def read(self) -> View:
        """All views, by their names. Raises Unavailable."""
        with closing(self._url.connect(_TIMEOUT_S)) as connection:
            try:
                seen = {name: self._get(connection, path) for name, path in VIEWS.items()}
                for name, path in MAYBE.items():
                    with suppress(Unavailable):
                        seen[name] = self._get(connection, path)
                return seen
            except (OSError, http.client.HTTPException, ValueError) as error:
                where = f"{self._url.host}:{self._url.port}" if self._url.port else self._url.host
                raise Unavailable(f"There is no answer from {where} ({error}).") from None

    def _get(self, connection: http.client.HTTPConnection, path: str) -> Any:
        connection.request("GET", self._url.base + path, headers=self._headers)
        response = connection.getresponse()
        text = response.read()
        if response.status in (401, 403):
            raise Unavailable(
                "The server wants an API key of scope admin: give it by --api-key, or in TOKENMILL_API_KEY."
            )
        if response.status != 200:
            raise Unavailable(f"The server answered {response.status} to {path}: {text[:300].decode(errors='replace')}")
        return json.loads(text)


# ---- the page ----


def page(url: str, seen: View, width: int = 80, height: int = 0) -> str:
    """`height` 0: as long as it is."""
    if "error" in seen:
        return _cut([f"tokenmill top   {url}", "", seen["error"]], width, height)
    lines = [*_head(url, seen["load"]), *_tiers(seen.get("tiers")), "", *_workers(seen["workers"]["workers"])]
    lines += ["", *_streams(seen["requests"]["data"], seen["load"]["open"])]
    lines += ["", *_decisions(seen["decisions"]["data"], seen["load"]["time"])]
    return _cut(lines, width, height)


def _cut(lines: list[str], width: int, height: int) -> str:
    return "\n".join(_plain(line)[:width].rstrip() for line in (lines[:height] if height else lines))


def _plain(text: str) -> str:
    """Names that others chose may not steer the terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _head(url: str, load: View) -> list[str]:
    rates, kv = load["tokens_per_s"], load["kv"]
    state = "ready" if load["ready"] else "no engine"
    clock = time.strftime("%H:%M:%S", time.localtime(load["time"]))
    return [
        f"tokenmill top   {url}   {state}   {clock}",
        f"requests  running {load['running']}  waiting {load['waiting']} (in engines {load['waiting_in_engines']})  "
        f"wait now {load['predicted_wait_s']:.2f} s  preemptions {load['preemptions']}",
        f"tokens/s  prompt {rates['prompt_computed']:.0f} computed, {rates['prompt_cached']:.0f} cached  "
        f"output {rates['output']:.0f}   steps/s {load['steps_per_s']:.1f}",
        f"KV        {_bar(kv['usage'])} {100 * kv['usage']:.0f} %  held {kv['held']}  cached {kv['cached']}  "
        f"free {kv['free']} of {kv['blocks']} blocks",
        f"TTFT {_spread(load['ttft_s'])}   TPOT {_spread(load['tpot_s'])}",
    ]


def _tiers(told: View | None) -> list[str]:
    """A line for each tier of the KV store."""
    if told is None:
        return []
    lines = []
    for tier, counts in told["tiers"].items():
        has = f"{format_bytes(counts['bytes'])} of {format_bytes(counts['max_bytes'])}, " if "bytes" in counts else ""
        blocks = f"{counts['blocks']} blocks  " if "blocks" in counts else ""
        lines.append(
            f"{tier:<10}{has}{blocks}hits {counts['hits']}  loaded {format_bytes(counts['load_bytes'])}  "
            f"saved {format_bytes(counts['save_bytes'])}  evicted {counts['evictions']}  corrupt {counts['corrupt']}"
        )
    return lines


def _bar(share: float, width: int = 20) -> str:
    full = round(min(1.0, max(0.0, share)) * width)
    return "[" + "#" * full + "." * (width - full) + "]"


def _spread(spread: View) -> str:
    if not spread["count"]:
        return "-"
    return f"p50 {1e3 * spread['p50']:.0f} p99 {1e3 * spread['p99']:.0f} ms"


def _workers(workers: list[View]) -> list[str]:
    rows: list[tuple[str, ...]] = [("WORKER", "STATE", "POOL", "PID", "OPEN", "RUN", "WAIT", "KV %", "STEPS", "FROM")]
    rows += [
        (
            each["id"], each["state"], each["pool"], str(each["pid"] or "-"), str(each["num_open"]),
            str(each["num_running"]), str(each["num_waiting"]), f"{100 * each['kv_usage']:.0f}",
            str(each["num_steps"]), each["address"] or "here",
        )
        for each in workers
    ]  # fmt: skip
    return _table(rows)


def _streams(requests: list[View], num_open: int) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("REQUEST", "STATE", "ENGINE", "PROMPT", "OUTPUT", "AGE s", "TTFT s", "MOVES", "RESUMED", "WHY THERE")
    ]
    rows += [
        (
            each["id"], each["state"], "-" if each["engine"] is None else str(each["engine"]),
            str(each["prompt_tokens"]), f"{each['output_tokens']}/{each['max_tokens']}", f"{each['age_s']:.1f}",
            "-" if each["ttft_s"] is None else f"{each['ttft_s']:.2f}", str(each["num_moves"]),
            str(each["num_resumptions"]), _why(each["lives"]),
        )
        for each in requests
    ]  # fmt: skip
    more = num_open - len(requests)
    return [*_table(rows), *([f"and {more} more"] if more > 0 else ())]


def _why(lives: list[View]) -> str:
    """Why it is where it is."""
    return (lives[-1]["why"] or lives[-1]["route"] or "-") if lives else "-"


def _decisions(decisions: list[View], now: float) -> list[str]:
    return ["DECISIONS", *(f"{now - each['time']:7.1f} s ago  {told(each)}" for each in decisions)]


def told(decision: View) -> str:
    """One decision in words."""
    kind = decision["kind"]
    if kind in ("moved", "not_moved"):
        way = f"{decision['worker']} -> {decision['to']} ({decision['why']})"
        if kind == "not_moved":
            return f"not moved {way}: {decision['error']}  {decision['request']}"
        pause = f", pause {1e3 * decision['pause_s']:.0f} ms" if decision["pause_s"] else ""
        return f"moved {way}, KV of {decision['tokens']} tokens{pause}  {decision['request']}"
    if kind in ("copied", "not_copied"):
        way = f"a prefix {decision['worker']} -> {decision['to']} ({decision['why']})"
        if kind == "not_copied":
            return f"not copied {way}: {decision['error']}"
        return f"copied {way}, KV of {decision['tokens']} tokens in {1e3 * decision['took_s']:.0f} ms"
    if "num_requests" in decision:
        return f"{kind.replace('_', ' ')}: {decision['num_requests']} requests"
    if kind == "pool":
        return f"{decision['worker']} serves in pool {decision['pool']}"
    return f"{decision['worker']} {'has' if kind == 'left' else 'is'} {kind}"


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    """The first three columns to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if place < 3 else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells))
    return lines
