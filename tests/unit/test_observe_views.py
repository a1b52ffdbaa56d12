"""The operator's views over a scripted engine: /admin/load, /admin/requests and one request's timeline."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from scripted import Served
from tokenmill.cluster.events import Ended
from tokenmill.control.observe.monitor import Monitor
from tokenmill.control.observe.requests import RequestRegistry
from tokenmill.control.observe.window import Window, quantile, spread
from tokenmill.core.events import EngineStats, Output, Timing
from tokenmill.core.request import Request, SamplingParams
from tokenmill.core.terms import Terms


def read(served: Served, path: str) -> dict[str, Any]:
    status, text, _ = served.ask(path)
    assert status == 200, text
    return json.loads(text)


def request_of(name: str, terms: Terms | None = None, arrival_s: float = 10.0) -> Request:
    return Request(name, (1, 2, 3), SamplingParams(), 9, seed=1, arrival_s=arrival_s, terms=terms or Terms())


def finish(monitor: Monitor, request: Request, *, first_s: float, end_s: float, num_output: int = 5) -> None:
    monitor.opened([request], "me", request.arrival_s)
    monitor.requests.given(0, request, request.arrival_s)
    monitor.first(request, first_s - request.arrival_s, first_s)
    timing = Timing(request.arrival_s, request.arrival_s + 0.5, first_s, end_s, 2)
    output = Output(request.id, finish_reason="stop", num_output=num_output, num_cached=2, timing=timing)
    monitor.requests.close(Ended(request, output, "stop", end_s, end_s))


def test_a_request_that_has_ended_is_shown_with_its_times() -> None:
    """Lengths, times and the reason of an ended call are found under its own id and its choices'."""
    with Served() as served:
        status, text, _ = served.ask("/v1/completions", {"prompt": "one two", "n": 2, "max_tokens": 4})
        assert status == 200
        call = json.loads(text)["id"]
        listed = read(served, "/admin/requests")
        assert listed["object"] == "list" and [each["call"] for each in listed["data"]] == [call, call]
        shown = read(served, f"/admin/requests/{call}")
        assert shown["choices"] == [f"{call}-0", f"{call}-1"] and shown["id"] == f"{call}-0"
        assert (shown["state"], shown["finish_reason"], shown["output_tokens"]) == ("ended", "length", 4)
        assert 0 <= shown["queue_s"] <= shown["ttft_s"] <= shown["age_s"]
        names = [span["name"] for span in shown["timeline"]]
        assert names == ["queue", "prefill", "decode"]
        ends = [span["end_s"] for span in shown["timeline"]]
        assert ends == sorted(ends) and ends[-1] == pytest.approx(shown["age_s"])


def test_an_open_request_is_shown_as_it_runs_and_after_its_engine_has_gone() -> None:
    """States follow a request from its engine's death to its resumption and its end."""
    with Served(reply=lambda prompt: "a b c d e f g h") as served:
        served.call(served.script.go.clear)
        asking = threading.Thread(
            target=served.ask, args=("/v1/completions", {"prompt": "p", "max_tokens": 6, "request_id": "mine"})
        )
        asking.start()
        served.wait_until(lambda: any(record.lives for record in served.client.observers.monitor.requests))
        (shown,) = read(served, "/admin/requests?state=open")["data"]
        assert (shown["state"], shown["output_tokens"], shown["finish_reason"]) == ("prefill", 0, None)
        served.kill_engine()
        served.wait_until(lambda: served.client.ready is None)
        assert read(served, f"/admin/requests/{shown['id']}")["state"] == "held"
        served.call(served.script.go.set)
        served.restart_engine()
        asking.join(20)
        ended = read(served, f"/admin/requests/{shown['id']}")
        assert (ended["state"], ended["num_resumptions"], ended["engine"]) == ("ended", 1, 1)
        assert [span["name"] for span in ended["timeline"]][:3] == ["queue", "prefill", "held"]
        assert [span["engine"] for span in ended["timeline"] if span["name"] == "prefill"] == [0, 1]


@pytest.mark.parametrize(
    ("query", "field"), [("state=gone", "state"), ("limit=0", "limit"), ("limit=x", "limit"), ("limit=99999", "limit")]
)
def test_a_bad_question_is_told_which_field_is_wrong(query: str, field: str) -> None:
    """Bad input is a 400 that names the field."""
    with Served() as served:
        status, text, _ = served.ask(f"/admin/requests?{query}")
        assert status == 400 and json.loads(text)["error"]["param"] == field


def test_an_unknown_request_is_404_and_a_key_without_scope_403() -> None:
    """What is not there is not found; the views need the operator's scope where keys are given out."""
    with Served() as served:
        assert served.ask("/admin/requests/none")[0] == 404
    with Served(api_keys=("secret",)) as served:
        for path in ("/admin/load", "/admin/requests", "/admin/requests/none"):
            assert served.ask(path)[0] == 401


def test_the_load_shows_rates_waits_and_no_tenants_without_an_admin_key() -> None:
    """The last minute's requests are in the load's spreads and groups."""
    with Served() as served:
        served.ask("/v1/completions", {"prompt": "one two", "max_tokens": 4})
        body = read(served, "/admin/load")
    assert body["ready"] and body["steps"] > 0 and body["open"] == 0
    assert body["ttft_s"]["count"] == body["tpot_s"]["count"] == 1
    assert body["ended"] == {"length": 1} and body["slo"] == {"attained": 0, "missed": 0}
    assert [(each["priority_class"], each["profile"]) for each in body["classes"]] == [(1, "")]
    assert "tenants" not in body


