"""The arithmetic of a measurement: percentiles, definitions, intervals, the goodput search and verdicts."""

from __future__ import annotations

import asyncio
import json
import math
import random
from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.bench.load import goodput, measure
from tokenmill.bench.load.compare import Side, choose_primary, decide, make_figures, make_ratio
from tokenmill.bench.load.context import Context, Window
from tokenmill.bench.load.datasets import Lengths, random_prompts
from tokenmill.bench.load.histogram import QUANTILES, SUB_BUCKETS, Histogram, describe, quantile
from tokenmill.bench.load.measure import NUM_BUCKETS, jain
from tokenmill.bench.load.player import Played
from tokenmill.bench.load.retries import EarlyStop, hopeless_wait_s
from tokenmill.bench.load.run import pool
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.load.scrape import EnergyMeter, difference, find_energy_meter, parse
from tokenmill.bench.load.show import print_result, runs_of, to_csv
from tokenmill.bench.load.stream import Exchange
from tokenmill.bench.result import Comparison, Probe, Repeats, Run, Sweep
from tokenmill.bench.stats import can_decide, holm, mean_interval, paired_ratio, t_point, t_two_sided
from tokenmill.core.errors import ConfigError

START_S = 1000.0


def exchange(index: int, due: float, sent: float, events: list[float], **fields: Any) -> Exchange:
    """A finished answer; times from the start of the run."""
    made = Exchange(index, START_S + due)
    made.sent_s = START_S + sent
    made.event_times = array("d", (START_S + at for at in events))
    made.event_tokens = array("l", fields.pop("counts", [1] * len(events)))
    made.end_s = START_S + fields.pop("end", events[-1] if events else sent)
    made.input_tokens = 10
    made.output_tokens = sum(made.event_tokens)
    made.finish_reason = "length"
    if error := fields.pop("error", None):
        made.fail(error, "why")
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def run_of(exchanges: list[Exchange], objectives: dict[str, float] | None = None, **context: Any) -> Run:
    plan = random_prompts(len(exchanges), 0, Lengths(10, 4))
    plan = replace(plan, calls=tuple(replace(c, tenant="ab"[c.index % 2]) for c in plan.calls))
    played = Played(START_S, START_S + 10.0, exchanges, 0.5, 1000, array("d", [1e-4] * 10), False)
    fields: dict[str, Any] = {
        "name": "n",
        "started_at": "",
        "objectives": objectives or {},
        "schedule": {"mode": "open", "repeat": 0},
        "dataset": {"digest": "d"},
        "endpoint": {},
        "environment": {},
        "argv": [],
    }
    filled = Context(**(fields | context))
    return measure.summarise(filled, played, measure.make_rows(plan, played, filled.objectives))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_the_histogram_agrees_with_exact_percentiles(values: list[float]) -> None:
    """Every percentile within half a bucket of the exact one; count, sum, extremes exact."""
    exact, rough = describe(values), describe(values, max_exact=0)
    assert rough.num == exact.num == len(values)
    for name in (*QUANTILES, "mean", "min", "max"):
        true, seen = getattr(exact, name), getattr(rough, name)
        assert abs(seen - true) <= max(abs(true) / SUB_BUCKETS, 1e-12), name


@given(st.lists(st.floats(0, 10), min_size=1, max_size=50), st.sampled_from(sorted(QUANTILES.values())))
def test_percentiles_are_nearest_rank(values: list[float], q: float) -> None:
    """The q-quantile is a value that at least a share q does not exceed, and no smaller value is."""
    found = quantile(sorted(values), q)
    share = sum(value <= found for value in values) / len(values)
    below = sum(value < found for value in values) / len(values)
    assert found in values and share >= q - 1e-9 and below < q


def test_a_large_sample_goes_through_the_histogram() -> None:
    """Beyond the exact limit, percentiles stay within a thousandth."""
    rng = random.Random(0)
    values = [rng.lognormvariate(-4, 1) for _ in range(5000)]
    exact, rough = describe(values), describe(values, max_exact=1000)
    assert rough.p99 != exact.p99 and rough.p99 == pytest.approx(exact.p99, rel=1e-3)
    assert rough.std == pytest.approx(exact.std, rel=1e-6)


