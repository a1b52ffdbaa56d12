"""`bench fairness`: what a tenant feels of another one that sends many times its share.

Two loads run at once, of two API keys. In the even phase the other tenant sends its share, in the greedy phase many
times that; the watched tenant sends the same in both. The verdict is on the ratio of its p99 TTFTs, over all requests
of the repeats.

With --other-concurrency the other tenant keeps so many long prompts open instead. Both are measured alone and beside
each other: what the watched tenant's calls wait for, and what they cost the other.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from ...core.errors import ConfigError
from .. import machine
from ..report import console_beside, write_json
from ..result import Run
from . import datasets, measure, options, show
from .histogram import quantile
from .http import parse_url
from .material import Vocabulary
from .retries import EarlyStop, RetryPolicy
from .run import Load, run_async, run_load
from .schedule import Schedule
from .target import Target

SCHEMA = 1
FEW = 100
"""So many requests leave one above their 99th percentile."""
_ASKS = 1000
"""Of a prompt that is refused: until the load is over."""


@dataclass(frozen=True, slots=True)
class Phase:
    """What one tenant saw and the other did, over the repeats. ttfts_s: of the watched tenant, in order."""

    name: str
    ttfts_s: Sequence[float]
    num_requests: int
    num_failed: int
    num_other: int
    num_other_ok: int
    output_tokens: int
    output_tokens_other: int

    @property
    def p50_s(self) -> float:
        return quantile(self.ttfts_s, 0.5)

    @property
    def p99_s(self) -> float:
        return quantile(self.ttfts_s, 0.99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="server, such as http://127.0.0.1:8000")
    group = parser.add_argument_group("tenants")
    group.add_argument("--greedy-key", required=True, metavar="KEY", help="API key of the tenant that asks for more")
    group.add_argument(
        "--times", type=float, default=10.0, metavar="X", help="of its share, that it sends (default: 10)"
    )
    group.add_argument(
        "--load", type=float, default=0.8, metavar="X", help="of its share, that the watched one sends (default: 0.8)"
    )
    group.add_argument(
        "--other-concurrency", type=int, metavar="N", help="instead: the other keeps N long prompts open"
    )
    group.add_argument("--other-input-len", type=int, default=800, metavar="N", help="tokens of these (default: 800)")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="of both phases (default: 3)")
    group.add_argument(
        "--most-ratio", type=float, default=1.5, metavar="X", help="exit code 1 if p99 TTFT rises more (default: 1.5)"
    )
    options.add_target_arguments(parser)
    options.add_load_arguments(parser)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the result; -: to standard output, and only it"
    )
    parser.set_defaults(duration=60.0, goodput=[], metric_percentiles=(), no_event_times=True)


def run(args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None) -> int:
    """Exit code 0 if the watched tenant felt little enough of the other, else 1."""
    if args.api_key is None or args.api_key == args.greedy_key:
        raise ConfigError(
            "bench fairness takes two keys: --api-key of the watched tenant, --greedy-key.", param="api_key"
        )
    if not args.request_rate or args.repeats < 1 or not (args.times > 0 and args.load > 0):
        raise ConfigError(
            "--request-rate is one tenant's share, above 0; --times and --load are above 0, --repeats at least 1.",
            param="request_rate",
        )
    load = replace(options.make_load(args, argv, vocabulary), give_up=EarlyStop(1.0))
    watched = options.make_target(args, args.url, "watched", None)
    address = parse_url(args.url, args.greedy_key, args.header, watched.address.tls)
    other = replace(watched, name="other", address=address)
    with show.Status(Console(stderr=True), load.num_prompts) as status:
        if args.other_concurrency is not None:
            seen = run_async(_beside_prompts(args, load, watched, other, status))
            return conclude_prompts(args, seen, list(load.argv))
        phases = run_async(_phases(args, load, watched, other, status))
    return conclude(args, phases, list(load.argv))


async def _phases(
    args: argparse.Namespace, load: Load, watched: Target, other: Target, status: show.Status
) -> list[Phase]:
    runs: dict[str, list[tuple[Run, Run]]] = {"even": [], "greedy": []}
    for repeat in range(args.repeats):
        for number, (name, times) in enumerate((("even", 1.0), ("greedy", args.times))):
            seed = load.seed + 10 * repeat + 2 * number  # nothing that a prefix cache knows
            status.label = f"{name} {repeat + 1}: "
            runs[name].append(
                await asyncio.gather(
                    run_load(watched, _part(load, args, args.load, seed), observe=status.observe),
                    run_load(other, _part(load, args, times, seed + 1)),
                )
            )
    return [_phase(name, each) for name, each in runs.items()]


async def _beside_prompts(
    args: argparse.Namespace, load: Load, watched: Target, other: Target, status: show.Status
) -> list[tuple[Run, Run, bool]]:
    """(the watched tenant's run, the other's, whether both were at once)"""
    lengths = datasets.Lengths(args.other_input_len, args.random_output_len)
    prompts = replace(
        load,
        make_plan=lambda num, seed, rate: datasets.random_prompts(num, seed, lengths),
        schedule=Schedule(concurrency=args.other_concurrency, stop_after_s=args.duration),
        num_prompts=args.other_concurrency,
        retry_policy=RetryPolicy(
            _ASKS
        ),  # a client that is refused and asks again at once would take the server's processor
    )
    found = []
    for repeat in range(args.repeats):
        seed = load.seed + 10 * repeat
        status.label = f"{repeat + 1}: "
        alone = await run_load(watched, _part(load, args, 1.0, seed), observe=status.observe)
        found.append((alone, await run_load(other, replace(prompts, seed=seed + 1)), False))
        both = await asyncio.gather(
            run_load(watched, _part(load, args, 1.0, seed + 2), observe=status.observe),
            run_load(other, replace(prompts, seed=seed + 3)),
        )
        found.append((*both, True))
    return found


def conclude_prompts(args: argparse.Namespace, seen: Sequence[tuple[Run, Run, bool]], argv: list[str]) -> int:
    """Print and write what was found. Exit code 1 where a call of the watched tenant failed."""
    phases = []
    for is_beside in (False, True):
        runs = [(run, other) for run, other, is_both in seen if is_both == is_beside]
        ttfts_s = sorted(
            each for run, _ in runs for row in run.requests if row.ok and (each := measure.ttft_s(row)) is not None
        )
        if not ttfts_s:
            raise ConfigError("No request of the watched tenant was answered; look at the server's log.", param="url")
        phases.append(
            {
                "is_beside": is_beside, "num_ok": len(ttfts_s), "num_failed": sum(run.num_failed for run, _ in runs),
                "ttft_p50_s": quantile(ttfts_s, 0.5), "ttft_p90_s": quantile(ttfts_s, 0.9),
                "prompts_per_s": fmean(other.requests_per_s for _, other in runs),
            }
        )  # fmt: skip
    alone, beside = (phase["prompts_per_s"] for phase in phases)
    loss = 1 - beside / alone if alone else None
    table = Table("", "watched: ok", "failed", "TTFT p50", "p90", "other: prompts/s")
    for phase in phases:
        table.add_row(
            "beside" if phase["is_beside"] else "alone", str(phase["num_ok"]), str(phase["num_failed"]),
            f"{1e3 * phase['ttft_p50_s']:.0f} ms", f"{1e3 * phase['ttft_p90_s']:.0f} ms",
            f"{phase['prompts_per_s']:.3g}",
        )  # fmt: skip
    console = console_beside(args.json)
    console.print(table)
    if loss is not None:
        console.print(f"The other tenant's prompts lose {100 * loss:.1f} % of their throughput.", highlight=False)
    facts = {"schema": SCHEMA, "kind": "fairness", "throughput_loss": loss, "phases": phases}
    write_json(args.json, {**facts, "argv": argv, "hardware": machine.hardware()}, indent=2)
    return 1 if any(phase["num_failed"] for phase in phases) else 0


def _part(load: Load, args: argparse.Namespace, times: float, seed: int) -> Load:
    rate = times * args.request_rate
    num = max(1, round(rate * args.duration)) if args.num_prompts is None else max(1, round(times * args.num_prompts))
    return replace(load.with_rate(rate), seed=seed, num_prompts=num)


def _phase(name: str, runs: Sequence[tuple[Run, Run]]) -> Phase:
    seen = [measure.ttft_s(row) for run, _ in runs for row in run.requests if row.ok]
    return Phase(
        name,
        sorted(each for each in seen if each is not None),
        sum(run.num_requests for run, _ in runs),
        sum(run.num_failed for run, _ in runs),
        sum(run.num_requests for _, run in runs),
        sum(run.num_ok for _, run in runs),
        sum(run.output_tokens for run, _ in runs),
        sum(run.output_tokens for _, run in runs),
    )


def conclude(args: argparse.Namespace, phases: Sequence[Phase], argv: list[str]) -> int:
    """Print and write what was found."""
    even, greedy = phases
    if not (even.ttfts_s and greedy.ttfts_s):
        raise ConfigError("No request of the watched tenant was answered; look at the server's log.", param="url")
    ratio = greedy.p99_s / even.p99_s
    is_fair = ratio <= args.most_ratio and not greedy.num_failed > even.num_failed
    table = Table("other tenant", "watched: ok", "failed", "TTFT p50", "p99", "other: ok", "of", "tokens w / o")
    for each in phases:
        table.add_row(
            each.name, str(len(each.ttfts_s)), str(each.num_failed), f"{1e3 * each.p50_s:.0f} ms",
            f"{1e3 * each.p99_s:.0f} ms", str(each.num_other_ok), str(each.num_other),
            f"{each.output_tokens} / {each.output_tokens_other}",
        )  # fmt: skip
    console = console_beside(args.json)
    console.print(table)
    verdict = "fair" if is_fair else "not fair"
    text = f"p99 TTFT {ratio:.2f} times that beside a tenant that sends its share (bar: {args.most_ratio:g}): {verdict}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if len(even.ttfts_s) < FEW:
        console.print(f"Fewer than {FEW} requests a phase: their p99 is hardly more than the longest of them.")
    plain = [
        {
            "other": each.name, "num_ok": len(each.ttfts_s), "num_failed": each.num_failed, "ttft_p50_s": each.p50_s,
            "ttft_p99_s": each.p99_s, "num_other": each.num_other, "num_other_ok": each.num_other_ok,
            "output_tokens": each.output_tokens, "output_tokens_other": each.output_tokens_other,
        }
        for each in phases
    ]  # fmt: skip
    facts = {"schema": SCHEMA, "kind": "fairness", "ratio": ratio, "most_ratio": args.most_ratio, "is_fair": is_fair}
    write_json(args.json, {**facts, "phases": plain, "argv": argv, "hardware": machine.hardware()}, indent=2)
    return 0 if is_fair else 1
