"""LoRA adapters over HTTP: loaded at the start or later, chosen by name, mixed, unloaded, and back after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from serving import Server, wait_until

from adapters import write_adapter
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import ModelNotFound

SMALL = ("--kv-cache-memory-bytes", "200MiB")
WIDTH, FFN, LAYERS, RANK = 576, 1536, 30, 8
PROMPT = "The sea is wide and the"


def smollm2_adapter(folder: Path, seed: int) -> Path:
    """An adapter of the default model that makes it say something else."""
    pairs = {}
    for layer in range(LAYERS):
        for name, num_rows, num_cols in (("self_attn.q_proj", WIDTH, WIDTH), ("mlp.down_proj", WIDTH, FFN)):
            rng = np.random.default_rng([seed, layer, num_cols])
            a = (rng.standard_normal((RANK, num_cols)) * num_cols**-0.5).astype(np.float16)
            b = (rng.standard_normal((num_rows, RANK)) * 0.3).astype(np.float16)
            pairs[f"model.layers.{layer}.{name}"] = (a, b)
    return write_adapter(folder, pairs, rank=RANK, alpha=RANK)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """loras/first, loras/second, loras/escape (a link outside), and other/, which lies beside."""
    root = tmp_path_factory.mktemp("adapters")
    smollm2_adapter(root / "loras" / "first", 1)
    smollm2_adapter(root / "loras" / "second", 2)
    smollm2_adapter(root / "other", 3)
    (root / "loras" / "escape").symlink_to(root / "other")
    return root


def complete(server: Server, model: str, **more: object) -> dict:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    status, text = server.request("POST", "/v1/completions", body)
    assert status == 200, text
    return json.loads(text)


def text_of(server: Server, model: str, **more: object) -> str:
    return complete(server, model, **more)["choices"][0]["text"]


def post(server: Server, what: str, **body: object) -> tuple[int, str]:
    return server.request("POST", f"/v1/{what}_lora_adapter", body)


def test_adapters_come_go_and_survive_a_crash(smollm2: Path, folders: Path) -> None:
    loras = folders / "loras"
    with Server(*SMALL, "--lora-modules", f"first={loras / 'first'}", "--lora-dir", str(loras)) as server:
        base, first = text_of(server, "smollm2"), text_of(server, "first")
        assert base != first
        assert complete(server, "first")["model"] == "first"

        status, said = post(server, "load", lora_name="second", lora_path="second")
        assert (status, said) == (200, "Success: LoRA adapter 'second' added successfully.")
        second = text_of(server, "second")
        assert second not in (base, first)
        cards = json.loads(server.request("GET", "/v1/models")[1])["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("smollm2", None),
            ("first", "smollm2"),
            ("second", "smollm2"),
        ]

        with ThreadPoolExecutor(9) as pool:  # all three in the same steps
            mixed = list(pool.map(lambda model: text_of(server, model), ["smollm2", "first", "second"] * 3))
        assert mixed == [base, first, second] * 3

        for name, path, said in (
            ("second", "second", "loaded already"),
            ("smollm2", "second", "not the model's own"),
            ("third", "../other", "does not lie inside"),
            ("third", str(folders / "other"), "does not lie inside"),
            ("third", "escape", "does not lie inside"),
            ("third", "nothing", "no adapter_config.json"),
            ("third", "a\0b", "must be the path of a folder"),
            ("", "second", "lora_name must be a string that is not empty"),
        ):
            status, answer = post(server, "load", lora_name=name, lora_path=path)
            assert status == 400 and said in answer, (name, path, answer)

        engine = server.engine_pid
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: server.engine_pid not in (None, engine), "a new engine")
        wait_until(lambda: server.request("GET", "/health")[0] == 200, "the engine's return")
        assert [text_of(server, model) for model in ("smollm2", "first", "second")] == [base, first, second]

        # Other content under the same name: never the KV, nor the answer, of the content before.
        smollm2_adapter(loras / "third", 3)
        assert post(server, "load", lora_name="second", lora_path="third", load_inplace=True)[0] == 200
        answer = complete(server, "second")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert answer["choices"][0]["text"] not in (base, first, second)

        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(complete, server, "first", max_tokens=400)
            wait_until(lambda: server.metrics()["vllm:num_requests_running"] == 1, "the long request")
            assert post(server, "unload", lora_name="first")[0] == 200
            assert server.request("POST", "/v1/completions", {"model": "first", "prompt": PROMPT})[0] == 404
            answer = running.result()
        assert answer["usage"]["completion_tokens"] == 400
        assert answer["choices"][0]["text"].startswith(first)
        assert post(server, "unload", lora_name="first")[0] == 404
        assert post(server, "load", lora_name="first", lora_path="first")[0] == 200
        assert text_of(server, "first") == first


def test_without_a_folder_nothing_is_loaded_over_http(smollm2: Path, folders: Path) -> None:
    with Server(*SMALL, "--enable-lora") as server:
        status, said = post(server, "load", lora_name="x", lora_path=str(folders / "loras" / "first"))
        assert status == 400 and "--lora-dir" in said


@pytest.mark.sampled(1 / 3)
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--lora-modules", "x={}/nothing"), "has no adapter_config.json"),
        (("--lora-modules", "x={}/loras/first", "--max-lora-rank", "4"), "larger --max-lora-rank"),
        (("--lora-modules", "smollm2={}/loras/first"), "names of their own"),
        (("--lora-modules", "nonsense"), "must be NAME=PATH"),
        (("--max-loras", "3"), "need --enable-lora"),
    ],
)
def test_what_cannot_be_served_is_told_at_the_start(smollm2: Path, folders: Path, flags: tuple, said: str) -> None:
    command = [sys.executable, "-m", "tokenmill.cli.main", "serve", "smollm2", "--port", "0", *SMALL]
    command += [flag.format(folders) for flag in flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and said in done.stderr, done.stderr


def test_in_process(smollm2: Path, folders: Path) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with LLM(str(smollm2), enable_lora=True, kv_cache_memory_bytes=200 << 20) as llm:
        llm.load_adapter("first", str(folders / "loras" / "first"))
        base = llm.generate(PROMPT, greedy)[0].text
        adapted = llm.generate(PROMPT, greedy, lora="first")[0].text
        assert base != adapted
        llm.unload_adapter("first")
        with pytest.raises(ModelNotFound, match="load it with load_adapter"):
            llm.generate(PROMPT, greedy, lora="first")
        assert llm.generate(PROMPT, greedy)[0].text == base


@pytest.mark.sampled(1 / 3)
def test_dora_of_everything_at_rank_64(smollm2: Path, tmp_path: Path) -> None:
    """On a quantised model: a linear, the embedding and the tied head, in the same steps as the model itself, and the
    same as the rest of the time."""
    rng = np.random.default_rng(1)

    def half(*shape: int, size: float) -> np.ndarray:
        return (rng.standard_normal(shape) * size).astype(np.float16)

    vocabulary = 49_152
    pairs = {
        "model.layers.3.self_attn.q_proj": (half(64, WIDTH, size=0.05), half(WIDTH, 64, size=0.05)),
        "model.embed_tokens": (half(64, vocabulary, size=0.05), half(WIDTH, 64, size=0.05)),
        "lm_head": (half(64, WIDTH, size=0.02), half(vocabulary, 64, size=0.02)),
    }
    lengths = {module: np.full(len(b), 1.0, np.float32) for module, (_, b) in pairs.items()}
    copied = {"lm_head": np.zeros((vocabulary, WIDTH), np.float16)}
    folder = write_adapter(tmp_path / "big", pairs, rank=64, alpha=64, magnitudes=lengths, copied=copied)
    with Server(*SMALL, "--lora-modules", f"big={folder}", "--max-lora-rank", "64", "--max-loras", "1") as server:
        base, big = text_of(server, "smollm2"), text_of(server, "big")
        assert base != big
        with ThreadPoolExecutor(6) as pool:
            mixed = list(pool.map(lambda model: text_of(server, model), ["smollm2", "big"] * 3))
        assert mixed == [base, big] * 3
    with Server(*SMALL) as server:
        assert text_of(server, "smollm2") == base