def test_nothing_has_no_percentiles() -> None:
    """An empty sample is None all over, not zero; the histogram refuses negative times."""
    assert describe([]).p50 is None and describe([]).num == 0
    with pytest.raises(AssertionError):
        Histogram().add(-1.0)


def test_every_quantity_follows_its_definition() -> None:
    """One request worked out by hand: due at 1, sent 0.5 late, tokens at 2, 2.2, 2.5 (two at once)."""
    run = run_of([exchange(0, 1.0, 1.5, [2.0, 2.2, 2.5], counts=[1, 1, 2], end=2.6, cached_tokens=4)])
    for name, wanted in {
        "ttft_s": 1.0,
        "ttft_from_send_s": 0.5,
        "ttst_s": 0.2,
        "tpot_s": 0.5 / 3,
        "e2el_s": 1.5,
        "e2el_from_send_s": 1.0,
        "normalised_latency_s": 1.5 / 4,
        "lateness_s": 0.5,
    }.items():
        assert getattr(run, name).p50 == pytest.approx(wanted), name
    assert (run.itl_s.num, run.itl_s.min, run.itl_s.max) == (2, pytest.approx(0.2), pytest.approx(0.3))
    assert run.duration_s == pytest.approx(1.6) and run.output_tokens_per_s == pytest.approx(4 / 1.6)
    assert run.input_tokens_per_s == pytest.approx(10 / 1.6) and run.total_tokens_per_s == pytest.approx(14 / 1.6)
    assert run.tokens_per_event == pytest.approx(4 / 3) and run.prefix_hit_tokens == 4
    assert run.prefix_hit_share == pytest.approx(0.4)
    assert run.mean_in_flight == pytest.approx(1.1 / 1.6) and run.max_in_flight == 1
    row = run.requests[0]
    assert row.event_tokens == [1, 1, 2] and row.event_s == [1.0, pytest.approx(1.2), 1.5]


def test_an_answer_in_one_piece_has_no_times_between_tokens() -> None:
    """A whole answer has a latency, but neither TTFT nor TPOT nor ITL, and meets no objective on them; several tokens
    in one event have a TTFT and no TPOT. None of them is 0."""
    whole = run_of([exchange(0, 0.0, 0.0, [2.0], counts=[5], is_streamed=False)], {"ttft_s": 9.0})
    assert (whole.ttft_s.num, whole.tpot_s.num, whole.itl_s.num, whole.e2el_s.p50) == (0, 0, 0, 2.0)
    assert whole.tpot_s.p50 is None and whole.requests[0].first_s is None and whole.slo.attainment == 0.0
    assert "1 of 1 answers came as a whole" in whole.warnings[0]
    packed = run_of([exchange(0, 0.0, 0.0, [2.0], counts=[5])], {"ttft_s": 9.0, "tpot_s": 9.0})
    assert (
        packed.ttft_s.p50 == 2.0
        and packed.tpot_s.p50 is None
        and packed.slo.by_objective
        == {
            "ttft_s": 1.0,
            "tpot_s": 0.0,
        }
    )


def test_sends_made_again_are_counted() -> None:
    """In the run, in the row, and as a warning; the first send is the one that counts."""
    run = run_of([exchange(0, 0.0, 0.0, [1.0, 2.0, 3.0, 4.0], num_retries=1), exchange(1, 0.0, 0.0, [1.0] * 4)])
    assert run.num_retries == 1 and [row.num_retries for row in run.requests] == [1, 0]
    assert "sends met a kept" in run.warnings[0]


