"""Results as CSV, for spreadsheets: one line per run with every summary figure, or one line per request."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from .load import runs_of

Json = dict[str, Any]

_KEYS = ("run", "name")
_NOT_IN_ROWS = ("event_s", "event_tokens")


def summary_csv(results: Sequence[Json]) -> str:
    """One line per run of every result. Figures inside a distribution are named as 'ttft_s.p50'."""
    return _write([{"run": i, **_flat(run)} for i, run in enumerate(_all_runs(results))])


def requests_csv(results: Sequence[Json]) -> str:
    """One line per request of every run, without the times of its tokens."""
    rows = []
    for i, run in enumerate(_all_runs(results)):
        for row in run["requests"]:
            kept = {name: value for name, value in row.items() if name not in _NOT_IN_ROWS}
            rows.append({"run": i, "name": run["name"], **kept})
    return _write(rows)


def _all_runs(results: Sequence[Json]) -> list[Json]:
    return [run for result in results for run in runs_of(result)]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Json:
    """Numbers, texts and nothing else, nested names joined by dots."""
    found: Json = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            found |= _flat(inner, f"{prefix}{name}.")
        elif not isinstance(inner, list):
            found[prefix + name] = inner
    return found


def _write(rows: Sequence[Json]) -> str:
    """Columns in the order in which they first appear."""
    columns = list(dict.fromkeys([*_KEYS, *(name for row in rows for name in row)]))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
