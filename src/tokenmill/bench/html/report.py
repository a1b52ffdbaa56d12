"""A report people look at: one HTML file from one or several results of `bench serve`, `goodput`, `compare`, `quality`.

Reads results as the JSON objects they are written as (docs/operate/benchmarking.md, docs/operate/quality.md), so that a
file from another machine draws the same. What a result shows is decided in load and quality, the plots are
curves', how things look is plot's and page's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..result import SCHEMA
from . import load, page, quality
from .fidelity import fidelity_section

Json = dict[str, Any]

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
