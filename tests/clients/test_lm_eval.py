"""lm-evaluation-harness against the server, off line: a task of one's own from a file, without a tokenizer of its own.

Skipped where `make lm-eval` has not installed it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from serving import Server

from lm_eval_task import CHOSEN, COMMAND, run_task

ITEMS = [
    {"question": "The capital of France is", "choices": ["Paris", "Oslo", "Rome"], "answer": 0},
    {"question": "Two and two is", "choices": ["five", "four"], "answer": 1},
]
TEXT = {"doc_to_text": "{{question}}"}
ANSWERED = TEXT | {
    "output_type": "generate_until",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Server]:
    if not COMMAND.exists():
        pytest.skip(f"no lm-eval at {COMMAND}: make lm-eval installs it")
    with Server("--enable-tokenizer-info-endpoint", model="smollm2") as running:
        yield running


def test_choices_are_scored_with_the_servers_tokenizer(server: Server, tmp_path: Path) -> None:
    """local-completions finds /tokenizer_info by itself; each choice is the likeliest."""
    samples = run_task(server.url, tmp_path, ITEMS, CHOSEN | TEXT)
    assert [sample["acc"] for sample in samples] == [1, 1]
    found = [[float(log_likelihood) for log_likelihood, _ in sample["filtered_resps"]] for sample in samples]
    assert all(value < 0 for values in found for value in values) and max(found[0]) == found[0][0]


def test_answers_are_drawn_in_conversations(server: Server, tmp_path: Path) -> None:
    """local-chat-completions leaves the template to the server."""
    chat = {"model": "local-chat-completions", "path": "/v1/chat/completions"}
    samples = run_task(server.url, tmp_path, ITEMS, ANSWERED, "--apply_chat_template", **chat)
    assert [bool(sample["resps"][0][0]) for sample in samples] == [True, True]
