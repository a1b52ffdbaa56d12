"""`tokenmill bench speculation`: what drafts gain on prompts that are like one's own, and that they change no token.

Engines of the same model, one of which drafts nothing, answer the same prompts in turns, so many at a time. Each repeat
has a cache salt of its own: none finds KV or outputs of an earlier repeat, but a drafter may use outputs of the prompts
before. Answers that repeat themselves are counted apart, since whoever copies is good at them: those in which some run
of LOOP_TOKENS tokens occurs LOOP_TIMES times.

Two times are taken. One is that until all answers of a group are there, prompts included. The other is that from the
first token of an answer to its last, summed over answers: drafts can make nothing else shorter.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from rich.table import Table

from ..core.errors import ConfigError, TokenmillError
from ..core.speculation import MOST_SPECULATIVE_TOKENS
from ..text.files import fill_template, read_jsonl
from . import machine
from .engine import stream_counts
from .load.options import positive
from .report import console_beside, write_json

SCHEMA = 2
RANDOM = "random"
RANDOM_TOKENS = 128
REPEATS, NUM_PROMPTS, MAX_TOKENS = 5, 12, 128
LOOP_TOKENS, LOOP_TIMES = 16, 3
QUARTERS = 4
NONE, CHOSEN = "none", "chosen"
"""Engines: what drafts nothing, and what chooses how much. Others are called by the number they draft."""

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Given:
    """What a group of prompts was answered with. decode_s: from each answer's first token to its last, summed. texts:
    what the answers say. drafted: drafts that were verified; accepted: that were right."""

    seconds: float
    decode_s: float
    tokens: Sequence[Sequence[int]]
    texts: Sequence[str]
    drafted: int = 0
    accepted: int = 0


class Answering(Protocol):
    """An engine. `vocab_size`: of its tokens."""

    vocab_size: int

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, by the model's chat template where it has one."""
        ...

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str, *, ignore_eos: bool) -> Given: ...

    def close(self) -> None: ...


