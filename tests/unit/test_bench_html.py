"""The report: one sound, safe and small file for every kind of result."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import asdict
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.bench import result
from tokenmill.bench.html import page as html_page
from tokenmill.bench.html import plot as html_plot
from tokenmill.bench.html import report as html
from tokenmill.bench.html.plot import Axis, Estimate, Series
from tokenmill.bench.html.report import requests_csv, summary_csv
from tokenmill.bench.load.compare import Side, make_figures
from tokenmill.core.errors import ConfigError

HOSTILE = "<script>alert('x')</script>&\"' ]]>"
VOID = {"meta", "br", "link", "img"}


def distribution(values: list[float]) -> result.Distribution:
    if not values:
        return result.Distribution(0)
    ranked = sorted(values)
    at = [ranked[min(len(ranked) - 1, math.ceil(share * len(ranked)) - 1)] for share in (0.5, 0.9, 0.95, 0.99, 0.999)]
    mean = sum(ranked) / len(ranked)
    return result.Distribution(len(ranked), mean, 0.1, ranked[0], *at, ranked[-1])


def make_row(rng: random.Random, index: int, *, ok: bool = True, num_events: int = 8) -> result.RequestRow:
    first, gap = rng.uniform(0.02, 0.4), rng.uniform(0.005, 0.05)
    events = [round(first + i * gap, 6) for i in range(num_events)]
    due = index * 0.1
    return result.RequestRow(
        index=index, session="s", turn=0, tenant="", group="", due_s=due, sent_s=due + 0.001,
        first_s=due + first if ok else None, last_s=due + events[-1] if ok else None, end_s=due + events[-1],
        input_tokens=rng.randrange(10, 2000) if ok else None, output_tokens=num_events if ok else None,
        cached_tokens=None,
        wanted_input_tokens=None, wanted_output_tokens=num_events, ok=ok, met_slo=ok, finish_reason="length",
        error=None if ok else "timeout", error_detail=None, event_s=events if ok else None,
    )  # fmt: skip


def make_run(name: str = "a run", *, num: int = 40, num_failed: int = 2, seed: int = 0, **changes) -> result.Run:
    rng = random.Random(seed)
    rows = [make_row(rng, i, ok=i >= num_failed) for i in range(num)]
    good = [row for row in rows if row.ok]
    ttft = distribution([row.first_s - row.due_s for row in good])
    e2el = distribution([row.last_s - row.due_s for row in good])
    tpot = distribution([(row.last_s - row.first_s) / (row.output_tokens - 1) for row in good])
    buckets = [result.Bucket(i * 0.5, 3, 3, 2, i % 2, 20, 1.5, None, None) for i in range(max(2, num // 5))]
    fields = dict(
        name=name, started_at="2026-01-02T03:04:05+00:00", duration_s=num * 0.1, num_requests=num, num_ok=len(good),
        num_failed=num_failed, num_retries=0, ttft_s=ttft, ttfo_s=ttft, ttst_s=tpot,
        tpot_s=tpot, itl_s=tpot, e2el_s=e2el, normalised_latency_s=tpot, ttft_from_send_s=ttft,
        e2el_from_send_s=e2el, lateness_s=distribution([0.001]),
        input_lengths=distribution([5, 9]), output_lengths=distribution([8]), input_tokens=100, output_tokens=99,
        prefix_hit_tokens=None, prefix_hit_share=None, tokens_per_event=1.0, requests_per_s=9.5,
        input_tokens_per_s=10.0, output_tokens_per_s=1234.5, total_tokens_per_s=20.0, goodput_requests_per_s=9.0,
        goodput_output_tokens_per_s=70.0, offered_requests_per_s=10.0, mean_in_flight=1.5, max_in_flight=4,
        slo=result.Slo({"ttft_s": 0.5}, 0.95, {"ttft_s": 0.95}), fairness=result.Fairness(0.9, []),
        errors=[result.ErrorClass("timeout", num_failed, HOSTILE)],
        client=result.ClientCost(0.1, 0.01, 100, 1000, 10.0, 0.0, distribution([0.001])),
        server=result.ServerMetrics("http://h/metrics", {'a{b="c"}': 1.0}, {"g": [0.0, 1.0]}, {"h": 0.5}),
        energy=result.Energy("rapl", 10.0, 0.1),
        schedule={"mode": "open", "request_rate": 10.0, "repeat": seed, "phase": "cold"},
        dataset={"name": "random", "digest": "d" * 64, "seed": 0},
        endpoint={"name": name, "url": "http://h/v1", "model": "m"}, environment={"cores": "2"},
        argv=["/bin/tokenmill", "bench", "serve", "--url", "http://h", "--api-key", "sesame", "--header=X: secret"],
        warnings=["careful"], timeline_bucket_s=0.5, timeline=buckets, requests=rows,
    )  # fmt: skip
    return result.Run(**(fields | changes))


def make_all() -> dict[str, result.Result]:
    runs = [make_run(f"r{i}", seed=i) for i in range(3)]
    interval = result.Interval(9.5, 9.0, 10.0, 0.95, [9.0, 9.5, 10.0])
    probes = [
        result.Probe(
            rate, share, share - 0.1, min(1.0, share + 0.1), [share], 9, share > 0.5, 0.1, share > 0.8, 0.9, runs[i]
        )
        for i, (rate, share) in enumerate([(1.0, 1.0), (2.0, 0.9), (4.0, 0.3)])
    ]
    twins = [make_run(name, seed=seed) for seed in range(2) for name in ("base", HOSTILE)]
    ratios = [
        result.Ratio(
            "cold", metric, "per" in metric, "base", HOSTILE, 1.0, 1.2, 1.2, 1.1, 1.3, 0.97, 0.01, 0.02, False, "worse"
        )
        for metric in ("ttft_s.p50", "output_tokens_per_s")
    ]
    sides = [Side(name, "cold", [run for run in twins if run.name == name]) for name in ("base", HOSTILE)]
    figures_of_sides = [figure for side in sides for figure in make_figures(side)]
    intervals = {"requests_per_s": interval, "ttft_s.p50": interval}
    figures = (2.0, 2.0, 4.0, interval, 1.9, 100.0, 1.0, None, 5.0, None, 2, None, 0.2)
    return {
        "run": make_run(),
        "repeats": result.Repeats(make_run(requests=[], timeline=[]), intervals, runs),
        "sweep": result.Sweep("request_rate", [1.0, 2.0, 4.0], runs),
        "goodput": result.Goodput({"ttft_s": 0.5}, {}, 0.9, *figures, ["bench"], [], probes),
        "compare": result.Comparison(
            [{"name": "base", "url": "http://h"}, {"name": HOSTILE, "url": "http://i"}],
            "ttft_s.p50",
            figures_of_sides,
            ratios,
            ["bench"],
            [],
            twins,
        ),
    }


class Checker(HTMLParser):
    """Collects tags and attributes, and fails on a tag that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"


