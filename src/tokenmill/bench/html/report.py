"""Results for people: one HTML file from results of `bench serve`, `goodput`, `compare` and `quality`; and CSV.

Reads results as the JSON objects they are written as (docs/operate/benchmarking.md, docs/operate/quality.md), so that
a file from another machine draws the same. `load`, `quality` and `fidelity` decide what a result shows, `curves` draws
the plots, `plot` and `page` decide how things look.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..result import SCHEMA
from . import load, page, quality
from .fidelity import fidelity_section
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


_LOAD_KINDS = ("run", "repeats", "sweep", "goodput", "goodput_sweep", "compare", "fidelity")
_KINDS = (*_LOAD_KINDS, "quality", "quality-comparison")


def write_report(results: Json | Sequence[Json], path: Path) -> None:
    """Write `results` (one, or several to be read side by side) as one HTML file. Raises ConfigError for an object that
    is no result."""
    several = [results] if isinstance(results, Mapping) else list(results)
    path.write_text(render(several), encoding="utf8")


def read_results(paths: Sequence[Path]) -> list[Json]:
    """The results in JSON files. Raises ConfigError."""
    results = []
    for path in paths:
        try:
            result = json.loads(path.read_text(encoding="utf8"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="result") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no JSON: {error}.", param="result") from None
        if not isinstance(result, dict) or result.get("kind") not in _KINDS:
            raise ConfigError(f"{path} is no result of tokenmill bench.", param="result")
        if result["kind"] in _LOAD_KINDS and result.get("schema") != SCHEMA:
            raise ConfigError(
                f"{path} has schema {result.get('schema')}, and this version reads {SCHEMA}: measure again, or draw it"
                " with the version that wrote it.",
                param="result",
            )
        results.append(result)
    return results


def render(results: Sequence[Json]) -> str:
    """The HTML text."""
    draw: dict[str, Callable[[Json], str]] = {
        "run": load.run_section,
        "repeats": load.repeats_section,
        "sweep": load.sweep_section,
        "goodput": load.goodput_section,
        "goodput_sweep": load.goodput_sweep_section,
        "compare": load.compare_section,
        "fidelity": fidelity_section,
        "quality": quality.quality_section,
        "quality-comparison": quality.comparison_section,
    }
    for result in results:
        if result.get("kind") not in draw:
            raise ConfigError(f"A result has the unknown kind {result.get('kind')!r}.", param="result")
    sections = [draw[result["kind"]](result) for result in results]
    runs = [result for result in results if result["kind"] in ("run", "repeats")]
    if len(runs) > 1:
        sections.insert(0, load.side_by_side_section(runs))
    title, lead = _title(results)
    return page.page(title, lead, sections)


def _title(results: Sequence[Json]) -> tuple[str, str]:
    names = {
        "run": "Load measurement",
        "repeats": "Load measurement",
        "sweep": "Load and latency",
        "goodput": "Goodput",
        "goodput_sweep": "Goodput",
        "compare": "Comparison",
        "fidelity": "Fidelity of a simulation",
        "quality": "Quality",
        "quality-comparison": "Quality compared",
    }
    kinds = list(dict.fromkeys(names[result["kind"]] for result in results))
    run = next((run for result in results for run in load.runs_of(result)), None)
    lead = "Measured with tokenmill bench."
    if run is not None:
        lead = f"{run['endpoint'].get('model') or 'A model'}, {run['started_at'][:16].replace('T', ' ')} UTC. {lead}"
    return ", ".join(kinds), lead
