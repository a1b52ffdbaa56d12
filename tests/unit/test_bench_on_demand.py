"""bench on-demand: what a call waited is told apart into its load, its own time and the excess."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenmill.bench import on_demand as bench
from tokenmill.bench.on_demand import Call

LOAD_S, OWN_S, EXCESS_S = 3.0, 1.0, 0.2


class FakeServer:
    """bench.quality.api.ApiSubject over a server with room for one model; it is its clock too. "sour" cannot be
    loaded."""

    def __init__(self) -> None:
        self.now = 100.0
        self.loaded = ""
        self.num_loads = {"a": 5, "b": 0}
        self.asked: list[dict[str, Any]] = []

    def exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, dict[str, str], bytes]:
        if path == "/v1/models":
            cards = [{"id": name, "status": {"value": "unloaded"}} for name in ("b", "a")]
            cards += [{"id": "own"}, {"id": "sour", "status": {"value": "unloaded", "failed": True}}]
            return 200, {}, json.dumps({"data": cards}).encode()
        if path == "/metrics":
            assert method == "GET"
            return 200, {}, self._metrics().encode()
        assert body is not None
        asked = json.loads(body)
        self.asked.append(asked)
        if asked["model"] == "sour":
            self.now += 0.5
            return 503, {"Retry-After": "1"}, b'{"error": {"message": "no room"}}'
        if asked["model"] != self.loaded:
            self.loaded = asked["model"]
            self.num_loads[self.loaded] += 1
            self.now += LOAD_S + EXCESS_S
        self.now += OWN_S
        return 200, {}, b'{"choices": []}'

    def _metrics(self) -> str:
        lines = ["# TYPE tokenmill:model_loads counter"]
        for name, num in self.num_loads.items():
            lines.append(f'tokenmill:model_loads_total{{model_name="{name}",outcome="loaded"}} {num}')
            lines.append(f'tokenmill:model_loads_total{{model_name="{name}",outcome="failed"}} 7')
        lines.append("# TYPE tokenmill:model_load_seconds counter")
        for name, num in self.num_loads.items():
            lines.append(f'tokenmill:model_load_seconds_total{{model_name="{name}"}} {LOAD_S * num}')
        return "\n".join(lines) + "\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    monkeypatch.setattr(bench.time, "perf_counter", lambda: server.now)
    return server


def test_a_wait_is_load_and_own_time_and_what_is_beyond(server: FakeServer) -> None:
    """Models alternate, and each call is followed by an equal one; what was loaded before does not count."""
    calls = bench.measure(server, ["a", "b"], 3, 32)
    assert [call.model for call in calls] == ["a", "b", "a"]
    assert [asked["model"] for asked in server.asked] == ["a", "a", "b", "b", "a", "a"]
    assert all(asked["max_tokens"] == 32 and asked["ignore_eos"] for asked in server.asked)
    for call in calls:
        assert (call.num_loads, call.error) == (1, "")
        times = (call.waited_s, call.load_s, call.own_s, call.excess_s, call.share)
        assert times == pytest.approx((4.2, 3.0, 1.0, 0.2, 0.05))
    assert bench.summary(calls) == (
        "3 calls, 0 failed, 3 waited for a load: waited 4.20 s in the median, 5 % beyond load + own time, 5 % at most"
    )


def test_a_call_whose_model_is_there_waits_for_its_answer_alone(server: FakeServer) -> None:
    server.loaded = "a"
    (call,) = bench.measure(server, ["a", "b"], 1, 8)
    assert (call.num_loads, call.waited_s, call.load_s, call.excess_s) == (0, 1.0, 0.0, 0.0)
    assert bench.summary([call]) == "1 calls, 0 failed, 0 waited for a load"


def test_a_refusal_is_told_and_not_asked_again(server: FakeServer) -> None:
    calls = bench.measure(server, ["sour", "a"], 2, 8)
    assert calls[0].error == "/v1/completions answered with status 503: no room" and not calls[1].error
    assert len(server.asked) == 4
    assert bench.summary(calls).startswith("2 calls, 1 failed, 1 waited for a load: waited 4.20 s")
    shown = bench.to_table(calls)
    assert list(shown.columns[-1].cells) == [calls[0].error, "5 %"]


def test_models_are_those_that_calls_load(server: FakeServer) -> None:
    """By name; not the server's own, nor one that cannot be loaded."""
    assert bench.models_on_demand(server) == ["a", "b"]


def test_the_largest_excess_is_of_calls_that_loaded() -> None:
    calls = [
        Call("a", 1, 4.4, 3.0, 1.0, ""),
        Call("b", 1, 4.0, 3.0, 1.0, ""),
        Call("b", 0, 9.0, 0.0, 1.0, ""),
        Call("a", 1, 9.0, 3.0, 1.0, "failed"),
    ]
    assert bench.summary(calls).endswith("4.20 s in the median, 5 % beyond load + own time, 10 % at most")
