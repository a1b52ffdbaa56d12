"""A server whose policies are in a file of its user's, or in packages."""

from __future__ import annotations

import contextlib
import json
import socket
from pathlib import Path

from serving import Server

from plugin_packages import install_examples

FILE = '''
from dataclasses import dataclass

from tokenmill.cluster.routing import Route


class Last:
    """All go to the worker that joined last."""

    uses_keys = False

    def choose(self, request, links, now):
        return Route(links[max(links)], "mine")

    def leave(self, link):
        pass

    def note_fetch(self, num_tokens, took_s):
        pass


@dataclass(frozen=True)
class ShortAnswers:
    summary: str = "fewest tokens to draw"
    num_refreshed: int = 0
    patience: int = 0

    def due(self, waiting):
        with open(__file__ + ".asked", "a") as asked:
            asked.write("due\\n")
        return waiting.arrived + waiting.request.max_tokens
'''


def test_front_end_and_engine_each_ask_the_policy_of_a_file(smollm2: Path, tmp_path: Path) -> None:
    """Routing is the front end's, order of service the engine's, which is another process."""
    path = tmp_path / "mine.py"
    path.write_text(FILE, "utf8")
    flags = ("--routing-policy", f"{path}:Last", "--scheduling-policy", f"{path}:ShortAnswers", "--workers", "2")
    with Server(*flags, "--max-model-len", "256", "--kv-cache-memory-bytes", "30MB") as server:
        for _ in range(3):
            body = {"prompt": "One, two, three,", "max_tokens": 2}
            status, text = server.request("POST", "/v1/completions", body)
            assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 2, text
        lines = server.request("GET", "/metrics")[1].splitlines()
    routed = [line for line in lines if line.startswith("tokenmill:requests_routed_total")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in routed if 'reason="mine"' in line) >= 1, routed
    assert (tmp_path / "mine.py.asked").read_text("utf8").count("due") >= 3


def test_plugins_are_used_in_every_process(smollm2: Path, tmp_path: Path) -> None:
    """By name alone: engines look the order of service up for themselves, and the sandbox the parser of calls, of whose
    form it makes a grammar. An observer is told of it all."""
    names = {
        "--routing-policy": "fewest_prompt_tokens",
        "--scheduling-policy": "short-answers-first",
        "--tool-call-parser": "internlm",
        "--reasoning-parser": "command_a",
    }
    flags = [word for pair in names.items() for word in pair]
    flags += ["--observer", "statsd", "--workers", "2", "--max-model-len", "512", "--kv-cache-memory-bytes", "30MB"]
    tool = {
        "type": "function",
        "function": {"name": "look", "parameters": {"properties": {"far": {"type": "boolean"}}}},
    }
    call = {"messages": [{"role": "user", "content": "Look!"}], "tools": [tool], "tool_choice": "required"}
    env = {"PYTHONPATH": str(install_examples(tmp_path))}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as daemon:
        daemon.bind(("127.0.0.1", 0))
        with Server(*flags, env={**env, "STATSD_PORT": str(daemon.getsockname()[1])}) as server:
            for _ in range(3):
                body = {"prompt": "One, two, three,", "max_tokens": 2}
                status, text = server.request("POST", "/v1/completions", body)
                assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 2, text
            status, text = server.request("POST", "/v1/chat/completions", {**call, "max_tokens": 60, "seed": 1})
            assert status == 200, text
            lines = server.request("GET", "/metrics")[1].splitlines()
            told = server.output
        sent = received(daemon)
    message = json.loads(text)["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "look" and not message["content"], message
    routed = [line for line in lines if line.startswith("tokenmill:requests_routed_total")]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in routed if 'reason="fewest prompt tokens"' in line) >= 1, routed
    assert "short-answers-first" in told, told
    assert sent.count("tokenmill.requests.length:1|c") >= 3 and "tokenmill.output_tokens:2|c" in sent, sent
    assert any(line.startswith("tokenmill:observer_events_total") and 'outcome="told"' in line for line in lines)


def received(daemon: socket.socket) -> list[str]:
    """All that was sent to it."""
    daemon.setblocking(False)
    found = []
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(daemon.recv(512).decode())
    return found
