"""`serve --expert-load`: what the experts of all workers computed is in the file when the server has stopped, and in
metrics before."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import Server, wait_until

from tokenmill.cli.expert_load import read_load
from tokenmill.cli.main import main

pytest.importorskip("gguf")
from random_models import Shape, write_hf_model

SHAPE = Shape(
    "qwen3moe", layers=2, width=64, heads=2, kv_heads=1, head=32, rope=32, value=32, experts=8, top_k=3, expert_ffn=32
)
NUM_PROMPT, NUM_NEW, NUM_CALLS = 20, 12, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    write_hf_model(path, SHAPE)
    return path


def test_the_file_holds_what_all_workers_computed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "load.json"
    args = (
        "--backend",
        "numpy",
        "--workers",
        "2",
        "--threads",
        "1",
        "-c",
        "256",
        "--expert-load",
        str(path),
        "--no-enable-prefix-caching",
    )
    with Server(*args, "--disaggregation", "never", "--routing-policy", "round_robin", model=str(folder)) as server:
        for number in range(NUM_CALLS):
            prompt = [100 + number + place for place in range(NUM_PROMPT)]
            body = {"prompt": prompt, "max_tokens": NUM_NEW, "ignore_eos": True, "temperature": 0}
            status, said = server.request("POST", "/v1/completions", body)
            assert status == 200, said
        least = 2 * SHAPE.top_k * NUM_CALLS * (NUM_PROMPT + NUM_NEW - 1)
        wait_until(lambda: server.metrics().get("tokenmill:expert_tokens_total", 0) >= least, "metrics of experts")
        status, told = server.request("GET", "/metrics/workers")
        steps = [float(line.split()[-1]) for line in told.splitlines() if line.startswith("tokenmill:steps_total")]
        assert status == 200 and len(steps) == 2 and all(steps), "both workers have computed"
    found = read_load(path)
    assert found.load.layers == (0, 1) and found.numerics_id
    rows = NUM_CALLS * (NUM_PROMPT + NUM_NEW - 1)
    for tokens in found.load.tokens:
        assert len(tokens) == SHAPE.experts
        # A row planned ahead of the end of its request is computed and discarded.
        assert SHAPE.top_k * rows <= sum(tokens) <= SHAPE.top_k * (rows + 2 * NUM_CALLS)
    assert main(["inspect", "--expert-load", str(path)]) == 0
    assert "8 in each of 2 layers" in capsys.readouterr().out
