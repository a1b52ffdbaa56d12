"""Traces as they are found in the wild: rows that lack something are counted, and no file ends in a traceback."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench.load import traces
from tokenmill.bench.load.plan import Plan
from tokenmill.core.errors import ConfigError

GOOD: dict[str, Any] = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def read(path: Path, rows: list[Any], num: int = 99, **fit: Any) -> Plan:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return traces.read_trace(path, num, 0, traces.Fit(**fit))


def lengths(plan: Plan) -> list[int | None]:
    return [call.input_tokens for call in plan.calls]


def test_a_slice_of_a_trace_begins_at_once(tmp_path: Path) -> None:
    """Its times count from its own first row, in order, also where rows were not in order, which is said."""
    rows = [GOOD | {"timestamp": stamp} for stamp in (3_000_500, 3_000_000, 3_002_000)]
    plan = read(tmp_path / "m.jsonl", rows)
    assert [call.delay_s for call in plan.calls] == [0.0, 0.5, 2.0]
    assert plan.remarks == ("The trace: 1 rows came before their time and were sorted.",)
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:02.5+00:00,3,4\n2024-05-10 00:00:02+00:00,5,6\n"
    )
    plan = traces.read_trace(azure, 9, 0, traces.Fit())
    assert [(call.delay_s, call.input_tokens) for call in plan.calls] == [(0.0, 5), (0.5, 3)]


def test_a_prompt_is_as_long_as_its_trace_says(tmp_path: Path) -> None:
    """Whatever its ids would hold: too many are dropped, what they do not reach is its own text; both are counted."""
    rows = [
        GOOD | {"input_length": 300, "hash_ids": [1, 2, 3, 4]},
        GOOD | {"input_length": 2000, "hash_ids": [1]},
        GOOD,
    ]
    plan = read(tmp_path / "m.jsonl", rows)
    assert lengths(plan) == [300, 2000, 600]
    keys = [[part.key for part in call.parts] for call in plan.calls]  # type: ignore[union-attr]
    assert keys == [["block/1"], ["block/1", "request/1"], ["block/1", "block/2"]]
    (remark,) = plan.remarks
    assert remark.startswith("The trace: 2 prompts are not as long as their hash_ids") and plan.facts["notes"]
    assert lengths(read(tmp_path / "s.jsonl", rows, scale=1 / 32)) == [9, 16 + 46, 16 + 3]


@pytest.mark.parametrize("missing", [{}, {"hash_ids": None}, {"hash_ids": []}])
def test_mooncake_rows_without_ids_share_nothing(tmp_path: Path, missing: dict[str, Any]) -> None:
    """They are requests all the same."""
    bare = {name: value for name, value in GOOD.items() if name != "hash_ids"} | missing
    plan = read(tmp_path / "m.jsonl", [bare, bare])
    assert lengths(plan) == [600, 600]
    assert {part.key for call in plan.calls for part in call.parts} == {"request/0", "request/1"}  # type: ignore[union-attr]
    assert "2 rows have no hash_ids" in plan.remarks[0]
    path = tmp_path / "m.jsonl"
    assert len(traces.read_trace(path, 2, 0, traces.Fit(), is_sampled=True).calls) == 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"timestamp": None}, "timestamp is no number"),
        ({"timestamp": "soon"}, "timestamp is no number"),
        ({"timestamp": float("nan")}, "timestamp is no number"),
        ({"input_length": None}, "input_length is no number"),
        ({"input_length": True}, "input_length is no number"),
        ({"output_length": 0}, "output_length is below 1"),
        ({"output_length": -3}, "output_length is below 1"),
        ({"hash_ids": "12"}, "hash_ids is no list"),
    ],
)
def test_rows_that_cannot_be_used_are_counted(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    """With the reason; a file of which nothing is left is refused with it."""
    plan = read(tmp_path / "m.jsonl", [GOOD, GOOD | change, GOOD], num=2)
    assert len(plan.calls) == 2 and plan.remarks == (f"The trace: 1 rows were left out: {reason}.",)
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path / "m.jsonl", [GOOD | change])


@pytest.mark.parametrize(
    "text",
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,1\nsoon,5,1\n2023-11-16 18:17:04,x,1\n"
        "2023-11-16 18:17:04,5\n2023-11-16 18:17:04,5,0\n",
        "num_prefill_tokens,num_decode_tokens\n5,1\nx,1\n5\n,\n0,1\n",
    ],
)
def test_rows_of_tables_are_counted_too(tmp_path: Path, text: str) -> None:
    """One of five can be used."""
    path = tmp_path / "t.csv"
    path.write_text(text)
    plan = traces.read_trace(path, 9, 0, traces.Fit())
    assert lengths(plan) == [5] and sum(plan.facts["notes"].values()) == 4


CONVERSATION: dict[str, Any] = {"id": "x", "block_size": 64, "tool_tokens": 60, "system_tokens": 10}
STEP = {"type": "n", "in": 130, "out": 5, "hash_runs": [[1, 2]]}


def test_malformed_conversations_and_clients_are_left_out(tmp_path: Path) -> None:
    """Whole, so that no half of one is sent; answers of nothing ask for one token."""
    rows = [
        CONVERSATION | {"requests": [STEP, {"type": "n"}]},
        CONVERSATION | {"requests": None},
        CONVERSATION | {"requests": [STEP, STEP | {"out": 0}]},
    ]
    plan = read(tmp_path / "a.jsonl", rows)
    assert [call.output_tokens for call in plan.calls] == [5, 1] and [call.after for call in plan.calls] == [(), (0,)]
    assert sum(plan.facts["notes"].values()) == 3
    with pytest.raises(ConfigError, match="no conversation"):
        read(tmp_path / "a.jsonl", rows[:1])
    shapes = {"0": {"input_tokens": {"bin": [10], "p": [1.0]}, "output_tokens": {"bin": [3], "p": [1.0]}}}
    clients = [
        {"client": 1, "trace": [[0, 3.0]], "lengths": shapes},
        {"client": 2, "trace": [[0]], "lengths": shapes},
        {"client": 3, "trace": [[0, 3.0]], "lengths": {"0": {}}},
        {"client": 4, "trace": None, "lengths": shapes},
    ]
    path = tmp_path / "s.jsonl"
    path.write_text("".join(json.dumps(client) + "\n" for client in clients))
    plan = traces.servegen(path, 50, 0, traces.Fit(), rate=10.0, window_start_s=0.0)
    assert {call.tenant for call in plan.calls} == {"client-1"} and sum(plan.facts["notes"].values()) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\xff\xfe",
        b"{\n",
        b'{"timestamp": 1, "input_length": 2, "output_length": 3}\n[1]\n',
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n\x00,\x00\n",
        gzip.compress(b'{"timestamp": 1, "input_length": 2, "output_length": 3}\n' * 999, mtime=0)[:40],
        b"[" * 100_000,
        b"{" * 100_000,
    ],
)
def test_no_file_ends_in_a_traceback(tmp_path: Path, content: bytes) -> None:
    """Whatever is in it, it is refused in one line."""
    path = tmp_path / ("t.jsonl.gz" if content[:2] == b"\x1f\x8b" else "t.jsonl")
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        traces.read_trace(path, 9999, 0, traces.Fit())
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_published_traces_need_no_remark() -> None:
    """They are as they say."""
    folder = Path(__file__).resolve().parent.parent.parent.parent / "shared" / "data" / "traces"
    if not folder.exists():
        pytest.skip("no traces beside the checkout")
    for name in ("mooncake_conversation.jsonl.gz", "azure_llm_2023_conv.csv.gz", "agentic_coding.jsonl.gz"):
        assert traces.read_trace(folder / name, 200, 0, traces.Fit()).remarks == (), name
