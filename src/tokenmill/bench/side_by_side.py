"""A comparison's figures and ratios as cells of tables, the same for the terminal, Markdown and the HTML report.

Takes the JSON objects of docs/operate/benchmarking.md. One table holds a phase: a row for each quantity, a column for
each endpoint; another the ratios to the baseline, with their intervals and verdicts.
"""

from __future__ import annotations

from typing import Any

from .html.plot import short
from .html.words import metric_name, quantity
from .report import markdown_row

Json = dict[str, Any]
Cells = tuple[list[str], list[list[str]]]
"""A header and its rows."""


def phases_of(result: Json) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(figure["phase"] for figure in result["figures"]))


def figure_cells(result: Json, phase: str) -> Cells:
    """Medians over repeats, with the least and the most where they differ; '-' where an endpoint has none."""
    figures = [figure for figure in result["figures"] if figure["phase"] == phase]
    names = list(dict.fromkeys(endpoint["name"] for endpoint in result["endpoints"]))
    found = {(figure["metric"], figure["endpoint"]): _spread(figure) for figure in figures}
    metrics = dict.fromkeys(figure["metric"] for figure in figures)
    rows = [[metric_name(metric), *(found.get((metric, name), "-") for name in names)] for metric in metrics]
    return ["median [least to most]", *names], rows


def _spread(figure: Json) -> str:
    metric = figure["metric"]
    median, low, high = (quantity(metric, figure[part]) for part in ("median", "low", "high"))
    return median if low == high else f"{median} [{low} to {high}]"


def ratio_cells(result: Json, phase: str) -> Cells:
    """The primary metric first; p is corrected for the number of ratios looked at."""
    rows = [
        [
            metric_name(ratio["metric"]) + (" (primary)" if ratio["is_primary"] else ""),
            ratio["candidate"],
            short(ratio["ratio"]),
            f"{short(ratio['low'])} to {short(ratio['high'])}",
            f"{ratio['p_adjusted']:.2g}",
            "higher" if ratio["higher_is_better"] else "lower",
            ratio["verdict"],
        ]
        for ratio in result["ratios"]
        if ratio["phase"] == phase
    ]
    baseline = result["endpoints"][0]["name"]
    return [f"ratio to {baseline}", "", "mean", "interval", "p, corrected", "better if", "verdict"], rows


def to_markdown(result: Json) -> str:
    """Both tables of every phase, the warnings, and how it was measured."""
    phases = phases_of(result)
    lines: list[str] = []
    for phase in phases:
        if len(phases) > 1:
            lines += [f"**{phase}**", ""]
        for header, rows in (figure_cells(result, phase), ratio_cells(result, phase)):
            lines += [markdown_row(header), markdown_row(["---"] * len(header)), *map(markdown_row, rows), ""]
    lines += [f"- {warning}" for warning in result["warnings"]]
    first = result["runs"][0]
    repeats = len({run["schedule"]["repeat"] for run in result["runs"]})
    lines += [f"- {repeats} repeats of {first['num_requests']} requests, from {first['started_at']}"]
    lines += [f"- {name}: {value}" for name, value in first["environment"].items()]
    return "\n".join(lines) + "\n"