def test_a_window_measures_the_steady_state() -> None:
    """Latencies of what was due in it, rates of what came in it; counts and errors stay those of the whole run."""
    exchanges = [exchange(i, float(i), float(i), [i + 0.5, i + 1.0]) for i in range(10)]
    exchanges[0] = exchange(0, 0.0, 0.0, [], error="http_500", end=9.9)
    exchanges[9] = exchange(9, 9.0, 9.0, [9.9, 10.0])
    run = run_of(exchanges, {"ttft_s": 1.0}, window=Window(0.2, 3.0))
    assert run.window == {"from_s": 2.0, "to_s": 7.0, "num_requests": 5} and run.duration_s == 5.0
    assert (run.ttft_s.num, run.ttft_s.max, run.slo.attainment) == (5, 0.5, 1.0)
    assert run.requests_per_s == pytest.approx(1.0) and run.output_tokens_per_s == pytest.approx(2.0)
    assert run.input_tokens_per_s == pytest.approx(10.0) and run.mean_in_flight == pytest.approx(2.0)
    assert (run.num_requests, run.num_ok, run.num_failed, len(run.errors)) == (10, 9, 1, 1)
    both = pool([run, run])
    assert (both.num_requests, both.ttft_s.num, both.requests_per_s) == (20, 10, pytest.approx(1.0))
    with pytest.raises(ConfigError, match="leave no request"):
        run_of(exchanges, window=Window(8.0, 8.0))
    with pytest.raises(ConfigError, match="negative"):
        Window(-1.0)


def test_any_percentile_can_be_asked_for() -> None:
    """By nearest rank, from exact values and from the histogram."""
    values = [float(i) for i in range(1, 201)]
    for max_exact in (1000, 10):
        found = describe(values, max_exact=max_exact, more=(75.0, 99.5))
        assert found.percentile("75") == pytest.approx(150.0, rel=1e-3)
        assert found.percentile("99.5") == pytest.approx(199.0, rel=1e-3)
        assert found.percentile("99.9") == found.p99_9 and found.percentile("33") is None


def test_answers_that_failed_are_said_to_be_left_out() -> None:
    """As a warning and under the table; not where all succeeded or none did."""
    mixed = run_of([exchange(0, 0.0, 0.0, [1.0, 2.0, 3.0, 4.0]), exchange(1, 0.0, 0.0, [], error="x", end=1.0)])
    assert "1 of 2 requests failed" in mixed.warnings[0]
    assert not any("failed" in text for text in run_of([exchange(0, 0.0, 0.0, [], error="x")]).warnings)


def test_reasoning_is_not_the_answer() -> None:
    """TTFT is the first token of any kind, TTFO the first of the answer: after reasoning, text or a tool call."""
    for answer in ('{"content":"x"}', '{"tool_calls":[{"function":{"arguments":"{"}}]}'):
        one = exchange(0, 0.0, 0.0, [])
        for at, delta in ((1.0, '{"reasoning":"a"}'), (2.0, '{"reasoning_content":"b"}'), (3.0, answer)):
            one.on_data(START_S + at, b'{"choices":[{"delta":%b}]}' % delta.encode())
        run = run_of([one])
        assert (run.ttft_s.p50, run.ttfo_s.p50) == (1.0, 3.0)
    assert run_of([exchange(0, 0.0, 0.0, [1.0])]).ttfo_s.num == 0


class Letters:
    """One token a letter."""

    vocab_size = 26

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Any, *, skip_special: bool = True) -> str:
        return "".join(map(chr, ids))


def test_a_tokenizer_counts_where_the_server_does_not() -> None:
    """Tokens of the answer's text instead of events; the server's own count is never replaced."""
    plan = random_prompts(2, 0, Lengths(10, 4))
    silent, counted = exchange(0, 0.0, 0.0, [1.0], input_tokens=None, output_tokens=None), exchange(1, 0.0, 0.0, [1.0])
    silent.texts = counted.texts = ["abc", "de"]
    played = Played(START_S, START_S + 2.0, [silent, counted], 0.5, 0, array("d"), False)
    rows = measure.make_rows(plan, played, {}, Letters())
    assert [row.output_tokens for row in rows] == [5, 1] and [row.has_usage for row in rows] == [False, True]
    assert [row.input_tokens for row in rows] == [10, 10]


def test_a_run_is_given_up_when_nothing_can_come_of_it() -> None:
    """When enough have failed of enough, or a queue has grown beyond what can be waited for."""
    policy = EarlyStop(max_error_rate=0.5, max_wait_s=4.0)
    assert policy.reason(49, 49, 0.0) is None and policy.reason(100, 50, 4.0) is None
    assert "51 of 100 requests failed" in (policy.reason(100, 51, 0.0) or "")
    assert "waited 4.1 s" in (policy.reason(0, 0, 4.1) or "") and EarlyStop().reason(10, 0, 1e9) is None
    assert hopeless_wait_s({"ttft_s": 2.0, "e2el_s": 9.0}) == 20.0 and hopeless_wait_s({"tpot_s": 1.0}) is None
    for wrong in ({"max_error_rate": 1.1}, {"max_wait_s": 0.0}):
        with pytest.raises(ConfigError):
            EarlyStop(**wrong)


