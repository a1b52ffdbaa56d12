"""Recognition of the profile from the traffic's shape, on the halves of published traces that shapes were not made of.

A half is every other block of 200 requests, so that a trace whose traffic changes has all of it in both; of agents'
conversations and of clients it is every other one, or the later half of each client's lengths.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenmill.core.slo import ENOUGH, FEATURES, PROFILES, SHAPES, Traffic

_AROUND = Path(__file__).resolve().parents
TRACES = next((each / "shared/data/traces" for each in _AROUND if (each / "shared/data/traces").is_dir()), _AROUND[0])
"""Beside the repository, or beside what holds its work trees."""

BLOCK = 200

Row = tuple[int, int, float]
"""Prompt tokens, output tokens, and the share of the prompt that came before."""


def _lines(name: str) -> Iterator[str]:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with gzip.open(path, "rt", encoding="utf8") as lines:
        yield from lines


def _pairs(name: str, column: int) -> list[Row]:
    rows = list(csv.reader(_lines(name)))[1:]
    return [(int(row[column]), int(row[column + 1]), 0.0) for row in rows]


def _mooncake(name: str) -> list[Row]:
    seen: set[int] = set()
    return [_reused(row["input_length"], row["output_length"], row["hash_ids"], 512, seen) for row in _records(name)]


def _records(name: str) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in _lines(name))


def _reused(num_prompt: int, num_output: int, ids: list[int], size: int, seen: set[int]) -> Row:
    hits = 0
    while hits < len(ids) and ids[hits] in seen:
        hits += 1
    seen.update(ids)
    return (num_prompt, num_output, min(1.0, hits * size / max(1, num_prompt)))


def _agents() -> list[list[Row]]:
    found = []
    for record in _records("agentic_coding.jsonl.gz"):
        seen: set[int] = set()
        rows = []
        for request in record["requests"]:
            if "in" in request:
                ids = [each for first, number in request["hash_runs"] for each in range(first, first + number)]
                rows.append(_reused(request["in"], request["out"], ids, record["block_size"], seen))
        found.append(rows)
    return found


def _clients(name: str, most_prompt: float, outputs: tuple[float, float]) -> list[list[Row]]:
    """The clients whose median request is of the form: ServeGen's do not say what they are for."""
    rng = random.Random(7)
    found = []
    for record in _records(name):
        rows: list[Row] = []
        for _, lengths in sorted((record["lengths"] or {}).items(), key=lambda each: int(each[0])):
            drawn = [
                rng.choices(lengths[key]["bin"], lengths[key]["p"], k=40) for key in ("input_tokens", "output_tokens")
            ]
            rows += [(max(1, prompt), max(1, output), 0.0) for prompt, output in zip(*drawn, strict=True)]
        if len(rows) >= 4 * ENOUGH:
            prompt, output = (statistics.median(row[part] for row in rows) for part in (0, 1))
            if prompt <= most_prompt and outputs[0] <= output <= outputs[1]:
                found.append(rows)
    return found


def _others(rows: list[Row]) -> list[list[Row]]:
    """The blocks that no shape was made of."""
    return [rows[start : start + BLOCK] for start in range(BLOCK, len(rows), 2 * BLOCK)]


def _later(clients: list[list[Row]]) -> list[list[Row]]:
    return [rows[len(rows) // 2 :] for rows in clients]


HALVES = {
    "azure_llm_2023_conv": ("chat", lambda: _others(_pairs("azure_llm_2023_conv.csv.gz", 1))),
    "azure_llm_2023_code": ("code", lambda: _others(_pairs("azure_llm_2023_code.csv.gz", 1))),
    "arxiv_summarization": ("rag", lambda: _others(_pairs("arxiv_summarization_lengths.csv.gz", 0))),
    "mooncake_conversation": ("chat", lambda: _others(_mooncake("mooncake_conversation.jsonl.gz"))),
    "mooncake_synthetic": ("rag", lambda: _others(_mooncake("mooncake_synthetic.jsonl.gz"))),
    "agentic_coding": ("agent", lambda: _agents()[len(_agents()) // 2 :]),
    "servegen_m-small": ("edge", lambda: _later(_clients("servegen_m-small.jsonl.gz", 512, (0, 64)))),
    "servegen_deepseek-r1": ("content", lambda: _later(_clients("servegen_deepseek-r1.jsonl.gz", 1e9, (512, 1e9)))),
}


def _verdict(rows: list[Row]) -> str:
    traffic = Traffic()
    for at, (num_prompt, num_output, reuse) in enumerate(rows):
        traffic.came(float(at), True)
        traffic.ended(num_prompt, num_output, round(reuse * num_prompt))
    assert traffic.verdict is not None
    return traffic.verdict.profile


@pytest.mark.parametrize("name", HALVES)
def test_traces_are_recognised_after_20_requests(name: str) -> None:
    """Of windows of 20 requests from the half that the shape was not made of, at least nine in ten are right."""
    wanted, read = HALVES[name]
    verdicts: Counter[str] = Counter()
    for rows in read():
        for start in range(0, len(rows) - ENOUGH + 1, ENOUGH):
            verdicts[_verdict(rows[start : start + ENOUGH])] += 1
    print(name, wanted, dict(verdicts))
    assert verdicts.total() >= 50
    assert verdicts[wanted] >= 0.9 * verdicts.total(), verdicts


def test_a_burst_that_nobody_reads_is_a_batch() -> None:
    """Calls at once and unstreamed are a batch, whatever their lengths; others are not."""
    for gap_s, is_streamed, is_at_once, wanted in (
        (0.001, False, True, True), (0.001, True, True, False), (0.1, False, True, False), (0.001, False, False, False),
    ):  # fmt: skip
        traffic = Traffic()
        for number in range(ENOUGH):
            traffic.came(number * gap_s, is_streamed)
            if not is_at_once:
                traffic.ended(1000 + 100 * number, 120, 0)
        for number in range(ENOUGH if is_at_once else 0):
            traffic.ended(1000 + 100 * number, 120, 0)
        assert traffic.verdict is not None and (traffic.verdict.profile == "batch") == wanted


def test_a_verdict_needs_enough_and_says_why() -> None:
    """None before 20 requests; then the profile with the features that decided, each with its distance."""
    traffic = Traffic()
    for number in range(ENOUGH):
        assert traffic.verdict is None
        traffic.ended(20_000 + 300 * number, 200, 19_500)
    verdict = traffic.verdict
    assert verdict is not None and verdict.profile == "agent" and verdict.reason == "agentic_coding"
    assert len(verdict.features) == len(verdict.distances) == len(FEATURES) and verdict.lead > 1


def test_a_verdict_changes_with_the_traffic() -> None:
    """A tenant that does something else now is recognised by that before long, and one odd request changes nothing."""
    traffic = Traffic()
    for number in range(40):
        traffic.ended(300 * 2 ** (number % 6), 7 + 5 * (number % 4), 0)
    assert traffic.verdict is not None and traffic.verdict.profile == "code"
    traffic.ended(10, 2000, 0)
    for _ in range(4):
        traffic.ended(1200, 14, 0)
    assert traffic.verdict.profile == "code"
    for number in range(60):
        traffic.ended(200, 900 + number, 0)
    assert traffic.verdict.profile == "content"


def test_shapes_are_of_profiles() -> None:
    """Every shape names a profile, and every profile but batch has one."""
    assert {shape.profile for shape in SHAPES} == set(PROFILES) - {"batch"}
    assert all(spread > 0 for shape in SHAPES for spread in shape.spreads)
