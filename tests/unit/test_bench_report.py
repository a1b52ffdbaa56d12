"""The arithmetic of reports: medians, ranges, ratios to the best peer, and the three forms they are shown in."""

from __future__ import annotations

import io
import json

from rich.console import Console

from tokenmill.bench.machine import Interference
from tokenmill.bench.report import Figure, Report, Summary, summarise

CLEAN = Interference(other_cores=0.05, steal_cores=0.01)
BUSY = Interference(other_cores=0.9, steal_cores=0.0)


def figure(state: Interference | None = CLEAN) -> Figure:
    runs = {"ours": [100.0, 90.0, 200.0], "slow": [10.0, 30.0, 20.0], "quick": [50.0, 40.0, 60.0]}
    return Figure("1 stream", "decode only", runs, state)


def report(*figures: Figure) -> Report:
    return Report({"machine": {"cores": "2"}, "ours": {"kernels": "native"}}, (40.0, 38.5), list(figures))


def test_summary_is_median_and_range() -> None:
    """An outlier moves the range, not the median."""
    assert summarise([3.0, 100.0, 1.0]) == Summary(3.0, 1.0, 100.0)
    assert summarise([4.0]).show(".1f") == "4.0"
    assert summarise([3.0, 4.0]).show(".2f") == "3.50 [3.00-4.00]"


def test_ratio_is_of_medians_to_the_best_peer_and_its_range_of_neighbouring_runs() -> None:
    """100 / 50; run by run 100/50, 90/40, 200/60."""
    assert figure().best_peer() == "quick"
    assert figure().ratio() == Summary(2.0, 2.0, 200 / 60)


def test_an_engine_alone_has_no_ratio() -> None:
    alone = Figure("prefill 512", "prompt", {"ours": [5.0]}, None)
    assert alone.best_peer() is None and alone.ratio() is None
    header, rows = report(alone).cells()
    assert header == ["load", "tokens/s", "ours", "machine"]
    assert rows == [["prefill 512", "prompt", "5.0", "not known"]]


def test_contamination_shows_in_the_row_and_in_the_notes() -> None:
    """A figure taken while others computed is marked where it stands; others are not."""
    mixed = report(figure(), Figure("4 streams", "decode only", figure().runs, BUSY))
    _, rows = mixed.cells()
    assert rows[0][-1] == "clean"
    assert rows[1][-1] == "CONTAMINATED 0.90 cores"
    assert mixed.is_contaminated and not report(figure()).is_contaminated
    assert [note for note in mixed.notes() if note.startswith("4 streams: CONTAMINATED")]
    assert not [note for note in mixed.notes() if note.startswith("1 stream:")]


def test_markdown_is_a_table_with_as_many_cells_in_every_row() -> None:
    lines = report(figure()).to_markdown().splitlines()
    assert lines[0] == "| load | tokens/s | ours | slow | quick | ratio to the best peer | machine |"
    assert lines[2].startswith("| 1 stream | decode only | 100.0 [90.0-200.0] | 20.0 [10.0-30.0] |")
    assert "| 2.00 [2.00-3.33] of quick |" in lines[2]
    assert {line.count("|") for line in lines[:3]} == {8}
    assert "- memory read, all threads: 40.0 GB/s before, 38.5 GB/s after" in lines


def test_the_terminal_table_shows_the_same_cells() -> None:
    screen = io.StringIO()
    Console(width=200, file=screen).print(report(figure()).to_table())
    for cell in report(figure()).cells()[1][0]:
        assert cell in screen.getvalue()


def test_json_keeps_every_run() -> None:
    """The file holds the raw values and what was made of them."""
    saved = json.loads(json.dumps(report(figure()).to_json()))
    (only,) = saved["figures"]
    assert only["runs"] == figure().runs
    assert only["best_peer"] == "quick"
    assert only["ratio"]["median"] == 2.0
    assert only["summaries"]["ours"] == {"median": 100.0, "low": 90.0, "high": 200.0}
    assert saved["bandwidth_gb_per_s"] == {"before": 40.0, "after": 38.5}


def test_a_load_that_an_engine_cannot_run_leaves_a_dash() -> None:
    """And the ratio names the best of those that could."""
    partial = Figure("mixed", "read and generated", {"ours": [8.0], "slow": [4.0]}, CLEAN)
    header, rows = report(figure(), partial).cells()
    assert rows[1] == ["mixed", "read and generated", "8.0", "4.0", "-", "2.00 of slow", "clean"]
    assert len(header) == len(rows[0])
