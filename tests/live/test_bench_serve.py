"""The load generator over real sockets, against a server that does as its script says."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands import run_command
from raw_server import ANSWER, ask_raw, read_request
from synthetic_server import Script, Sent, serve
from tokenmill.bench.load import datasets, http
from tokenmill.bench.load.body import BodyFormat
from tokenmill.bench.load.datasets import Lengths
from tokenmill.bench.load.http import Client, parse_url
from tokenmill.bench.load.material import token_material, word_material
from tokenmill.bench.load.plan import Plan
from tokenmill.bench.load.run import Load, run_load, run_repeats
from tokenmill.bench.load.schedule import Schedule
from tokenmill.bench.load.stream import EventParser, Exchange
from tokenmill.bench.load.target import Target, send_one, takes_tokens
from tokenmill.bench.result import Run
from tokenmill.core.errors import ConfigError, Unavailable

QUICK = Script(ttft_s=0.002, itl_s=0.001)
SERVER = Path(__file__).resolve().parent.parent / "synthetic_server.py"


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[int, list[Sent]]]:
    server, port, records = await serve(script)
    try:
        yield port, records
    finally:
        server.close()


def target(port: int, api: str = "completions", prompt_format: str = "tokens", **rest: Any) -> Target:
    timeout_s = rest.pop("timeout_s", 20.0)
    body = BodyFormat(api, prompt_format, "synthetic", **rest)
    return Target("synthetic", parse_url(f"127.0.0.1:{port}"), body, f"http://127.0.0.1:{port}/metrics", timeout_s)


def load(schedule: Schedule, num: int, plan: Callable[[int, int], Plan] | None = None, **rest: Any) -> Load:
    def make_plan(num: int, seed: int, rate: float | None) -> Plan:
        return plan(num, seed) if plan is not None else datasets.random_prompts(num, seed, Lengths(16, 8))

    def make_material(seed: int, prompt_format: str) -> Any:
        return token_material(seed, 1000, 2000) if prompt_format == "tokens" else word_material(seed, None)

    return Load(make_plan, make_material, schedule, num, seed=0, **rest)


def measure(script: Script, schedule: Schedule, num: int, **rest: Any) -> tuple[Run, list[Sent]]:
    """A run and what the server saw of it, warm-up left out."""
    api, prompt_format = rest.pop("api", "completions"), rest.pop("prompt_format", "tokens")
    target_rest = {name: rest.pop(name) for name in ("timeout_s", "scripted_replies") if name in rest}

    async def go() -> tuple[Run, list[Sent]]:
        async with serving(script) as (port, records):
            chosen = load(schedule, num, **rest)
            run = await run_load(target(port, api, prompt_format, **target_rest), chosen)
            return run, records[chosen.num_warmups :]

    return asyncio.run(go())


def test_what_is_measured_is_what_was_sent() -> None:
    """Every request, token and length arrives; every event is stamped after it was sent, and in order."""
    run, records = measure(QUICK, Schedule(concurrency=4), 40)
    assert (run.num_ok, run.num_failed) == (40, 0) and len(records) == 40
    assert run.output_tokens == 40 * 8 and run.input_tokens == 40 * 16 and run.tokens_per_event == 1.0
    by_id = {int(record.request_id.rpartition("-")[2]): record for record in records}
    for row in run.requests:
        sent, due_s = by_id[row.index], run.client.clock_start_s + row.due_s
        assert row.event_s is not None and len(row.event_s) == len(sent.events_s) == 8
        assert row.event_s == sorted(row.event_s)
        # A stamp is rounded to a microsecond.
        assert all(due_s + seen >= at - 2e-6 for seen, at in zip(row.event_s, sent.events_s, strict=True))
    assert run.max_in_flight <= 4 and run.server is not None
    assert run.server.counters["synthetic_tokens_total"] == 40 * 8


def test_an_open_loop_keeps_its_times_whatever_the_server_does() -> None:
    """A server that serves one at a time does not slow the sending down: all are sent before the third answer."""
    script = Script(ttft_s=0.5, itl_s=0.0, max_running=1)
    run, _ = measure(script, Schedule(request_rate=100.0, burstiness=4.0), 6)
    due = sorted(row.due_s for row in run.requests)
    assert run.num_ok == 6 and run.offered_requests_per_s == pytest.approx(5 / (due[-1] - due[0]))
    ends = sorted(row.end_s or 0.0 for row in run.requests)
    assert max(row.sent_s or 0.0 for row in run.requests) < ends[2]
    # The queue shows in the latencies: the last waits for the five before it.
    assert (run.e2el_s.max or 0.0) > 4 * 0.5


def test_held_back_requests_keep_their_due_time() -> None:
    """A cap on requests in flight shows as lateness and in TTFT; counted from the send nothing would be seen."""
    script = Script(ttft_s=0.05, itl_s=0.0)
    run, _ = measure(script, Schedule(max_concurrency=2), 8)
    assert run.max_in_flight == 2 and (run.lateness_s.max or 0.0) > 2 * 0.05
    assert (run.ttft_s.max or 0.0) > (run.ttft_from_send_s.max or 0.0) + 2 * 0.05
    assert any("--max-concurrency 2 held requests back" in warning for warning in run.warnings)


def test_conversations_wait_quote_and_end_together() -> None:
    """A turn is sent after the answer before it and the think time, and quotes what was answered."""

    def make(num: int, seed: int) -> Plan:
        return datasets.conversations(num, seed, Lengths(4, 3), num_turns=3, think_time_s=0.01)

    chat = {"api": "chat", "prompt_format": "text", "scripted_replies": False}
    run, records = measure(QUICK, Schedule(concurrency=2), 12, plan=make, **chat)
    plan = make(12, 0)
    assert run.num_ok == 12 and run.max_in_flight <= 2
    rows = {row.index: row for row in run.requests}
    for record in records:
        row = rows[int(record.request_id.rpartition("-")[2])]
        roles = [message["role"] for message in record.body["messages"]]
        assert roles == ["user", "assistant"] * row.turn + ["user"]
        if row.turn:
            assert record.body["messages"][1]["content"] == " word word word"
            think_s = plan.calls[row.index].delay_s
            assert think_s > 0 and row.due_s == pytest.approx((rows[row.index - 1].end_s or 0.0) + think_s, abs=1e-6)


def test_failures_have_classes_and_do_not_stop_the_run() -> None:
    """Refusals and cut connections are counted apart; what follows a failed turn is abandoned, not sent."""
    run, records = measure(Script(0.001, 0.001, fail_every=4, fail_status=503), Schedule(concurrency=2), 16)
    assert {error.kind for error in run.errors} == {"http_503"} and run.num_ok + run.num_failed == 16
    assert "as the script says" in run.errors[0].example and len(records) == 16
    run, _ = measure(Script(0.001, 0.001, drop_every=4), Schedule(concurrency=2), 16)
    assert {error.kind for error in run.errors} == {"disconnected"} and run.num_failed >= 3
    run, records = measure(
        Script(0.001, 0.001, fail_every=2),
        Schedule(concurrency=1),
        6,
        num_warmups=0,
        plan=lambda num, seed: datasets.conversations(num, seed, Lengths(4, 3), num_turns=3, think_time_s=0.0),
    )
    kinds = [row.error for row in sorted(run.requests, key=lambda row: row.index)]
    assert kinds == [None, "http_500", "abandoned"] * 2 and len(records) == 4


def test_a_slow_answer_times_out() -> None:
    """And is a failure of its own class."""
    run, _ = measure(Script(ttft_s=5.0), Schedule(concurrency=2), 2, num_warmups=0, timeout_s=0.2)
    assert [error.kind for error in run.errors] == ["timeout"] and run.num_failed == 2


def test_nothing_becomes_due_after_the_duration() -> None:
    """A closed loop of many requests ends when its time is over, with whole answers."""
    run, _ = measure(Script(ttft_s=0.02, itl_s=0.0), Schedule(concurrency=2, stop_after_s=0.2), 10_000)
    assert 1 <= run.num_ok < 100 and run.num_failed == 0
    assert max(row.due_s for row in run.requests) < 0.2


def test_tokens_in_one_event_are_counted_by_usage() -> None:
    """Three tokens an event: token counts are the server's, gaps are between events, and the ratio is told."""
    run, _ = measure(Script(0.002, 0.002, tokens_per_event=3, cached_tokens=5), Schedule(concurrency=2), 6)
    assert run.output_tokens == 48 and run.tokens_per_event == pytest.approx(8 / 3)
    assert run.itl_s.num == 6 * 2 and run.prefix_hit_tokens == 30
    run, _ = measure(Script(0.002, 0.002, usage=False), Schedule(concurrency=2), 6)
    assert run.output_tokens == 48 and run.input_lengths.num == 0
    assert any("no usage" in warning for warning in run.warnings)


