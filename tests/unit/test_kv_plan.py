"""`tokenmill kv plan`: sizes of tiers from a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenmill.cli.main import main


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return str(path)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(["kv", "plan", *arguments, "--json"])
    assert code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def conversations(num: int) -> list[dict[str, Any]]:
    """So many prompts of four blocks, all asked and then all asked again."""
    ids = [[4 * talk + place for place in range(4)] for talk in range(num)]
    return [
        {"timestamp": 1000 * at, "input_length": 2048, "output_length": 1, "hash_ids": one}
        for at, one in enumerate([*ids, *ids])
    ]


def test_a_cycle_is_saved_from_its_size_on(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ten prompts of four blocks, asked twice in order: LRU with room for all but one has lost the last block of each,
    and with room for all saves half of what is asked, which is also what is advised."""
    trace = write(tmp_path / "t.jsonl", conversations(10))
    block = 512 * 1000
    sizes = f"{39 * block},{40 * block}"
    found = planned(capsys, "--trace", trace, "--bytes-per-token", "1000", "--host", sizes, "--disk", sizes)
    small, large, _, disk = found["sizes"]
    assert found["blocks"] == 40 and found["block_bytes"] == block and found["least_bytes"] == 40 * block
    assert (small["hit_share"], large["hit_share"]) == (pytest.approx(30 / 80), 0.5)
    assert large["saved_s"] == pytest.approx(found["most_s"]) == pytest.approx(found["all_s"] / 2)
    assert large["ttft_s"] < small["ttft_s"] < found["ttft_s"]
    assert disk["writes_day"] == disk["second_use_day"] == pytest.approx(40 * block * 86400 / 19)
    assert found["flags"] == "--kv-host 0.1GiB"


def test_request_bodies_are_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Messages that begin alike share blocks; another salt shares none."""
    system = {"role": "system", "content": "You are a mill. " * 64}
    rows = [{"messages": [system, {"role": "user", "content": f"Question {nth}"}]} for nth in range(3)]
    found = planned(capsys, "--trace", write(tmp_path / "a.jsonl", rows), "--bytes-per-token", "100")
    assert 0.6 < found["most_s"] / found["all_s"] < 0.7
    for nth, row in enumerate(rows):
        row["cache_salt"] = str(nth)
    found = planned(capsys, "--trace", write(tmp_path / "b.jsonl", rows), "--bytes-per-token", "100")
    assert found["most_s"] == 0 and found["flags"] == ""


def test_the_page_names_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl", conversations(300))
    assert main(["kv", "plan", "--trace", trace, "--bytes-per-token", "10000", "--host", "1GiB,4GiB"]) == 0
    page = capsys.readouterr().out
    assert "--kv-disk DIR:5.8GiB" in page and "1,200 distinct" in page


@pytest.mark.parametrize("rows", [[], [{"a": 1}], [{"timestamp": 0, "input_length": 9, "hash_ids": [1]}]])
def test_what_is_no_trace_is_refused(
    rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(SystemExit) as refused:
        raise SystemExit(main(["kv", "plan", "--trace", trace, "--bytes-per-token", "100"]))
    assert refused.value.code == 2
    assert "t.jsonl" in capsys.readouterr().err
