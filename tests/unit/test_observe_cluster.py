"""What an operator sees of workers and of requests that go from one to another."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from scripted import Served
from tokenmill.cluster.events import CopyEnded, Effects, Ended, MoveEnded
from tokenmill.control.observe.monitor import NUM_KEPT, DecisionLog, Monitor
from tokenmill.control.observe.requests import state_of, summary
from tokenmill.control.observe.timeline import timeline
from tokenmill.core.events import Output, Timing, WorkerFacts
from tokenmill.core.moves import KVSource
from tokenmill.core.request import Request, SamplingParams

REQUEST = Request("r-0", (1, 2, 3), SamplingParams(), 9, seed=1, arrival_s=10.0)
SOURCE = KVSource("w0", "life", "address", "host", "ticket")


def arriving() -> Request:
    return Request("r-0", (1, 2, 3), SamplingParams(), 9, seed=1, arrival_s=10.0, output_tokens=(4, 5), source=SOURCE)


def moved(error: str = "", pause_s: float = 0.25) -> Effects:
    return Effects(moved=[MoveEnded(REQUEST, "balance", 0, 1, 0 if error else 5, error, pause_s)])


def running() -> Monitor:
    monitor = Monitor("m", CollectorRegistry())
    for number in range(2):
        monitor.engine_came(number, WorkerFacts(f"w{number}"), "")
    monitor.opened([REQUEST], "me", 10.0)
    monitor.requests.given(0, REQUEST, 10.5)
    monitor.first(REQUEST, 1.0, 11.0)
    monitor.requests.given(1, arriving(), 12.0)
    return monitor


def end(monitor: Monitor) -> list[dict[str, Any]]:
    timing = Timing(10.0, 10.5, 11.0, 15.0)
    output = Output("r-0", finish_reason="stop", num_output=5, timing=timing)
    monitor.requests.close(Ended(REQUEST, output, "stop", 15.0, 15.0))
    record = monitor.requests.find("r-0")
    assert record is not None
    return timeline(record, monitor.rings)


def test_a_moved_request_has_two_lives_and_the_pause_between_them() -> None:
    monitor = running()
    (record,) = monitor.requests
    assert state_of(record) == "decode" and [life.link for life in record.lives] == [0]
    monitor.moved(moved(), 13.0)
    shown = summary(record, 14.0, 100.0, lambda name: 4)
    assert (shown["engine"], shown["num_moves"], shown["num_resumptions"], shown["state"]) == (1, 1, 0, "decode")
    assert [(each["engine"], each["ended_by"], each["why"]) for each in shown["lives"]] == [
        (0, "move", None),
        (1, None, "balance"),
    ]
    spans = end(monitor)
    assert [(span["name"], span["engine"], span["start_s"], span["end_s"]) for span in spans] == [
        ("queue", None, 0.0, 0.5),
        ("prefill", 0, 0.5, 1.0),
        ("decode", 0, 1.0, 2.75),
        ("move", 1, 2.75, 3.0),
        ("decode", 1, 3.0, 5.0),
    ]
    (event,) = spans[3]["events"]
    assert event == {"name": "moved", "at_s": 3.0, "why": "balance", "from": 0, "copied_tokens": 5}


def test_why_a_request_was_given_to_its_engine_is_told() -> None:
    monitor = running()
    monitor.requests.routed(0, "r-0", "prefix")
    monitor.requests.routed(1, "r-0", "load")  # not where it is
    (record,) = monitor.requests
    assert [life.route for life in record.lives] == ["prefix"]
    queue = end(monitor)[0]
    assert queue["events"] == [{"name": "routed", "at_s": 0.5, "why": "prefix", "to": 0}]


def test_a_request_whose_move_fails_stays_where_it_is() -> None:
    monitor = running()
    monitor.moved(moved("no room"), 13.0)
    (record,) = monitor.requests
    assert [life.link for life in record.lives] == [0] and record.num_moves == 0 and record.arriving is None
    assert [span["name"] for span in end(monitor)] == ["queue", "prefill", "decode"]


def test_a_request_whose_source_dies_on_the_way_is_held_and_then_moved() -> None:
    monitor = running()
    monitor.engine_left(0, 12.5)
    (record,) = monitor.requests
    assert state_of(record) == "held"
    monitor.moved(moved(pause_s=0.0), 13.0)
    assert record.num_resumptions == 1 and state_of(record) == "decode"
    assert [span["name"] for span in end(monitor)] == ["queue", "prefill", "decode", "held", "decode"]


def test_decisions_are_told_newest_first_with_their_reasons_and_bounded() -> None:
    decisions = DecisionLog(lambda: 7.0)
    decisions.came(0, WorkerFacts("w0"))
    decisions.worker("ready", WorkerFacts("w0", pool="decode"))
    decisions.lost(Effects(resumed=2, poisoned=1))
    copied = [CopyEnded(0, 1, 64, "", 0.5), CopyEnded(0, 1, 0, "no room", 0.5)]
    decisions.moved(Effects(rerouted=3, moved=[*moved().moved, *moved("no room").moved], copied=copied))
    told = decisions.shown(10)
    assert (told[0]["kind"], told[0]["error"], told[1]["kind"], told[1]["tokens"]) == (
        "not_copied",
        "no room",
        "copied",
        64,
    )
    told = told[2:]
    assert [each["kind"] for each in told] == ["not_moved", "moved", "rerouted", "given_up", "resumed", "ready"]
    assert (told[0]["worker"], told[0]["to"], told[0]["error"], told[0]["why"]) == (
        "w0",
        "engine-1",
        "no room",
        "balance",
    )
    assert told[1]["error"] is None and told[-1] == {"time": 7.0, "kind": "ready", "worker": "w0", "pool": "decode"}
    for number in range(2 * NUM_KEPT):
        decisions.worker("lost", WorkerFacts(f"w{number}"))
    assert len(decisions.shown(10 * NUM_KEPT)) == NUM_KEPT


def test_each_worker_has_series_of_its_own_and_the_sums_have_none() -> None:
    with Served() as served:
        served.ask("/v1/completions", {"prompt": "one two", "max_tokens": 4})
        status, text, _ = served.ask("/metrics/workers")
        assert status == 200
        families = {each.name: each for each in text_string_to_metric_families(text)}
        (tokens,) = families["vllm:generation_tokens"].samples
        assert tokens.value == 4 and tokens.labels == {"model_name": "toy", "worker": "engine-0", "pool": "mixed"}
        assert {each.labels["state"]: each.value for each in families["tokenmill:worker_state"].samples} == {
            "starting": 0,
            "ready": 1,
            "draining": 0,
            "lost": 0,
        }
        assert 'worker="' not in served.ask("/metrics")[1]
        served.kill_engine()
        served.wait_until(lambda: served.client.ready is None)
        text = served.ask("/metrics/workers")[1]
        assert "vllm:generation_tokens_total{" not in text and 'state="lost",worker="engine-0"} 1.0' in text


@pytest.mark.parametrize("limit", ["0", "x", "501"])
def test_a_bad_limit_is_named(limit: str) -> None:
    with Served() as served:
        assert served.ask(f"/admin/decisions?limit={limit}")[0] == 400