def test_repeats_draw_new_text_and_give_intervals() -> None:
    """Each repeat has its own seed, so nothing is answered from a cache; figures come with their spread."""

    async def go() -> Any:
        async with serving(QUICK) as (port, _):
            return await run_repeats(target(port), load(Schedule(concurrency=2), 6), 3)

    repeats = asyncio.run(go())
    assert len({run.dataset["digest"] for run in repeats.runs}) == 3
    assert [run.schedule["repeat"] for run in repeats.runs] == [0, 1, 2]
    interval = repeats.intervals["ttft_s.p50"]
    assert interval.low <= interval.mean <= interval.high and len(interval.values) == 3
    assert repeats.pooled.num_ok == 18 and repeats.to_json()["kind"] == "repeats"


def test_the_server_is_asked_what_prompts_it_takes() -> None:
    """Ids where it takes them, text otherwise; where nobody listens, one line says so."""

    async def ask(script: Script) -> bool:
        async with serving(script) as (port, _):
            return await takes_tokens(parse_url(f"http://127.0.0.1:{port}/v1"), "synthetic")

    assert asyncio.run(ask(QUICK)) and not asyncio.run(ask(replace(QUICK, takes_tokens=False)))
    with pytest.raises(Unavailable, match="No server answers"):
        asyncio.run(takes_tokens(parse_url("http://127.0.0.1:9"), "m"))