def test_the_load_tells_how_each_second_was() -> None:
    """As far back as is asked for, to five minutes; waits as they were then, not as they are now."""
    monitor = Monitor("m", CollectorRegistry())
    stats = EngineStats(num_steps=1, last_step_s=0.25)
    monitor.sample(9.0, stats)
    finish(monitor, request_of("one", Terms()), first_s=10.8, end_s=12.0)
    for at_s in (13.0, 100.0, 400.0):
        monitor.sample(at_s, stats)
    window = monitor.window
    assert [(each.at_s, each.ttft_s is None, each.tpot_s is None) for each in window.history(400.0, 391.0)] == [
        (9.0, True, True), (13.0, False, False), (100.0, True, True), (400.0, True, True)
    ]  # fmt: skip
    assert [each.at_s for each in window.history(400.0, 300.0)] == [100.0, 400.0]
    assert window.history(401.0, 0.0) == []
    with Served() as served:
        served.ask("/v1/completions", {"prompt": "one two", "max_tokens": 4})
        last = read(served, "/admin/load?history_s=300")["history"][-1]
        assert last["last_step_s"] > 0 and last["steps"] > 0 and "ttft_p90_s" in last and "tpot_p50_s" in last
        assert read(served, "/admin/load?history_s=0")["history"] == []
        for bad in ("301", "-1", "x"):
            assert served.ask(f"/admin/load?history_s={bad}")[0] == 400


def test_targets_that_were_met_or_missed_are_counted_by_class_and_tenant() -> None:
    """A request misses its SLO by its TTFT or its TPOT alone; one without targets counts for neither."""
    from tokenmill.server.admin.requests import _group, _tenants

    monitor = Monitor("m", CollectorRegistry())
    strict = Terms(tenant="a", profile="chat", ttft_s=1.0, tpot_s=0.5)
    finish(monitor, request_of("good", strict), first_s=10.8, end_s=12.0)
    finish(monitor, request_of("late", strict), first_s=11.2, end_s=12.0)
    finish(monitor, request_of("slow", strict), first_s=10.8, end_s=14.0)
    finish(monitor, request_of("free", Terms(tenant="b")), first_s=15.0, end_s=40.0)
    monitor.opened([request_of("open", strict, 20.0)], "me", 20.0)
    firsts, ends = monitor.window.firsts(41.0), monitor.window.ends(41.0)
    assert _group(firsts, ends)["slo"] == {"attained": 1, "missed": 2}
    tenants = _tenants(monitor, firsts, ends)
    assert [(each["tenant"], each["slo"]["missed"], each["waiting"]) for each in tenants] == [("a", 2, 1), ("b", 0, 0)]
    assert tenants[0]["prompt_tokens"] == 9 and tenants[0]["cached_tokens"] == 6 and tenants[0]["output_tokens"] == 15
    assert not monitor.window.ends(200.0), "older than the window"


@pytest.mark.parametrize(
    ("reason", "kind", "is_attained"),
    [("error", "overloaded_error", False), ("error", "timeout_error", False), ("error", "", False),
     ("error", "invalid_request_error", None), ("abort", "", None)],
)  # fmt: skip
def test_a_request_with_targets_that_got_no_answer_missed_them(
    reason: str, kind: str, is_attained: bool | None
) -> None:
    """Unless its client was wrong or left; one without targets counts for neither."""
    registry = RequestRegistry()
    for request in (request_of("strict", Terms(ttft_s=1.0)), request_of("free", Terms())):
        registry.opened([request], "me", 10.0)
        output = Output(request.id, finish_reason=reason, error="why", error_kind=kind) if kind else None
        registry.close(Ended(request, output, reason, -1.0, 40.0))
    assert [each.is_attained for each in registry.ended] == [is_attained, None]


def test_the_book_keeps_a_bounded_number_of_ended_requests() -> None:
    """The oldest ended requests go; open ones stay however many come."""
    registry = RequestRegistry(num_ended=3)
    requests = [request_of(f"call-{i}") for i in range(6)]
    registry.opened(requests, "me", 10.0)
    for request in requests[:5]:
        registry.close(Ended(request, None, "abort", -1.0, 11.0))
    assert [each.id for each in registry.ended] == ["call-2", "call-3", "call-4"]
    assert [each.id for each in registry] == ["call-5"]
    assert registry.find("call-0") is None and len(registry.of_call("call")) == 4


def test_a_rate_is_what_a_counter_grew_over_the_time_asked_for() -> None:
    """Samples once a second give the counter's value so many seconds ago; before the first, since the first."""
    window = Window()
    assert window.rate("num_steps", EngineStats(num_steps=5), 1.0, 10.0) == 0
    for second in range(30):
        window.sample(float(second), EngineStats(num_steps=second * 7))
    assert window.rate("num_steps", EngineStats(num_steps=29 * 7), 29.0, 10.0) == pytest.approx(7.0)
    assert window.rate("num_steps", EngineStats(num_steps=29 * 7), 39.0, 10.0) == 0, "idle since"
    assert window.rate("num_steps", EngineStats(num_steps=29 * 7 + 5), 40.0, 10.0) == 0, "steps behind the last sample"


def test_quantiles_are_linear_between_neighbours() -> None:
    """The quantile of 0..10 at share s is 10 s."""
    values = [float(value) for value in range(11)]
    assert [quantile(values, share) for share in (0, 0.25, 0.5, 1)] == [0, 2.5, 5, 10]
    assert spread([])["p50"] is None and spread([3.0])["p99"] == 3.0