class Peer(Protocol):
    """Another engine. Its answers may be others."""

    name: str

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, *, ignore_eos: bool) -> Given: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked for. conversations: the first message of each, or the tokens of its only prompt; follow_ups: what
    each goes on with, after the answer before."""

    conversations: Sequence[str | list[int]]
    follow_ups: Sequence[str] = ()
    max_tokens: int = MAX_TOKENS
    num_repeats: int = REPEATS
    ignore_eos: bool = False


@dataclass(slots=True)
class Sums:
    """Of the answers of one kind by one engine. Seconds are by repeat, the others of the last one. groups: tokens and
    accepted drafts of each group of answers, in the order in which they were asked for."""

    seconds: list[float]
    decode_s: list[float]
    groups: list[tuple[int, int]] = field(default_factory=list)
    num_answers: int = 0
    num_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, repeat: int, given: Given) -> None:
        self.seconds[repeat] += given.seconds
        self.decode_s[repeat] += given.decode_s
        if repeat == len(self.seconds) - 1:
            num_tokens = sum(map(len, given.tokens))
            self.groups.append((num_tokens, given.accepted))
            self.num_answers += len(given.tokens)
            self.num_tokens += num_tokens
            self.drafted += given.drafted
            self.accepted += given.accepted

    @property
    def speeds(self) -> list[float]:
        """Tokens a second of all answers together, by repeat."""
        return [self.num_tokens / seconds for seconds in self.seconds]

    @property
    def decode_speeds(self) -> list[float]:
        """Tokens a second of an answer behind its first, in the mean."""
        return [(self.num_tokens - self.num_answers) / seconds if seconds else 0.0 for seconds in self.decode_s]

    @property
    def tokens_a_row(self) -> float:
        """In the mean, whether the row had drafts or none."""
        return self.num_tokens / (self.num_tokens - self.accepted)

    @property
    def quarters(self) -> list[float]:
        """tokens_a_row of each quarter of the groups, none where these are too few."""
        bounds = [len(self.groups) * number // QUARTERS for number in range(QUARTERS + 1)]
        sums = [map(sum, zip(*self.groups[start:end], strict=True)) for start, end in pairwise(bounds) if start < end]
        return [tokens / (tokens - accepted) for tokens, accepted in sums] if len(sums) == QUARTERS else []


@dataclass(slots=True)
class Outcome:
    """answers: by kind (PLAIN, REPEATING), the sums of each engine by its name, those of NONE first."""

    streams: int
    answers: dict[str, dict[str, Sums]] = field(default_factory=dict)


PLAIN, REPEATING = "plain", "repeating"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        default=RANDOM,
        help=f"JSON lines, .gz too (default: {RANDOM}: {RANDOM_TOKENS} tokens drawn at random, which nobody can guess)",
    )
    group.add_argument(
        "--template",
        default="{prompt}",
        metavar="TEXT",
        help="the message made of a row, in Python's format, such as 'Rewrite:\\n{prompt}{canonical_solution}' or"
        " '{turns[0]}'; \\n is a line break (default: {prompt})",
    )
    group.add_argument("--where", metavar="FIELD=VALUE", help="rows that have this value in this field, and no others")
    group.add_argument(
        "--follow-up",
        action="append",
        default=[],
        metavar="TEXT",
        help="message to go on with after the answer, as an agent does (repeatable)",
    )
    group.add_argument(
        "--num-prompts", type=positive, default=NUM_PROMPTS, metavar="N", help=f"(default: {NUM_PROMPTS})"
    )
    group.add_argument(
        "--max-tokens", type=positive, default=MAX_TOKENS, metavar="N", help=f"of an answer (default: {MAX_TOKENS})"
    )
    group.add_argument(
        "--streams",
        type=stream_counts,
        default=(1,),
        metavar="N,N",
        help="prompts that are answered together (default: 1)",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="with a seed for each prompt")
    group.add_argument("--repeats", type=positive, default=REPEATS, metavar="N", help=f"(default: {REPEATS})")
    group.add_argument(
        "--fixed-drafts",
        type=draft_counts,
        default=(),
        metavar="N,N",
        help="take turns with engines that always draft so many, and tell how near the best of them the choice comes",
    )
    group.add_argument(
        "--peer-llama-server", type=Path, metavar="FILE", help="take turns with llama.cpp's server on the same file"
    )
    group.add_argument(
        "--peer-flags",
        action="append",
        default=[],
        metavar="TEXT",
        help="flags of such a server, as --peer-flags='--spec-type ngram-mod' (repeatable: a server for each)",
    )
    group.add_argument("--acceptance", type=Path, metavar="FILE", help="write what came of drafts, for simulations")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every measured value; -: to standard output")


def draft_counts(text: str) -> tuple[int, ...]:
    """The numbers of --fixed-drafts."""
    counts = stream_counts(text)
    if max(counts) > MOST_SPECULATIVE_TOKENS:
        raise argparse.ArgumentTypeError(f"must be at most {MOST_SPECULATIVE_TOKENS} each, got {text!r}")
    return counts


def run(
    args: argparse.Namespace,
    make: Callable[[Mapping[str, Any] | None], Answering],
    make_peer: Callable[[str], Peer],
) -> int:
    """`make(what is set of drafts beside the configuration, None: they are off)`, `make_peer(flags)`. Raises
    TokenmillError where an answer is another with drafts. Exit code 0."""
    is_random = args.prompts == RANDOM
    if is_random and args.follow_up:
        raise ConfigError("--follow-up goes on with --prompts; random tokens say nothing.", param="follow_up")
    if args.peer_flags and args.peer_llama_server is None:
        raise ConfigError("--peer-flags are those of --peer-llama-server.", param="peer_flags")
    messages = [] if is_random else read_messages(Path(args.prompts), args.template, args.where)
    drafting: dict[str, Mapping[str, Any] | None] = {NONE: None, CHOSEN: {}}
    drafting |= {str(num): {"num_speculative_tokens": num, "adaptive": False} for num in args.fixed_drafts}
    outcomes = []
    with ExitStack() as stack:
        engines: dict[str, Answering] = {}
        for name, settings in drafting.items():
            engines[name] = make(settings)
            stack.callback(engines[name].close)
        peers: list[Peer] = []
        for flags in (args.peer_flags or [""]) if args.peer_llama_server else ():
            peers.append(make_peer(flags))
            stack.callback(peers[-1].close)
        first = (
            random_prompts(engines[NONE].vocab_size, args.num_prompts) if is_random else messages[: args.num_prompts]
        )
        asked = Asked(first, args.follow_up, args.max_tokens, args.repeats, is_random)
        before = machine.read_cpu_time([])
        for streams in args.streams:
            outcomes.append(compare(engines, peers, asked, streams))
        state = machine.interference(before, machine.read_cpu_time([]))
    console = console_beside(args.json)
    for table in to_tables(outcomes):
        console.print(table)
    notes = {**machine.environment(), "other work while it ran": str(state)}
    for line in (*by_quarter(outcomes), *best_fixed(outcomes), *(f"{name}: {value}" for name, value in notes.items())):
        console.print(line, markup=False, highlight=False)
    result = {
        "schema": SCHEMA,
        "kind": "speculation",
        "environment": machine.environment(),
        "argv": sys.argv[1:],
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    write_json(args.json, result, indent=1)
    return 0


def random_prompts(vocab_size: int, num_prompts: int) -> list[list[int]]:
    """The first hundred ids are left out: special tokens live there."""
    rng, ids = random.Random(0), range(100, vocab_size)
    return [[rng.choice(ids) for _ in range(RANDOM_TOKENS)] for _ in range(num_prompts)]


def read_messages(path: Path, template: str, where: str | None) -> list[str]:
    """Of the rows of a file. Raises ConfigError."""
    name, _, value = (where or "").partition("=")
    rows = (row for row in read_jsonl(path) if not name or str(row.get(name)) == value)
    messages = [fill_template(template, row) for row in rows]
    if not messages:
        raise ConfigError(f"--prompts {path} has no rows that are asked for.", param="prompts")
    return messages


def compare(engines: Mapping[str, Answering], peers: Sequence[Peer], asked: Asked, streams: int) -> Outcome:
    """All in turns, one group of prompts after the other, after a run of the first group that warms up. What a
    conversation goes on with is what the engines have answered."""
    groups = [asked.conversations[start : start + streams] for start in range(0, len(asked.conversations), streams)]
    outcome = Outcome(streams)
    for repeat in range(-1, asked.num_repeats):
        for number, group in enumerate(groups if repeat >= 0 else groups[:1]):
            said: list[list[Message]] = [[] for _ in group]
            for turn, message in enumerate(("", *asked.follow_ups)):
                for one, first in zip(said, group, strict=True):
                    one.append({"role": "user", "content": message if turn else str(first)})
                prompts = [
                    first if isinstance(first, list) else engines[NONE].encode(one)
                    for first, one in zip(group, said, strict=True)
                ]
                given = _answers(engines, peers, asked, prompts, f"{streams} {repeat}", repeat + number + turn)
                if any(given[name].tokens != given[NONE].tokens for name in engines):
                    where = f"prompt {number * streams} or one after it"
                    raise TokenmillError(f"An answer to {where} is another with drafts.")
                if repeat >= 0:
                    _add(outcome, given, repeat, asked.num_repeats)
                for one, text in zip(said, given[NONE].texts, strict=True):
                    one.append({"role": "assistant", "content": text})
        if repeat >= 0:
            print(f"{streams} at a time, {repeat + 1} of {asked.num_repeats}", file=sys.stderr)
    return outcome


def _answers(
    engines: Mapping[str, Answering],
    peers: Sequence[Peer],
    asked: Asked,
    prompts: Sequence[Sequence[int]],
    salt: str,
    first: int,
) -> dict[str, Given]:
    """Of all, by name, NONE first. first: which of them begins."""
    given: dict[str, Given] = {}
    names = [*engines, *(peer.name for peer in peers)]
    for name in (*names[first % len(names) :], *names[: first % len(names)]):
        if name in engines:
            given[name] = engines[name].answer(prompts, asked.max_tokens, salt, ignore_eos=asked.ignore_eos)
        else:
            (peer,) = (peer for peer in peers if peer.name == name)
            given[name] = peer.answer(prompts, asked.max_tokens, ignore_eos=asked.ignore_eos)
    return {name: given[name] for name in names}


def _add(outcome: Outcome, given: Mapping[str, Given], repeat: int, num_repeats: int) -> None:
    kind = REPEATING if any(map(is_loop, given[NONE].tokens)) else PLAIN
    sums = outcome.answers.setdefault(kind, {})
    for name, each in given.items():
        sums.setdefault(name, Sums([0.0] * num_repeats, [0.0] * num_repeats)).add(repeat, each)


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether some run of LOOP_TOKENS tokens occurs LOOP_TIMES times."""
    runs: Iterable[tuple[int, ...]] = zip(*(tokens[start:] for start in range(LOOP_TOKENS)), strict=False)
    return max(Counter(runs).values(), default=0) >= LOOP_TIMES


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """How many times as many tokens a second, repeat by repeat."""
    return [our / other if other else 0.0 for our, other in zip(ours, others, strict=True)]


