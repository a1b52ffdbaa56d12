"""How soon a server that was started again answers about a document that it knows from before, and about a new one.

    python tests/bench/bench_kv_restart.py [--tokens 4000] [--rounds 5] [--uses 2] [--kill] [--folder DIR]

In each round one server is asked about a document of random words `--uses` times, with other questions, and stopped
(with --kill: killed with all its processes, two seconds after the last answer). The next one, with the same folder, is
asked about that document, and about another of the same length that nobody has seen: the time to the first token of
each, in an order that changes from round to round. It has answered a short prompt before. The answers of before and
after the restart must be the same tokens.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "live"))

from serving import Server

QUESTION_TOKENS, ANSWER_TOKENS = 20, 8


def ask(server: Server, prompt: list[int], max_tokens: int = ANSWER_TOKENS) -> tuple[float, list[int], int]:
    """Seconds to the first token, all tokens, and how many of the prompt were cached."""
    body = {
        "model": server.model, "prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    began_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200, response.read()
    first_s, tokens, num_cached = 0.0, [], 0
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        told = json.loads(line[6:])
        assert "error" not in told, told
        for choice in told["choices"]:
            first_s = first_s or time.perf_counter() - began_s
            tokens += choice.get("token_ids") or []
        if told.get("usage"):
            num_cached = (told["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    connection.close()
    return first_s, tokens, num_cached


def document(rng: random.Random, num_tokens: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(num_tokens)]


def end(server: Server, is_killed: bool) -> None:
    if is_killed:
        time.sleep(2)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--uses", type=int, default=2)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="on the file system to be measured (default: a temporary one)")
    parser.add_argument("args", nargs="*", help="more options of serve, after --")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    known_s, new_s, ratios, starts_s = [], [], [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        options = ("--kv-disk", f"{folder}:4GB", "--kv-host", "512MB", "--max-model-len", "8192", *args.args)
        for nth in range(args.rounds):
            seen, unseen = document(rng, args.tokens), document(rng, args.tokens)
            questions = [document(rng, QUESTION_TOKENS) for _ in range(args.uses)]
            with Server(*options) as server:
                before = [ask(server, seen + question)[1] for question in questions]
                end(server, args.kill)
            began_s = time.perf_counter()
            with Server(*options) as server:
                starts_s.append(time.perf_counter() - began_s)
                ask(server, document(rng, 40))
                order = [seen + questions[0], unseen + questions[0]]
                found = [ask(server, prompt) for prompt in (order if nth % 2 else order[::-1])]
                known, new = found if nth % 2 else found[::-1]
                again = [known[1], *(ask(server, seen + question)[1] for question in questions[1:])]
                end(server, args.kill)
            assert again == before, "the answers after the restart are other ones"
            known_s.append(known[0])
            new_s.append(new[0])
            ratios.append(new[0] / known[0])
            print(
                f"round {nth}: known {known[0] * 1e3:.0f} ms ({known[2]} tokens cached), new {new[0] * 1e3:.0f} ms"
                f" ({new[2]} cached): {ratios[-1]:.1f} times",
                flush=True,
            )
    print(
        f"first token on {args.tokens} tokens after a restart: known {statistics.median(known_s) * 1e3:.0f} ms"
        f" ({min(known_s) * 1e3:.0f} to {max(known_s) * 1e3:.0f}), new {statistics.median(new_s) * 1e3:.0f} ms"
        f" ({min(new_s) * 1e3:.0f} to {max(new_s) * 1e3:.0f}): {statistics.median(ratios):.1f} times"
        f" ({min(ratios):.1f} to {max(ratios):.1f}); ready after {statistics.median(starts_s):.1f} s;"
        f" {'killed' if args.kill else 'stopped'}, {args.rounds} rounds"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
