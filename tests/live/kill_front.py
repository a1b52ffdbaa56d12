"""kill -9 of the front end under streams of three APIs, whose clients come back by the id of the last event they had.

Each client also drops its own connection now and then. What it is told in all its connections together is compared with
what one undisturbed connection is told: the same events, numbered without a gap, and nothing twice. Then what is billed
is compared with what the answers tell.

The model is that of kill.py, with a template for chats.

    python tests/live/kill_front.py [--kills 50] [--seed 0] [--model smollm2] [--workers 2 | 1:1]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from kill import ARGS, write_model
from serving import Server

from scripted import EOS, SPECIAL
from tokenmill.control.usage.ledger import Ledger
from tokenmill.control.usage.question import Question

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
GRACE_S = 60
LONGEST_S = 200.0
QUIET_S = 30.0
ENDS = (b"[DONE]", b"response.completed", b"response.incomplete", b"message_stop")
_CHANGING = re.compile(
    rb'"(created|created_at|completed_at|cached_tokens|cache_read_input_tokens)":\s*[\d.]+|"input_tokens":\d+,'
)


@dataclass
class Heard:
    """What one client has heard of its stream: its events by their numbers. quiet: connections that it gave up."""

    events: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    problems: list[str] = field(default_factory=list)
    quiet: list[str] = field(default_factory=list)

    def take(self, event: bytes) -> None:
        head, _, rest = event.partition(b"\n")
        number = int(head.removeprefix(b"id: "))
        if number != len(self.events) + 1:
            self.problems.append(f"event {number} came behind {len(self.events)} others")
        self.events.append(rest)

    @property
    def is_whole(self) -> bool:
        return bool(self.events) and any(mark in self.events[-1] for mark in ENDS)

    def said(self, name: str) -> bytes:
        """All events, without what differs from call to call."""
        data = b"\n".join(self.events)
        for found in set(re.findall(rb'"((?:chatcmpl|cmpl|resp|msg)[-_][0-9A-Za-z_-]+)"', data)):
            data = data.replace(found, b"ID")
        return _CHANGING.sub(b"", data.replace(name.encode(), b"NAME"))


def calls(rng: random.Random, model: str, max_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """(path, body) of streams of one choice."""
    said = {"model": model, "stream": True, "temperature": 1.0}
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"logprobs": 2},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4},
        {"stop": ["q", "zz"]},
        {"structured_outputs": {"regex": "([a-f]{8},)+"}},
        {"return_token_ids": True},
    ]
    found = []
    for number, kind in enumerate(kinds):
        prompt = [rng.randrange(3, 250) for _ in range(rng.choice([5, 60, 300]))]
        body = said | {"prompt": prompt, "max_tokens": max_tokens, "seed": number, "ignore_eos": True} | kind
        found.append(("/v1/completions", body | {"stream_options": {"include_usage": True}}))
    words = "".join(rng.choice("abcdefgh ") for _ in range(40))
    messages = [{"role": "user", "content": words}]
    chat = said | {"messages": messages, "seed": 7, "ignore_eos": True, "stream_options": {"include_usage": True}}
    found.append(("/v1/chat/completions", chat | {"max_tokens": max_tokens}))
    found.append(("/v1/chat/completions", chat | {"max_tokens": max_tokens, "logprobs": True, "top_logprobs": 2}))
    found.append(("/v1/responses", said | {"input": words, "max_output_tokens": max_tokens, "temperature": 0}))
    found.append(("/v1/messages", said | {"messages": messages, "max_tokens": max_tokens, "temperature": 0}))
    return found


class Clients:
    """port: of the server there is now."""

    def __init__(self, port: int, rng: random.Random, drop_rate: float) -> None:
        self.port = port
        self._rng = rng
        self._drop_rate = drop_rate
        self._lock = threading.Lock()

    def ask(self, path: str, body: dict[str, Any], name: str) -> Heard:
        heard, until_s = Heard(), time.monotonic() + LONGEST_S
        while not heard.is_whole and not heard.problems:
            if time.monotonic() > until_s:
                quiet = "; ".join(heard.quiet)
                heard.problems.append(f"no end after {LONGEST_S} s and {len(heard.events)} events; {quiet}")
            port = self.port
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=QUIET_S)
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                try:
                    self._read(connection, path, body, name, heard)
                except TimeoutError:
                    heard.quiet.append(f"nothing for {QUIET_S} s behind {len(heard.events)} events at port {port}")
            time.sleep(0.05)
        return heard

    def _read(
        self, connection: http.client.HTTPConnection, path: str, body: dict[str, Any], name: str, heard: Heard
    ) -> None:
        status = 404
        if heard.num_connections:
            connection.request("GET", f"/v1/requests/{name}/stream?after={len(heard.events)}")
            response = connection.getresponse()
            status = response.status
            if status == 404:  # killed before the call was in the file: then nothing of it has gone out
                response.read()
                if heard.events:
                    heard.problems.append("the stream is not known any more")
                    return
        if status == 404:
            headers = {"Content-Type": "application/json", "X-Request-Id": name, "x-tokenmill-resume": "true"}
            heard.num_connections += 1
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
        heard.num_connections += 1
        if response.status != 200:
            heard.problems.append(f"{response.status}: {response.read()[:300]!r}")
            return
        with self._lock:
            drops_after = self._rng.randrange(1, 60) if self._rng.random() < self._drop_rate else 1 << 30
        parts: list[bytes] = []
        for line in response:
            parts.append(line)
            if line == b"\n":
                heard.take(b"".join(parts)[:-2])
                parts = []
                drops_after -= 1
                if drops_after == 0:
                    return


def billed(folder: Path) -> tuple[int, int, int]:
    """(calls, prompt tokens, output tokens) of all that was ever counted in the folder."""
    ledger = Ledger(folder)
    ledger.fold()
    sums = ledger.ask(Question(0, 2**40 // 86400 * 86400, 86400, ("model",), (), 0))
    ledger.close()
    return sum(each.calls for each in sums), sum(each.prompt for each in sums), sum(each.output for each in sums)


def owed(heard: Heard) -> tuple[int, int]:
    """(prompt tokens, output tokens) as the answer tells them."""
    num_prompt = num_output = 0
    for event in heard.events:
        data = event.rpartition(b"data: ")[2]
        body = {} if data == b"[DONE]" else json.loads(data)
        for usage in (body.get("usage"), body.get("response", {}).get("usage"), body.get("message", {}).get("usage")):
            given = usage or {}
            cached = given.get("cache_read_input_tokens") or 0
            num_prompt = max(num_prompt, given.get("prompt_tokens", 0), given.get("input_tokens", 0) + cached)
            num_output = max(num_output, given.get("completion_tokens", 0), given.get("output_tokens", 0))
    return num_prompt, num_output


def run(
    num_kills: int, seed: int, max_tokens: int, model: str = "", drop_rate: float = 0.5, more: tuple[str, ...] = ()
) -> list[str]:
    """What is wrong after so many kills. `more`: arguments of the server."""
    rng = random.Random(seed)
    problems: list[str] = []
    quiet: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tokenmill-front-") as folder:
        path = model or str(write_model(Path(folder)))
        if not model:
            config = {"eos_token": SPECIAL[EOS], "chat_template": TEMPLATE}
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        usage = Path(folder) / "usage"
        args = (
            *(ARGS if not model else ("--kv-cache-memory-bytes", "256MiB")),
            "--resume-file", f"{folder}/resume.db", "--resume-grace-s", str(GRACE_S), "--usage-dir", str(usage),
            "--served-model-name", "tiny", *more,
        )  # fmt: skip
        adapters = [] if model else ["named", "late"]
        if adapters:
            shutil.copytree(Path(folder) / "lora", Path(folder) / "loras" / "late")
            args += (
                "--enable-lora", "--lora-modules", f"named={folder}/lora", "--lora-dir", f"{folder}/loras",
            )  # fmt: skip
        server = Server(*args, model=path).__enter__()
        clients = Clients(server.port, rng, 0.0)
        bodies = calls(rng, "tiny", max_tokens)
        if adapters:
            status, said = server.request("POST", "/v1/load_lora_adapter", {"lora_name": "late", "lora_path": "late"})
            assert status == 200, said
        for adapter in adapters:  # one that the flags name, and one that was loaded at run time
            where, body = bodies[0]
            bodies.append((where, body | {"model": adapter}))
        rows = [0, 0]
        num_calls = 0

        def ask(number: int, name: str) -> Heard:
            return clients.ask(*bodies[number], name)

        def check(heard: list[Heard], names: list[str]) -> None:
            nonlocal num_calls
            for number, (each, name) in enumerate(zip(heard, names, strict=True)):
                problems.extend(f"{bodies[number][0]} {number}: {problem}" for problem in each.problems)
                quiet.extend(f"{bodies[number][0]} {number} {name}: {word}" for word in each.quiet)
                num_calls += 1
                rows[:] = (total + more for total, more in zip(rows, owed(each), strict=True))
                said = each.said(name)
                if said != wanted[number]:
                    problems.append(f"{bodies[number][0]} {number} differs: {difference(said, wanted[number])}")

        names = [f"plain-{number}" for number in range(len(bodies))]
        plain = [ask(number, name) for number, name in enumerate(names)]
        wanted = [each.said(name) for each, name in zip(plain, names, strict=True)]
        check(plain, names)
        num_killed, num_reconnects, num_rounds = 0, 0, 0
        longest_s = 0.0
        clients = Clients(server.port, rng, drop_rate)
        try:
            while num_killed < num_kills and not problems:
                num_rounds += 1
                names = [f"round-{num_rounds}-{number}" for number in range(len(bodies))]
                with ThreadPoolExecutor(len(bodies)) as pool:
                    asking = [pool.submit(ask, number, name) for number, name in enumerate(names)]
                    while num_killed < num_kills:
                        time.sleep(rng.uniform(0.05, 1.5))
                        if all(each.done() for each in asking):
                            break
                        os.kill(server.process.pid, signal.SIGKILL)
                        since_s = time.monotonic()
                        server.__exit__()
                        server = Server(*args, model=path).__enter__()
                        clients.port = server.port
                        longest_s = max(longest_s, time.monotonic() - since_s)
                        num_killed += 1
                    heard = [each.result() for each in asking]
                check(heard, names)
                num_reconnects += sum(each.num_connections - 1 for each in heard)
        finally:
            server.__exit__()
        found = billed(usage)
        print(
            f"{num_killed} kills, {num_calls} streams, {num_reconnects} reconnects, slowest restart {longest_s:.2f} s, "
            f"billed {found}, {len(problems)} problems, {len(quiet)} quiet connections"
        )
        print("".join(f"{each}\n" for each in quiet), end="")
        if found != (num_calls, *rows):
            problems.append(f"{found} was billed of calls, prompts and answers, and {(num_calls, *rows)} told")
    return problems


def difference(one: bytes, other: bytes) -> str:
    place = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin, end = max(0, place - 80), place + 80
    return f"at {place} of {len(one)} and {len(other)}: {one[begin:end]!r} {other[begin:end]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--model", default="")
    parser.add_argument("--workers", default="1", help="engines of the server, or prefill:decode")
    args = parser.parse_args()
    prefill, _, decode = args.workers.partition(":")
    more = ("--prefill-workers", prefill, "--decode-workers", decode, "--disaggregation", "always")
    more = more if decode else ("--workers", prefill) if prefill != "1" else ()
    problems = run(args.kills, args.seed, args.max_tokens, args.model, more=more)
    print("\n".join(problems))
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