def check(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    return checker


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg viewBox.*?</svg>", text, re.DOTALL)]


def numbers(svg: ElementTree.Element) -> list[tuple[float, float]]:
    """Every place a drawing puts ink at."""
    places = []
    for node in svg.iter():
        if node.tag == "circle":
            places.append((float(node.get("cx")), float(node.get("cy"))))
        elif node.tag == "line":
            places += [(float(node.get(f"x{i}")), float(node.get(f"y{i}"))) for i in (1, 2)]
        elif node.tag == "path" and "H" not in node.get("d"):
            places += [tuple(map(float, pair.split())) for pair in node.get("d")[1:].split("L")]
    return places


@pytest.mark.parametrize("kind", ["run", "repeats", "sweep", "goodput", "compare"])
def test_every_kind_gives_a_sound_page(kind) -> None:
    """Well-formed, with drawings inside their frames, nothing that is no number, and a table."""
    text = html.render([json.loads(json.dumps(make_all()[kind].to_json()))])
    check(text)
    assert "<table>" in text and "Nothing to draw" not in text
    assert not re.search(r"\b(nan|inf|None)\b", text)
    charts = [svg for svg in drawings(text) if svg.get("aria-label")]
    assert len(charts) >= 4
    for svg in charts:
        width, height = map(float, svg.get("viewBox").split()[2:])
        assert all(-0.1 <= x <= width + 0.1 and -0.1 <= y <= height + 0.1 for x, y in numbers(svg)), svg.get(
            "aria-label"
        )


def test_only_a_line_that_is_drawn_is_explained() -> None:
    """Goals of percentiles have a target each, which stands at the rate it was judged at."""
    goodput = make_all()["goodput"].to_json()
    assert "the dashed line is the target" in html.render([goodput])
    assert "dashed" not in html.render([{**goodput, "goals": {"p99_ttft": 0.5}}])


def test_a_page_needs_and_runs_nothing() -> None:
    """No script, no address to fetch, and a policy that forbids both; hostile names stay text; secrets stay out."""
    everything = make_all()
    everything["compare"].warnings.append(HOSTILE)
    text = html.render([each.to_json() for each in everything.values()])
    checker = check(text)
    for tag, attributes in checker.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "a")
        assert not {"src", "href", "style", "xlink:href"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "url(" not in text and "@import" not in text
    assert "default-src 'none'" in text
    assert "&lt;script&gt;" in text
    assert "sesame" not in text and "secret" not in text


def test_a_large_run_gives_a_small_file_and_the_same_one_twice() -> None:
    run = make_run(num=10_000, num_failed=0)
    many = [result.Bucket(i * 0.5, 1, 1, 1, 0, 10, 1.0, None, None) for i in range(20_000)]
    data = asdict(run) | {"kind": "run", "timeline": [asdict(bucket) for bucket in many]}
    text = html.render([data])
    assert len(text.encode()) < 1_000_000
    assert text == html.render([data])
    assert "1500 of 10000 requests" in text


def test_a_run_in_which_everything_failed_still_gives_a_page() -> None:
    run = make_run(num=5, num_failed=5, tokens_per_event=None)
    text = html.render([run.to_json()])
    check(text)
    assert "5 failed" in text and "timeout" in text


def test_results_without_token_times_lack_only_the_itl_plot() -> None:
    data = make_run().to_json()
    for row in data["requests"]:
        row["event_s"] = None
    titles = [svg.get("aria-label") for svg in drawings(html.render([data]))]
    assert "ITL" not in titles and {"TTFT", "TPOT", "E2EL"} <= set(titles)


def test_several_runs_stand_side_by_side() -> None:
    text = html.render([make_run("same").to_json(), make_run("same", seed=1).to_json()])
    assert "Side by side" in text and "same (1)" in text and "same (2)" in text


def test_the_table_shows_the_exact_figures() -> None:
    """What is thinned is the drawing, never the figures."""
    run = make_run(num=3000, num_failed=0)
    text = html.render([run.to_json()])
    assert f"<td>{html_plot.short(run.ttft_s.p99 * 1e3)}</td>" in text


def test_files_that_are_no_results_are_refused_by_name(tmp_path) -> None:
    bad = tmp_path / "bad.json"
    for content in ("{", "[]", '{"kind": "cake"}', '{"kind": "run", "schema": 1}'):
        bad.write_text(content)
        with pytest.raises(ConfigError, match=r"bad\.json"):
            html.read_results([bad])
    good = tmp_path / "good.json"
    good.write_text(json.dumps(make_run().to_json()))
    html.write_report(html.read_results([good]), tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text(encoding="utf8").startswith("<!doctype html>")


def test_csv_has_a_line_per_run_and_per_request() -> None:
    sweep = make_all()["sweep"].to_json()
    lines = summary_csv([sweep]).splitlines()
    assert len(lines) == 4 and "ttft_s.p50" in lines[0].split(",")
    rows = requests_csv([sweep]).splitlines()
    assert len(rows) == 1 + 3 * 40 and "event_s" not in rows[0]


# ---- plots -----------------------------------------------------------------------------------------------------------

FINITE = st.floats(-1e12, 1e12, allow_nan=False).filter(lambda value: value == 0 or abs(value) > 1e-9)


@given(FINITE, FINITE)
def test_nice_ticks_enclose_the_range_in_round_steps(a, b) -> None:
    low, high = sorted((a, b))
    if high - low < 1e-9 * max(abs(low), abs(high)):
        high = low
    ticks = html_plot.nice_ticks(low, high)
    step = ticks[1] - ticks[0]
    assert 2 <= len(ticks) <= 12
    assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= high - 1e-6 * step
    assert f"{step:.6e}"[0] in "125" or math.isclose(step, 10 ** round(math.log10(step)), rel_tol=1e-6)


@given(st.floats(1e-6, 1e9), st.floats(1, 1e9))
def test_log_ticks_enclose_the_range(low, factor) -> None:
    ticks = html_plot.log_ticks(low, low * factor)
    assert ticks == sorted(ticks) and 1 <= len(ticks) <= 12
    assert ticks[0] <= low * 1.0001 or len(ticks) == 1


@given(st.lists(FINITE, min_size=1, max_size=2000))
def test_a_cumulative_curve_keeps_both_ends_and_never_falls(values) -> None:
    points = html_plot.cumulative(values, most=60)
    assert points[0] == (min(values), 0.0) and points[-1] == (max(values), 1.0)
    assert points == sorted(points) and len(points) <= 62
    for value, share in points[1:]:
        assert sum(each <= value for each in values) / len(values) >= share


@given(st.lists(st.integers(), max_size=300), st.integers(2, 50))
def test_thinning_keeps_order_and_ends(items, most) -> None:
    kept = html_plot.thin(items, most)
    assert len(kept) == min(len(items), most)
    if items:
        assert kept[0] == items[0] and kept[-1] == items[-1]


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=40), st.booleans())
def test_any_points_can_be_drawn(points, log) -> None:
    """Also infinite ones, not-a-numbers and, on a log axis, zeros and negatives: they are left out."""
    text = html_plot.plot("t", Axis("x"), Axis("y", log=log), [Series(HOSTILE, points, "marked")])
    check(text)
    assert "nan" not in text and "inf" not in text


