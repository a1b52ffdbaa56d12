"""`tokenmill bench tools`: asks a server questions that need calls of tools, and checks every call.

Questions are the Berkeley Function Calling Leaderboard's, JSON lines with `question`, `function` and `ground_truth`
(https://gorilla.cs.berkeley.edu/leaderboard.html). Each answer counts once: as refused (400), ended by the limit of
tokens, without a call, malformed, not fitting its schema, or fitting; of those that fit, how many are right. What ends
by itself under `required` or a named choice must fit: any that does not is a fault of the server, and the exit code is
1.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import __version__
from ..core.errors import ConfigError, InvalidRequest
from . import machine
from .quality.api import ApiSubject
from .report import console_beside, without_secrets, write_json

_TYPES = {"dict": "object", "float": "number", "tuple": "array"}
"""Its names of types that JSON schema knows by others."""


@dataclass(frozen=True, slots=True)
class Case:
    """answers: of each call, the name and the values that each argument may have; "" among them: it may be left out."""

    id: str
    group: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    answers: list[tuple[str, dict[str, list[Any]]]]

    @property
    def schemas(self) -> dict[str, Any]:
        return {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}


def read_cases(path: Path, limit: int | None, seed: int) -> list[Case]:
    """All, or `limit` that `seed` chooses, in the file's order. Raises ConfigError."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        cases = [_case(json.loads(line)) for line in text.decode().splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        what = f"a line has no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} cannot be read as questions with functions: {what}.", param="data") from None
    if not cases:
        raise ConfigError(f"{path} has no questions.", param="data")
    if limit is not None and limit < len(cases):
        kept = random.Random(seed).sample(range(len(cases)), limit)
        cases = [cases[number] for number in sorted(kept)]
    return cases


def _case(row: dict[str, Any]) -> Case:
    tools = [
        {"type": "function", "function": {**function, "parameters": schema_of(function["parameters"])}}
        for function in row["function"]
    ]
    answers = [next(iter(call.items())) for call in row["ground_truth"]]
    return Case(row["id"], row["category"], row["question"][0], tools, answers)


def schema_of(given: Any) -> Any:
    """The parameters as JSON schema has them."""
    if isinstance(given, list):
        return [schema_of(item) for item in given]
    if not isinstance(given, dict):
        return given
    schema = {key: value if key in ("enum", "default") else schema_of(value) for key, value in given.items()}
    kind = schema.get("type")
    if kind == "any":
        del schema["type"]
    elif isinstance(kind, str):
        schema["type"] = _TYPES.get(kind, kind)
    return schema


def is_right(case: Case, calls: Sequence[tuple[str, dict[str, Any]]]) -> bool:
    """Whether the calls are those wanted, in any order, each argument one of the values that it may have."""
    wanted = list(case.answers)
    for name, arguments in calls:
        place = next(
            (at for at, (other, allowed) in enumerate(wanted) if name == other and _fit(arguments, allowed)), -1
        )
        if place < 0:
            return False
        del wanted[place]
    return not wanted


def _fit(arguments: dict[str, Any], allowed: dict[str, list[Any]]) -> bool:
    return all(name in allowed for name in arguments) and all(
        "" in values if name not in arguments else any(_same(arguments[name], value) for value in values)
        for name, values in allowed.items()
    )


def _same(value: Any, wanted: Any) -> bool:
    """Text without regard to case and punctuation; in objects each value is a list of those allowed."""
    if isinstance(value, str) and isinstance(wanted, str):
        return _plain(value) == _plain(wanted)
    if isinstance(value, dict) and isinstance(wanted, dict):
        return all(isinstance(values, list) for values in wanted.values()) and _fit(value, wanted)
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    return (type(value) is not bool and type(wanted) is not bool and value == wanted) or value is wanted


def _plain(text: str) -> str:
    return "".join(char for char in text.lower() if char.isalnum())


