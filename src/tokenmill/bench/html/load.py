"""The report's sections on load: one for each kind of result of `bench serve`, `goodput` and `compare`.

Decides which tables and plots a result deserves. Figures in tables are never thinned.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ..load.show import figure_cells, phases_of, ratio_cells
from . import page
from .curves import few, latency_curves, load_curves, repeat_bars, scatters, timeline
from .page import LATENCIES, PLAIN, metric_name, repeat_with, show_time, time_unit, to_ms, words
from .plot import Axis, Estimate, intervals, short

Json = dict[str, Any]

_COLUMNS = ("mean", "p50", "p90", "p99", "p99_9", "max")


def runs_of(result: Json) -> list[Json]:
    kind = result["kind"]
    if kind == "goodput":
        return [probe["run"] for probe in result["probes"]]
    if kind == "run":
        return [result]
    if kind == "fidelity":
        return [*result["live"], *result["simulated"]]
    return result["runs"] if kind in ("repeats", "sweep", "compare") else []


def run_section(run: Json) -> str:
    return page.section(
        run["name"],
        [
            _headline(run),
            page.warnings(run["warnings"]),
            _what(run),
            page.heading("Latency"),
            page.plots(latency_curves({run["name"]: [run]})),
            _latency_table(run),
            page.heading("Over time"),
            page.plots(timeline(run)),
            page.heading("By request"),
            page.plots(scatters({run["name"]: [run]})),
            *_details(run),
        ],
    )


def repeats_section(result: Json) -> str:
    runs = result["runs"]
    by_repeat = {f"repeat {i + 1}": [run] for i, run in enumerate(runs)}
    rows = []
    for metric, interval in result["intervals"].items():
        unit = time_unit([interval["mean"]]) if "_s." in metric else PLAIN
        cells = (interval["mean"], interval["low"], interval["high"], min(interval["values"]), max(interval["values"]))
        rows.append([f"{metric_name(metric)} {unit.name}".strip(), *(short(cell * unit.factor) for cell in cells)])
    confidence = next((interval["confidence"] for interval in result["intervals"].values()), 0.95)
    header = ("metric", "mean", f"{confidence:.0%} from", "to", "least", "most")
    return page.section(
        f"{result['name']}: {len(runs)} repeats",
        [
            _headline(result),
            page.warnings(result["warnings"]),
            _what(result),
            page.heading("Over repeats"),
            page.paragraph("Each repeat draws its load from a fresh seed; intervals are Student's t over repeats."),
            page.table(header, rows),
            page.heading("Latency"),
            page.plots(latency_curves(few(by_repeat))),
            _latency_table(result),
            page.heading("By request"),
            page.plots(scatters(few(by_repeat))),
            *_details(result),
        ],
    )


def sweep_section(result: Json) -> str:
    by = {"request_rate": "request rate", "concurrency": "concurrency"}.get(result["by"], result["by"])
    unit = "requests/s" if result["by"] == "request_rate" else "clients"
    runs, points = result["runs"], result["points"]
    names = {f"{short(point)} {unit}": [run] for point, run in zip(points, runs, strict=True)}
    texts = [f"At {name}: {text}" for name, (run,) in names.items() for text in run["warnings"]]
    return page.section(
        f"Latency by {by}",
        [
            page.warnings(texts),
            _what(runs[0], varied=(result["by"], "concurrency")) if runs else "",
            page.plots(load_curves(points, runs, f"{by}, {unit}")),
            _points_table(points, runs, f"{by}, {unit}"),
            page.heading("Distributions"),
            page.plots(latency_curves(few(names))),
        ],
    )


def goodput_sweep_section(result: Json) -> str:
    searches = zip(result["labels"], result["searches"], strict=True)
    return "".join([f"<h2>{escape(label)}</h2>{goodput_section(search)}" for label, search in searches])


def goodput_section(result: Json) -> str:
    probes = sorted(result["probes"], key=lambda probe: probe["request_rate"])
    rates, runs = [probe["request_rate"] for probe in probes], [probe["run"] for probe in probes]
    slo = ", ".join(f"{metric_name(name)} <= {show_time(limit)}" for name, limit in result["slo"].items())
    goals = result.get("goals", {})
    wanted = [f"{slo}, for {result['target_attainment']:.0%} of requests"] if slo or not goals else []
    wanted += [f"{name.replace('_', ' ').upper()} <= {show_time(limit)}" for name, limit in goals.items()]
    found = [
        ("Highest request rate", short(result["request_rate"]), "requests/s"),
        ("Goodput there", short(result["goodput_requests_per_s"]), "requests/s"),
        ("Output there", short(result["output_tokens_per_s"]), "tokens/s"),
    ]
    for field, name, unit in (
        ("per_core", "Per core", "requests/s"),
        ("per_gpu", "Per GPU", "requests/s"),
        ("requests_per_dollar", "Per dollar", "requests"),
        ("output_tokens_per_dollar", "Per dollar", "output tokens"),
    ):
        if result[field] is not None:
            found.append((name, short(result[field]), unit))
    low, high = short(result["request_rate_low"]), result["request_rate_high"]
    bounds = f"at least {low} requests/s: no rate failed" if high is None else f"{low} to {short(high)} requests/s"
    rows = [
        Estimate(
            f"{short(probe['request_rate'])} requests/s, {_judgement(probe)}"
            + (f", {100 * probe['target']:g}% wanted by {probe['goal']}" if probe.get("goal") else ""),
            probe["attainment"],
            probe["attainment_low"],
            probe["attainment_high"],
            2 if probe["passed"] else 1,
        )
        for probe in probes
    ]
    attainment = intervals(
        "SLO attainment at each rate tried",
        Axis("share of requests that met every objective", low=0.0, high=1.0),
        rows,
        reference=None if goals else result["target_attainment"],
        note="Wilson intervals of as many independent requests as there are in effect"
        + ("" if goals else "; the dashed line is the target")
        + ". A rate must also be stable: its queue does not grow.",
    )
    return page.section(
        "Goodput",
        [
            page.headline(found),
            page.warnings(result["warnings"]),
            page.facts(
                {
                    "objectives": "; ".join(wanted),
                    "interval": bounds,
                }
            ),
            repeat_with(result["argv"]),
            _what(runs[0], with_command=False, varied=("request_rate", "objectives")) if runs else "",
            page.plots([attainment, *load_curves(rates, runs, "request rate, requests/s", with_tradeoff=False)]),
            _points_table(rates, runs, "request rate"),
        ],
    )


def _judgement(probe: Json) -> str:
    return "passed" if probe["passed"] else "failed" if probe["stable"] else "not stable"


def compare_section(result: Json) -> str:
    names = list(dict.fromkeys(endpoint["name"] for endpoint in result["endpoints"]))
    endpoints = {
        endpoint["name"]: words({key: value for key, value in endpoint.items() if key != "name"})
        for endpoint in result["endpoints"]
    }
    return page.section(
        " / ".join(names) or "Comparison",
        [
            page.warnings(result["warnings"]),
            page.facts(endpoints),
            repeat_with(result["argv"]),
            _what(result["runs"][0], with_command=False, with_endpoint=False, varied=("phase",))
            if result["runs"]
            else "",
            *(part for phase in phases_of(result) for part in _phase(result, phase)),
        ],
    )


def _phase(result: Json, phase: str) -> list[str]:
    """One phase of a comparison: all figures, their ratios, and how they were distributed."""
    title = f"Figures, {phase}" if len(phases_of(result)) > 1 else "Figures"
    by_name: dict[str, list[Json]] = {}
    for run in result["runs"]:
        if run["schedule"]["phase"] == phase:
            by_name.setdefault(run["name"], []).append(run)
    colours = {name: i for i, name in enumerate(by_name)}
    bars = [
        repeat_bars(name, axis, by_name, colours, read)
        for name, axis, read in (
            ("Output throughput", "tokens/s", lambda run: run["output_tokens_per_s"]),
            ("Median TTFT", "TTFT p50, ms", lambda run: to_ms(run["ttft_s"]["p50"])),
            ("Median TPOT", "TPOT p50, ms", lambda run: to_ms(run["tpot_s"]["p50"])),
        )
    ]
    ratios = [ratio for ratio in result["ratios"] if ratio["phase"] == phase]
    candidates = dict.fromkeys(ratio["candidate"] for ratio in ratios)
    return [
        page.heading(title),
        page.table(*figure_cells(result, phase)),
        page.plots(bars),
        page.heading("Ratios"),
        page.plots([_ratio_bars([ratio for ratio in ratios if ratio["candidate"] == name]) for name in candidates]),
        page.table(*ratio_cells(result, phase)),
        page.heading("Latency, all repeats together"),
        page.plots(latency_curves(few(by_name))),
        page.heading("By request"),
        page.plots(scatters(few(by_name))),
    ]


def _ratio_bars(ratios: Sequence[Json]) -> str:
    """Of one candidate to the baseline."""
    baseline, candidate = ratios[0]["baseline"], ratios[0]["candidate"]
    estimates = [
        Estimate(
            f"{metric_name(ratio['metric'])}: {short(ratio['ratio'])}, {ratio['verdict']}",
            ratio["ratio"],
            ratio["low"],
            ratio["high"],
            {"better": 2, "worse": 1}.get(ratio["verdict"], 0),
        )
        for ratio in ratios
    ]
    note = f"{ratios[0]['confidence']:.0%} intervals over repeats. Left of 1 is lower, which is better for latencies."
    title = f"{candidate} over {baseline}"
    return intervals(title, Axis("ratio, geometric mean of repeats", log=True), estimates, 1.0, note)


def side_by_side_section(runs: Sequence[Json]) -> str:
    names = distinct([run["name"] for run in runs])
    header = ("metric", *names)
    rows = [
        [label, *(short(run[field]) for run in runs)]
        for field, label in (
            ("output_tokens_per_s", "output tokens/s"),
            ("requests_per_s", "requests/s"),
            ("goodput_requests_per_s", "goodput, requests/s"),
            ("num_failed", "failed requests"),
        )
    ]
    for field in ("ttft_s", "tpot_s", "itl_s", "e2el_s"):
        for share in ("p50", "p99"):
            rows.append([f"{LATENCIES[field][0]} {share}", *(show_time(run[field][share]) for run in runs)])
    named = {name: runs_of(run) for name, run in zip(names, runs, strict=True)}
    note = (
        "These were separate runs: what the machine did between them is in the difference. bench compare takes turns."
    )
    return page.section(
        "Side by side", [page.paragraph(note), page.table(header, rows), page.plots(latency_curves(few(named)))]
    )


# ---- parts -----------------------------------------------------------------------------------------------------------


def _headline(run: Json) -> str:
    num_failed = run["num_failed"]
    found = [
        ("Output", short(run["output_tokens_per_s"]), "tokens/s"),
        ("Requests", short(run["requests_per_s"]), "requests/s"),
        ("TTFT p50", show_time(run["ttft_s"]["p50"]), f"p99 {show_time(run['ttft_s']['p99'])}"),
        ("TPOT p50", show_time(run["tpot_s"]["p50"]), f"p99 {show_time(run['tpot_s']['p99'])}"),
        (
            "Answered",
            f"{run['num_ok']}",
            f"of {run['num_requests']}" + (f", {num_failed} failed" if num_failed else ""),
        ),
    ]
    if run["slo"]["objectives"]:
        attainment = run["slo"]["attainment"]
        share = "-" if attainment is None else f"{attainment:.1%}"
        found.insert(2, ("Goodput", short(run["goodput_requests_per_s"]), f"requests/s, {share} met the SLO"))
    return page.headline(found)


def _what(run: Json, *, with_command: bool = True, with_endpoint: bool = True, varied: Sequence[str] = ()) -> str:
    """What was measured, where, and how to do it again. `varied`: settings in which the runs of a result differ."""
    pairs: dict[str, object] = {}
    if with_endpoint:
        pairs["endpoint"] = words(run["endpoint"])
    pairs["load"] = words({key: value for key, value in run["schedule"].items() if key not in ("repeat", *varied)})
    pairs["data"] = words({key: value for key, value in run["dataset"].items() if key not in ("digest", "plan_digest")})
    if digest := run["dataset"].get("digest"):
        pairs["data digest"] = digest
    if run["slo"]["objectives"] and "objectives" not in varied:
        pairs["objectives"] = ", ".join(
            f"{metric_name(name)} <= {show_time(limit)}" for name, limit in run["slo"]["objectives"].items()
        )
    pairs["client"] = words(run["environment"])
    pairs["started"] = f"{run['started_at']}, {run['duration_s']:.1f} s"
    return page.facts(pairs) + (repeat_with(run["argv"]) if with_command else "")


def _latency_table(run: Json) -> str:
    rows = []
    for field, (name, _) in LATENCIES.items():
        found = run[field]
        unit = time_unit([found["p50"]])
        cells = ["-" if found[column] is None else short(found[column] * unit.factor) for column in _COLUMNS]
        rows.append([name, unit.name, *cells, str(found["num"])])
    header = ("quantity", "unit", *(column.replace("_", ".") for column in _COLUMNS), "values")
    return page.table(header, rows, {name: definition for name, definition in LATENCIES.values()})


def _points_table(points: Sequence[float], runs: Sequence[Json], label: str) -> str:
    header = (
        label,
        "requests/s",
        "output tokens/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "SLO met",
        "failed",
    )
    rows = []
    for point, run in zip(points, runs, strict=True):
        attainment = run["slo"]["attainment"] if run["slo"]["objectives"] else None
        rows.append(
            [
                short(point),
                short(run["requests_per_s"]),
                short(run["output_tokens_per_s"]),
                *(show_time(run[field][share]) for field in ("ttft_s", "tpot_s") for share in ("p50", "p99")),
                "-" if attainment is None else f"{attainment:.1%}",
                str(run["num_failed"]),
            ]
        )
    return page.table(header, rows)


def _details(run: Json) -> list[str]:
    """Lengths, tenants, errors, and what the server said of itself."""
    parts = [page.heading("Lengths, client and server")]
    pairs: dict[str, object] = {}
    for field, name in (("input_lengths", "input tokens"), ("output_lengths", "output tokens")):
        found = run[field]
        if found["num"]:
            pairs[name] = f"p50 {short(found['p50'])}, p90 {short(found['p90'])}, most {short(found['max'])}"
    if run["prefix_hit_share"] is not None:
        pairs["prefix hits"] = f"{run['prefix_hit_tokens']} tokens, {run['prefix_hit_share']:.1%} of the input"
    pairs["in flight"] = f"mean {short(run['mean_in_flight'])}, most {run['max_in_flight']}"
    client = run["client"]
    per_event = client["cpu_us_per_event"]
    cost = "" if per_event is None else f", {per_event:.0f} us per token event"
    pairs["client cost"] = (
        f"{client['cores']:.3f} cores{cost}; event loop late by p99 {show_time(client['loop_lag_s']['p99'])}"
    )
    if energy := run["energy"]:
        per_token = energy["joules_per_output_token"]
        share = "" if per_token is None else f", {short(per_token)} J per output token"
        pairs["energy"] = f"{short(energy['joules'])} J{share} ({energy['source']})"
    if run["fairness"]["jain"] is not None:
        pairs["fairness"] = f"Jain's index {run['fairness']['jain']:.3f} over {len(run['fairness']['tenants'])} tenants"
    parts.append(page.facts(pairs))
    if run["errors"]:
        rows = [[error["kind"], str(error["num"]), error["example"]] for error in run["errors"]]
        parts += [page.heading("Errors"), page.table(("kind", "requests", "example"), rows)]
    if run["server"]:
        means = run["server"]["histogram_means"]
        rows = [[name, short(value)] for name, value in sorted(means.items())]
        rows += [[name, f"+{short(value)}"] for name, value in sorted(run["server"]["counters"].items()) if value]
        parts += [page.heading("What the server says"), page.table(("metric", "mean or increase"), rows)]
    return parts


def distinct(names: Sequence[str]) -> list[str]:
    """The names, numbered where they repeat."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: i + 1].count(name)})" for i, name in enumerate(names)
    ]