def test_hover_texts_belong_to_their_dots() -> None:
    points = [(1.0, math.nan), (2.0, 1.0), (3.0, 2.0)]
    text = html_plot.plot("t", Axis("x"), Axis("y"), [Series("s", points, "dots", ["one", "two", "three"])])
    assert re.findall(r"<title>(\w+)</title></circle>", text) == ["two", "three"]


def test_intervals_without_an_upper_bound_keep_their_dot() -> None:
    text = html_plot.intervals("t", Axis("x", log=True), [Estimate("e", 1.0, 0.0, math.inf)], reference=1.0)
    check(text)
    assert text.count("<circle") == 1 and 'class="bar"' not in text


def test_names_stand_off_the_reference_line() -> None:
    """Wherever the line is, no piece of it reaches the height of a name."""
    rows = [Estimate(f"a rather long name {i}", 1.0, 0.5, 2.0) for i in range(5)]
    text = html_plot.intervals("t", Axis("x", log=True), rows, reference=1.0)
    pieces = re.findall(r'class="reference" x1="[^"]*" x2="[^"]*" y1="([^"]*)" y2="([^"]*)"', text)
    names = [float(y) for y in re.findall(r'class="row" x="[^"]*" y="([^"]*)"', text)]
    assert len(pieces) == len(names) == 5
    for low, high in pieces:
        assert all(float(high) <= name - 11 or float(low) >= name + 2 for name in names)


def test_tables_scroll_and_keep_their_names() -> None:
    """A table wider than a phone scrolls by itself, its first column staying in view."""
    text = html_page.page("t", "l", [html_page.table(["a", "b"], [["1", "2"]])])
    assert '<div class="scroll" tabindex="0"><table>' in text and ".scroll { overflow-x: auto;" in text
    assert re.search(r"\.scroll td:first-child \{ position: sticky; left: 0;", text)


def test_long_names_lose_their_middle() -> None:
    text = html_plot.intervals("t", Axis("x"), [Estimate("a" * 100 + ": 1.5, better", 1.0, 0.5, 2.0)])
    shown = re.search(r'class="row"[^>]*>([^<]*)<', text)[1]
    assert len(shown) < 65 and shown.startswith("aaa") and shown.endswith("1.5, better") and "…" in shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (0.123456, "0.123"), (1234.5, "1234"), (12345, "12.3k"), (2.5e6, "2.5M"), (-20000, "-20k")],
)
def test_numbers_are_short(value, shown) -> None:
    assert html_plot.short(value) == shown
