"""kill -9 of engines and front ends under streams and whole answers: what is billed against what clients received.

The engine:     every call ends with its answer, and what is billed equals what the answers tell, to the token.
The front end:  never less than clients received; of streams at most the tokens of one message of the engine more (a
                step's, or of the two in flight, since steps of this model end faster than they are told), of whole
                answers at most those that were under way.

The model is that of kill.py. It says letters alone, a token each, so that what a client received of a stream can be
counted from its text.

    python tests/live/kill_usage.py [--engine-kills 100] [--front-end-kills 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from kill import ARGS, Killer, write_model
from serving import Server

from scripted import make_text_model
from tokenmill.control.usage.ledger import Ledger
from tokenmill.control.usage.question import Question

LETTERS = "abcdefghijklmnopqrstuvwxyz"
STEPS = 2
"""That one message may tell of."""
STREAMED, WHOLE = "tiny", "lora"
"""Models, so that the two are billed apart."""


@dataclass
class Got:
    """What one call's client received. `prompt`: of its body; it is owed as soon as anything was received."""

    model: str
    prompt: int
    output: int = 0
    is_complete: bool = False
    usage: dict[str, Any] | None = None


def letters() -> list[int]:
    tokenizer = make_text_model().tokenizer
    return [tokenizer.encode(letter, add_special=False)[0] for letter in LETTERS]


