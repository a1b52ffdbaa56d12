"""kill -9 of the engine under eighteen calls of every kind, against what each gives undisturbed.

The model is random and tiny, with a window on half of its layers and an int8 KV cache, so that an engine is back within
seconds; what is asked mixes streams and whole answers, log probabilities, those of the prompt, penalties, min_tokens,
bias, bad words, grammars, stop strings that end between two tokens, several choices and LoRA. Embeddings are asked of
the same model as one of vectors.

Nothing lost:       every call ends with its answer, whatever is killed meanwhile.
Nothing different:  texts, log probabilities, finish reasons and usage equal the undisturbed run's.

    python tests/live/kill.py [--kills 20] [--seed 0]

It prints the longest pause of each stream (p50, p99, most) beside the time from a kill to the next ready engine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving import Server, wait_until

from adapters import random_pairs, safetensors, write_adapter
from scripted import EOS, SPECIAL, make_text_model
from tiny import tensor
from tokenmill.formats.checkpoint import Checkpoint
from tokenmill.models.config import config_from_checkpoint
from tokenmill.models.roles import expected_shapes

CONTEXT = 4096
METADATA = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 288,
    "max_position_embeddings": CONTEXT, "tie_word_embeddings": False, "use_sliding_window": True, "sliding_window": 40,
    "max_window_layers": 2, "rope_theta": 10000.0, "hidden_act": "silu", "eos_token_id": EOS,
}  # fmt: skip


def write_model(folder: Path, seed: int = 0) -> Path:
    """A model that says anything, and an adapter of it in `folder`/lora."""
    config = config_from_checkpoint(Checkpoint("hf", folder, METADATA, {}))
    values = {}
    for index, (name, shape) in enumerate(sorted(expected_shapes("hf", config).items())):
        rng = np.random.default_rng([seed, index])
        values[name] = (1 if len(shape) == 1 and "norm" in name else 0) + rng.normal(size=shape) * shape[-1] ** -0.5
    arrays = {name: array.astype(np.float32) for name, array in values.items()}
    (folder / "config.json").write_text(json.dumps(METADATA))
    (folder / "model.safetensors").write_bytes(safetensors(arrays))
    (folder / "tokenizer.json").write_text(make_text_model().tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[EOS]}))
    checkpoint = Checkpoint("hf", folder, METADATA, {name: tensor(name, array) for name, array in arrays.items()})
    write_adapter(folder / "lora", random_pairs(checkpoint, modules=("q_proj", "down_proj")))
    return folder


def calls(rng: random.Random, max_tokens: int) -> list[dict[str, Any]]:
    """Eighteen bodies of completions; a half are streamed."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"logprobs": 3},
        {"prompt_logprobs": 2},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        {"min_tokens": max_tokens // 2, "ignore_eos": False},
        {"logit_bias": {"40": 4.0, "41": -100}},
        {"n": 4, "logprobs": 1},
        {"model": "lora"},
        {"model": "lora", "temperature": 0, "logprobs": 2},
        {"bad_words": ["ab", "e"], "top_p": 0.9},
        {"top_k": 20, "min_p": 0.01},
        {"stop": ["never said"]},
    ]
    kinds += [{"stop_of": number} for number in (0, 1, 3, 9)]
    items = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}
    kinds += [
        {"structured_outputs": {"regex": "([a-f]{8},)+"}, "logprobs": 1},
        {"structured_outputs": {"json": {"type": "array", "items": items}}, "n": 2, "ignore_eos": False},
    ]
    bodies = []
    for number, kind in enumerate(kinds):
        prompt = [rng.randrange(3, 250) for _ in range(rng.choice([5, 60, 300]))]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "seed": number, "ignore_eos": True} | kind
        if "stop_of" in kind:  # the same call, with a stop string from the middle of what it says
            body = {**bodies[kind["stop_of"]], "stop_of": kind["stop_of"]}
        bodies.append(body | {"stream": number % 2 == 0 and "prompt_logprobs" not in kind})
    return bodies


@dataclass
class Said:
    """All that a client was told."""

    status: int
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: Any = None
    error: Any = None
    longest_pause_s: float = 0.0

    def key(self) -> str:
        return json.dumps([self.status, sorted(self.choices.items()), self.usage, self.error])

    def add(self, part: dict[str, Any]) -> None:
        self.error = part.get("error", self.error)
        self.usage = part.get("usage") or self.usage
        if self.usage:  # what is in the cache depends on what was asked before
            self.usage.pop("prompt_tokens_details", None)
        for choice in part.get("choices", ()):
            said = self.choices.setdefault(choice["index"], {"text": "", "logprobs": [], "end": None, "stop": None})
            said["text"] += choice["text"]
            said["logprobs"] += (choice.get("logprobs") or {}).get("token_logprobs", [])
            said["end"] = choice["finish_reason"] or said["end"]
            said["stop"] = choice.get("stop_reason") or said["stop"]
            if choice.get("prompt_logprobs"):
                said["prompt"] = choice["prompt_logprobs"]


def ask(server: Server, body: dict[str, Any]) -> Said:
    import http.client

    body = {name: value for name, value in body.items() if name != "stop_of"}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    said, last_s, is_done = Said(response.status), time.monotonic(), not body["stream"]
    for line in response:
        now = time.monotonic()
        said.longest_pause_s, last_s = max(said.longest_pause_s, now - last_s), now
        data = line.removeprefix(b"data: ").strip()
        is_done |= data == b"[DONE]"
        if data and data != b"[DONE]":
            said.add(json.loads(data))
    connection.close()
    assert is_done or said.error, "a stream ended without [DONE]"
    return said


