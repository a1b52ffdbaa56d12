"""The benchmark of one front end, tiny: what it counts is right. No time is judged."""

from __future__ import annotations

import bench_front_end


def test_streams_are_counted_on_both_sides() -> None:
    """Six streams are open at once at the client and the engine, and all tokens that the engine sent have arrived."""
    measured = bench_front_end.measure(0.02, 6, 25, ["--concurrency", "6"], "completions")
    assert len(measured.good) == measured.client["max_in_flight"] == measured.engine["most_open"] == 6
    assert measured.engine["num_tokens"] == measured.client["output_tokens"] == 6 * 25
    assert measured.engine["full_tokens_per_s"] > 0 and measured.front["cpu_s"] > 0
    assert measured.front["most_open"] == 6 and measured.front["late_s"]
    start_s = measured.client["client"]["clock_start_s"]
    rows = sorted(measured.client["requests"], key=lambda row: row["sent_s"])
    assert start_s + rows[0]["sent_s"] < measured.engine["records"][0][0]
    assert max(gave_s for _, gave_s in measured.engine["records"]) < start_s + max(row["first_s"] for row in rows)
