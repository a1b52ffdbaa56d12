"""docs/develop/fidelity.md, written from the saved results of a measurement: tables, verdicts, and plots as files
beside it.

Knows what `fidelity_sim` found, as JSON. Every figure of the page stands with the command that it came from.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.bench.html.fidelity import error_curves, queue_curves, share, signed
from tokenmill.bench.html.page import metric_name, quantity
from tokenmill.bench.html.plot import Axis, Series, cumulative, plot
from tokenmill.bench.load.fidelity import latency_of

Json = dict[str, Any]

STYLE = """<style>
svg { background: #fff; } text { font: 12px system-ui, sans-serif; fill: #59636e; }
.grid { stroke: #d5dae0; stroke-width: 1; } .line { fill: none; stroke: var(--c); stroke-width: 2; }
circle { fill: var(--c); } .s0 { --c: #0072b2; } .s1 { --c: #d55e00; } .s2 { --c: #009e73; } .s3 { --c: #b5528b; }
.s1 .line { stroke-dasharray: 6 3; } .s2 .line { stroke-dasharray: 2 2.5; } .s3 .line { stroke-dasharray: 9 3 2 3; }
</style>"""
SHOWN = ("ttft_s.mean", "ttft_s.p50", "ttft_s.p99", "tpot_s.mean", "tpot_s.p99", "e2el_s.mean", "e2el_s.p50",
         "e2el_s.p99", "output_tokens_per_s", "mean_in_flight", "prefix_hit_share")  # fmt: skip

HEAD = """# How near simulations come

What the live CPU server did under loads that were not used to calibrate it, and what `tokenmill simulate` says of the
same loads. This page is written by one command from saved results:

    python tests/bench/bench_fidelity.py report OUT --write docs/develop/fidelity.md

The figures are of one machine: {processor}, {cores} cores, {system}; tokenmill {version}, commit {commit}.
They were measured by

    {command}

How: the coefficients of the cost model of steps, of the host's time between steps, and of front end and clients come
from one calibration for each kind of engine (`tokenmill serve --step-log`, `tokenmill calibrate`; engines of one
thread by a server of two of them) and are fixed from then on. Each load is played live up to {turns} times by the
same plan and seed, each time to a fresh server; before and after it a slice of another load, to a second server with
the same settings, tells how fast the machine is just then: how many times as long as by the calibration the slice's
steps took ("slowness"). The mean of the two is all that a simulation gets from the time of its load. A slice is
requests that come one by one. Capacity is what a closed loop of 48 clients reached before the loads; that differs by
a quarter from time to time on a shared machine, so that 105 % of it need not be more than the server can do. Errors
are simulated / live - 1, as sizes, means over the repeats; of E2EL the median over requests, matched one by one.
*Live to live* is what two live runs of the load differ by. Bars are stated shares: 6 % of E2EL of one engine, 10 % of
several and of tiers, 12 % of the mean TTFT, 20 % of its p99, and 5 % of the load at which the simulation shows the
live TTFT. Beside them stand the same bars widened to {limit} times live to live, where that is more: what a machine
repeats no better can show no better. Throughput has no bar: below capacity both sides have what was offered.

What was in view: that requests which come and end hold steps up was found on an earlier measurement of the first case;
that told steps do, and that slices say more by their steps than by their latencies, on earlier loads of two workers and
of prefill and decode, with other seeds; that slices say more if they are like loads than if they are closed loops, on
an earlier measurement of all cases by closed loops. Prefill and decode workers split every request here
(`--disaggregation always`): by default they split where it costs less, and of nearly equal costs each decision tips the
next, so that live runs differ from each other by what was decided first.
"""


def write(out: Path, page: Path) -> None:
    """The page, and its plots in a folder `reports` beside it. Raises SystemExit where nothing was measured."""
    found = sorted((out / "found").glob("*.json"))
    if not found:
        raise SystemExit(f"{out}/found is empty: measure and simulate first.")
    facts: Json = json.loads((out / "facts.json").read_text())
    results: list[Json] = [json.loads(path.read_text()) for path in found if path.stem != "order"]
    results.sort(key=lambda result: result["place"])
    plots = page.parent / "reports"
    plots.mkdir(parents=True, exist_ok=True)
    facts["turns"] = max(len(result["fidelity"]["live"]) for result in results)
    parts = [HEAD.format(**facts), _bars(results)]
    for result in results:
        parts.append(_section(result, page, plots))
    order = out / "found" / "order.json"
    if order.exists():
        parts.append(_order(json.loads(order.read_text())))
    page.write_text("\n".join(parts).rstrip() + "\n")
    print(f"wrote {page} and its plots in {plots}")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _bars(results: Sequence[Json]) -> str:
    rows = []
    for result in results:
        for each in result["verdicts"]:
            row = [result["title"], each["what"], share(each["size"]), share(each["live_to_live"])]
            for bar in (each["stated"], each["allowed"]):
                row += [share(bar), "kept" if each["size"] <= bar else "**missed**"]
            rows.append(row)
    strictly, widened = (sum(row[column] == "kept" for row in rows) for column in (5, 7))
    text = f"\n## Bars: {strictly} of {len(rows)} kept as stated, {widened} as widened\n\n"
    text += "| quantity | kept as stated | as widened |\n| --- | ---: | ---: |\n"
    for what in dict.fromkeys(row[1] for row in rows):
        of = [row for row in rows if row[1] == what]
        strictly, widened = (sum(row[column] == "kept" for row in of) for column in (5, 7))
        text += f"| {what} | {strictly} of {len(of)} | {widened} of {len(of)} |\n"
    return text + "\n" + _table(("load", "quantity", "error", "live to live", "stated", "", "widened", ""), rows)


def _section(result: Json, page: Path, plots: Path) -> str:
    fidelity, live = result["fidelity"], result["fidelity"]["live"]
    speed = ", ".join(f"{each:.3f}" for each in fidelity["speed"])
    text = f"\n## {result['title']}\n\n"
    text += f"Server: `{shlex.join(result['serve'])}`  \nLoad: `{_load_words(live[0]['argv'])}`  \n"
    text += f"Offered {live[0]['offered_requests_per_s']:.1f} requests/s; {len(live)} live runs of"
    text += f" {live[0]['num_requests']:,} requests, {fidelity['num_left_out']} left out; slowness {speed}.\n"
    if result["load_shown"]:
        shown = ", ".join(f"{each:.3f}" for each in result["load_shown"])
        text += f"The simulation shows the live mean TTFT at so many times the live load: {shown}.\n"
    figures = [each for name in SHOWN for each in fidelity["figures"] if each["metric"] == name]
    rows = [
        [
            metric_name(each["metric"]),
            quantity(each["metric"], each["live"]),
            quantity(each["metric"], each["simulated"]),
            signed(each["error"]),
            share(each["size"]),
            share(each["live_to_live"]),
        ]
        for each in figures
    ]
    text += "\n" + _table(("", "live", "simulated", "error", "size", "live to live"), rows)
    rows = [
        [metric_name(each["metric"]), signed(each["median"]), *(share(each[name]) for name in _OF_REQUESTS)]
        for each in fidelity["requests"]
    ]
    text += "\n" + _table(("of each request", "median error", "median size", "mean", "p90", "live to live"), rows)
    text += "\n"
    for name, drawing in _drawings(fidelity).items():
        path = plots / f"fidelity-{result['name']}-{name}.svg"
        path.write_text(drawing)
        text += f"![{_ALT[name]}]({path.relative_to(page.parent)})\n"
    return text


_OF_REQUESTS = ("median_size", "mean_size", "p90_size", "live_to_live")
_ALT = {
    "ttft": "TTFT, cumulative: live (solid) and simulated (dashed)",
    "e2el": "E2EL, cumulative: live (solid) and simulated (dashed)",
    "queue": "Requests in flight over time: live (solid) and simulated (dashed)",
    "errors": "Errors of single requests, cumulative: TTFT (solid), TPOT (dashed), E2EL (dotted)",
}


def _drawings(fidelity: Json) -> dict[str, str]:
    drawn = {"queue": standalone(queue_curves(fidelity)[0]), "errors": standalone(error_curves(fidelity))}
    for name, metric in (("ttft", "ttft_s"), ("e2el", "e2el_s")):
        series = []
        for side in ("live", "simulated"):
            rows = [row for run in fidelity[side] for row in run["requests"] if row["ok"]]
            values = [1e3 * value for row in rows if (value := latency_of(row, metric)) is not None]
            series.append(Series(side, cumulative(values)))
        axes = Axis(f"{metric_name(metric)}, ms", low=0.0), Axis("share of requests", low=0.0)
        drawn[name] = standalone(plot(metric_name(metric), *axes, series))
    return dict(sorted(drawn.items(), reverse=True))


def standalone(figure: str) -> str:
    """The drawing of a figure as a file of its own, with its style."""
    drawing = re.findall(r"<svg viewBox=\"0 0 420.*?</svg>", figure, re.DOTALL)[-1]
    return drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", ">" + STYLE, 1) + "\n"


def _load_words(argv: Sequence[str]) -> str:
    """`bench serve` and the words that matter."""
    words, shown, skip = list(argv), ["tokenmill", "bench", "serve"], False
    for word in words[words.index("serve") + 1 :]:
        if skip or word in ("--url", "--json"):
            skip = not skip
            continue
        shown.append(word)
    return shlex.join(shown)


def _order(order: Json) -> str:
    decided = [pair for pair in order["pairs"] if pair["is_decided"]]
    alike = sum((pair["live"] > 1) == (pair["simulated"] > 1) for pair in decided)
    text = f"\n## Ten settings in order\n\nMetric: {metric_name(order['metric'])}, medians. `{order['command']}`\n\n"
    rows = [
        [name, quantity(order["metric"], live), quantity(order["metric"], simulated), signed(simulated / live - 1)]
        for name, (live, simulated) in sorted(order["medians"].items(), key=lambda item: item[1][0])
    ]
    text += _table(("setting", "live", "simulated", "error"), rows)
    text += (
        f"\nOf {len(order['pairs'])} pairs {len(decided)} differ live by `bench compare`'s rule for two endpoints; the"
    )
    text += f" simulation puts {alike} of them in the same order ({share(alike / max(1, len(decided)))}; the bar is"
    text += f" 95 % of at least 15). It chooses *{order['chosen']}*, which is live {share(order['regret'])} from the"
    text += f" best, *{order['best']}*"
    text += f" (bar: the larger of 3 % and the repeat error, {share(order['repeat_error'])}).\n"
    wrong = [pair for pair in decided if (pair["live"] > 1) != (pair["simulated"] > 1)]
    for pair in wrong:
        ratios = f"live {pair['live']:.3f}, simulated {pair['simulated']:.3f}"
        text += f"- Wrong: {pair['second']} over {pair['first']}: {ratios}.\n"
    return text