class Killer:
    """Kills the engine, and waits until the next one is ready and has given tokens to all who wait for some."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        self.server = server
        self.rng = rng
        self.ready_s: list[float] = []

    def kill(self) -> None:
        pid = self.server.engine_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        started_s = time.monotonic()
        wait_until(lambda: self.server.engine_pid not in (None, pid), "a new engine")
        wait_until(lambda: self.server.request("GET", "/health")[0] == 200, "the engine's return")
        self.ready_s.append(time.monotonic() - started_s)
        seen = self.num_tokens()
        wait_until(lambda: self.num_tokens() > seen + 300 or self.server.idle(), "tokens")

    def num_tokens(self) -> float:
        return self.server.metrics()["vllm:generation_tokens_total"]


def disturbed(server: Server, bodies: list[dict[str, Any]], killer: Killer, num_kills: int) -> list[Said]:
    """What the calls say while the engine is killed so many times, if they last so long."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        asking = [pool.submit(ask, server, body) for body in bodies]
        for _ in range(num_kills):
            time.sleep(killer.rng.uniform(0.05, 0.4))
            if all(each.done() for each in asking):
                break
            killer.kill()
        return [each.result() for each in asking]


def with_stops(bodies: list[dict[str, Any]], said: list[Said]) -> list[dict[str, Any]]:
    """Stop strings that end what other calls said: seven characters, so that tokens end within them."""
    found = []
    for body in bodies:
        if "stop_of" in body:
            text = said[body["stop_of"]].choices[0]["text"]
            middle = len(text) * 2 // 3
            body = {**body, "stop": [text[middle : middle + 7]]}
        found.append(body)
    return found


ARGS = ("--kv-cache-memory-bytes", "64MiB", "--kv-cache-dtype", "int8", "--served-model-name", "tiny")


def run(num_kills: int, seed: int, max_tokens: int) -> list[str]:
    """What is wrong; prints figures."""
    rng = random.Random(seed)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name))
        lora = ("--enable-lora", "--lora-modules", f"lora={folder / 'lora'}")
        with Server(*ARGS, *lora, "--max-queue-s", "120", model=str(folder)) as server:
            bodies = calls(rng, max_tokens)
            with ThreadPoolExecutor(len(bodies)) as pool:
                bodies = with_stops(bodies, list(pool.map(lambda body: ask(server, body), bodies)))
                expected = list(pool.map(lambda body: ask(server, body), bodies))
            problems += [f"undisturbed: {said.status} {said.error}" for said in expected if said.status != 200]
            killer, pauses = Killer(server, rng), []
            while len(killer.ready_s) < num_kills and not problems:
                given = disturbed(server, bodies, killer, min(4, num_kills - len(killer.ready_s)))
                pauses += [each.longest_pause_s for each, body in zip(given, bodies, strict=True) if body["stream"]]
                for number, (before, after) in enumerate(zip(expected, given, strict=True)):
                    if before.key() != after.key():
                        problems.append(
                            f"call {number}: {after.error or after.key()[:300]}\n   not {before.key()[:300]}"
                        )
            shown = server.metrics()
            print(show(killer.ready_s, pauses), f"{shown['tokenmill:requests_resumed_total']:.0f} resumed")
            problems += [] if shown["tokenmill:requests_resumed_total"] else ["nothing was resumed"]
        problems += vectors(folder, min(num_kills, 3), rng)
    return problems


def difference(found: str, expected: str) -> str:
    """Where two long texts part."""
    pairs = zip(found, expected, strict=False)
    place = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(found), len(expected)))
    return f"at {place}: ...{found[max(0, place - 40) : place + 80]} instead of ...{expected[place : place + 80]}"


def vectors(folder: Path, num_kills: int, rng: random.Random) -> list[str]:
    """The same of embeddings."""
    with Server(*ARGS, "--runner", "pooling", "--max-queue-s", "120", model=str(folder)) as server:
        inputs = [[rng.randrange(3, 250) for _ in range(400)] for _ in range(60)]
        body = {"model": "tiny", "input": inputs}

        def embed() -> tuple[int, Any]:
            status, text = server.request("POST", "/v1/embeddings", body, 120)
            answer = json.loads(text)
            return status, (answer.get("data"), answer.get("usage"))

        expected = embed()
        with ThreadPoolExecutor(4) as pool:
            killer = Killer(server, rng)
            asking = [pool.submit(embed) for _ in range(4)]
            for _ in range(num_kills):
                time.sleep(0.02)
                killer.kill()
            answers = [each.result() for each in asking]
    assert expected[0] == 200, expected
    return [f"embeddings differ: {status}" for status, answer in answers if (status, answer) != expected]


def show(ready_s: list[float], pauses: list[float]) -> str:
    def at(values: list[float], share: float) -> float:
        return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0

    return (
        f"{len(ready_s)} kills; ready after p50 {at(ready_s, 0.5):.2f} s, most {max(ready_s, default=0):.2f} s; pause "
        f"p50 {at(pauses, 0.5):.2f} s, p99 {at(pauses, 0.99):.2f} s, most {max(pauses, default=0):.2f} s;"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 of the engine under streams of every kind.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1500)
    options = parser.parse_args()
    problems = run(options.kills, options.seed, options.max_tokens)
    print("\n".join(problems) or "every call was answered as without a kill")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
