"""The report's sections on quality: figures with their intervals, by task and by group, and paired comparisons."""

from __future__ import annotations

from typing import Any

from . import page
from .page import repeat_with, words
from .plot import Axis, Estimate, intervals

MAX_ROWS = 30

Json = dict[str, Any]


def quality_section(result: Json) -> str:
    shares = [task for task in result["tasks"] if task["kind"] != "score"]
    rows = []
    for task in result["tasks"]:
        bounds = task["interval"]
        rows.append(
            [
                f"{task['task']}, {task['metric']}",
                _figure(task["value"]),
                _figure(task["standard_error"]),
                f"{_figure(bounds['low'])} to {_figure(bounds['high'])}",
                str(task["num_items"]),
            ]
        )
    figures = []
    if shares:
        figures.append(_shares("Share right", [(task["task"], task) for task in shares]))
    for task in shares:
        if task["groups"]:
            groups = sorted(task["groups"].items())[:MAX_ROWS]
            figures.append(_shares(f"{task['task']} by group", groups))
    facts = {key: value for key, value in result["subject"].items() if value}
    return page.section(
        f"Quality of {result['subject'].get('model', 'a model')}",
        [
            page.facts({**facts, "settings": words(result["settings"])}),
            repeat_with(result["argv"]),
            page.table(("task", "value", "standard error", "95 % interval", "items"), rows),
            page.plots(figures),
        ],
    )


def _shares(title: str, shares: list[tuple[str, Json]]) -> str:
    rows = [
        Estimate(f"{name}: {share['value']:.1%}", share["value"], share["interval"]["low"], share["interval"]["high"])
        for name, share in shares
    ]
    return intervals(title, Axis("share right", low=0.0, high=1.0), rows, note="95 % Wilson intervals.")


def comparison_section(result: Json) -> str:
    rows, estimates = [], []
    for task in result["tasks"]:
        bounds = task["interval"]
        rows.append(
            [
                f"{task['task']}, {task['unit']}",
                _figure(task["first"]),
                _figure(task["second"]),
                _figure(task["change"]),
                f"{_figure(bounds['low'])} to {_figure(bounds['high'])}",
                task["verdict"],
            ]
        )
        if task["unit"] == "share right":
            estimates.append(Estimate(task["task"], task["change"], bounds["low"], bounds["high"]))
    note = "95 % intervals of the paired bootstrap; right of the line the second is better."
    figures = (
        [intervals("Change of the share right", Axis("second - first"), estimates, 0.0, note)] if estimates else []
    )
    return page.section(
        "Quality compared",
        [
            page.facts({side: result[side].get("model", "") for side in ("first", "second")}),
            page.table(("task", "first", "second", "change", "95 % interval", "verdict"), rows),
            page.plots(figures),
        ],
    )


def _figure(value: float) -> str:
    return f"{value:.4g}"