def test_an_slo_is_a_conjunction_over_all_requests() -> None:
    """A failed request meets nothing; a request of one token has no TPOT to miss; goodput counts those that met all."""
    run = run_of(
        [
            exchange(0, 0.0, 0.0, [0.1, 0.2]),
            exchange(1, 0.0, 0.0, [0.1, 0.9]),
            exchange(2, 0.0, 0.0, [0.6, 0.7]),
            exchange(3, 0.0, 0.0, [0.1]),
            exchange(4, 0.0, 0.0, [], error="http_500", end=2.0),
        ],
        {"ttft_s": 0.5, "tpot_s": 0.3},
    )
    assert [row.met_slo for row in run.requests] == [True, False, False, True, False]
    assert run.slo.attainment == pytest.approx(0.4)
    assert run.slo.by_objective == {"ttft_s": pytest.approx(0.6), "tpot_s": pytest.approx(0.6)}
    assert run.goodput_requests_per_s == pytest.approx(2 / 2.0) and run.requests_per_s == pytest.approx(4 / 2.0)
    assert run.goodput_output_tokens_per_s == pytest.approx(3 / 2.0)
    assert [(error.kind, error.num, error.example) for error in run.errors] == [("http_500", 1, "why")]
    assert (run.num_ok, run.num_failed, run.ttft_s.num) == (4, 1, 4)


def test_without_objectives_every_success_is_good() -> None:
    """Goodput is then throughput."""
    run = run_of([exchange(0, 0.0, 0.0, [1.0])])
    assert run.goodput_requests_per_s == run.requests_per_s == 1.0


def test_objectives_are_read_as_vllm_writes_them() -> None:
    """Milliseconds by name; anything else is refused and named."""
    assert measure.parse_objectives(["ttft:500", "tpot:50"]) == {"ttft_s": 0.5, "tpot_s": 0.05}
    for wrong in ("ttft", "ttft:", "ttft:-1", "speed:3", "tpot:nan"):
        with pytest.raises(ConfigError, match=wrong):
            measure.parse_objectives([wrong])


def test_jain_is_one_for_equal_and_one_over_n_for_one() -> None:
    """And per-tenant speed is output tokens over summed latency."""
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) is None
    run = run_of([exchange(0, 0.0, 0.0, [1.0, 2.0]), exchange(1, 0.0, 0.0, [0.5, 1.0])])
    assert [(t.tenant, t.service_tokens_per_s) for t in run.fairness.tenants] == [("a", 1.0), ("b", 2.0)]
    assert run.fairness.jain == pytest.approx(9 / 10)


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(0, 5), st.integers(0, 6)), min_size=1, max_size=30))
def test_the_timeline_loses_nothing(drawn: list[tuple[float, float, int]]) -> None:
    """Over all slices: every request due, sent and ended once, every token counted, time in flight conserved."""
    exchanges = []
    for i, (due, length, tokens) in enumerate(drawn):
        events = [due + length * (k + 1) / (tokens + 1) for k in range(tokens)]
        exchanges.append(exchange(i, due, due, events, end=due + length, error=None if tokens else "no_tokens"))
    run = run_of(exchanges)
    slices = run.timeline
    assert sum(s.num_due for s in slices) == sum(s.num_sent for s in slices) == len(drawn)
    assert sum(s.num_ok for s in slices) == run.num_ok and sum(s.num_failed for s in slices) == run.num_failed
    assert sum(s.output_tokens for s in slices) == sum(tokens for *_, tokens in drawn)
    busy = sum(s.in_flight for s in slices) * run.timeline_bucket_s
    assert busy == pytest.approx(sum(length for _, length, _ in drawn), abs=1e-5)
    assert len(slices) <= NUM_BUCKETS + 1


