"""lm-evaluation-harness against the server, off line: a task of one's own from a file, without a tokenizer of its own.

It and what it needs take 760 MB, so it has an environment of its own (requirements-lm-eval.txt, `make lm-eval`),
without which this is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server

ENVIRONMENT = Path(os.environ.get("TOKENMILL_LM_EVAL_VENV", Path(__file__).parents[2] / ".venv-lm-eval"))
ITEMS = [
    {"question": "The capital of France is", "choices": ["Paris", "Oslo", "Rome"], "answer": 0},
    {"question": "Two and two is", "choices": ["five", "four"], "answer": 1},
]
COMMON = {"task": "mine", "dataset_path": "json", "test_split": "test", "doc_to_text": "{{question}}"}
CHOSEN = COMMON | {
    "output_type": "multiple_choice",
    "doc_to_choice": "choices",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc"}],
}
ANSWERED = COMMON | {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    if not (ENVIRONMENT / "bin" / "lm_eval").exists():
        pytest.skip(f"no lm-eval at {ENVIRONMENT}: make lm-eval installs it")
    with Server("--enable-tokenizer-info-endpoint", model="smollm2") as running:
        yield running


def run(server: Server, folder: Path, task: dict[str, Any], model: str, path: str, *args: str) -> list[dict[str, Any]]:
    """The samples of the task, as lm-eval writes them."""
    items, out = folder / "items.jsonl", folder / "out"
    items.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    # JSON is YAML.
    (folder / "mine.yaml").write_text(json.dumps(task | {"dataset_kwargs": {"data_files": {"test": str(items)}}}))
    ran = subprocess.run(
        [
            *(str(ENVIRONMENT / "bin" / "lm_eval"), "run", "--model", model, "--tasks", "mine"),
            *("--include_path", str(folder), "--output_path", str(out), "--log_samples"),
            *("--model_args", f"model=smollm2,base_url={server.url}{path},num_concurrent=4", *args),
        ],
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, f"{ran.stdout[-5000:]}\n--- the server:\n{server.output[-3000:]}"
    (samples,) = out.glob("*/samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


def test_choices_are_scored_with_the_servers_tokenizer(server: Server, tmp_path: Path) -> None:
    """local-completions finds /tokenizer_info by itself; each choice is the likeliest."""
    samples = run(server, tmp_path, CHOSEN, "local-completions", "/v1/completions")
    assert [sample["acc"] for sample in samples] == [1, 1]
    found = [[float(log_likelihood) for log_likelihood, _ in sample["filtered_resps"]] for sample in samples]
    assert all(value < 0 for values in found for value in values) and max(found[0]) == found[0][0]


def test_answers_are_drawn_in_conversations(server: Server, tmp_path: Path) -> None:
    """local-chat-completions leaves the template to the server."""
    samples = run(server, tmp_path, ANSWERED, "local-chat-completions", "/v1/chat/completions", "--apply_chat_template")
    assert [bool(sample["resps"][0][0]) for sample in samples] == [True, True]
