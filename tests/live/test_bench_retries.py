"""Clients that ask again what a server refused, and clients that leave."""

from __future__ import annotations

from test_bench_serve import measure

from synthetic_server import Script
from tokenmill.bench.load.retries import RetryPolicy
from tokenmill.bench.load.schedule import Schedule


def test_what_a_server_refuses_is_asked_again() -> None:
    """Every third request is refused; all are answered in the end, after the pause that the server names."""
    script = Script(ttft_s=0.005, itl_s=0.0, fail_every=3, fail_status=429, retry_after_s=0.2)
    run, records = measure(script, Schedule(concurrency=2), 12, num_warmups=0, retry_policy=RetryPolicy(5))
    again = [row for row in run.requests if row.num_refused]
    assert run.num_ok == 12 and sum(row.num_refused for row in again) == len(records) - 12 > 0
    for row in run.requests:
        assert row.first_s is not None and (row.first_s - row.due_s >= 0.2 or not row.num_refused)
    assert run.schedule["retries"] == 5 and any("asked again" in warning for warning in run.warnings)
    refused, _ = measure(script, Schedule(concurrency=2), 12, num_warmups=0)
    assert [error.kind for error in refused.errors] == ["http_429"] and refused.num_ok == 8


def test_a_client_leaves_a_server_that_says_nothing() -> None:
    """The connection is cut, and the next client finds a new one; who has a token stays however long it takes."""
    script = Script(ttft_s=60.0, itl_s=0.0)
    run, records = measure(script, Schedule(concurrency=2), 4, num_warmups=0, retry_policy=RetryPolicy(0, 0.15))
    assert [error.kind for error in run.errors] == ["gave_up"] and run.num_failed == 4 == len(records)
    assert all(0.15 <= (row.end_s or 0.0) - row.due_s < 30.0 for row in run.requests)
    script = Script(ttft_s=0.01, itl_s=1.0)
    run, _ = measure(script, Schedule(concurrency=4), 4, num_warmups=0, retry_policy=RetryPolicy(0, 6.0))
    assert run.num_ok == 4 and (run.e2el_s.min or 0.0) > 6.0
