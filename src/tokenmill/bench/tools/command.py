"""`tokenmill bench tools`: asks a server questions that need calls of tools, and checks every call.

Each answer counts once: as refused (400), ended by the limit of tokens, without a call, malformed, not fitting its
schema, or fitting; of those that fit, how many are right. What ends by itself under `required` or a named choice must
fit: any that does not is a fault of the server, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table

from ... import __version__
from ...core.errors import ConfigError, InvalidRequest
from .. import machine
from ..output import console_beside, write_json
from ..quality.api import ApiSubject
from ..recorded import without_secrets
from .cases import Case, is_right, read_cases

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
