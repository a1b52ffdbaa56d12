"""Lengths and arrivals of public traces, for the scripts of this folder. Each gives (seconds, prompt, answer, who)."""

from __future__ import annotations

import csv
import gzip
import json
from datetime import datetime
from pathlib import Path

Row = tuple[float, int, int, str]
NAMES = ("chat", "code", "agentic", "mooncake")


def rows_of(name: str, folder: Path, most: int) -> list[Row]:
    """The first `most` requests of a load, in order of time."""
    made = {"chat": _azure, "code": _azure, "agentic": _agentic, "mooncake": _mooncake}[name](name, folder, most)
    return sorted(made)[:most]


def _azure(name: str, folder: Path, most: int) -> list[Row]:
    path = folder / f"azure_llm_2023_{'conv' if name == 'chat' else 'code'}.csv.gz"
    rows = []
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            rows.append((at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]), name))
            if len(rows) >= most:
                break
    return [(at_s - rows[0][0], *rest) for at_s, *rest in rows]


def _agentic(name: str, folder: Path, most: int) -> list[Row]:
    """Sessions, begun one after another; of each turn, what is new since the turn before."""
    rows: list[Row] = []
    with gzip.open(folder / "agentic_coding.jsonl.gz", "rt") as file:
        for number, line in enumerate(file):
            session = json.loads(line)
            before = 0
            for turn in session["requests"]:
                if "in" not in turn or not turn.get("out"):
                    continue
                new = turn["in"] - before if turn["in"] > before else turn["in"]
                before = turn["in"] + turn["out"]
                rows.append((30.0 * number + turn["t"], max(1, new), turn["out"], session["id"]))
            if len(rows) >= 4 * most:
                break
    return rows


def _mooncake(name: str, folder: Path, most: int) -> list[Row]:
    rows: list[Row] = []
    with gzip.open(folder / "mooncake_conversation.jsonl.gz", "rt") as file:
        for line in file:
            row = json.loads(line)
            rows.append((row["timestamp"] / 1e3, row["input_length"], row["output_length"], name))
            if len(rows) >= most:
                break
    return rows
