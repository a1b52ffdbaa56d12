"""How values of flags of the load benchmarks are read. Each raises ArgumentTypeError, whose text the user is told."""

from __future__ import annotations

import argparse
import json
from typing import Any

from .day import read_duration
from .show import METRIC_NAMES


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def numbers(text: str) -> list[float]:
    numbers = [float(part) for part in text.split(",") if part]
    if not numbers or any(number <= 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers above 0, got {text}")
    return numbers


def counts(text: str) -> list[float]:
    found = numbers(text)
    if not all(number.is_integer() for number in found):
        raise argparse.ArgumentTypeError(f"must be whole numbers above 0, got {text}")
    return found


def duration(text: str) -> float:
    try:
        return read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def metrics(text: str) -> tuple[str, ...]:
    return known(text, METRIC_NAMES, "metrics")


def percentiles(text: str) -> tuple[str, ...]:
    try:
        percents = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        percents = []
    if not percents or not all(0 < percent <= 100 for percent in percents):
        raise argparse.ArgumentTypeError(f"percentiles are above 0 and at most 100, got {text}")
    return tuple(f"{percent:g}" for percent in percents)


def known(text: str, names: dict[str, Any], what: str) -> tuple[str, ...]:
    wanted = tuple(part.strip() for part in text.split(",") if part.strip())
    if not wanted or any(name not in names for name in wanted):
        raise argparse.ArgumentTypeError(f"{what} are among {', '.join(names)}; got {text}")
    return wanted
