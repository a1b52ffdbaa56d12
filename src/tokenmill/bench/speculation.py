"""`tokenmill bench speculation`: what drafts gain on prompts that are like one's own, and that they change no token.

Two engines of the same model, one of which drafts, answer the same prompts in turns, so many at a time. Each repeat has
a cache salt of its own: neither finds KV or outputs of an earlier repeat, but the drafter may use outputs of the
prompts before. Answers that repeat themselves are counted apart, since whoever copies is good at them: those in which
some run of LOOP_TOKENS tokens occurs LOOP_TIMES times.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from rich.table import Table

from ..core.errors import ConfigError, TokenmillError
from ..text.files import fill_template, read_jsonl
from . import machine
from .engine import stream_counts
from .load.options import positive
from .report import console_beside, write_json

SCHEMA = 1
RANDOM = "random"
RANDOM_TOKENS = 128
REPEATS, NUM_PROMPTS, MAX_TOKENS = 5, 12, 128
LOOP_TOKENS, LOOP_TIMES = 16, 3


@dataclass(frozen=True, slots=True)
class Given:
    """What a group of prompts was answered with. drafted: drafts that were verified; accepted: that were right."""

    seconds: float
    tokens: Sequence[Sequence[int]]
    drafted: int = 0
    accepted: int = 0


class Answering(Protocol):
    """An engine. `vocab_size`: of its tokens."""

    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The tokens of a message to the model, by its chat template where it has one."""
        ...

    def answer(self, prompts: Sequence[Sequence[int]], max_tokens: int, salt: str, *, ignore_eos: bool) -> Given: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Sums:
    """Of the groups of one kind, by repeat: seconds without drafts and with them. The others are of one repeat."""

    plain_s: list[float]
    drafting_s: list[float]
    num_groups: int = 0
    num_tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def ratios(self) -> list[float]:
        """How many times as many tokens a second drafts give."""
        return [plain / drafting for plain, drafting in zip(self.plain_s, self.drafting_s, strict=True)]

    @property
    def tokens_a_row(self) -> float:
        """In the mean, whether the row had drafts or none."""
        return self.num_tokens / (self.num_tokens - self.accepted)


@dataclass(slots=True)
class Outcome:
    streams: int
    plain: Sums
    loops: Sums


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
    group.add_argument("--json", type=Path, metavar="FILE", help="write every measured value; -: to standard output")


def run(args: argparse.Namespace, make: Callable[[bool], Answering]) -> int:
    """`make(whether it drafts)`. Raises TokenmillError where an answer is another with drafts. Exit code 0."""
    messages = [] if args.prompts == RANDOM else read_messages(Path(args.prompts), args.template, args.where)
    plain, drafting = make(False), make(True)
    try:
        if args.prompts == RANDOM:
            rng = random.Random(0)
            ids = range(100, plain.vocab_size)
            prompts = [[rng.choice(ids) for _ in range(RANDOM_TOKENS)] for _ in range(args.num_prompts)]
        else:
            prompts = [plain.encode(message) for message in messages[: args.num_prompts]]
        outcomes = []
        before = machine.read_cpu_time([])
        for streams in args.streams:
            outcome = compare(
                plain, drafting, prompts, streams, args.max_tokens, args.repeats, ignore_eos=args.prompts == RANDOM
            )
            outcomes.append(outcome)
        state = machine.interference(before, machine.read_cpu_time([]))
    finally:
        plain.close()
        drafting.close()
    console = console_beside(args.json)
    console.print(to_table(outcomes))
    environment = machine.environment()
    for name, value in environment.items():
        console.print(f"{name}: {value}", markup=False, highlight=False)
    console.print(f"other work while it ran: {state}", markup=False, highlight=False)
    result = {
        "schema": SCHEMA,
        "kind": "speculation",
        "environment": environment,
        "argv": sys.argv[1:],
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    write_json(args.json, result, indent=1)
    return 0


def read_messages(path: Path, template: str, where: str | None) -> list[str]:
    """Of the rows of a file. Raises ConfigError."""
    name, _, value = (where or "").partition("=")
    rows = (row for row in read_jsonl(path) if not name or str(row.get(name)) == value)
    messages = [fill_template(template, row) for row in rows]
    if not messages:
        raise ConfigError(f"--prompts {path} has no rows that are asked for.", param="prompts")
    return messages


def compare(
    plain: Answering,
    drafting: Answering,
    prompts: Sequence[Sequence[int]],
    streams: int,
    max_tokens: int,
    num_repeats: int,
    *,
    ignore_eos: bool,
) -> Outcome:
    """Both in turns, one group of prompts after the other, after a run of the first group that warms up."""
    groups = [prompts[start : start + streams] for start in range(0, len(prompts), streams)]
    outcome = Outcome(streams, *(Sums([0.0] * num_repeats, [0.0] * num_repeats) for _ in range(2)))
    for engine in (plain, drafting):
        engine.answer(groups[0], max_tokens, f"warm {streams}", ignore_eos=ignore_eos)
    for repeat in range(num_repeats):
        for number, group in enumerate(groups):
            order = (plain, drafting) if (repeat + number) % 2 else (drafting, plain)
            given = {
                engine is drafting: engine.answer(group, max_tokens, f"{streams} {repeat}", ignore_eos=ignore_eos)
                for engine in order
            }
            if given[True].tokens != given[False].tokens:
                raise TokenmillError(f"An answer to prompt {number * streams} or one after it is another with drafts.")
            sums = outcome.loops if any(map(is_loop, given[False].tokens)) else outcome.plain
            sums.plain_s[repeat] += given[False].seconds
            sums.drafting_s[repeat] += given[True].seconds
            if repeat == num_repeats - 1:
                sums.num_groups += 1
                sums.num_tokens += sum(map(len, given[True].tokens))
                sums.drafted += given[True].drafted
                sums.accepted += given[True].accepted
        print(f"{streams} at a time, {repeat + 1} of {num_repeats}", file=sys.stderr)
    return outcome


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether some run of LOOP_TOKENS tokens occurs LOOP_TIMES times."""
    runs: Iterable[tuple[int, ...]] = zip(*(tokens[start:] for start in range(LOOP_TOKENS)), strict=False)
    return max(Counter(runs).values(), default=0) >= LOOP_TIMES


def to_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table("streams", "groups", "tokens", "tok/s", "drafting", "ratio", "range", "tokens a row", "accepted")
    for outcome in outcomes:
        for name, sums in (("", outcome.plain), (", repeating", outcome.loops)):
            if not sums.num_groups:
                continue
            ratios = sums.ratios
            table.add_row(
                str(outcome.streams),
                f"{sums.num_groups}{name}",
                str(sums.num_tokens),
                f"{sums.num_tokens / median(sums.plain_s):.1f}",
                f"{sums.num_tokens / median(sums.drafting_s):.1f}",
                f"{median(ratios):.3f}",
                f"{min(ratios):.2f}-{max(ratios):.2f}",
                f"{sums.tokens_a_row:.2f}",
                f"{sums.accepted} of {sums.drafted}",
            )
    return table