def test_a_result_is_json_and_holds_what_is_promised() -> None:
    """The stable fields are there, with numbers; nothing needs NaN; rows can be left without event times."""
    run = run_of([exchange(0, 0.0, 0.0, [0.5, 1.0])], keep_event_times=False)
    plain = json.loads(json.dumps(run.to_json(), allow_nan=False))
    for name in ("ttft_s", "tpot_s", "itl_s", "e2el_s"):
        assert {"mean", "p50", "p90", "p99"} <= plain[name].keys() and plain[name]["p99"] is not None
    for name in ("output_tokens_per_s", "requests_per_s", "goodput_requests_per_s", "num_ok", "num_failed"):
        assert isinstance(plain[name], int | float)
    assert plain["kind"] == "run" and plain["requests"][0]["event_s"] is None
    assert len(to_csv(run).splitlines()) == 2


def test_late_sends_and_lost_usage_are_told() -> None:
    """Each cause of disbelief has its warning; a clean run has none."""
    clean = run_of([exchange(i, 0.1 * i, 0.1 * i, [1.0, 2.0, 3.0, 4.0]) for i in range(3)])
    assert clean.warnings == []
    late = run_of([exchange(0, 0.0, 0.5, [1.0] * 4)])
    assert "late" in late.warnings[0]
    silent = run_of([exchange(0, 0.0, 0.0, [1.0] * 4, input_tokens=None)])
    assert "usage" in silent.warnings[0]
    short = run_of([exchange(0, 0.0, 0.0, [1.0], finish_reason="stop")])
    assert "before their wanted length" in short.warnings[0]
    long = run_of([exchange(0, 0.0, 0.0, [1.0] * 4, input_tokens=99)])
    assert "99 input tokens where 10" in long.warnings[0]


def test_pooling_is_over_requests_and_summed_time() -> None:
    """Two runs of one second each: twice the requests, the same rate."""
    one, two = (run_of([exchange(0, 0.0, 0.0, [at, 1.0])]) for at in (0.2, 0.4))
    pooled = pool([one, two])
    assert pooled.num_ok == 2 and pooled.requests_per_s == pytest.approx(1.0)
    assert (pooled.ttft_s.min, pooled.ttft_s.max) == (pytest.approx(0.2), pytest.approx(0.4))
    assert pooled.max_in_flight == 1 and pooled.mean_in_flight == pytest.approx(1.0)
    assert pooled.requests == [] and pooled.client.cpu_s == 1.0


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Student's t on small normal samples: 95 % of the intervals hold the mean."""
    rng = random.Random(3)
    hits = 0
    for _ in range(1000):
        interval = mean_interval([rng.gauss(5.0, 1.0) for _ in range(5)])
        hits += interval.low <= 5.0 <= interval.high
    assert 930 <= hits <= 968
    assert (mean_interval([2.0]).low, mean_interval([2.0]).high) == (2.0, 2.0)


def test_ratios_of_turns_cancel_what_both_suffered() -> None:
    """A machine that doubles its speed midway leaves the paired interval narrow; few repeats decide nothing."""
    baseline = [1.0, 1.1, 0.9, 2.0, 2.2, 1.8, 1.0, 2.1]
    found = paired_ratio(baseline, [1.2 * value for value in baseline], 0.97)
    assert found.ratio == pytest.approx(1.2) and found.low == pytest.approx(1.2) and found.high == pytest.approx(1.2)
    assert found.p_value < 1e-9 and paired_ratio([1.0], [2.0], 0.97).p_value == 1.0
    assert [can_decide(n) for n in (1, 5, 6)] == [False, False, True]