def test_a_server_that_fails_the_warm_up_is_not_measured() -> None:
    """The reason is the server's own."""
    with pytest.raises(Unavailable, match="as the script says"):
        measure(replace(QUICK, fail_every=1), Schedule(concurrency=1), 3)


def test_urls_are_read_and_wrong_ones_refused() -> None:
    """With or without scheme, /v1, or a whole path; https has its own port."""
    for url in ("127.0.0.1:80", "http://127.0.0.1", "http://127.0.0.1/v1/", "http://127.0.0.1/v1/chat/completions"):
        address = parse_url(url)
        assert (address.host, address.port, address.base) == ("127.0.0.1", 80, "/v1"), url
    assert parse_url("http://h:1/api/v2", "key", ["A: b"]).headers == {"A": "b", "Authorization": "Bearer key"}
    secure = parse_url("https://h/v1")
    assert (secure.port, secure.root_url) == (443, "https://h:443") and secure.tls is not None
    for url in ("ftp://h", "http://", "http://h:99999"):
        with pytest.raises(ConfigError):
            parse_url(url)
    for header in ("no colon", "A: b\r\nC: d"):
        with pytest.raises(ConfigError):
            parse_url("h", None, [header])


EVENTS = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    b': a comment\n\nevent: x\ndata: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"choices":[{"delta":{"reasoning_content":"b"}}]}\r\n\r\n'
    b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}\n\n'
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\ndata: [DONE]\n\n'
)


def cuttings(data: bytes) -> list[list[bytes]]:
    """data whole, in two pieces at every place, and byte by byte."""
    halves = [[data[:i], data[i:]] for i in range(1, len(data))]
    return [[data], *halves, [data[i : i + 1] for i in range(len(data))]]


def test_events_are_the_same_however_they_are_cut() -> None:
    """Three token events, usage and the end, wherever the network splits the stream."""
    for pieces in cuttings(EVENTS):
        exchange = Exchange(0, 0.0, keep_text=True)
        parser = EventParser(exchange)
        for i, piece in enumerate(pieces):
            parser.feed(float(i), piece)
        parser.close(9999.0)
        assert len(exchange.event_times) == 3 and exchange.text == "ab" and exchange.is_complete, pieces
        assert (exchange.input_tokens, exchange.output_tokens, exchange.finish_reason) == (7, 3, "stop"), pieces
        assert exchange.ok and list(exchange.event_times) == sorted(exchange.event_times), pieces


def text(piece: str, more: str = '"usage":null') -> str:
    return f'{{"choices":[{{"text":"{piece}"}}],{more}}}'


@pytest.mark.parametrize(
    ("events", "counts"),
    [
        ((text(""), text("x"), '{"choices":[{"text":"","finish_reason":"length"}]}'), [1, 1]),
        (('{"choices":[{"text":"x","token_ids":[1,2]}]}', text("y")), [2, 1]),
        ((text("x", '"usage":{"completion_tokens":2}'), text("y", '"usage":{"completion_tokens":5}')), [2, 3]),
        ((text("x"), text("y", '"usage":{"completion_tokens":9}')), [1, 1]),
    ],
)
def test_tokens_of_events(events: tuple[str, ...], counts: list[int]) -> None:
    """Held-back text is a token; ids and continuous usage count exactly; usage at the end says nothing of its event."""
    exchange = Exchange(0, 0.0)
    for event in events:
        exchange.on_data(1.0, event.encode())
    assert list(exchange.event_tokens) == counts


