"""A task of one's own for lm-evaluation-harness, off line: run against a server, and its samples read.

It and what it needs take 760 MB, so it has an environment of its own (`make lm-eval`).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT = Path(os.environ.get("TOKENMILL_LM_EVAL_VENV", Path(__file__).parents[1] / ".venv-lm-eval"))
COMMAND = ENVIRONMENT / "bin" / "lm_eval"
TIMEOUT_S = 1800

QUESTIONS = {"task": "mine", "dataset_path": "json", "test_split": "test"}
CHOSEN = {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
"""Of items with `question`, `choices` and `answer` (an index): which choice is likeliest."""


def run_task(
    url: str,
    folder: Path,
    items: Sequence[dict[str, Any]],
    task: dict[str, Any],
    *args: str,
    model: str = "local-completions",
    path: str = "/v1/completions",
    served_name: str = "smollm2",
) -> list[dict[str, Any]]:
    """The samples as lm-eval writes them, of a task about the items; `folder` is for files. args: further ones of
    lm_eval. Raises AssertionError with what it said where it fails."""
    data, out = folder / "items.jsonl", folder / "out"
    data.write_text("".join(json.dumps(item) + "\n" for item in items))
    # JSON is YAML.
    (folder / "mine.yaml").write_text(
        json.dumps(QUESTIONS | task | {"dataset_kwargs": {"data_files": {"test": str(data)}}})
    )
    how = f"model={served_name},base_url={url}{path},num_concurrent=4,max_length=8192"
    ran = subprocess.run(
        [
            *(str(COMMAND), "run", "--model", model, "--tasks", "mine", "--model_args", how),
            *("--include_path", str(folder), "--output_path", str(out), "--log_samples", *args),
        ],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stdout[-5000:]
    (samples,) = out.glob("*/samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]
