"""`tokenmill bench engine`: how fast an engine reads prompts and extends many streams, in process, without HTTP.

Loads: one prompt of 512 tokens; then 1, 4, 16 and 32 streams of distinct prompts of 128 tokens, 128 new tokens each,
end tokens ignored, prefix cache off. A load of B streams is run to the first token (w1 seconds) and to the N-th (wN):

    decode only          B * (N - 1) / (wN - w1)
    generated over wall  B * N / wN

The mixed load gives short prompts with long answers and long prompts with short answers together, so that prompts are
read in chunks among decodes; its figure is all tokens, read and generated, over wall.

With peers, engines take turns inside every repeat, on the same prompts: a machine that changes speed changes it for
all. This module times nothing itself; an engine reports the seconds of its own run, so that a peer in another process
is not charged for the pipe. --cpu-time takes the processor time of an engine's process for the wall clock's: on a
machine that others use too, two builds of one engine still compare by it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .. import __version__
from ..core.errors import ConfigError, TokenmillError
from ..core.units import format_bytes
from . import machine
from .peer import processes as peers
from .report import Figure, Report, console_beside, write_json

PREFILL_TOKENS = 512
PROMPT_TOKENS = 128
NEW_TOKENS = 128
STREAMS = (1, 4, 16, 32)
MIXED = ((12, 128, 128), (4, 512, 32))
"""(streams, prompt tokens, new tokens) of the mixed load."""

SEED = 0
REPEATS, QUICK_REPEATS = 5, 2
QUICK_NEW_TOKENS = 64

SETTLE_S = 0.3
"""Pause before each engine's turn: the threads of the one before may still be spinning."""


class Measured(Protocol):
    """An engine that can be timed. `pids`: its other processes, whose processor time is not interference.
    `takes_uneven`: whether prompts of one run may differ in length and in new tokens."""

    name: str
    facts: dict[str, str]
    vocab_size: int

    @property
    def takes_uneven(self) -> bool: ...

    @property
    def pids(self) -> tuple[int, ...]: ...

    def run(self, prompts: list[list[int]], max_tokens: Sequence[int]) -> machine.RunTime:
        """Read all prompts and extend prompt i by max_tokens[i] tokens, whatever the tokens are."""
        ...

    def peak_bytes(self) -> int | None:
        """Most memory its process has held so far, where that can be told."""
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
    """Streams given together: (how many, prompt tokens, new tokens) of each kind."""

    name: str
    kinds: tuple[tuple[int, int, int], ...]

    @property
    def num_streams(self) -> int:
        return sum(count for count, _, _ in self.kinds)

    @property
    def num_prompt(self) -> int:
        return sum(count * prompt for count, prompt, _ in self.kinds)

    @property
    def max_tokens(self) -> list[int]:
        """New tokens of each stream."""
        return [new for count, _, new in self.kinds for _ in range(count)]

    @property
    def longest(self) -> int:
        return max(prompt + new for _, prompt, new in self.kinds)

    def draw(self, rng: random.Random, vocab_size: int) -> list[list[int]]:
        """Distinct prompts of random ids. The first hundred ids are left out: special tokens live there."""
        lengths = [prompt for count, prompt, _ in self.kinds for _ in range(count)]
        return [[rng.randrange(100, vocab_size) for _ in range(length)] for length in lengths]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--peers", action="store_true", help="take turns with other engines; by default llama.cpp on the same file"
    )
    group.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="PATH",
        help="interpreter with llama-cpp-python, vLLM or OpenVINO GenAI, or with another tokenmill and none of these"
        " (repeatable; implies --peers)",
    )
    group.add_argument("--peer-llama-bin", type=Path, metavar="DIR", help="llama.cpp's own programs (implies --peers)")
    group.add_argument(
        "--peer-model",
        action="append",
        type=_peer_model,
        default=[],
        metavar="ENGINE=PATH",
        help=f"model of a peer: {', '.join(peers.TITLES)} (repeatable; llama: default the same file)",
    )
    group.add_argument(
        "--cpu-time", action="store_true", help="tokens by an engine's processor time in place of the wall clock's"
    )
    group.add_argument("--repeats", type=int, metavar="N", help=f"runs of each load (default: {REPEATS})")
    group.add_argument(
        "--streams",
        type=stream_counts,
        default=STREAMS,
        metavar="N,N",
        help="numbers of streams (default: 1,4,16,32)",
    )
    group.add_argument(
        "--sampling",
        type=_settings,
        default={},
        metavar="JSON",
        help='settings of every stream, such as {"temperature": 1, "logprobs": 5} or {"structured_outputs": {"regex": '
        '"([a-z]+ )*"}} (default: greedy)',
    )
    group.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_REPEATS} runs of each load, {QUICK_NEW_TOKENS} new tokens a stream",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write every measured value")
    group.add_argument("--markdown", type=Path, metavar="FILE", help="write the table")


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    biases = settings.get("logit_bias")
    if isinstance(biases, dict):  # JSON writes the token ids as strings
        settings["logit_bias"] = {int(token) if token.isdecimal() else token: bias for token, bias in biases.items()}
    return settings