def test_students_t_is_that_of_the_tables() -> None:
    """Two-sided points, odd and even degrees of freedom; a level and its point are inverses."""
    for freedom, point in ((1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (11, 2.201), (120, 1.980)):
        assert t_point(0.95, freedom) == pytest.approx(point, abs=6e-4)
        assert t_two_sided(t_point(0.97, freedom), freedom) == pytest.approx(0.03)


def test_holm_corrects_step_by_step() -> None:
    """The smallest p-value by the number of all, the next by one less, and never below the one before."""
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([0.9, 0.8]) == [1.0, 1.0]


def test_a_verdict_needs_its_interval() -> None:
    """Better only beyond chance, in the direction that is better for the metric."""
    fast = [run_of([exchange(0, 0.0, 0.0, [0.10 + 0.001 * i, 1.0])]) for i in range(6)]
    slow = [run_of([exchange(0, 0.0, 0.0, [0.20 + 0.001 * i, 2.0])]) for i in range(6)]
    runs = {"slow": slow, "fast": fast, "same": slow[::-1]}

    def verdict(metric: str, higher: bool, baseline: str, candidate: str, num: int = 6) -> str:
        some = {name: Side(name, "cold", own[:num]) for name, own in runs.items()}
        ratio = make_ratio(metric, higher, some[baseline], some[candidate])
        assert ratio is not None
        return decide([ratio], metric, num)[0].verdict

    assert verdict("ttft_s.p50", False, "slow", "fast") == "better"
    assert verdict("ttft_s.p50", False, "fast", "slow") == "worse"
    assert verdict("output_tokens_per_s", True, "slow", "fast") == "better"
    assert verdict("ttft_s.p50", False, "slow", "same") == "undecided"
    assert verdict("ttft_s.p50", False, "slow", "fast", num=5) == "undecided"
    failed = Side("fast", "cold", [run_of([exchange(0, 0.0, 0.0, [], error="x")])] * 6)
    assert make_ratio("ttft_s.p50", False, Side("slow", "cold", slow), failed) is None
    assert "ttft_s.p50" not in {figure.metric for figure in make_figures(failed)}


def test_the_primary_metric_follows_who_sets_the_pace() -> None:
    """Throughput in a closed loop and in a burst, latency where a schedule offers all servers the same; or as asked."""
    open_loop = Schedule(request_rate=2.0)
    assert choose_primary(Schedule(concurrency=4), {}, None) == "output_tokens_per_s"
    assert choose_primary(Schedule(), {}, None) == "output_tokens_per_s"
    assert (
        choose_primary(open_loop, {}, None) == choose_primary(Schedule(use_trace_times=True), {}, None) == "e2el_s.p50"
    )
    assert choose_primary(open_loop, {}, "ttft_s.p99") == "ttft_s.p99"
    for wrong in ("speed", "goodput_requests_per_s"):
        with pytest.raises(ConfigError, match=f"not {wrong}"):
            choose_primary(open_loop, {}, wrong)


def test_goals_are_of_percentiles() -> None:
    """Beside objectives of each request; what names none is refused."""
    objectives, goals = goodput.parse_goals(["ttft:500", "ttft_p99:1000", "tpot_p99.9:50"])
    assert objectives == {"ttft_s": 0.5}
    assert [(goal.name, goal.quantity, goal.limit_s) for goal in goals] == [
        ("ttft_p99", "ttft_s", 1.0),
        ("tpot_p99.9", "tpot_s", 0.05),
    ]
    assert [goal.share for goal in goals] == [0.99, 0.999]
    for tenths in range(1, 1000):
        assert goodput.parse_goals([f"ttft_p{tenths / 10}:500"])[1][0].share == tenths / 1000
    assert goodput.limits_of({"tpot_s": 1.0}, goals) == {"ttft_s": 1.0, "tpot_s": 1.0}
    assert goodput.limits_of({"ttft_s": 0.5, "tpot_s": 0.01}, goals) == {"ttft_s": 1.0, "tpot_s": 0.05}
    assert goodput.limits_of({"ttft_s": 2.0}, goals)["ttft_s"] == 2.0
    for wrong in (
        "speed_p99:5",
        "ttft_p100:5",
        "ttft_p0:5",
        "ttft_p:5",
        "ttft_px:5",
        "ttft_p99:0",
        "ttft_p99",
        "p99:5",
    ):
        with pytest.raises(ConfigError, match="--goodput takes"):
            goodput.parse_goals([wrong])
    with pytest.raises(ConfigError, match="each once"):
        goodput.parse_goals(["ttft_p99:5", "ttft_p99:6"])


def test_a_probe_tells_what_it_misses_by_most() -> None:
    """Of 200 requests, 4 are late: enough for p90 and too many for p99, whatever the objectives say; a request that
    failed is late; of goals that are all kept the nearest is told."""
    rows = [
        exchange(i, 0.1 * i, 0.1 * i, [0.1 * i + (2.0 if i % 50 == 49 else 0.2), 0.1 * i + 2.5]) for i in range(200)
    ]

    def judged(*goals: str, objectives: dict[str, float] | None = None, given: Any = rows) -> Probe:
        return goodput.judge(10.0, run_of(given, objectives or {}), 0.9, goodput.parse_goals(goals)[1])

    found = judged("ttft_p90:1000", "ttft_p99:1000", objectives={"ttft_s": 1.0})
    assert (found.passed, found.goal, found.target) == (False, "ttft_p99", 0.99)
    assert found.attainment == pytest.approx(0.98, abs=0.01)
    assert judged("ttft_p90:1000").passed and judged("ttft_p99:2500").passed
    assert (judged("ttft_p50:1000", "ttft_p90:1000").goal, judged("ttft_p50:100").passed) == ("ttft_p90", False)
    plain = judged(objectives={"ttft_s": 1.0})
    assert (plain.passed, plain.goal, plain.target) == (True, "", 0.9)
    failed = [exchange(i, 0.1 * i, 0.1 * i, [], error="x") if i % 8 == 7 else rows[0] for i in range(200)]
    assert not judged("ttft_p90:1000", given=failed).passed


@pytest.mark.parametrize(
    ("target", "size", "num_late"),
    [
        (0.999, 125, [0, 0, 0, 0, 0, 0, 0, 1]),
        (0.8, 25, [6, 4, 4, 7, 4, 7, 4, 4]),
        (0.8, 10, [0, 3, 4, 0, 0, 3, 3, 3]),
    ],
)
def test_a_share_that_is_exactly_the_target_passes(target: float, size: int, num_late: list[int]) -> None:
    """Of eight blocks, after two in which a queue fills; one more that is late is too many."""

    def passes(late: list[int]) -> bool:
        met = [i >= num for num in (0, 0, *late) for i in range(size)]
        return goodput.probe_of(1.0, met, [], target, run_of([])).passed

    assert sum(num_late) == round(8 * size * (1 - target))
    assert passes(num_late) and not passes([num_late[0] + 1, *num_late[1:]])


def probe(rate: float, capacity: float) -> Probe:
    """A server that answers at once below its capacity and falls ever further behind above it."""
    slope = max(0.0, 1.0 - capacity / rate)
    rows = [exchange(i, i / rate, i / rate, [i / rate + 0.01 + slope * i / rate] * 4) for i in range(100)]
    return goodput.judge(rate, run_of(rows, {"ttft_s": 0.5}), 0.9)


@pytest.mark.parametrize("capacity", [0.13, 7.0, 412.0])
def test_the_search_finds_the_capacity(capacity: float) -> None:
    """Wherever it starts, the interval holds the capacity and is narrow, where luck has no part in it."""
    limits = goodput.Search(start_rate=3.0, tolerance=0.05, max_probes=40)

    async def attempt(rate: float) -> Probe:
        return probe(rate, capacity)

    probes = asyncio.run(goodput.search(attempt, limits))
    result = goodput.conclude([probes], {"ttft_s": 0.5}, limits, goodput.Price(4, 2, 3.6), [])
    low, high = result.request_rate_low, result.request_rate_high
    # An objective of half a second is still met a little above the capacity, while the queue is short.
    assert high is not None and low <= capacity * 1.02 and high >= capacity and high / low <= 1.6
    assert low <= result.request_rate <= high and result.request_rate_interval is not None
    assert result.per_core == pytest.approx(result.goodput_requests_per_s / 4)
    assert result.per_gpu == pytest.approx(result.goodput_requests_per_s / 2)
    assert result.requests_per_dollar == pytest.approx(result.goodput_requests_per_s * 1000)
    assert json.dumps(result.to_json(), allow_nan=False) and len(runs_of(result)) == len(probes)


def test_a_search_without_end_says_so() -> None:
    """All passing is a lower bound, none passing is zero: both are warned of, and neither has an interval."""

    async def answer(capacity: float) -> list[Probe]:
        async def attempt(rate: float) -> Probe:
            return probe(rate, capacity)

        return await goodput.search(attempt, goodput.Search(max_rate=8.0, min_rate=0.25))

    for capacity, rate, words in ((1e9, 8.0, "lower bound"), (1e-9, 0.0, "No rate from 0.25")):
        probes = asyncio.run(answer(capacity))
        result = goodput.conclude([probes], {"ttft_s": 0.5}, goodput.Search(), goodput.Price(), [])
        assert result.request_rate == rate and any(words in warning for warning in result.warnings)
        assert result.request_rate_interval is None and json.dumps(result.to_json(), allow_nan=False)


BEFORE = """# TYPE t counter
t_total{model_name="m",engine="0",kind="a"} 5
# TYPE r gauge
r 2
# TYPE h histogram
h_bucket{le="+Inf"} 1
h_sum 4
h_count 1
"""


def test_the_difference_of_two_pages_is_the_run() -> None:
    """Counters by what they grew, gauges as pairs, histograms by the mean of what came in between."""
    after = BEFORE.replace("} 5", "} 9").replace("r 2", "r 3").replace("sum 4", "sum 10").replace("count 1", "count 3")
    found = difference("u", parse(BEFORE), parse(after))
    assert found is not None
    assert found.counters == {'t_total{kind="a"}': 4.0} and found.gauges == {"r": [2.0, 3.0]}
    assert found.histogram_means == {"h": 3.0}
    assert difference("u", None, parse(after)) is None


def test_energy_is_counted_over_a_wrap(tmp_path: Any) -> None:
    """RAPL packages are added up, their parts left out, and a counter that wrapped still counts up."""
    for name, joules in (("intel-rapl:0", 5), ("intel-rapl:1", 7), ("intel-rapl:0:0", 100)):
        zone = tmp_path / name
        zone.mkdir()
        (zone / "energy_uj").write_text(str(joules * 1_000_000))
        (zone / "max_energy_range_uj").write_text("10000000")
    meter = find_energy_meter(tmp_path)
    if meter is None or "RAPL" not in meter.source:
        pytest.skip("a GPU counts energy here")
    assert meter.read_j() == [5.0, 7.0] and meter.spent_j([9.0, 7.0], [1.0, 8.0]) == pytest.approx(3.0)
    assert isinstance(meter, EnergyMeter)


def test_every_kind_of_result_can_be_printed() -> None:
    """Tables of a run, repeats, a sweep, a search and a comparison hold their figures."""
    from rich.console import Console

    run = run_of([exchange(0, 0.0, 0.0, [0.5, 1.0]), exchange(1, 0.0, 0.0, [], error="http_500")], {"ttft_s": 1.0})
    sides = [Side(name, "cold", [run] * 6) for name in ("a", "b")]
    ratio = make_ratio("ttft_s.p50", False, *sides)
    assert ratio is not None
    figures = [figure for side in sides for figure in make_figures(side)]
    results = {
        "http_500": run,
        "repeats": Repeats(run, {"x": mean_interval([1.0, 2.0])}, [run, run]),
        "concurrency": Sweep("concurrency", [1.0], [run]),
        "highest rate": goodput.conclude([[probe(1.0, 5.0)]], {}, goodput.Search(), goodput.Price(2), []),
        "undecided": Comparison([{"name": "a"}, {"name": "b"}], "ttft_s.p50", figures, [ratio], [], ["careful"], [run]),
    }
    for words, result in results.items():
        console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        print_result(console, result, ("ttft", "itl"), ("50", "99.9"))
        assert words in console.export_text()
        console.file.close()
        assert json.dumps(result.to_json(), allow_nan=False)


def test_offered_rate_is_of_what_was_due() -> None:
    """Not of what was sent or answered; one moment has no rate."""
    run = run_of([exchange(i, float(i), i + 5.0, [i + 6.0]) for i in range(5)])
    assert run.offered_requests_per_s == pytest.approx(1.0)
    assert run_of([exchange(0, 0.0, 0.0, [1.0])]).offered_requests_per_s is None
    assert not math.isnan(run.requests_per_s)
