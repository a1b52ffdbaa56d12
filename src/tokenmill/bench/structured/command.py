"""`tokenmill bench structured`: how much of JSON Schema is taken, and whether what is taken is enforced.

Which schemas are taken, and by which keyword others are refused; their own data replayed through the masks of the
model's tokens; with --url, answers of a server, judged; and with --bombs, what others feel of grammars that explode.
docs/use/structured-output.md explains the figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from ... import __version__
from ...core.errors import ConfigError
from ...text.text_model import TextModel
from .. import machine
from ..load.options import positive
from ..quality.api import ApiSubject
from ..report import console_beside, without_secrets, write_json
from .answers import Case, Settings, ask_all, judge, known_formats, measure_gaps, read_cases, speed
from .replay import Replay, take

SCHEMA = 1
QUICK_REPLAYED = 150
QUICK_ASKED = 32
TEMPERATURES = (0.0, 1.0)
_SETTINGS = ("limit", "quick", "max_tokens", "concurrency", "bombs", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("schemas")
    group.add_argument("--data", type=Path, required=True, metavar="FILE", help="JSON lines, as .jsonl or .jsonl.gz")
    group.add_argument("--limit", type=positive, metavar="N", help="so many of them, spread evenly (default: all)")
    group.add_argument("--quick", action="store_true", help="replay and ask about a few: a look of two minutes")
    group = parser.add_argument_group("answers")
    group.add_argument("--url", metavar="URL", help="also ask this server, such as http://127.0.0.1:8000")
    group.add_argument("--served-model-name", metavar="NAME", help="with --url (default: the server's first)")
    group.add_argument("--api-key", metavar="KEY", help="with --url")
    group.add_argument("--concurrency", type=positive, default=16, metavar="N", help="requests at once (default: 16)")
    group.add_argument("--max-tokens", type=positive, default=400, metavar="N", help="of an answer (default: 400)")
    group.add_argument(
        "--num-asked", type=positive, metavar="N", help="schemas to ask about (default: all that are taken)"
    )
    group.add_argument(
        "--bombs",
        type=positive,
        metavar="N",
        help="with --url: gaps of others' tokens while N grammars explode at once",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of draws (default: 0)")
    group = parser.add_argument_group("result")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every figure and every error")


def run(args: argparse.Namespace, load: Callable[[], TextModel]) -> int:
    """Exit code 1 where something invalid is taken, something valid is refused or an answer does not fit."""
    result = measure(args, load)
    console = console_beside(args.json)
    for table in _tables(result):
        console.print(table)
    write_json(args.json, result, indent=1)
    bad = result["replay"]["errors"] + [misfit for answers in result["answers"] for misfit in answers["misfits"]]
    return 1 if bad else 0


def measure(args: argparse.Namespace, load: Callable[[], TextModel]) -> dict[str, Any]:
    """`load`: gives the model's tokenizer and end tokens."""
    if args.bombs and not args.url:
        raise ConfigError("--bombs needs the --url of a server.", param="bombs")
    if args.url:
        known_formats()
    cases = read_cases(args.data, args.limit)
    taken, pairs = take(cases)
    text = load()
    replayed = pairs if not args.quick else _spread(pairs, QUICK_REPLAYED)
    replay = Replay(text.tokenizer, text.eos_token_ids).run(replayed)
    num_asked = args.num_asked or (QUICK_ASKED if args.quick else len(pairs))
    asked = [case for case, _ in _spread(pairs, num_asked)]
    return {
        "schema": SCHEMA,
        "kind": "structured",
        "settings": {name: getattr(args, name) for name in _SETTINGS},
        "environment": {"tokenmill": __version__, "commit": machine.commit(), **machine.hardware()},
        "argv": without_secrets(sys.argv[1:]),
        "taken": taken,
        "replay": replay,
        **(_ask(args, asked) if args.url else {"answers": [], "gaps": []}),
    }


def _ask(args: argparse.Namespace, cases: list[Case]) -> dict[str, Any]:
    settings = Settings(args.max_tokens, args.seed)
    subject = ApiSubject(
        args.url, model=args.served_model_name, api_key=args.api_key, concurrency=args.concurrency, extra=None
    )
    rows = []
    try:
        for temperature in TEMPERATURES:
            answers = judge(cases, *ask_all(subject, cases, settings, temperature, constrained=True))
            free = speed(*ask_all(subject, cases, settings, temperature, constrained=False))
            rows.append({"temperature": temperature, "formats": known_formats(), **answers, "unconstrained": free})
            print(f"answers at temperature {temperature:g}: {len(cases)}", file=sys.stderr)
        gaps = measure_gaps(subject, args.bombs, args.max_tokens, args.seed) if args.bombs else []
    finally:
        subject.close()
    return {"answers": rows, "gaps": gaps}


def _spread(pairs: list[tuple[Case, str]], number: int) -> list[tuple[Case, str]]:
    if number >= len(pairs):
        return pairs
    return [pairs[place * len(pairs) // number] for place in range(number)]


def _tables(result: dict[str, Any]) -> list[Table]:
    taken, replay = result["taken"], result["replay"]
    first = Table("schemas", "number", title=f"{taken['num_taken']} of {taken['num_schemas']} schemas taken")
    for keyword, number in taken["refused_by_keyword"].items():
        first.add_row(f"refused for {keyword}", str(number))
    second = Table(
        "data", "number", title=f"{replay['num_tests']} pieces of data replayed, {len(replay['errors'])} wrong"
    )
    for what, number in replay["counts"].items():
        second.add_row(what, str(number))
    if not result["answers"]:
        return [first, second]
    third = Table("temperature", "answers", "ended as", "do not fit", "failed", "tokens/s", "unconstrained tokens/s")
    for row in result["answers"]:
        third.add_row(
            f"{row['temperature']:g}",
            str(row["num_answers"]),
            ", ".join(f"{reason} {number}" for reason, number in row["by_finish_reason"].items()),
            str(len(row["misfits"])),
            str(len(row["failures"])),
            f"{row['tokens_per_s']:.1f}",
            f"{row['unconstrained']['tokens_per_s']:.1f}",
        )
    if not result["gaps"]:
        return [first, second, third]
    fourth = Table("grammars that explode at once", "they end as", "others' token gaps", "p50", "p99", "most")
    for row in result["gaps"]:
        fourth.add_row(
            str(row["num_bombs"]),
            ", ".join(f"{end} {number}" for end, number in row["bombs_ended_as"].items()),
            str(row["num_gaps"]),
            *(f"{1e3 * row[name]:.1f} ms" for name in ("p50_s", "p99_s", "max_s")),
        )
    return [first, second, third, fourth]