SCHEMA = 1
OUTCOMES = ("fits", "length", "refused", "no call", "malformed", "does not fit")
FAULTS = ("no call", "malformed", "does not fit")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", required=True, help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--data", type=Path, metavar="FILE", required=True, help="questions of BFCL's form, JSON lines")
    parser.add_argument(
        "--choice",
        choices=("auto", "required", "named"),
        default="required",
        help="tool_choice; named: the first function that is right (default: required)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="ask N questions (default: all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="chooses them (default: 0)")
    parser.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of an answer (default: 512)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="requests at once (default: 8)")
    parser.add_argument("--served-model-name", metavar="NAME", help="(default: the server's first)")
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure and every answer")


def run(args: argparse.Namespace) -> int:
    """Exit code 1 where an answer that had to call does not fit."""
    try:
        validator = importlib.import_module("jsonschema").Draft202012Validator
    except ImportError:
        raise ConfigError(
            "bench tools needs the jsonschema package: pip install 'jsonschema[format-nongpl]'.", param="bench"
        ) from None
    cases = read_cases(args.data, args.limit, args.seed)
    subject = ApiSubject(args.url, model=args.served_model_name, api_key=args.api_key, concurrency=args.concurrency)
    try:
        items = subject.each(lambda case: ask(subject, case, args, validator), cases)
    finally:
        subject.close()
    counts = Counter(item["outcome"] for item in items)
    right = sum(item["right"] for item in items)
    result = {
        "schema": SCHEMA,
        "kind": "tools",
        "subject": subject.facts,
        "settings": {
            "choice": args.choice,
            "seed": args.seed,
            "max_tokens": args.max_tokens,
            "temperature": args.temperature,
        },
        "environment": {"tokenmill": __version__, "commit": machine.commit(), **machine.hardware()},
        "argv": without_secrets(sys.argv[1:]),
        "counts": {outcome: counts[outcome] for outcome in OUTCOMES},
        "right": right,
        "items": items,
    }
    table = Table(title=f"{len(items)} questions, tool_choice {args.choice}")
    for name in ("outcome", "answers"):
        table.add_column(name, justify="left" if name == "outcome" else "right")
    for outcome in OUTCOMES:
        table.add_row(outcome, str(counts[outcome]))
    table.add_row("of those that fit: right", str(right))
    console_beside(args.json).print(table)
    write_json(args.json, result, indent=1)
    return int(args.choice != "auto" and any(counts[outcome] for outcome in FAULTS))


def ask(subject: ApiSubject, case: Case, args: argparse.Namespace, validator: Any) -> dict[str, Any]:
    """One question and what became of it."""
    choice: Any = args.choice
    if choice == "named":
        choice = {"type": "function", "function": {"name": case.answers[0][0]}}
    body = {
        "model": subject.model,
        "messages": case.messages,
        "tools": case.tools,
        "tool_choice": choice,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.seed,
    }
    item: dict[str, Any] = {"id": case.id, "group": case.group, "right": False}
    try:
        answer = subject.post("/v1/chat/completions", body)["choices"][0]
    except InvalidRequest as error:
        return item | {"outcome": "refused", "why": error.message}
    calls = answer["message"].get("tool_calls") or []
    item["calls"] = [call["function"] for call in calls]
    if answer["finish_reason"] == "length":
        return item | {"outcome": "length"}
    if not calls:
        return item | {"outcome": "no call", "why": answer["message"]["content"]}
    read = []
    for call in item["calls"]:
        try:
            arguments = json.loads(call["arguments"])
        except ValueError as error:
            return item | {"outcome": "malformed", "why": str(error)}
        schema = case.schemas.get(call["name"], False)
        fault = next(iter(validator(schema).iter_errors(arguments)), None)
        if fault is not None:
            return item | {"outcome": "does not fit", "why": fault.message}
        read.append((call["name"], arguments))
    return item | {"outcome": "fits", "right": is_right(case, read)}
