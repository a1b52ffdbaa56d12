"""`tokenmill bench engine`: how fast an engine reads prompts and extends many streams, in process, without HTTP.

Loads: one prompt of 512 tokens; then 1, 4, 16 and 32 streams of distinct prompts of 128 tokens, 128 new tokens each,
end tokens ignored, prefix cache off. A load of B streams is run to the first token (w1 seconds) and to the N-th (wN):

    decode only          B * (N - 1) / (wN - w1)
    generated over wall  B * N / wN

With peers, engines take turns inside every repeat, on the same prompts: a machine that changes speed changes it for
all. This room times nothing itself; an engine reports the seconds of its own run, so that a peer in another process
is not charged for the pipe.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from .. import __version__
from ..core.errors import ConfigError, TokenmillError
from . import machine, peers
from .report import Figure, Report

PREFILL_TOKENS = 512
PROMPT_TOKENS = 128
NEW_TOKENS = 128
STREAMS = (1, 4, 16, 32)
SEED = 0


class Measured(Protocol):
    """An engine that can be timed. `pids`: its other processes, whose processor time is not interference."""

    name: str
    facts: dict[str, str]
    vocab_size: int

    @property
    def pids(self) -> tuple[int, ...]: ...

    def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds to read all prompts and extend each by max_tokens tokens, whatever the tokens are."""
        ...

    def close(self) -> None: ...


class BenchEngine(Measured, Protocol):
    """The engine under test. `model_path` and `threads` are what a peer gets too."""

    model_path: Path
    threads: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What the engine must be able to hold: sequences at once, and tokens of each."""

    num_seqs: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Load:
    """num_streams prompts of prompt_tokens each, extended by new_tokens."""

    name: str
    num_streams: int
    prompt_tokens: int
    new_tokens: int

    def draw(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        """Distinct prompts of random ids. The first hundred ids are left out: special tokens live there."""
        return [[rng.randrange(100, vocab_size) for _ in range(self.prompt_tokens)] for _ in range(self.num_streams)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument("--peers", action="store_true", help="take turns with llama.cpp on the same file and threads")
    group.add_argument("--peer-python", metavar="PATH", help="interpreter with llama-cpp-python (implies --peers)")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each load (default: 3)")
    group.add_argument(
        "--streams",
        type=_stream_counts,
        default=STREAMS,
        metavar="N,N",
        help="numbers of streams (default: 1,4,16,32)",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write every measured value")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")


def run(args: argparse.Namespace, make_engine: Callable[[Demand], BenchEngine]) -> int:
    """Measure what `make_engine` makes, beside the peers asked for; print the report. Exit code 0."""
    if args.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {args.repeats}.", param="repeats")
    python = peers.find_python(args.peer_python) if args.peers or args.peer_python else None
    demand = Demand(max(args.streams, default=1), max(PREFILL_TOKENS + 1, PROMPT_TOKENS + NEW_TOKENS))
    own = make_engine(demand)
    engines: list[Measured] = [own]
    try:
        if python is not None:
            for flash in (False, True):
                engines.append(peers.start_llama(python, own.model_path, threads=own.threads, flash_attention=flash))
        report = compare(engines, loads(args.streams), args.repeats, own.threads)
    finally:
        for engine in engines:
            engine.close()
    console = Console()
    console.print(report.to_table())
    for note in report.notes():
        console.print(note, markup=False, highlight=False)
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    if args.markdown is not None:
        args.markdown.write_text(report.to_markdown())
    return 0


def loads(stream_counts: Sequence[int]) -> list[Load]:
    prefill = Load(f"prefill {PREFILL_TOKENS}", 1, PREFILL_TOKENS, 1)
    return [prefill, *(Load(f"{n} stream{'s' if n > 1 else ''}", n, PROMPT_TOKENS, NEW_TOKENS) for n in stream_counts)]


def compare(engines: Sequence[Measured], wanted: Sequence[Load], num_repeats: int, num_threads: int) -> Report:
    """Every load on every engine, in turns, num_repeats times after one run that warms up."""
    rng = random.Random(SEED)
    bandwidth_before = machine.read_bandwidth(num_threads)
    figures: list[Figure] = []
    for load in wanted:
        figures += measure(engines, load, num_repeats, rng)
    facts = {"machine": machine.hardware(), "run": _run_facts(num_repeats)}
    facts |= {engine.name: engine.facts for engine in engines}
    return Report(facts, (bandwidth_before, machine.read_bandwidth(num_threads)), figures)


def measure(engines: Sequence[Measured], load: Load, num_repeats: int, rng: random.Random) -> list[Figure]:
    """The figures of one load."""
    vocab_size = min(engine.vocab_size for engine in engines)
    for engine in engines:
        engine.run(load.draw(rng, vocab_size), min(load.new_tokens, 4))
    pids = [pid for engine in engines for pid in engine.pids]
    rates: dict[str, dict[str, list[float]]] = {}
    before = machine.read_cpu_time(pids)
    for repeat in range(num_repeats):
        prompts = load.draw(rng, vocab_size)
        for engine in engines:
            seconds, values = _measure_once(engine, load, prompts)
            print(f"{load.name}, {repeat + 1} of {num_repeats}: {engine.name} {seconds:.2f} s", file=sys.stderr)
            for quantity, value in values.items():
                rates.setdefault(quantity, {}).setdefault(engine.name, []).append(value)
    state = machine.interference(before, machine.read_cpu_time(pids))
    return [Figure(load.name, quantity, runs, state) for quantity, runs in rates.items()]


def _measure_once(engine: Measured, load: Load, prompts: list[list[int]]) -> tuple[float, dict[str, float]]:
    """Seconds in all, and tokens per second by quantity."""
    first_s = engine.run(prompts, 1)
    if load.new_tokens == 1:
        return first_s, {"prompt": load.num_streams * load.prompt_tokens / first_s}
    total_s = engine.run(prompts, load.new_tokens)
    if total_s <= first_s:
        raise TokenmillError(
            f"{engine.name} took {first_s:.3f} s for one token and {total_s:.3f} s for {load.new_tokens}: the machine"
            " is too busy to measure on. Try again when it is idle."
        )
    num_new = load.num_streams * load.new_tokens
    decode = (num_new - load.num_streams) / (total_s - first_s)
    return first_s + total_s, {"decode only": decode, "generated over wall": num_new / total_s}


def _run_facts(num_repeats: int) -> dict[str, str]:
    return {
        "tokenmill": __version__,
        "commit": machine.commit() or "not a checkout",
        "repeats": str(num_repeats),
        "seed": str(SEED),
        "command": " ".join(sys.argv[1:]),
    }


def _stream_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(",") if part)
    if not all(1 <= count <= 256 for count in counts):
        raise argparse.ArgumentTypeError(f"must be numbers from 1 to 256, got {text}")
    return counts
