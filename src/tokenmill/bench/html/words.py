"""How a report names quantities, lengths of time, settings and command lines."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..recorded import without_secrets
from .page import command
from .plot import short

LATENCIES = {
    "ttft_s": ("TTFT", "first token event − due"),
    "ttfo_s": ("TTFO", "first event of the answer, after reasoning − due"),
    "ttst_s": ("TTST", "second token event − first"),
    "tpot_s": ("TPOT", "(last token event − first) / (output tokens − 1), per request"),
    "itl_s": ("ITL", "gaps between token events, over all requests"),
    "e2el_s": ("E2EL", "last token event − due"),
    "normalised_latency_s": ("Normalised latency", "E2EL / output tokens, per request"),
    "ttft_from_send_s": ("TTFT from send", "first token event − sent"),
    "e2el_from_send_s": ("E2EL from send", "last token event − sent"),
    "lateness_s": ("Lateness", "sent − due: the client's own delay"),
}


class TimeUnit:
    """A unit of time and what seconds are multiplied with."""

    def __init__(self, name: str, factor: float) -> None:
        self.name = name
        self.factor = factor


PLAIN = TimeUnit("", 1.0)


def time_unit(values_s: Sequence[float | None]) -> TimeUnit:
    known = [abs(value) for value in values_s if value is not None]
    return TimeUnit("s", 1.0) if known and max(known) >= 2.0 else TimeUnit("ms", 1e3)


def show_time(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    unit = time_unit([value_s])
    return f"{short(value_s * unit.factor)} {unit.name}"


def to_ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3


def metric_name(metric: str) -> str:
    """'ttft_s.p50' -> 'TTFT p50'; 'output_tokens_per_s' -> 'output tokens/s'."""
    base, _, share = metric.partition(".")
    name = LATENCIES[base][0] if base in LATENCIES else base.replace("_per_s", "/s").replace("_", " ")
    return f"{name} {share.replace('_', '.')}".strip()


def quantity(metric: str, value: float) -> str:
    return show_time(value) if metric.partition(".")[0] in LATENCIES else short(value)


def words(facts: Mapping[str, Any]) -> str:
    """'mode open, request rate 4': what is set, without what is empty."""
    shown = []
    for key, value in facts.items():
        if value is None or value == "" or value == {} or value == []:
            continue
        if isinstance(value, (dict, list, bool)):
            text = json.dumps(value)
        else:
            text = short(value) if isinstance(value, float) else str(value)
        shown.append(f"{key.replace('_', ' ')} {text}")
    return ", ".join(shown)


def repeat_with(argv: Sequence[str]) -> str:
    """The command line as HTML, without secrets."""
    shown = without_secrets(argv)
    if shown and shown[0] != "bench":
        shown = shown[1:]
    return command(["tokenmill", *map(shlex.quote, shown)]) if shown else ""