def to_tables(outcomes: Sequence[Outcome]) -> Iterator[Table]:
    """Of each kind of answers. `whole`: tokens a second with the prompts; `decode`: from the first tokens on."""
    for outcome in outcomes:
        for kind, engines in sorted(outcome.answers.items()):
            plain = engines[NONE]
            heads = ("drafts", "whole", "ratio", "decode", "ratio", "a row", "right")
            beside = "" if kind == PLAIN else f", {kind}"
            table = Table(*heads, title=f"{plain.num_answers} answers, {outcome.streams} at a time{beside}")
            for name, sums in engines.items():
                table.add_row(
                    name,
                    f"{median(sums.speeds):.1f}",
                    _ratio(ratios(sums.speeds, plain.speeds)),
                    f"{median(sums.decode_speeds):.1f}",
                    _ratio(ratios(sums.decode_speeds, plain.decode_speeds)),
                    f"{sums.tokens_a_row:.2f}",
                    f"{sums.accepted}/{sums.drafted}",
                )
            yield table


def _ratio(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.2f}-{max(values):.2f})"


def by_quarter(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Whether drafts are right as often late in a run as early, in a line for each engine that drafts."""
    for outcome in outcomes:
        for kind, engines in sorted(outcome.answers.items()):
            for name, sums in engines.items():
                if sums.accepted and sums.quarters:
                    found = ", ".join(f"{rate:.2f}" for rate in sums.quarters)
                    yield f"{outcome.streams} at a time, {kind}, by quarter of the run: {name} {found} tokens a row"


def best_fixed(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """How near the choice comes to the fixed number that was the fastest, in a line for each kind of answers."""
    for outcome in outcomes:
        for kind, engines in sorted(outcome.answers.items()):
            fixed = [name for name in engines if name.isdecimal()]
            if fixed:
                chosen = engines[CHOSEN].decode_speeds
                best = max((NONE, *fixed), key=lambda name: median(engines[name].decode_speeds))
                found = _ratio(ratios(chosen, engines[best].decode_speeds))
                yield f"{outcome.streams} at a time, {kind}: chosen decodes at {found} of the best fixed number, {best}"