def run(args: argparse.Namespace, make_engine: Callable[[Demand], BenchEngine]) -> int:
    """Measure what `make_engine` makes, beside the peers asked for; print the report. Exit code 0."""
    num_repeats = args.repeats if args.repeats is not None else QUICK_REPEATS if args.quick else REPEATS
    if num_repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {num_repeats}.", param="repeats")
    wanted = _find_peers(args)
    chosen = loads(args.streams, QUICK_NEW_TOKENS if args.quick else NEW_TOKENS)
    demand = Demand(max(load.num_streams for load in chosen), max(load.longest for load in chosen))
    own = make_engine(demand)
    engines: list[Measured] = [own]
    try:
        for peer in wanted:
            print(f"starting {peer.name()}", file=sys.stderr)
            engines += peers.start(peer, own.model_path, own.threads, demand.num_seqs)
        report = compare(engines, chosen, num_repeats, own.threads, by_cpu=args.cpu_time)
    finally:
        for engine in engines:
            engine.close()
    console = console_beside(args.json)
    console.print(report.to_table())
    for note in report.notes():
        console.print(note, markup=False, highlight=False)
    write_json(args.json, report.to_json(), indent=2)
    if args.markdown is not None:
        args.markdown.write_text(report.to_markdown())
    return 0


def loads(stream_counts: Sequence[int], new_tokens: int = NEW_TOKENS) -> list[Load]:
    """Prefill, then the asked numbers of streams, then the mixed load."""
    streams = [Load(f"{n} stream{'s' if n > 1 else ''}", ((n, PROMPT_TOKENS, new_tokens),)) for n in stream_counts]
    return [Load(f"prefill {PREFILL_TOKENS}", ((1, PREFILL_TOKENS, 1),)), *streams, Load("mixed", MIXED)]


def compare(
    engines: Sequence[Measured], wanted: Sequence[Load], num_repeats: int, num_threads: int, *, by_cpu: bool = False
) -> Report:
    """Every load on every engine, in turns, num_repeats times after one run that warms up."""
    rng = random.Random(SEED)
    bandwidth_before = machine.read_bandwidth(num_threads)
    figures: list[Figure] = []
    for load in wanted:
        figures += measure(engines, load, num_repeats, rng, by_cpu=by_cpu)
    facts = {"machine": machine.hardware(), "run": _run_facts(num_repeats)}
    for engine in engines:
        peak = engine.peak_bytes()
        memory = {} if peak is None else {"peak memory": format_bytes(peak)}
        facts[engine.name] = {**engine.facts, **memory}
    clock = "cpu" if by_cpu else "wall"
    return Report(facts, (bandwidth_before, machine.read_bandwidth(num_threads)), figures, clock)


