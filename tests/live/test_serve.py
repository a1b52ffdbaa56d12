"""The served model, whole: real processes, sockets, signals and kills, with the clients that users have."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import openai
import pytest
from serving import Server, alive, wait_until

from tokenmill import LLM

QUESTION = [{"role": "user", "content": "Name the capital of France."}]
SMALL = ("--kv-cache-memory-bytes", "200MiB")


@pytest.fixture(scope="module")
def server(smollm2) -> Iterator[Server]:
    with Server(*SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def long_body(**more) -> dict:
    """A completion that runs until somebody stops it (for some seconds at least)."""
    return {
        "model": "smollm2",
        "prompt": "Count: 1 2 3",
        "max_tokens": 4000,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


class Streaming:
    """A streamed completion read in a thread; `events` grows as they come."""

    def __init__(self, server: Server, **more) -> None:
        self.events: list[str] = []
        self.status = 0
        self._server = server
        self._body = json.dumps(long_body(stream=True, **more)).encode()
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_until(lambda: len(self.events) > 2, "the stream's first events")

    def _read(self) -> None:
        length = f"Content-Length: {len(self._body)}"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{length}\r\n\r\n"
        with contextlib.suppress(OSError), self.socket, self.socket.makefile("rb") as lines:
            self.socket.sendall(head.encode() + self._body)
            for line in lines:
                if line.startswith(b"data: "):
                    self.events.append(line[6:].decode().strip())

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive(), "the stream did not end"


def test_the_openai_client_gets_the_right_answer(client):
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=20)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_answer_in_pieces(client):
    asked = {"model": "smollm2", "messages": QUESTION, "temperature": 0.7, "seed": 5, "max_tokens": 40}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 3


def test_a_loop_is_ended_with_a_warning_where_a_request_asks(client):
    """Whole and streamed alike; the server's default is off."""
    asked = {"model": "smollm2", "temperature": 0, "max_tokens": 515, "prompt": "A"}
    few = {"allowed_token_ids": [260, 282]}
    whole = client.completions.create(**asked, extra_body={"loop_guard": True} | few)
    (choice,) = whole.choices
    assert (choice.finish_reason, choice.stop_reason) == ("length", "repetition_detected")
    assert "repeats itself" in choice.warning and whole.usage.completion_tokens in (512, 513)
    chunks = list(client.completions.create(**asked, stream=True, extra_body={"loop_guard": True} | few))
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].warning == choice.warning
    (free,) = client.completions.create(**asked, extra_body=few).choices
    assert free.text.startswith(choice.text) and (free.finish_reason, free.stop_reason) == ("length", None)


def test_clients_that_leave_free_their_blocks(server):
    streams = [Streaming(server, seed=number) for number in range(3)]
    assert server.metrics()["vllm:kv_cache_usage_perc"] > 0
    for stream in streams:
        stream.socket.shutdown(socket.SHUT_RDWR)
        stream.join()
    wait_until(server.idle, "all blocks free after the clients left")


def test_many_at_once_equal_one_at_a_time(server):
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        answer = await client.completions.create(
            model="smollm2", prompt=f"The number {number} is", max_tokens=12, temperature=0.8, seed=number
        )
        return answer.choices[0].text

    async def both() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, number) for number in range(12)))
            return list(together), [await ask(client, number) for number in range(12)]

    together, alone = asyncio.run(both())
    assert together == alone


def text_of(events: list[str]) -> str:
    return "".join(choice["text"] for event in events if event != "[DONE]" for choice in json.loads(event)["choices"])


def test_a_killed_engine_comes_back_and_streams_go_on(smollm2):
    """The command's own: what streams of all kinds give then is test_kill's."""
    with Server(*SMALL, "--max-queue-s", "0.1") as server:
        stream = Streaming(server, max_tokens=150)
        first = server.engine_pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.request("GET", "/health")[0] == 503, "the news")
        assert server.request("POST", "/v1/completions", long_body())[0] == 503, "it would wait too long"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{server.url}/health", timeout=60)
        assert 1 <= int(refused.value.headers["retry-after"]) <= 120
        refused.value.close()
        wait_until(lambda: server.request("GET", "/health")[0] == 200, "the engine's return")
        assert server.engine_pid not in (None, first)
        stream.join()
        assert stream.events[-1] == "[DONE]" and "1 are resumed" in server.output
        status, body = server.request("POST", "/v1/completions", long_body(max_tokens=150))
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 150)
        assert text_of(stream.events) == json.loads(body)["choices"][0]["text"]


