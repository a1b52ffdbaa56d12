"""A server whose model is drafted for by another: answers are those without it, what came of its drafts is counted, a
request can turn it off, and what cannot draft is one line and an exit status."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kill import ARGS, Killer, Said, ask, write_model
from serving import Server

OFF = {"speculative": {"n_max": 0}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def drafting(model: Path, **how: Any) -> tuple[str, str]:
    """All drafts are verified, whatever that costs."""
    settings: dict[str, Any] = {"method": "draft_model,suffix", "model": str(model), "quantization": "q4_0"}
    settings |= {"num_speculative_tokens": 3, "adaptive": False, **how}
    return "--speculative-config", json.dumps(settings)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    """The model drafts for itself with coarser weights: most drafts are right, and not all."""
    with Server(*ARGS, *drafting(model), "--max-queue-s", "60", model=str(model)) as server:
        yield server


def bodies(max_tokens: int, **more: Any) -> list[dict[str, Any]]:
    rng = random.Random(max_tokens)
    asked = []
    for number, temperature in enumerate((0.0, 0.8, 0.8)):
        prompt = [rng.randrange(3, 250) for _ in range(20)]
        how = {"temperature": temperature, "seed": number, "logprobs": 1, "stream": number < 2, "ignore_eos": True}
        asked.append({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, **how, **more})
    return asked


def said(server: Server, asked: list[dict[str, Any]]) -> list[Said]:
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda body: ask(server, body), asked))


def drafts(server: Server) -> tuple[float, float, float]:
    shown = server.metrics()
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return tuple(shown[f"vllm:spec_decode_num_{name}_total"] for name in names)  # type: ignore[return-value]


def acceptance(server: Server, model: str) -> dict[str, float]:
    """By drafter."""
    pattern = rf'^tokenmill:draft_acceptance_ratio{{.*model_name="{model}".*source="(\w+)".*}} (.*)$'
    found = re.findall(pattern, server.request("GET", "/metrics")[1], re.MULTILINE)
    return {source: float(value) for source, value in found}


def test_answers_are_those_without_it_and_drafts_are_counted(server: Server, model: Path) -> None:
    asked = bodies(200)
    with Server(*ARGS, model=str(model)) as plain:
        expected = said(plain, asked)
        assert drafts(plain) == (0, 0, 0)
    assert [each.status for each in expected] == [200] * 3
    before = drafts(server)
    assert [each.key() for each in said(server, asked)] == [each.key() for each in expected]
    num_drafts, num_drafted, num_accepted = (now - was for now, was in zip(drafts(server), before, strict=True))
    assert num_drafts <= num_drafted <= 3 * num_drafts and num_drafted / 3 < num_accepted < num_drafted
    assert 0.3 < acceptance(server, "tiny")["draft_model"] < 1
    before = drafts(server)
    assert [each.key() for each in said(server, bodies(200, **OFF))] == [each.key() for each in expected]
    assert drafts(server) == before


def test_answers_outlive_a_kill(server: Server) -> None:
    """The engine that goes on with them has a drafter that has seen nothing of them."""
    asked = bodies(2000)
    expected = said(server, asked)
    with ThreadPoolExecutor(len(asked)) as pool:
        asking = [pool.submit(ask, server, body) for body in asked]
        time.sleep(0.2)
        Killer(server, random.Random(1)).kill()
        before = drafts(server)
        given = [each.result() for each in asking]
    assert [each.key() for each in given] == [each.key() for each in expected]
    assert server.metrics()["tokenmill:requests_resumed_total"] >= 1
    assert all(now > was for now, was in zip(drafts(server), before, strict=True))


def test_for_a_model_beside_it_suffixes_draft_and_no_model_does(server: Server, model: Path) -> None:
    """The second time that it is asked, its answers are those of before."""
    body = {"model": str(model), "name": "two", "kv_cache_memory_bytes": 32 << 20}
    assert server.request("POST", "/admin/models", body)[0] == 201
    asked = bodies(100)
    expected = [each.key() for each in said(server, asked)]
    for _ in range(2):
        assert [each.key() for each in said(server, [{**each, "model": "two"} for each in asked])] == expected
    assert list(acceptance(server, "two")) == ["suffix"] and acceptance(server, "two")["suffix"] > 0.5


def test_what_cannot_draft_is_one_line(model: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    for options, says in (
        (drafting(other), f"{other} cannot draft: "),
        (drafting(model, num_speculative_tokens=0), "num_speculative_tokens of speculative_config must be an integer"),
        (drafting(model, num_speculative_tokens=1000), "from 1 to 64, got 1000"),
        (drafting(tmp_path / "nothing"), "cannot draft: There is no file or folder"),
    ):
        command = [sys.executable, "-m", "tokenmill.cli.main", "serve", str(model), "--port", "0", *ARGS, *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2 and says in ended.stderr, ended
        assert ended.stderr.count("\n") == 1 and not ended.stdout, ended