def measure(
    engines: Sequence[Measured], load: Load, num_repeats: int, rng: random.Random, *, by_cpu: bool = False
) -> list[Figure]:
    """The figures of one load, of the engines that can run it."""
    is_uneven = len(load.kinds) > 1
    engines = [engine for engine in engines if engine.takes_uneven or not is_uneven]
    vocab_size = min(engine.vocab_size for engine in engines)
    for engine in engines:
        engine.run(load.draw(rng, vocab_size), [min(count, 4) for count in load.max_tokens])
    pids = [pid for engine in engines for pid in engine.pids]
    rates: dict[str, dict[str, list[float]]] = {}
    before = machine.read_cpu_time(pids)
    for repeat in range(num_repeats):
        prompts = load.draw(rng, vocab_size)
        for engine in engines:
            time.sleep(SETTLE_S)
            seconds, values = _measure_once(engine, load, prompts, by_cpu=by_cpu)
            print(f"{load.name}, {repeat + 1} of {num_repeats}: {engine.name} {seconds:.2f} s", file=sys.stderr)
            for quantity, value in values.items():
                rates.setdefault(quantity, {}).setdefault(engine.name, []).append(value)
    state = machine.interference(before, machine.read_cpu_time(pids))
    return [Figure(load.name, quantity, runs, state) for quantity, runs in rates.items()]


def _measure_once(
    engine: Measured, load: Load, prompts: list[list[int]], *, by_cpu: bool
) -> tuple[float, dict[str, float]]:
    """Seconds in all, and tokens per second by quantity."""

    def seconds_of(max_tokens: Sequence[int]) -> float:
        spent = engine.run(prompts, max_tokens)
        if not by_cpu:
            return spent.wall_s
        if spent.cpu_s is None:
            raise ConfigError(f"--cpu-time: the processor time of {engine.name} is not known.", param="cpu_time")
        return spent.cpu_s

    num_new = sum(load.max_tokens)
    if len(load.kinds) > 1:
        total_s = seconds_of(load.max_tokens)
        return total_s, {"read and generated": (load.num_prompt + num_new) / total_s}
    first_s = seconds_of([1] * load.num_streams)
    if num_new == load.num_streams:
        return first_s, {"prompt": load.num_prompt / first_s}
    total_s = seconds_of(load.max_tokens)
    if total_s <= first_s:
        raise TokenmillError(
            f"{engine.name} took {first_s:.3f} s for one token and {total_s:.3f} s for {load.max_tokens[0]}: the"
            " machine is too busy to measure on. Try again when it is idle."
        )
    decode = (num_new - load.num_streams) / (total_s - first_s)
    whole = f"generated over {'CPU time' if by_cpu else 'wall'}"
    return first_s + total_s, {"decode only": decode, whole: num_new / total_s}


def _find_peers(args: argparse.Namespace) -> list[peers.Wanted]:
    """Before any model is loaded."""
    if not (args.peers or args.peer_python or args.peer_llama_bin or args.peer_model):
        return []
    has_place = args.peer_python or args.peer_llama_bin
    return peers.find(args.peer_python if has_place else [sys.executable], args.peer_llama_bin, args.peer_model)


def _run_facts(num_repeats: int) -> dict[str, str]:
    return {
        "tokenmill": __version__,
        "commit": machine.commit() or "not a checkout",
        "repeats": str(num_repeats),
        "seed": str(SEED),
        "command": " ".join(sys.argv[1:]),
    }


def stream_counts(text: str) -> tuple[int, ...]:
    counts = tuple(int(part) for part in text.split(",") if part)
    if not all(1 <= count <= 256 for count in counts):
        raise argparse.ArgumentTypeError(f"must be numbers from 1 to 256, got {text}")
    return counts


def _peer_model(text: str) -> tuple[str, Path]:
    engine, _, path = text.partition("=")
    if engine not in peers.TITLES or not path:
        raise argparse.ArgumentTypeError(f"must be ENGINE=PATH with one of {', '.join(peers.TITLES)}, got {text}")
    return engine, Path(path)
