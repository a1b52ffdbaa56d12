"""`tokenmill bench quality`: what a model, or a way of serving it, gets right, with stated errors.

Decides what is run and shows it; asking is run's, the questions tasks'. Two results over the same
questions are compared question by question, which tells small differences from noise far better than two separate
intervals do. docs/operate/quality.md defines the figures and the JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from ... import __version__
from ...core.errors import ConfigError
from .. import machine
from ..load.options import positive
from ..report import console_beside, without_secrets, write_json
from ..stats import mcnemar, paired_bootstrap
from .code import CodeLimits
from .run import Subject, run_perplexity, run_task
from .tasks import FILES, find_file, load_task

SCHEMA = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("questions")
    group.add_argument(
        "--task",
        action="append",
        default=[],
        metavar="NAME[=FILE]",
        help=f"repeatable; one of {', '.join(FILES)}",
    )
    group.add_argument(
        "--data", type=Path, metavar="FOLDER", help="where the tasks' files are (docs/operate/quality.md names them)"
    )
    group.add_argument("--limit", type=positive, metavar="N", help="ask at most N questions (score N windows) a task")
    group.add_argument(
        "--shots", type=int, metavar="N", help="worked examples in each prompt (default: the task's own)"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="chooses examples and questions (default: 0)")
    group.add_argument("--chat", action="store_true", help="ask through the chat template instead of plain completion")
    group.add_argument("--window", type=positive, default=1024, metavar="TOKENS", help="of perplexity (default: 1024)")
    group.add_argument("--stride", type=positive, default=512, metavar="TOKENS", help="of perplexity (default: 512)")
    group.add_argument(
        "--allow-code-execution",
        action="store_true",
        help="run programs the model writes (humaneval), in a restricted process",
    )
    group = parser.add_argument_group("server")
    group.add_argument("--url", metavar="URL", help="ask a running server instead of loading MODEL")
    group.add_argument("--served-model-name", metavar="NAME", help="with --url (default: the server's first)")
    group.add_argument("--api-key", metavar="KEY", help="with --url")
    group.add_argument("--concurrency", type=positive, default=8, metavar="N", help="requests at once (default: 8)")
    group.add_argument("--extra-body", type=_object, metavar="JSON", help="fields added to every completion request")
    group = parser.add_argument_group("result")
    group.add_argument("--json", type=Path, metavar="FILE", help="write every figure and every answer")
    group.add_argument(
        "--compare", nargs=2, type=Path, metavar="FILE", help="compare two results instead: what did the second lose?"
    )


def run(args: argparse.Namespace, make_subject: Callable[[], Subject]) -> int:
    """Run the tasks on the subject `make_subject` makes, or compare two earlier results. Exit code 0."""
    if args.compare:
        result = compare(*(read_result(path) for path in args.compare), seed=args.seed)
        _show([_comparison_table(result)], args.json)
    else:
        result = measure(args, make_subject)
        _show([_result_table(result)], args.json)
    write_json(args.json, result, indent=1)
    return 0


def measure(args: argparse.Namespace, make_subject: Callable[[], Subject]) -> dict[str, Any]:
    """The result of all tasks asked for. Wrong settings are found before a model is loaded or a question asked."""
    wanted = [_find(spec, args.data) for spec in args.task]
    if not wanted:
        raise ConfigError(f"Name a --task: {', '.join(FILES)}.", param="task")
    if any(name == "humaneval" for name, _ in wanted) and not args.allow_code_execution:
        raise ConfigError(
            "humaneval runs programs the model writes. Allow that with --allow-code-execution.", param="task"
        )
    tasks = {
        name: load_task(name, path, num_shots=args.shots, limit=args.limit, seed=args.seed, chat=args.chat)
        for name, path in wanted
        if name != "perplexity"
    }
    subject = make_subject()
    try:
        results = []
        for name, path in wanted:
            if name == "perplexity":
                results.append(run_perplexity(subject, path, window=args.window, stride=args.stride, limit=args.limit))
            else:
                limits = CodeLimits() if name == "humaneval" else None
                results.append(run_task(subject, tasks[name], chat=args.chat, limits=limits))
    finally:
        subject.close()
    return {
        "schema": SCHEMA,
        "kind": "quality",
        "subject": subject.facts,
        "settings": {"seed": args.seed, "limit": args.limit, "shots": args.shots, "chat": args.chat},
        "environment": {"tokenmill": __version__, "commit": machine.commit(), **machine.hardware()},
        "argv": without_secrets(sys.argv[1:]),
        "tasks": results,
    }


def compare(first: dict[str, Any], second: dict[str, Any], *, seed: int = 0) -> dict[str, Any]:
    """What changed from `first` to `second`, for every task both have. Raises ConfigError where questions differ."""
    by_name = {task["task"]: task for task in second["tasks"]}
    common = [(task, by_name[task["task"]]) for task in first["tasks"] if task["task"] in by_name]
    if not common:
        raise ConfigError("The two results have no task in common.", param="compare")
    return {
        "schema": SCHEMA,
        "kind": "quality-comparison",
        "first": first["subject"],
        "second": second["subject"],
        "tasks": [_compare_task(a, b, seed) for a, b in common],
    }


def read_result(path: Path) -> dict[str, Any]:
    """A result this command wrote. Raises ConfigError."""
    try:
        result = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", param="compare") from None
    if not isinstance(result, dict) or result.get("kind") != "quality" or result.get("schema") != SCHEMA:
        raise ConfigError(f"{path} is no result of bench quality of schema {SCHEMA}.", param="compare")
    return result


def _find(spec: str, folder: Path | None) -> tuple[str, Path]:
    name, _, file = spec.partition("=")
    if name not in FILES:
        raise ConfigError(f"--task must be one of {', '.join(FILES)}, got {name!r}.", param="task")
    return name, Path(file) if file else find_file(name, folder)


def _compare_task(first: dict[str, Any], second: dict[str, Any], seed: int) -> dict[str, Any]:
    name = first["task"]
    key = "num_tokens" if first["kind"] == "score" else "asked"
    ids = [[(item["id"], item[key]) for item in result["items"]] for result in (first, second)]
    if ids[0] != ids[1]:
        raise ConfigError(
            f"The two results of {name} are not over the same questions in the same form; repeat one with the other's"
            " settings (and, for perplexity, the same tokenizer).",
            param="compare",
        )
    pair = {"task": name, "metric": first["metric"], "first": first["value"], "second": second["value"]}
    if first["kind"] == "score":
        before, after = ([item["nll"] for item in result["items"]] for result in (first, second))
        counts = [item["num_tokens"] for item in first["items"]]
        change, interval = paired_bootstrap(before, after, counts, seed)
        ratio = {"ratio": math.exp(change), "ratio_low": math.exp(interval.low), "ratio_high": math.exp(interval.high)}
        pair |= {"unit": "nats per token", **ratio}
    else:
        metric = first["metric"]
        before, after = ([item["right"][metric] for item in result["items"]] for result in (first, second))
        change, interval = paired_bootstrap(before, after, [1] * len(before), seed)
        lost = sum(a and not b for a, b in zip(before, after, strict=True))
        won = sum(b and not a for a, b in zip(before, after, strict=True))
        pair |= {"unit": "share right", "num_only_first": lost, "num_only_second": won, "mcnemar_p": mcnemar(lost, won)}
    return {
        **pair,
        "num_items": len(ids[0]),
        "change": change,
        "interval": asdict(interval),
        "verdict": _verdict(pair, interval),
    }


def _verdict(pair: dict[str, Any], interval: Any) -> str:
    """Both tests must agree, where there are two."""
    if not interval.excludes_zero or pair.get("mcnemar_p", 0.0) >= 0.05:
        return "undecided"
    lower_is_better = pair["unit"] == "nats per token"
    return "better" if (interval.high < 0) == lower_is_better else "worse"


def _result_table(result: dict[str, Any]) -> Table:
    table = Table()
    for name in ("task", "metric", "value", "standard error", "95 % interval", "items"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for task in result["tasks"]:
        interval = task["interval"]
        cells = [task["value"], task["standard_error"]]
        bounds = f"{interval['low']:.4g} to {interval['high']:.4g}"
        table.add_row(task["task"], task["metric"], *(f"{cell:.4g}" for cell in cells), bounds, str(task["num_items"]))
        for metric, other in task["other_metrics"].items():
            error = f"{other['standard_error']:.4g}" if "standard_error" in other else ""
            bounds = f"{other['interval']['low']:.4g} to {other['interval']['high']:.4g}" if "interval" in other else ""
            table.add_row("", metric, f"{other['value']:.4g}", error, bounds, "")
    return table


def _comparison_table(result: dict[str, Any]) -> Table:
    table = Table()
    for name in ("task", "first", "second", "change", "95 % interval", "unit", "verdict"):
        table.add_column(name, justify="left" if name in ("task", "unit", "verdict") else "right")
    for task in result["tasks"]:
        interval = task["interval"]
        bounds = f"{interval['low']:+.4g} to {interval['high']:+.4g}"
        values = (f"{task['first']:.4g}", f"{task['second']:.4g}", f"{task['change']:+.4g}")
        table.add_row(task["task"], *values, bounds, task["unit"], task["verdict"])
    return table


def _show(tables: Sequence[Table], json_path: Path | None) -> None:
    console = console_beside(json_path)
    for table in tables:
        console.print(table)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value
