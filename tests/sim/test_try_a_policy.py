"""docs/develop/try-a-policy.md, followed to the letter: its files are written, its commands run."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

from tokenmill.plan.policies import KINDS, NAMES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "develop" / "try-a-policy.md"
TRACE = "azure_llm_2023_conv.csv.gz"
RECORDED = ROOT.parent / "shared" / "data" / "traces" / TRACE


def test_the_page_works_as_written(tmp_path: Path) -> None:
    """A toml or python block is the file named before it, a console block runs: all but the day, which takes long, and
    the server. Without the recorded trace beside the checkout, on one that is drawn."""
    if RECORDED.exists():
        shutil.copy(RECORDED, tmp_path / TRACE)
    else:
        print(f"no {RECORDED}: the lengths are drawn")
        draw_trace(tmp_path / TRACE)
    path, said, left_out = tmp_path, [], []
    for line, kind, block in re.findall(
        r"^([^`\n]*(?:`[^`\n]+`[^`\n]*)+)$|^```(\w+)\n(.*?)^```$", PAGE.read_text("utf8"), re.M | re.S
    ):
        if line:
            named = re.findall(r"`(\w+\.(?:toml|py))`", line)
            path = tmp_path / named[-1] if named else path
        elif kind in ("toml", "python"):
            assert not path.exists(), path
            path.write_text(block, "utf8")
        else:
            assert kind == "console"
            words = shlex.split(block.removeprefix("$ "))
            assert words[0] == "tokenmill"
            if words[1] == "serve" or "24h" in words:
                left_out.append(words)
            else:
                said.append(run(tmp_path, words[1:]))
    assert len(said) == len(left_out) == 2
    usual, mine = (json.loads((tmp_path / f"{name}.json").read_text("utf8")) for name in ("usual", "mine"))
    assert usual["num_requests"] == mine["num_requests"] > 100 and usual["num_failed"] == mine["num_failed"] == 0
    assert usual["output_tokens"] == mine["output_tokens"], "a policy changes no answer"
    assert usual["dataset"]["plan_digest"] == mine["dataset"]["plan_digest"]
    assert mine["endpoint"]["policies"]["routing"].endswith("fewest_prompt_tokens.py:FewestPromptTokens")
    digests = [re.findall(r"^digest (\w{16})$", text, re.M) for text in said]
    assert len(digests[0]) == len(digests[1]) == 1 and digests[0] != digests[1]
    assert "<html" in (tmp_path / "both.html").read_text("utf8")


def test_the_page_names_all_policies() -> None:
    rows = {
        row[0].strip("` "): set(re.findall(r"`([\w-]+)`", row[2]))
        for row in (
            line.strip("|").split("|") for line in PAGE.read_text("utf8").splitlines() if line.startswith("| `")
        )
    }
    assert {kind: set(names) for kind, names in NAMES.items()} == rows
    assert list(rows) == [kind.name for kind in KINDS]


def draw_trace(path: Path) -> None:
    """Half an hour with lengths about as skewed as Azure's."""
    rng, now = random.Random(0), datetime(2023, 11, 16, 18)
    with gzip.open(path, "wt", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
        while now < datetime(2023, 11, 16, 18, 29):
            lengths = (
                min(14000, int(rng.lognormvariate(6.7, 1.0)) + 1),
                min(1000, int(rng.lognormvariate(5.0, 0.8)) + 1),
            )
            rows.writerow((now.isoformat(" ", "microseconds"), *lengths))
            now += timedelta(seconds=rng.expovariate(5.5))


def run(folder: Path, words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill.cli.main", *words],
        cwd=folder, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
