"""Many mixed requests at once, against what each gets alone.

A plan of requests is drawn from a seed: prompts of 1 to --max-tokens tokens (log-uniform, a third on shared
prefixes), greedy and seeded sampling, streams and whole answers, log probabilities, two choices; a tenth are cancelled
in mid-stream and a tenth are invalid. All of it is sent at once, three rounds over, to a server whose KV pool is far
too small for it; then every completed request is sent again alone under a fresh cache salt, so that nothing is shared
and nothing runs beside it.

Nothing lost:      every request ends with its answer, its 4xx, or its own cancellation.
Nothing different: text, tokens' log probabilities, finish reason and counts equal the solo run's, in every round.
Nothing leaked:    after each round no block is held, no request is open, and neither process has more files open;
                   memory after the last round is that after the first, within 2 % and 8 MiB.

    python tests/live/stress.py [--requests 200] [--max-tokens 4000] [--rounds 3] [--seed 0] [--backend auto]
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import re
import sys
import time
from dataclasses import dataclass
from typing import Any

import openai
from serving import Server, open_files, resident_bytes, wait_until

from tokenmill.core.units import parse_bytes

KV_BYTES_PER_TOKEN = 23040  # of smollm2 with an f16 cache
VOCABULARY = range(1000, 40000)
INVALID: tuple[tuple[dict[str, Any], int], ...] = (
    ({"max_tokens": -1}, 400),
    ({"temperature": "hot"}, 400),
    ({"top_p": 7}, 400),
    ({"model": "no-such-model"}, 404),
    ({"max_tokens": 100_000}, 400),
    ({"n": 0}, 400),
)


@dataclass(frozen=True)
class Planned:
    """One request. expect: "answer", "cancel" (after a few chunks) or the status of a refusal."""

    number: int
    body: dict[str, Any]
    expect: str | int
    stream: bool

    @property
    def may_run(self) -> bool:
        return isinstance(self.expect, str)


@dataclass(frozen=True)
class Choice:
    text: str
    finish_reason: str | None
    logprobs: tuple[float, ...]


Outcome = tuple[Choice, ...] | str | int


def plan(seed: int, num_requests: int, max_tokens: int) -> list[Planned]:
    rng = random.Random(seed)
    max_output = min(64, max(8, max_tokens // 16))
    prefixes = [[rng.choice(VOCABULARY) for _ in range(max_tokens)] for _ in range(4)]
    planned = []
    for number in range(num_requests):
        length = max(1, min(max_tokens, round(max_tokens ** rng.random())))
        shared = rng.randrange(length) if rng.random() < 0.33 else 0
        prompt = rng.choice(prefixes)[:shared] + [rng.choice(VOCABULARY) for _ in range(length - shared)]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.randint(1, max_output)}
        body |= {"temperature": 0.0} if rng.random() < 0.5 else {"temperature": 0.8, "top_p": 0.95}
        body["seed"] = number
        if rng.random() < 0.3:
            body["logprobs"] = 2
        if rng.random() < 0.15:
            body["n"] = 2
        if rng.random() < 0.2:
            body["stop"] = ["the", "."]
        if rng.random() < 0.2:
            body["extra"] = {"priority": rng.randint(-2, 2)}
        expect: str | int = "answer"
        stream = rng.random() < 0.5
        if number % 10 == 3:
            expect, stream = "cancel", True
            body |= {"max_tokens": 4 * max_output, "extra": {"ignore_eos": True}}
        elif number % 10 == 7:
            wrong, expect = rng.choice(INVALID)
            body |= wrong
        planned.append(Planned(number, body, expect, stream))
    return planned


async def send(client: openai.AsyncOpenAI, request: Planned, salt: str | None = None) -> Outcome:
    """The choices of an answer, the status of a refusal, or "cancelled"."""
    body = {"model": "smollm2", **request.body}
    extra = body.pop("extra", {}) | ({"cache_salt": salt} if salt else {})
    try:
        answer = await client.completions.create(**body, stream=request.stream, extra_body=extra)
        if not request.stream:
            return tuple(
                Choice(
                    choice.text, choice.finish_reason, tuple(choice.logprobs.token_logprobs if choice.logprobs else ())
                )
                for choice in answer.choices
            )
        texts: dict[int, str] = {}
        ends: dict[int, str | None] = {}
        logprobs: dict[int, list[float]] = {}
        chunks = 0
        async for chunk in answer:
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
                ends[choice.index] = choice.finish_reason or ends.get(choice.index)
                if choice.logprobs:
                    logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            chunks += 1
            if request.expect == "cancel" and chunks >= 1 + request.number % 5:
                await answer.close()
                return "cancelled"
        return tuple(Choice(texts[i], ends[i], tuple(logprobs.get(i, ()))) for i in sorted(texts))
    except openai.APIStatusError as refusal:
        return refusal.status_code


def check(request: Planned, outcome: Outcome, solo: Outcome | None) -> str | None:
    """What is wrong with an outcome, or None."""
    if request.expect == "cancel":
        return None if outcome == "cancelled" else f"was to be cancelled, ended as {outcome}"
    if isinstance(request.expect, int):
        return None if outcome == request.expect else f"expected status {request.expect}, got {outcome}"
    if not isinstance(outcome, tuple) or any(choice.finish_reason not in ("stop", "length") for choice in outcome):
        return f"was not answered: {outcome}"
    if len(outcome) != request.body.get("n", 1):
        return f"has {len(outcome)} choices"
    return None if outcome == solo else f"differs from its solo run:\n    {outcome}\n    {solo}"


def plan_bytes(server: Server) -> int:
    """What the printed plan says all processes hold at most."""
    found = re.search(r"at most ([\d.]+ \w+) \(", server.output)
    assert found is not None, server.output
    return parse_bytes(found[1], "plan")


@dataclass
class Report:
    """`problems` is empty when all went well; the rest is for the reader."""

    problems: list[str]
    lines: list[str]


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=1200)


async def rounds_and_solo(server: Server, requests: list[Planned], num_rounds: int, report: Report) -> None:
    outcomes: list[list[Outcome]] = []
    memory: list[list[int]] = []
    files: list[list[int]] = []
    pids = (server.process.pid, server.engine_pid)
    for number in range(num_rounds):
        start = time.monotonic()
        async with client_of(server) as client:  # its connections are closed when files are counted
            outcomes.append(list(await asyncio.gather(*(send(client, request) for request in requests))))
        await asyncio.to_thread(wait_until, server.idle, "no request open and no block held")
        memory.append([resident_bytes(pid) for pid in pids])
        files.append([open_files(pid) for pid in pids])
        report.lines.append(
            f"round {number + 1}: {time.monotonic() - start:.1f} s, memory (front end, engine) "
            + ", ".join(f"{size / 2**20:.1f} MiB" for size in memory[-1])
        )
    planned, held = plan_bytes(server), sum(resident_bytes(pid) for pid in server.pids())
    report.lines.append(f"all processes hold {held / 2**20:.1f} MiB of at most {planned / 2**20:.1f} MiB")
    if held > planned:
        report.problems.append(f"all processes hold {held} bytes, the plan said at most {planned}")
    if (server.process.pid, server.engine_pid) != pids:
        report.problems.append("the engine process was restarted")
    for name, first, last in zip(("front end", "engine"), memory[0], memory[-1], strict=True):
        if last > first * 1.02 + 8 * 2**20:
            report.problems.append(f"the {name}'s memory grew from {first} to {last} bytes")
    for name, first, last in zip(("front end", "engine"), files[0], files[-1], strict=True):
        if last > first + 2:
            report.problems.append(f"the {name} has {last} files open, {first} after the first round")

    start = time.monotonic()
    async with client_of(server) as client:
        for index, request in enumerate(requests):
            solo = None
            if request.expect == "answer":
                alone = dataclasses.replace(request, stream=False)
                solo = await send(client, alone, salt=f"solo-{index}")
            for number in range(num_rounds):
                problem = check(request, outcomes[number][index], solo)
                if problem:
                    report.problems.append(f"request {index}, round {number + 1}: {problem}")
    report.lines.append(f"solo runs: {time.monotonic() - start:.1f} s")
    values = server.metrics()
    report.lines.append(
        f"preemptions {values['vllm:num_preemptions_total']:.0f}, prefix hits "
        f"{values['vllm:prefix_cache_hits_total']:.0f} of {values['vllm:prefix_cache_queries_total']:.0f} tokens"
    )


def run(num_requests: int, max_tokens: int, num_rounds: int, seed: int, backend: str) -> Report:
    requests = plan(seed, num_requests, max_tokens)
    answered = [request for request in requests if request.expect == "answer"]
    wanted = sum(len(request.body["prompt"]) for request in answered)
    # Room for the longest request, or a fifth of all of them: eviction is certain, preemption likely.
    longest = max(len(request.body["prompt"]) + request.body["max_tokens"] for request in requests if request.may_run)
    pool_tokens = max(longest + 64, wanted // 5)
    report = Report([], [f"{num_requests} requests (seed {seed}), {wanted} prompt tokens, pool {pool_tokens} tokens"])
    pool = ("--kv-cache-memory-bytes", str(pool_tokens * KV_BYTES_PER_TOKEN))
    with Server(*pool, "--backend", backend, "--max-queue-s", "3600", "--max-priority", "-2") as server:
        asyncio.run(rounds_and_solo(server, requests, num_rounds, report))
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=4000, help="longest prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto")
    args = parser.parse_args()
    report = run(args.requests, args.max_tokens, args.rounds, args.seed, args.backend)
    print("\n".join(report.lines))
    for problem in report.problems:
        print("PROBLEM:", problem)
    print("stress: " + (f"{len(report.problems)} problems" if report.problems else "nothing lost, leaked or different"))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