def test_a_stopped_engine_is_replaced(smollm2):
    """One that has work and stands still; where all stood still, nobody is to blame."""
    with Server(*SMALL, "--threads", "1", "--engine-timeout-s", "3", "--liveness-s", "0") as server:
        first, front_end = server.engine_pid, server.process.pid
        stream = Streaming(server)
        for pid in (front_end, first):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5)
        for pid in (front_end, first):
            os.kill(pid, signal.SIGCONT)
        seen = len(stream.events)
        wait_until(lambda: len(stream.events) > seen + 20, "the stream to go on")
        assert server.engine_pid == first
        os.kill(first, signal.SIGSTOP)
        wait_until(lambda: server.engine_pid not in (None, first), "a new engine")
        seen = len(stream.events)
        wait_until(lambda: len(stream.events) > seen + 20, "the stream to go on")
        stream.socket.shutdown(socket.SHUT_RDWR)
        stream.join()
        assert server.engine_pid not in (None, first)
        assert "no progress for 3 s" in server.output
        assert server.request("POST", "/v1/completions", long_body(max_tokens=5))[0] == 200


def test_a_broken_template_leaves_completions_served(smollm2):
    with Server(*SMALL, "--chat-template", "{% if %}") as server:
        status, body = server.request("POST", "/v1/chat/completions", {"messages": QUESTION})
        assert status == 400 and "does not compile" in json.loads(body)["error"]["message"]
        assert server.request("POST", "/v1/completions", long_body(max_tokens=2))[0] == 200
        wait_until(lambda: "--chat-template FILE" in server.output, "the warning")


def test_a_template_from_a_file_replaces_the_models_own(smollm2, tmp_path):
    file = tmp_path / "plain.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with Server(*SMALL, "--chat-template", str(file)) as server:
        answers = [
            json.loads(server.request("POST", "/tokenize", {**body, "add_special_tokens": False})[1])["tokens"]
            for body in ({"messages": QUESTION}, {"prompt": QUESTION[0]["content"]})
        ]
        assert answers[0] == answers[1]


def test_a_template_that_never_ends_keeps_nothing_from_ending(smollm2):
    """/health answers, each request is refused, and SIGTERM ends all processes."""
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
    with Server(*SMALL, "--chat-template", endless, "--drain-s", "0") as server:
        body = {"messages": QUESTION}
        clients = [threading.Thread(target=server.request, args=("POST", "/v1/chat/completions", body)) for _ in "abc"]
        for client in clients:
            client.start()
        assert server.request("GET", "/health")[0] == 200
        assert server.request("POST", "/v1/chat/completions", body)[0] == 400
        pids = [server.engine_pid, server.sandbox_pid]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        for client in clients:
            client.join()
        wait_until(lambda: not any(alive(pid) for pid in pids), "the end of engine and sandbox")


