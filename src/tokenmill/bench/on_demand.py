"""`tokenmill bench on-demand`: what calls wait for where models are loaded on demand (`serve --models-dir`).

Calls, one after another, name the models in turn; with room for fewer, each must be loaded again. Every call is
followed by an equal one, for which the model is there: that is the call's own time. The time of loads is the server's
own figure (`tokenmill:model_load_seconds`). What a call waited beyond both is its excess: others are unloaded first,
and a new engine's first step takes longer than its next.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from ..core.errors import ConfigError, TokenmillError
from . import machine
from .load.options import positive
from .quality.api import ApiSubject, content_of
from .report import console_beside, without_secrets, write_json

SCHEMA = 1
NUM_CALLS, MAX_TOKENS = 50, 32
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Call:
    """Seconds. own_s: of an equal call to the model once it is loaded; error: "" where both were answered."""

    model: str
    num_loads: int
    waited_s: float
    load_s: float
    own_s: float
    error: str

    @property
    def excess_s(self) -> float:
        return self.waited_s - self.load_s - self.own_s

    @property
    def share(self) -> float:
        """The excess, of the load's and its own time."""
        return self.excess_s / (self.load_s + self.own_s)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", required=True, help="the server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--models", type=_names, metavar="NAME,NAME", help="(default: all that the server loads on demand)"
    )
    parser.add_argument(
        "--num-calls", type=positive, default=NUM_CALLS, metavar="N", help=f"that are measured (default: {NUM_CALLS})"
    )
    parser.add_argument(
        "--max-tokens", type=positive, default=MAX_TOKENS, metavar="N", help=f"of an answer (default: {MAX_TOKENS})"
    )
    parser.add_argument("--api-key", metavar="KEY")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure; -: to standard output")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def run(args: argparse.Namespace) -> int:
    """Exit code 1 where a call failed."""
    subject = ApiSubject(args.url, api_key=args.api_key, concurrency=1)
    try:
        names = args.models or models_on_demand(subject)
        if len(names) < 2:
            raise ConfigError(
                f"{args.url} lists fewer than two models that calls load: start it with --models-dir, or name them"
                " with --models.",
                param="models",
            )
        calls = measure(subject, names, args.num_calls, args.max_tokens)
    finally:
        subject.close()
    environment = machine.environment()
    console = console_beside(args.json)
    console.print(to_table(calls))
    console.print(summary(calls))
    for name, value in environment.items():
        console.print(f"{name}: {value}", markup=False, highlight=False)
    result = {
        "schema": SCHEMA,
        "kind": "on-demand",
        "settings": {"models": names, "max_tokens": args.max_tokens},
        "environment": environment,
        "argv": without_secrets(sys.argv[1:]),
        "calls": [asdict(call) | {"excess_s": call.excess_s, "share": call.share} for call in calls],
    }
    write_json(args.json, result, indent=1)
    return int(any(call.error for call in calls))


def models_on_demand(subject: ApiSubject) -> list[str]:
    """Those whose card says whether they are loaded, without those that cannot be, by name."""
    status, _, data = subject.exchange("GET", "/v1/models", None)
    cards = content_of("/v1/models", status, data)["data"]
    return sorted(card["id"] for card in cards if "status" in card and not card["status"].get("failed"))


def measure(subject: ApiSubject, names: Sequence[str], num_calls: int, max_tokens: int) -> list[Call]:
    """The first calls find memory as it is. Raises TokenmillError where the server does not tell of loads."""
    calls = []
    for number in range(num_calls):
        name = names[number % len(names)]
        before = loads(subject, name)
        waited_s, failure = ask(subject, name, max_tokens)
        after = loads(subject, name)
        own_s, own_failure = ask(subject, name, max_tokens)
        calls.append(Call(name, after[0] - before[0], waited_s, after[1] - before[1], own_s, failure or own_failure))
        print(f"{number + 1} of {num_calls}: {name} {waited_s:.2f} s {calls[-1].error}".rstrip(), file=sys.stderr)
    return calls


def ask(subject: ApiSubject, name: str, max_tokens: int) -> tuple[float, str]:
    """Seconds to the end of the answer, and why it failed. Raises Unavailable where nobody answers."""
    body = {"model": name, "prompt": "Hello", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    start_s = time.perf_counter()
    status, _, data = subject.exchange("POST", COMPLETIONS, json.dumps(body).encode())
    seconds = time.perf_counter() - start_s
    try:
        content_of(COMPLETIONS, status, data)
    except TokenmillError as error:
        return seconds, error.message
    return seconds, ""


def loads(subject: ApiSubject, name: str) -> tuple[int, float]:
    """Of a model, by the server's counters: how many, and their seconds."""
    status, _, data = subject.exchange("GET", "/metrics", None)
    if status != 200:
        raise TokenmillError(f"/metrics answered with status {status}: without it the time of loads is not known.")
    found = {"tokenmill:model_loads_total": 0.0, "tokenmill:model_load_seconds_total": 0.0}
    for family in text_string_to_metric_families(data.decode()):
        for sample in family.samples:
            is_own = sample.labels.get("model_name") == name and sample.labels.get("outcome") != "failed"
            if is_own and sample.name in found:
                found[sample.name] = sample.value
    num, seconds = found.values()
    return int(num), seconds


def to_table(calls: Sequence[Call]) -> Table:
    table = Table("call", "model", "loads", "waited s", "load s", "own s", "excess s", "of load + own")
    for number, call in enumerate(calls):
        times = (call.waited_s, call.load_s, call.own_s, call.excess_s)
        table.add_row(
            str(number + 1),
            call.model,
            str(call.num_loads),
            *(f"{seconds:.3f}" for seconds in times),
            call.error or f"{round(100 * call.share)} %",
        )
    return table


def summary(calls: Sequence[Call]) -> str:
    """Of the calls that were answered after a load."""
    loaded = [call for call in calls if call.num_loads and not call.error]
    line = f"{len(calls)} calls, {sum(bool(call.error) for call in calls)} failed, {len(loaded)} waited for a load"
    if not loaded:
        return line
    waited = f"waited {median(call.waited_s for call in loaded):.2f} s in the median"
    shares = [100 * call.share for call in loaded]
    return f"{line}: {waited}, {round(median(shares))} % beyond load + own time, {round(max(shares))} % at most"
