"""Objectives over a scripted engine: what requests carry to the engine, /admin/slo and the metrics."""

from __future__ import annotations

import json
from typing import Any

from scripted import Served
from tokenmill.core.terms import Terms


def _terms(served: Any, body: dict[str, Any], headers: dict[str, str] | None = None) -> Terms:
    """Those of the request that is made of a body."""
    seen: list[Terms] = []

    class Watching:
        def opened(self, requests: Any, client: str) -> None:
            if client != "measure":  # the server's own requests, as it starts
                seen.extend(request.terms for request in requests)

        def sending(self, outputs: Any, step: Any) -> None:
            pass

        def ended(self, ended: Any) -> None:
            pass

    watcher = Watching()
    served.client.observers.added.append(watcher)
    status, text, _ = served.ask("/v1/completions", {"prompt": "p", "max_tokens": 3} | body, headers=headers or {})
    served.client.observers.added.remove(watcher)
    assert status == 200, text
    return seen[0]


def _metric(text: str, name: str, *labels: str) -> float:
    found = [line for line in text.splitlines() if line.startswith(name + "{") and all(each in line for each in labels)]
    assert len(found) == 1, (name, labels, found)
    return float(found[0].rsplit(" ", 1)[1])


def test_objectives_reach_the_engine() -> None:
    """From the body and from a gateway's headers, raised for a profile; a plain request has none."""
    with Served() as served:
        assert _terms(served, {}) == Terms()
        own = _terms(served, {"slo": {"ttft_ms": 5000, "tpot_ms": 7000}})
        assert (own.profile, own.ttft_s, own.tpot_s) == ("", 5.0, 7.0)
        chat = _terms(served, {"slo": "chat"}, {"x-llm-d-slo-tpot-ms": "4000"})
        assert chat.profile == "chat" and chat.ttft_s >= 0.2 and chat.tpot_s == 4.0
        status, text, _ = served.ask("/v1/completions", {"prompt": "p"}, headers={"x-slo-ttft-ms": "soon"})
        assert status == 400 and json.loads(text)["error"]["param"] == "x-slo-ttft-ms"


def test_the_view_shows_profiles_and_callers() -> None:
    """Profiles with what is wanted and what is held here, counts of requests, and why a caller is recognised."""
    with Served() as served:
        for _ in range(20):
            assert served.ask("/v1/completions", {"prompt": "p", "max_tokens": 4, "slo": "content"})[0] == 200
        served.ask("/v1/completions", {"prompt": "p", "max_tokens": 4, "slo": {"ttft_ms": 3600000}})
        status, text, _ = served.ask("/admin/slo")
        metrics = served.ask("/metrics")[1]
    assert status == 200
    body = json.loads(text)
    assert body["mode"] == "off" and body["is_measured"]
    profiles = {each["name"]: each for each in body["profiles"]}
    content = profiles["content"]
    assert content["requests"]["ttft"]["met"] + content["requests"]["ttft"]["missed"] == 20
    assert content["ttft_ms"] >= content["wanted_ttft_ms"] == 2000
    for each in body["profiles"]:
        assert each["is_raised"] == (
            (each["ttft_ms"], each["tpot_ms"]) != (each["wanted_ttft_ms"], each["wanted_tpot_ms"])
        )
        if each["ttft_ms"] is not None:
            assert each["ttft_ms"] > 1.8 * each["unloaded_ttft_ms"], "but for the last tenth that costs moved by"
    (caller,) = body["callers"]
    assert caller["num_requests"] == 21 and caller["profile"] == "edge" and caller["reason"] == "servegen_m-small"
    assert caller["features"]["output_log2"]["value"] == 2.0
    assert _metric(metrics, "tokenmill:slo_recognised_callers", 'profile="edge"') == 1
    own = [_metric(metrics, "tokenmill:slo_objectives_total", 'profile="own"', 'objective="ttft"')]
    assert own == [1.0]


def test_the_view_needs_the_operators_scope() -> None:
    """Where keys are given out, not everyone sees whose traffic resembles what."""
    with Served(api_keys=("secret",)) as served:
        assert served.ask("/admin/slo")[0] == 401
        assert served.ask("/admin/slo", headers={"authorization": "Bearer secret"})[0] == 403


def test_recognised_traffic_gets_its_profile() -> None:
    """With --slo auto, who names nothing is served by what its traffic resembles, once that is known."""
    with Served(slo="auto") as served:
        before = [_terms(served, {}).profile for _ in range(20)]
        assert set(before) == {""} and _terms(served, {}).profile == "edge"
        assert _terms(served, {"slo": "batch"}).profile == "batch"


def test_no_call_is_refused_for_a_profile_while_the_machine_is_measured() -> None:
    """Steps of 100 ms cannot keep to what chat wants, as the first of them tell; measuring takes many more."""
    with Served(slo="chat", step_s=0.1) as served:
        served.wait_until(lambda: served.client.stats.costs.is_known)
        assert not json.loads(served.ask("/admin/slo")[1])["is_measured"]
        assert served.ask("/v1/completions", {"prompt": "p", "max_tokens": 1})[0] == 200
        assert not json.loads(served.ask("/admin/slo")[1])["is_measured"], "the call came too late to show anything"


def test_the_servers_profile_is_for_all_that_name_none() -> None:
    """With --slo chat from the first request on; the machine is measured at the start."""
    with Served(slo="chat") as served:
        served.wait_until(lambda: served.client.stats.costs.is_known)
        assert _terms(served, {}).profile == "chat"
        assert _terms(served, {"slo": "rag"}).profile == "rag"