def test_errors_inside_a_stream_are_errors() -> None:
    """An error object, broken JSON and a stream that just stops each fail the request, the first cause being kept."""
    exchange = Exchange(0, 0.0)
    exchange.on_data(1.0, b'{"error":{"message":"no room"}}')
    exchange.on_data(1.0, b"not json")
    assert exchange.error == "stream_error" and "no room" in (exchange.error_detail or "")
    exchange = Exchange(0, 0.0)
    exchange.on_data(1.0, b"not json")
    assert exchange.error == "bad_response"


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x;ext=1\r\n%b\r\n" % (len(piece), piece) for piece in (EVENTS[:100], EVENTS[100:101], EVENTS[101:]))
    + b"0\r\n\r\n"
)


def test_answers_are_the_same_however_they_are_cut() -> None:
    """Head, chunk borders and events may fall anywhere in what one read brings; the connection is then free again."""
    client = SimpleNamespace(opened=lambda c: None, release=lambda c: freed.append(c), read=Exchange.on_data)
    transport = SimpleNamespace(write=lambda data: None, is_closing=lambda: False, abort=lambda: None)
    freed: list[Any] = []
    done: list[Exchange] = []
    connection = http._Connection(client)  # type: ignore[arg-type]
    connection.connection_made(transport)  # type: ignore[arg-type]
    for num, pieces in enumerate(cuttings(CHUNKED), 1):
        connection.start(Exchange(0, 0.0, keep_text=True), b"", done.append, is_fresh=True)
        for i, piece in enumerate(pieces):
            connection.parse(float(i), piece)
        assert len(done) == len(freed) == num and done[-1].ok, pieces
        assert done[-1].text == "ab" and len(done[-1].event_times) == 3, pieces


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def test_an_answer_in_one_piece_is_one_event() -> None:
    """A server that does not stream is measured too: one event, usage counted, connection kept or closed alike."""

    async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                await read_request(reader)
            except asyncio.IncompleteReadError:
                break
            head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
            writer.write(head + ANSWER)
        writer.close()

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + ANSWER)
        writer.close()

    for respond in (whole, closing):
        for exchange in ask_raw(respond, num=2):
            assert exchange.ok and exchange.output_tokens == 4 and list(exchange.event_tokens) == [4]


