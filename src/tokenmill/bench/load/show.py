"""What a person sees: one line while a run is under way, tables when it is over, and CSV for spreadsheets.

The cells of a comparison's tables are the same for the terminal, Markdown and the HTML report, made from the JSON
objects of docs/operate/benchmarking.md. One table holds a phase: a row for each quantity, a column for each
endpoint; another the ratios to the baseline, with their intervals and verdicts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..html.page import metric_name, quantity
from ..html.plot import short
from ..report import markdown_row
from ..result import Comparison, Distribution, Goodput, GoodputSweep, Repeats, RequestRow, Result, Run, Sweep
from ..stats import merge_warnings
from .player import Progress

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


METRIC_NAMES = {
    "ttft": ("ttft_s", "TTFT"),
    "ttfo": ("ttfo_s", "TTFO"),
    "ttst": ("ttst_s", "TTST"),
    "tpot": ("tpot_s", "TPOT"),
    "itl": ("itl_s", "ITL"),
    "e2el": ("e2el_s", "E2EL"),
    "normalised": ("normalised_latency_s", "normalised latency"),
    "lateness": ("lateness_s", "lateness"),
}


class Status:
    """One line of progress on standard error, rewritten in place; nothing where that is no terminal."""

    def __init__(self, console: Console, num_requests: int) -> None:
        self.label = ""
        self._num_requests = num_requests
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._last = (0.0, 0)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def expect(self, num_requests: int) -> None:
        self._num_requests = num_requests

    def observe(self, progress: Progress) -> None:
        if self._live is None:
            return
        then_s, then_tokens = self._last
        if progress.elapsed_s < then_s:
            then_s, then_tokens = 0.0, 0
        self._last = (progress.elapsed_s, progress.num_tokens)
        rate = (progress.num_tokens - then_tokens) / max(1e-3, progress.elapsed_s - then_s)
        line = (
            f"{self.label}{progress.elapsed_s:6.1f} s  {progress.num_ended}/{self._num_requests} ended"
            f"  {progress.num_failed} failed  {progress.num_in_flight} in flight"
            f"  {progress.num_due - progress.num_sent} held back  {max(0.0, rate):,.0f} tokens/s"
        )
        self._show(line)

    def _show(self, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)


def print_result(console: Console, result: Result, metrics: Sequence[str], percentiles: Sequence[str]) -> None:
    """Tables of any result; `metrics` are keys of METRIC_NAMES, `percentiles` numbers as texts."""
    match result:
        case Run():
            _print_run(console, result, metrics, percentiles)
        case Repeats():
            _print_run(console, result.pooled, metrics, percentiles)
            console.print(_interval_table(result))
        case Sweep():
            console.print(_sweep_table(result))
            _print_left_out(console, result.left_out)
            _print_warnings(console, merge_warnings(result.runs))
        case GoodputSweep():
            console.print(_goodput_table(result))
            _print_left_out(console, result.left_out)
            for label, each in zip(result.labels, result.searches, strict=True):
                _print_warnings(console, [f"{label}: {word}" for word in each.warnings])
        case Goodput():
            console.print(_probe_table(result))
            _print_goodput(console, result)
        case Comparison():
            for table in _comparison_tables(result):
                console.print(table)
            _print_warnings(console, result.warnings)


def _print_run(console: Console, run: Run, metrics: Sequence[str], percentiles: Sequence[str]) -> None:
    table = Table("ms", "mean", *(f"p{percentile}" for percentile in percentiles), "max", title=run.name)
    if run.num_failed:
        table.caption = f"{run.num_failed} failed, left out"
    for column in table.columns[1:]:
        column.justify = "right"
    for name in metrics:
        field_name, label = METRIC_NAMES[name]
        values: Distribution = getattr(run, field_name)
        found = (values.mean, *map(values.percentile, percentiles), values.max)
        table.add_row(label, *map(_ms, found))
    console.print(table)
    lines = [
        f"requests           {run.num_ok} ok, {run.num_failed} failed, in {run.duration_s:.2f} s"
        + (f"; {run.num_retries} sent again" if run.num_retries else ""),
        *_window_line(run),
        f"requests/s         {run.requests_per_s:.3f}"
        + (f" of {run.offered_requests_per_s:.3f} offered" if run.offered_requests_per_s is not None else ""),
        f"output tokens/s    {run.output_tokens_per_s:,.1f}",
        f"total tokens/s     {run.total_tokens_per_s:,.1f}",
        f"in flight          {run.mean_in_flight:.1f} mean, {run.max_in_flight} most",
    ]
    if run.slo.objectives:
        wanted = " ".join(f"{name.removesuffix('_s')}:{limit * 1e3:g}" for name, limit in run.slo.objectives.items())
        lines.append(f"goodput            {run.goodput_requests_per_s:.3f} requests/s within {wanted}")
        lines.append(f"SLO attainment     {(run.slo.attainment or 0.0):.1%}")
    if run.prefix_hit_tokens is not None:
        lines.append(f"prefix hits        {run.prefix_hit_tokens} tokens, {(run.prefix_hit_share or 0.0):.1%} of input")
    if run.fairness.jain is not None:
        lines.append(f"fairness           {run.fairness.jain:.3f} over {len(run.fairness.tenants)} tenants (Jain)")
    if run.energy is not None:
        lines.append(f"energy             {run.energy.joules:.0f} J ({run.energy.source})")
    per_event = f", {run.client.cpu_us_per_event:.0f} us a token event" if run.client.cpu_us_per_event else ""
    lines.append(f"client             {run.client.cores:.2f} cores{per_event}")
    for line in lines:
        console.print(line, markup=False, highlight=False)
    for error in run.errors:
        console.print(f"{error.num} x {error.kind}: {error.example}", markup=False, highlight=False)
    _print_warnings(console, run.warnings)


def _window_line(run: Run) -> list[str]:
    if run.window is None:
        return []
    low, high = run.window["from_s"], run.window["to_s"]
    return [f"steady state       {low:.2f} to {high:.2f} s, {run.window['num_requests']} requests due in it"]


def _print_warnings(console: Console, warnings: Sequence[str]) -> None:
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, style="yellow")


def _interval_table(result: Repeats) -> Table:
    table = Table("over repeats", "mean", "95 % interval", title=f"{len(result.runs)} repeats")
    for name, interval in result.intervals.items():
        table.add_row(name, f"{interval.mean:.4g}", f"{interval.low:.4g} to {interval.high:.4g}")
    return table


def _sweep_table(result: Sweep) -> Table:
    table = Table(result.by.replace("_", " "), "requests/s", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "failed")
    labels = result.labels or [f"{point:g}" for point in result.points]
    for label, run in zip(labels, result.runs, strict=True):
        table.add_row(
            escape(label),
            f"{run.requests_per_s:.2f}",
            f"{run.output_tokens_per_s:,.0f}",
            *map(_ms, (run.ttft_s.p50, run.ttft_s.p99, run.tpot_s.p50, run.tpot_s.p99)),
            str(run.num_failed),
        )
    return table


def _goodput_table(result: GoodputSweep) -> Table:
    table = Table(result.by, "highest rate", "interval", "goodput there", "tokens/s", "requests per dollar")
    for label, each in zip(result.labels, result.searches, strict=True):
        interval, dollar = each.request_rate_interval, each.requests_per_dollar
        table.add_row(
            escape(label),
            f"{each.request_rate:.3f}",
            "-" if interval is None else f"{interval.low:.3f} to {interval.high:.3f}",
            f"{each.goodput_requests_per_s:.3f}",
            f"{each.output_tokens_per_s:,.0f}",
            "-" if dollar is None else f"{dollar:,.0f}",
        )
    return table


def _print_left_out(console: Console, left_out: Mapping[str, str]) -> None:
    _print_warnings(console, [f"{label} is left out: {why}" for label, why in left_out.items()])


def _probe_table(result: Goodput) -> Table:
    table = Table("rate", "attainment", "wanted", "stable", "drift", "TTFT p99", "TPOT p99", "passed")
    for probe in result.probes:
        table.add_row(
            f"{probe.request_rate:.3f}",
            f"{probe.attainment:.1%}",
            probe.goal or f"{probe.target:.0%}",
            "yes" if probe.stable else "no",
            "-" if probe.drift is None else f"{probe.drift:+.1%}",
            _ms(probe.run.ttft_s.p99),
            _ms(probe.run.tpot_s.p99),
            "yes" if probe.passed else "no",
        )
    return table


def _print_goodput(console: Console, result: Goodput) -> None:
    lines = [f"highest rate       {result.request_rate:.3f} requests/s"]
    if (interval := result.request_rate_interval) is not None:
        lines.append(f"{interval.confidence:.0%} interval       {interval.low:.3f} to {interval.high:.3f}")
    lines.append(f"goodput there      {result.goodput_requests_per_s:.3f} requests/s")
    for label, value in (("core", result.per_core), ("GPU", result.per_gpu), ("dollar", result.requests_per_dollar)):
        if value is not None:
            unit = "requests" if label == "dollar" else "requests/s"
            lines.append(f"per {label:<14} {value:.3f} {unit}")
    for line in lines:
        console.print(line, markup=False, highlight=False)
    _print_warnings(console, result.warnings)


def _comparison_tables(result: Comparison) -> Iterator[Table]:
    plain = result.to_json()
    phases = phases_of(plain)
    for phase in phases:
        for header, rows in (figure_cells(plain, phase), ratio_cells(plain, phase)):
            table = Table(*map(escape, header), title=phase if len(phases) > 1 else None)
            for row in rows:
                table.add_row(*map(escape, row))
            yield table


def _ms(value_s: float | None) -> str:
    return "-" if value_s is None else f"{value_s * 1e3:.2f}"


def runs_of(result: Result) -> list[Run]:
    """Every run in a result."""
    match result:
        case Run():
            return [result]
        case Goodput():
            return [probe.run for probe in result.probes]
        case GoodputSweep():
            return [probe.run for search in result.searches for probe in search.probes]
        case _:
            return result.runs


def to_csv(result: Result) -> str:
    """One line per request of every run, without event times; the first columns say which run."""
    columns = [field.name for field in fields(RequestRow) if field.name not in ("event_s", "event_tokens")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", "name", *columns])
    for i, run in enumerate(runs_of(result)):
        for row in run.requests:
            writer.writerow([i, run.name, *(getattr(row, column) for column in columns)])
    return out.getvalue()