def test_sigterm_lets_open_streams_finish(smollm2):
    with Server(*SMALL, "--drain-s", "60") as server:
        engine = server.engine_pid
        stream = Streaming(server, max_tokens=300)
        server.process.send_signal(signal.SIGTERM)
        stream.join()
        assert stream.events[-1] == "[DONE]"
        assert json.loads(stream.events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(30) == 0
        wait_until(lambda: not alive(engine), "the engine's end")


def test_a_second_signal_ends_at_once(smollm2):
    with Server(*SMALL, "--drain-s", "600") as server:
        engine = server.engine_pid
        stream = Streaming(server)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(0.3)
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
        stream.join()
        assert '"finish_reason":"length"' not in stream.events[-1]
        wait_until(lambda: not alive(engine), "the engine's end")


def test_the_end_of_the_drain_time_ends_streams_with_an_error(smollm2):
    with Server(*SMALL, "--drain-s", "0.2") as server:
        stream = Streaming(server)
        server.process.send_signal(signal.SIGTERM)
        stream.join()
        assert any("error" in json.loads(event) for event in stream.events[-2:] if event != "[DONE]")
        server.process.wait(30)


def test_nothing_outlives_a_killed_front_end(smollm2, tmp_path):
    with Server(*SMALL, env={"TMPDIR": str(tmp_path)}) as server:
        engine = server.engine_pid
        stream = Streaming(server)
        server.process.kill()
        server.process.wait()
        stream.join()
        wait_until(lambda: not alive(engine), "the engine's end")
        wait_until(lambda: not glob.glob(f"{tmp_path}/*"), "the socket's folder to be gone")


def test_a_clean_end_leaves_no_file_and_says_that_it_is_one(smollm2, tmp_path):
    with Server(*SMALL, env={"TMPDIR": str(tmp_path)}) as server:
        said = len(server.lines)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
    assert not os.listdir(tmp_path)
    assert server.lines[said:] == ["tokenmill: stopping", "tokenmill: stopped"]


def test_a_file_answers_as_its_alias_does(server, smollm2, tmp_path):
    """Whatever a model is called by, equal bytes give equal answers, over HTTP and in process."""
    own = tmp_path / "own.gguf"
    own.symlink_to(smollm2)
    asked = [
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 24, "seed": 7}, "text"),
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 24, "seed": 8}, "message"),
    ]

    def answers(of: Server) -> list[object]:
        replies = [(of.request("POST", path, body)[1], key) for path, body, key in asked]
        return [json.loads(reply)["choices"][0][key] for reply, key in replies]

    with Server(*SMALL, model=str(own)) as by_file:
        assert "temperature 0.2, top_p 0.9" in by_file.output and "temperature 0.2, top_p 0.9" in server.output
        assert answers(by_file) == answers(server)
        with LLM(str(own), kv_cache_memory_bytes=100 * 2**20) as llm:
            text = llm.generate("Once upon a time", llm.default_sampling(max_tokens=24, seed=7))[0].text
            assert text == answers(by_file)[0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--dtype", "auto", "--gpu-memory-utilization", "0.9", "-tp", "1", "--max_model_len", "2K"), "2048 tokens"),
        (
            ("-ngl", "99", "-c", "2048", "-np", "4", "-fa", "on", "--temp", "0", "--jinja", "-ub", "64"),
            "temperature 0,",
        ),
    ],
)
def test_start_scripts_of_other_servers_start(smollm2, flags, said):
    """vLLM's and llama-server's own flags, on a server that runs and answers."""
    with Server(*SMALL, *flags, "--seed", "5", model=str(smollm2)) as server:
        assert said in server.output and "has no effect here" in server.output
        status, _ = server.request("POST", "/v1/completions", {"prompt": "Count:", "max_tokens": 6})
        assert status == 200 and "2048" in server.request("GET", "/v1/models")[1]


def test_the_start_print_explains_each_choice(server):
    assert "kernels" in server.output and "blocks" in server.output and "MiB" in server.output
    assert "as asked" in server.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("serve", "--max-model-len", "9000"), "--max-model-len must be between 1 and 8192"),
        (("serve", "no-such-model"), "no-such-model"),
        (("serve", "--max-num-seqs", "8", "--max-num-batched-tokens", "4"), "--max-num-batched-tokens"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(smollm2, args, said, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill.cli.main", *args, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "TOKENMILL_STATE": str(tmp_path)},  # another server has the folder of this process
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr
    assert not done.stdout


def test_a_damaged_file_is_refused_in_one_line(smollm2):
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file, open(smollm2, "rb") as whole:
        file.write(whole.read(3_000_000))
        file.flush()
        done = subprocess.run(
            [sys.executable, "-m", "tokenmill.cli.main", "serve", file.name, "--port", "0"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("tokenmill: ") and done.stderr.strip().count("\n") == 0, done.stderr


def test_a_taken_port_is_refused_by_name(server):
    done = subprocess.run(
        [sys.executable, "-m", "tokenmill.cli.main", "serve", "--port", str(server.port)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = [line for line in done.stderr.splitlines() if not line.startswith("tokenmill: loading")]
    assert done.returncode == 2 and len(said) == 1 and str(server.port) in said[0], done.stderr