def bodies(rng: random.Random, number: int, max_tokens: int) -> list[dict[str, Any]]:
    """Streams that are passed on, streams that are read (log probabilities), and whole answers."""
    allowed, found = letters(), []
    for index in range(number):
        body: dict[str, Any] = {
            "model": STREAMED,
            "prompt": [rng.randrange(3, 250) for _ in range(rng.choice([4, 30, 120]))],
            "max_tokens": rng.randrange(max_tokens // 2, max_tokens),
            "allowed_token_ids": allowed,
            "ignore_eos": True,
            "stream": index % 3 != 2,
        }
        if index % 3 == 1:
            body["logprobs"] = 1
        if index % 3 == 2:
            body |= {"model": WHOLE, "max_tokens": rng.randrange(1, max_tokens // 2)}
        found.append(body)
    return found


def ask(port: int, body: dict[str, Any], heard: threading.Semaphore | None = None) -> Got:
    """What a client received of a call. `heard` is released once for each event of a stream."""
    got = Got(body["model"], len(body["prompt"]))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        options = {"stream_options": {"include_usage": True}} if body["stream"] else {}
        connection.request("POST", "/v1/completions", json.dumps(body | options), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status in (200, 503), response.status
        if response.status == 503:
            return got
        if not body["stream"]:
            got.usage = json.loads(response.read())["usage"]
            got.output, got.is_complete = got.usage["completion_tokens"], True
            return got
        for line in response:
            if line == b"data: [DONE]\n":
                got.is_complete = True
            elif line.startswith(b"data: "):
                event = json.loads(line[6:])
                if heard:
                    heard.release()
                got.usage = event.get("usage") or got.usage
                got.output += sum(len(choice["text"]) for choice in event["choices"])
    return got


def billed(folder: Path) -> dict[str, tuple[int, int, int]]:
    """(calls, prompt tokens, output tokens) of each model, all that was ever counted in the folder."""
    ledger = Ledger(folder)
    ledger.fold()
    sums = ledger.ask(Question(0, 2**40 // 86400 * 86400, 86400, ("model",), (), 0))
    ledger.close()
    found: dict[str, tuple[int, int, int]] = {STREAMED: (0, 0, 0), WHOLE: (0, 0, 0)}
    for each in sums:
        calls, prompt, output = found[each.model]
        found[each.model] = (calls + each.calls, prompt + each.prompt, output + each.output)
    return found


def lora_of(model: Path) -> tuple[str, ...]:
    return ("--enable-lora", "--lora-modules", f"{WHOLE}={model / 'lora'}", "--max-queue-s", "120")


def engine_kills(model: Path, folder: Path, rng: random.Random, num_kills: int, max_tokens: int) -> list[str]:
    """What is wrong after so many kills of the engine."""
    problems: list[str] = []
    with Server(*ARGS, *lora_of(model), "--usage-dir", str(folder), model=str(model)) as server:
        killer, given = Killer(server, rng), []
        while len(killer.ready_s) < num_kills:
            with ThreadPoolExecutor(12) as pool:
                asking = [pool.submit(ask, server.port, body) for body in bodies(rng, 12, max_tokens)]
                for _ in range(min(4, num_kills - len(killer.ready_s))):
                    time.sleep(rng.uniform(0.05, 0.4))
                    if all(each.done() for each in asking):
                        break
                    killer.kill()
                given += [each.result() for each in asking]
        resumed = server.metrics()["tokenmill:requests_resumed_total"]
    problems += [f"a call did not end: {got}" for got in given if not got.is_complete]
    problems += [
        f"{got.usage} was told of {got}"
        for got in given
        if got.usage is None or (got.usage["prompt_tokens"], got.usage["completion_tokens"]) != (got.prompt, got.output)
    ]
    for name, found in billed(folder).items():
        mine = [got for got in given if got.model == name]
        owed = (len(mine), sum(got.prompt for got in mine), sum(got.output for got in mine))
        problems += [] if found == owed else [f"{name}: billed {found}, received {owed}"]
    problems += [] if resumed or not num_kills else ["nothing was resumed"]
    tokens = sum(got.output for got in given)
    print(f"{len(killer.ready_s)} kills of the engine: {len(given)} calls, {tokens} tokens, {resumed:.0f} resumed")
    return problems


def front_end_kills(model: Path, folder: Path, rng: random.Random, num_kills: int, max_tokens: int) -> list[str]:
    """What is wrong after so many kills of all of a server's processes, each in the middle of twelve calls.

    Each comes when clients have heard so many events, which is fewer than one of their streams has."""
    problems: list[str] = []
    over: dict[str, list[int]] = {STREAMED: [], WHOLE: []}
    num_received = num_cut = 0
    before = billed(folder)
    for number in range(num_kills):
        with Server(*ARGS, *lora_of(model), "--usage-dir", str(folder), model=str(model)) as server:
            heard, num_events = threading.Semaphore(0), rng.randrange(1, max_tokens // 4)
            with ThreadPoolExecutor(12) as pool:
                asking = [pool.submit(ask, server.port, body, heard) for body in bodies(rng, 12, max_tokens)]
                for _ in range(num_events):
                    assert heard.acquire(timeout=60), f"clients have not heard {num_events} events"
                os.killpg(server.process.pid, signal.SIGKILL)
                given = [each.result() for each in asking]
            server.process.wait()
        after = billed(folder)
        for name in (STREAMED, WHOLE):
            calls, prompt, output = (new - old for new, old in zip(after[name], before[name], strict=True))
            mine = [got for got in given if got.model == name]
            heard = [got for got in mine if got.output]
            owed = sum(got.output for got in heard)
            num_received += owed
            num_cut += sum(not got.is_complete for got in heard)
            is_open = [got for got in mine if not got.is_complete]
            most = STEPS * len(is_open) if name == STREAMED else max_tokens * len(is_open)
            over[name].append(output - owed)
            if not (owed <= output <= owed + most and calls >= len(heard)):
                problems.append(f"kill {number}, {name}: {owed} received, {output} billed, {len(is_open)} open")
            least = sum(got.prompt for got in heard)
            if not least <= prompt <= least + sum(got.prompt for got in mine if not got.output):
                problems.append(f"kill {number}, {name}: {least} of prompts owed, {prompt} billed")
        before = after
    told = "; ".join(
        f"{name}: {sum(map(bool, each))} times over, by {max(each, default=0)} at most" for name, each in over.items()
    )
    print(f"{num_kills} kills of the front end: {num_received} tokens received, {num_cut} streams cut; {told}")
    problems += ["a journal is damaged"] if list(folder.glob("*.damaged")) else []
    problems += [] if num_cut or not num_kills else ["no stream was cut"]
    return problems


def run(num_engine: int, num_front_end: int, seed: int, max_tokens: int) -> list[str]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        model.mkdir()
        write_model(model)
        problems = []
        for kind, number in ((engine_kills, num_engine), (front_end_kills, num_front_end)):
            folder = Path(name) / kind.__name__
            folder.mkdir()
            problems += kind(model, folder, rng, number, max_tokens)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description="kill -9 under streams: what is billed is what was received.")
    parser.add_argument("--engine-kills", type=int, default=100)
    parser.add_argument("--front-end-kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=1200)
    options = parser.parse_args()
    problems = run(options.engine_kills, options.front_end_kills, options.seed, options.max_tokens)
    print("\n".join(problems) or "billed is what clients received")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