def test_a_kept_connection_the_server_closed_is_not_a_failure() -> None:
    """The request is sent again on a new connection, once nothing of it has been answered."""
    num_connections = 0

    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        await read_request(reader)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ANSWER)
        writer.write(head + ANSWER)
        # The next request is read, and the connection closed without a word.
        with suppress(asyncio.IncompleteReadError):
            await read_request(reader)
        writer.close()

    exchanges = ask_raw(once, num=4)
    assert all(exchange.ok for exchange in exchanges) and num_connections == 4


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "disconnected"),
        (b"SSH-2.0-x\r\n\r\n", "bad_response"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "bad_response"),
        (STREAM_HEAD + b'data: {"choices":[{"text":"x"}]}\n\n', "incomplete"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"choices":[]}', "no_tokens"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno", "http_404"),
    ],
)
def test_broken_servers_have_their_error_classes(answer: bytes, error: str) -> None:
    """Whatever a server does, the request ends, with a class that says what happened."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        writer.close()

    assert ask_raw(respond)[0].error == error


def test_a_refused_connection_is_an_error_of_the_request() -> None:
    """Not of the run."""

    async def go() -> Exchange:
        client = Client(parse_url("127.0.0.1:9"), "/completions")
        try:
            return await send_one(client, b"{}")
        finally:
            await client.close()

    assert asyncio.run(go()).error == "connect_error"


@pytest.fixture
def synthetic() -> Any:
    """The synthetic server as a process of its own: its port."""
    command = [sys.executable, str(SERVER), "--ttft", "0.005", "--itl", "0.001"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield int(process.stdout.readline())
    process.terminate()
    process.stdout.close()
    process.wait()


def cli(*args: str, code: int = 0) -> str:
    """What `tokenmill bench ...` prints."""
    done = run_command("bench", *args)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_commands_write_what_they_promise(synthetic: int, tmp_path: Path) -> None:
    """serve, its sweep, goodput and compare: exit code 0, tables, and JSON of their kinds."""
    url, out = f"http://127.0.0.1:{synthetic}", tmp_path / "out.json"
    common = ("--random-input-len", "8", "--random-output-len", "4", "--json", str(out))
    few = (*common, "--num-prompts", "8")
    printed = cli("serve", "--url", url, *few, "--goodput", "ttft:500", "--csv", str(tmp_path / "out.csv"))
    result = json.loads(out.read_text())
    assert "TTFT" in printed and "goodput" in printed
    assert result["kind"] == "run" and result["num_ok"] == 8 and result["ttft_s"]["p99"] > 0
    assert result["endpoint"]["prompt_format"] == "tokens" and result["endpoint"]["model"] == "synthetic"
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 9
    cli("serve", "--url", url, *few, "--sweep-concurrency", "1,2", "--endpoint", "chat")
    assert [run["schedule"]["concurrency"] for run in json.loads(out.read_text())["runs"]] == [1, 2]
    goodput = ("--goodput", "ttft:4000", "--max-rate", "40", "--start-rate", "20", "--probe-s", "0.2")
    cli("goodput", "--url", url, *common, *goodput, "--min-requests", "8")
    result = json.loads(out.read_text())
    assert result["kind"] == "goodput" and result["request_rate"] >= 20
    cli("compare", f"a={url}", f"b={url}", *few, "--repeats", "2", "--concurrency", "2")
    result = json.loads(out.read_text())
    assert [run["name"] for run in result["runs"]] == ["a", "b", "b", "a"]
    assert {ratio["verdict"] for ratio in result["ratios"]} == {"undecided"}
    assert len({run["dataset"]["digest"] for run in result["runs"]}) == 2
    shared = ("--dataset-name", "shared-prefix", "--num-prefixes", "1", "--prefix-len", "5", "--warm", "--repeats", "1")
    report = tmp_path / "out.md"
    cli("compare", f"a={url}", f"b={url}", *few, *shared, "--markdown", str(report))
    result = json.loads(out.read_text())
    cold, warm = "cold", "warm"
    assert [(run["name"], run["schedule"]["phase"]) for run in result["runs"]] == [*product("ab", (cold, warm))]
    assert len({run["dataset"]["digest"] for run in result["runs"]}) == 2
    assert {ratio["phase"] for ratio in result["ratios"]} == {cold, warm}
    assert {figure["median"] for figure in result["figures"] if figure["metric"] == "output_tokens"} == {32}
    assert report.read_text().count("| output tokens/s") == 4


def test_wrong_command_lines_are_one_line(tmp_path: Path) -> None:
    """Exit code 2 and the field at fault, before anything is sent."""
    for args, words in (
        (("serve", "--url", "http://127.0.0.1:9"), "No server answers"),
        (("serve", "--url", "https://x", "--ca-file", str(tmp_path / "no.pem")), "no certificates"),
        (("serve", "--url", "h", "--goodput", "speed:1"), "speed:1"),
        (("serve", "--url", "h", "--dataset-name", "trace"), "--dataset-path"),
        (("serve", "--url", "h", "--json", str(tmp_path / "no" / "x.json")), "does not exist"),
        (("serve", "--url", "h", "--concurrency", "2", "--request-rate", "3"), "closed loop"),
        (("goodput", "--url", "h"), "objectives"),
        (("compare", "h"), "two endpoints"),
    ):
        printed = cli(*args, code=2)
        assert words in printed and len(printed.strip().splitlines()) == 1, printed


def num_answered(metrics: str) -> int:
    """Of the synthetic server."""
    return int(urllib.request.urlopen(metrics).read().decode().rpartition("synthetic_seconds_count ")[2])


def test_an_interrupt_ends_with_what_there_is(synthetic: int, tmp_path: Path) -> None:
    """Ctrl-C stops the sending; the result is written and says so."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "tokenmill.cli.main", "bench", "serve", "--url", f"http://127.0.0.1:{synthetic}"]
    command += ["--concurrency", "2", "--num-prompts", "9000", "--random-input-len", "4", "--random-output-len", "4"]
    command += ["--num-warmups", "0", "--json", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    metrics = f"http://127.0.0.1:{synthetic}/metrics"
    before = num_answered(metrics)
    while num_answered(metrics) < before + 8:
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=30)
    assert process.returncode == 0, printed
    result = json.loads(out.read_text())
    assert result["num_ok"] > 0 and any("interrupted" in warning for warning in result["warnings"])
