"""ShareGPT files: vLLM's filter, drawn by the seed, refused in one line where nothing is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_bench_load_measure import Letters

from tokenmill.bench.load.datasets import sharegpt
from tokenmill.bench.load.plan import Literal
from tokenmill.core.errors import ConfigError


def conversation(prompt: Any, answer: Any) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}


KEPT = [conversation("a" * 4, "b" * 4), conversation("c" * 1024, "d" * 1024), conversation("e" * 10, "f" * 9)]
LEFT_OUT = [
    conversation("a" * 3, "b" * 9),
    conversation("a" * 9, "b" * 3),
    conversation("a" * 1025, "b" * 9),
    conversation("a" * 1024, "b" * 1025),
    {"conversations": [{"from": "human", "value": "aaaaaa"}]},
    {"conversations": None},
    conversation(None, "aaaa"),
    {},
]


@pytest.mark.parametrize("form", ["list", "lines"])
def test_conversations_are_filtered_as_vllm_does(tmp_path: Path, form: str) -> None:
    """Too short, too long, one turn: left out and counted; the answer's length is the file's, or the one asked for."""
    path = tmp_path / "s.json"
    rows = [*KEPT, *LEFT_OUT]
    path.write_text(json.dumps(rows) if form == "list" else "".join(json.dumps(row) + "\n" for row in rows))
    plan = sharegpt(path, 3, 0, Letters(), None)
    texts = [part.text for call in plan.calls for part in call.parts if isinstance(part, Literal)]
    assert sorted(zip(map(len, texts), (c.output_tokens for c in plan.calls), strict=True)) == [
        (4, 4),
        (10, 9),
        (1024, 1024),
    ]
    again = sharegpt(path, 30, 0, Letters(), None)
    assert again.facts["num_left_out"] == len(LEFT_OUT) and len(again.calls) == 30
    assert ["8 conversations were left out" in again.remarks[0], "3 conversations" in again.remarks[1]] == [True, True]
    fixed = sharegpt(path, 4, 0, Letters(), 2)
    assert {call.output_tokens for call in fixed.calls} == {2}
    orders = {tuple(call.output_tokens for call in sharegpt(path, 3, seed, Letters(), None).calls) for seed in range(9)}
    assert len(orders) > 1


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    """In one line; without a tokenizer nothing can be filtered."""
    path = tmp_path / "s.json"
    for text, words in (("[1, 2", "not JSON"), (json.dumps(LEFT_OUT), "no conversation"), ("", "no conversation")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            sharegpt(path, 3, 0, Letters(), None)
    with pytest.raises(ConfigError, match="--tokenizer"):
        sharegpt(path, 3, 0, None, None)
    with pytest.raises(ConfigError, match="at least 1"):
        sharegpt(path, 3, 0, Letters(), 0)
