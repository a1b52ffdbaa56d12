"""The report's section on a simulation held against live runs, and the cells of its tables, for pages and for
terminals."""

from __future__ import annotations

from typing import Any

from ..load.fidelity import request_errors
from . import page
from .curves import latency_curves
from .page import metric_name, quantity
from .plot import Axis, Series, cumulative, plot, short

Json = dict[str, Any]

FIGURE_HEADER = ("metric", "live", "simulated", "error", "size", "live to live")
REQUEST_HEADER = ("of each request", "requests", "median error", "median size", "mean size", "p90 size", "live to live")


def fidelity_section(result: Json) -> str:
    speed = ", ".join(f"{each:.3f}" for each in result["speed"]) or "not corrected"
    facts = {
        "pairs of runs": len(result["live"]),
        "requests matched": result["num_matched"],
        "requests left out": result["num_left_out"],
        "machine's slowness against its calibration": speed,
    }
    groups = {"live": result["live"], "simulated": result["simulated"]}
    return page.section(
        f"{result['name']}: live and simulated",
        [
            page.warnings(result["warnings"]),
            page.facts(facts),
            page.paragraph(
                "Errors are simulated / live - 1; live to live is what two live runs of the load differ by."
            ),
            page.table(FIGURE_HEADER, figure_rows(result)),
            page.table(REQUEST_HEADER, request_rows(result)),
            page.heading("Latency"),
            page.plots(latency_curves(groups)),
            page.heading("Errors and queues"),
            page.plots([error_curves(result), *queue_curves(result)]),
        ],
    )


def figure_rows(result: Json) -> list[list[str]]:
    return [
        [
            metric_name(each["metric"]),
            quantity(each["metric"], each["live"]),
            quantity(each["metric"], each["simulated"]),
            signed(each["error"]),
            share(each["size"]),
            share(each["live_to_live"]),
        ]
        for each in result["figures"]
    ]


def request_rows(result: Json) -> list[list[str]]:
    return [
        [
            metric_name(each["metric"]),
            str(each["num"]),
            signed(each["median"]),
            *(share(each[name]) for name in ("median_size", "mean_size", "p90_size", "live_to_live")),
        ]
        for each in result["requests"]
    ]


def signed(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:+.1f} %"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def error_curves(result: Json) -> str:
    """Cumulative distributions of the sizes of single requests' errors."""
    series = []
    for each in result["requests"]:
        pairs = zip(result["live"], result["simulated"], strict=True)
        sizes = [100 * abs(error) for pair in pairs for error in request_errors(each["metric"], *pair)]
        series.append(Series(metric_name(each["metric"]), cumulative(sizes)))
    return plot(
        "Errors of single requests", Axis("size of the error, %", low=0.0), Axis("share of requests", low=0.0), series
    )


def queue_curves(result: Json) -> list[str]:
    """Queue lengths over time, of the first pair."""
    figures = []
    for each in result["queues"]:
        series = [
            Series(name, list(zip(each["at_s"], each[name], strict=True)), "step") for name in ("live", "simulated")
        ]
        note = "" if each["distance"] is None else f"Mean distance: {short(100 * each['distance'])} % of the live mean."
        time, level = Axis("time since the start, s", low=0.0), Axis("requests", low=0.0)
        figures.append(plot(f"Requests {each['name']}", time, level, series, note))
    return figures
