"""The flight recorder: what an engine writes is read back, also after a kill -9, and becomes a trace for Perfetto."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from scripted import Served
from tokenmill.cli.flight import describe
from tokenmill.cli.main import main
from tokenmill.control.observe.perfetto import trace_of
from tokenmill.control.observe.timeline import Rings
from tokenmill.core import events
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.flight import (
    CHUNK,
    FAILED,
    MAX_ROWS,
    NUM_EVENTS,
    NUM_STEPS,
    PREEMPTED,
    REASONS,
    SIZE,
    FlightWriter,
    RequestRecord,
    find_request,
    read_flight,
)
from tokenmill.net.mapped_files import flight_file, keep_copy, keep_lost, new_path, prune


def written() -> tuple[bytearray, FlightWriter]:
    data = bytearray(SIZE)
    return data, FlightWriter(data, pid=7, began_s=100.0, unix_s=1e9, model="toy")


def request(seq: int, name: str, **changes: Any) -> RequestRecord:
    fields = RequestRecord(seq, 100.0, 100.5, 0.0, 0.0, 20, 4, 9, 0, 1, "", 0, name, "tenant")
    return fields._replace(**changes)


def trace(data: bytes) -> dict[str, Any]:
    return trace_of(read_flight(bytes(data)))


def test_what_is_written_is_read_back() -> None:
    """A step in flight, an ended one, a request and its chunk come back with every field."""
    data, writer = written()
    writer.request(request(3, "r-3"))
    chunk = writer.event(CHUNK, 101.0, 3, 0, 4, 16)
    writer.step(0, 101.0, (1, 16, 1, 2, 50, 0), [3])
    writer.step_submitted(0, 101.1)
    writer.step(1, 101.2, (2, 2, 2, 1, 49, 1), [3, 4])
    writer.step_ended(0, 101.5, 0.3, 101.6, FAILED)
    writer.event_ended(chunk, 101.5)
    found = read_flight(bytes(data))
    assert (found.header.pid, found.header.model, found.header.unix_s) == (7, "toy", 1e9)
    first, second = found.steps
    assert first == (0, 101.0, 101.1, 101.5, 0.3, 101.6, 1, 16, 1, 2, 50, 0, FAILED, (3,))
    assert (second.number, second.ended_s, second.seqs) == (1, 0.0, (3, 4))
    assert found.requests == (request(3, "r-3"),)
    assert found.events == ((0, 101.0, 101.5, CHUNK, 3, 0, 4, 16),)
    assert find_request(bytes(data), "r-3") == request(3, "r-3") and find_request(bytes(data), "r") is None


def test_every_reason_to_end_can_be_written() -> None:
    reasons = {value for name, value in vars(events).items() if name.startswith("FINISH_")}
    assert reasons and reasons <= set(REASONS)


def test_the_last_steps_and_events_are_kept_and_wide_steps_cut() -> None:
    """Rings hold the newest; a step of more rows than fit says how many it had."""
    data, writer = written()
    for number in range(NUM_STEPS + 10):
        writer.step(number, 1.0, (300, 300, 300, 0, 0, 0), list(range(300)))
    for number in range(NUM_EVENTS + 5):
        writer.event(PREEMPTED, 1.0, number, 0, 0, 1)
    found = read_flight(bytes(data), 100)
    assert [step.number for step in found.steps] == list(range(NUM_STEPS - 90, NUM_STEPS + 10))
    assert found.steps[0].num_rows == 300 and found.steps[0].seqs == tuple(range(MAX_ROWS))
    assert (found.events[0].number, found.events[-1].number, len(found.events)) == (5, NUM_EVENTS + 4, NUM_EVENTS)


@pytest.mark.parametrize("data", [b"", b"x" * SIZE, b"TMFLIGHT" + (9).to_bytes(4, "little") + bytes(SIZE - 12)])
def test_what_is_no_recorder_s_file_is_refused(data: bytes) -> None:
    """Wrong sizes, signs and versions raise ValueError."""
    with pytest.raises(ValueError, match=r"recorder|version"):
        read_flight(data)


def test_a_recorded_call_can_be_seen_from_queue_to_end(tmp_path: Path) -> None:
    """Chunks of a long prompt and the steps of its decode are in the ring, the timeline and the trace."""
    config = EngineConfig(groups=full_groups(64), max_model_len=512, max_num_batched_tokens=64)
    with Served(lambda prompt: "a b c d e f g h", engine=config, flight_dir=tmp_path) as served:
        status, text, _ = served.ask("/v1/completions", {"prompt": "x" * 200, "max_tokens": 5})
        assert status == 200, text
        name = json.loads(text)["id"]
        shown = json.loads(served.ask(f"/admin/requests/{name}")[1])
        spans = {span["name"]: span for span in shown["timeline"]}
        chunks = spans["prefill"]["events"]
        assert [each["name"] for each in chunks] == ["chunk"] * len(chunks) and len(chunks) > 2
        assert sum(each["tokens"] for each in chunks) == shown["prompt_tokens"] == 200
        assert all(each["at_s"] <= each["end_s"] <= spans["prefill"]["end_s"] + 0.01 for each in chunks)
        status, text, kind = served.ask("/admin/flight?steps=100")
        assert status == 200 and kind == "application/json"
        body = json.loads(text)
        assert_opens_in_perfetto(body)
        steps = [each for each in body["traceEvents"] if each.get("cat") == "step"]
        assert len(steps) >= len(chunks) + 4 and all(f"{name}-0" in each["args"]["requests"] for each in steps)
        assert served.ask("/admin/flight?steps=0")[0] == served.ask("/admin/flight?engine=9")[0] == 400
    with Served() as served:
        assert served.ask("/admin/flight")[0] == 404


def assert_opens_in_perfetto(body: dict[str, Any]) -> None:
    """The rules of Chrome's trace event format that its readers insist on."""
    events = body["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[int, list[str]] = defaultdict(list)
    for each in events:
        assert each["ph"] in "MXCsitf" and {"name", "pid", "tid", "ts"} <= each.keys(), each
        assert isinstance(each["pid"], int) and isinstance(each["tid"], int) and isinstance(each["ts"], (int, float))
        if each["ph"] == "X":
            assert each["dur"] >= 0
            slices[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"]))
        if each["ph"] in "stf":
            flows[each["id"]].append(each["ph"])
    for track in slices.values():
        open_ends: list[float] = []
        for start, end in sorted(track, key=lambda one: (one[0], -one[1])):
            while open_ends and open_ends[-1] <= start + 0.002:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 0.002, "slices of a track nest"
            open_ends.append(end)
    for phases in flows.values():
        assert phases[0] == "s" and phases[-1] == "f" and set(phases[1:-1]) <= {"t"}, phases
    for each in events:
        if each["ph"] in "tf":
            assert any(start <= each["ts"] <= end for start, end in slices[each["pid"], each["tid"]]), "a flow binds"


def test_a_resumed_request_s_timeline_shows_both_lives(tmp_path: Path) -> None:
    """After its engine's death, the chunks that the next engine computed again are shown under that engine."""
    with Served(lambda prompt: "a b c d e f g h i j", flight_dir=tmp_path) as served:
        served.script.step_s = 0.01
        done: list[str] = []
        body = {"prompt": "y" * 40, "max_tokens": 12}
        asking = threading.Thread(target=lambda: done.append(served.ask("/v1/completions", body)[1]))
        asking.start()
        served.wait_until(lambda: any(each.first_s >= 0 for each in served.client.observers.monitor.requests))
        served.kill_engine()
        served.wait_until(lambda: served.client.ready is None)
        served.restart_engine()
        asking.join(20)
        shown = json.loads(served.ask(f"/admin/requests/{json.loads(done[0])['id']}")[1])
        spans = [(span["name"], span["engine"], len(span["events"])) for span in shown["timeline"]]
        assert [name for name, _, _ in spans] == ["queue", "prefill", "decode", "held", "prefill", "decode"]
        assert [(engine, count) for name, engine, count in spans if name == "prefill"] == [(0, 1), (1, 1)]
        assert shown["timeline"][4]["events"][0]["tokens"] > 40, "the tokens that it had were computed again"


def test_a_preempted_request_s_timeline_says_so(tmp_path: Path) -> None:
    """Where blocks run out, the one that gives way shows its preemption and the second prefill."""
    config = EngineConfig(groups=full_groups(8), max_model_len=512, max_num_batched_tokens=256)
    with Served(lambda prompt: "z " * 60, engine=config, flight_dir=tmp_path) as served:
        served.call(served.script.go.clear)
        body = {"max_tokens": 40, "ignore_eos": True}
        asking = [
            threading.Thread(target=served.ask, args=("/v1/completions", body | {"prompt": letter * 40}))
            for letter in "ab"
        ]
        for each in asking:
            each.start()
        served.wait_until(lambda: sum(bool(each.lives) for each in served.client.observers.monitor.requests) == 2)
        served.call(served.script.go.set)
        for each in asking:
            each.join(30)
        ended = json.loads(served.ask("/admin/requests")[1])["data"]
        assert sum(each["num_preemptions"] for each in ended) >= 1
        victim = next(each for each in ended if each["num_preemptions"])
        shown = json.loads(served.ask(f"/admin/requests/{victim['id']}")[1])
        told = [event for span in shown["timeline"] for event in span["events"]]
        preempted = [event for event in told if event["name"] == "preempted"]
        assert len(preempted) == victim["num_preemptions"] and preempted[0]["lost_tokens"] >= 40
        assert told[-1]["name"] == "chunk" and told[-1]["at_s"] >= preempted[-1]["at_s"], "computed again"


def test_a_failed_step_is_kept_in_a_file(tmp_path: Path) -> None:
    """The copy holds the failed step, and what ran in it."""
    with Served(flight_dir=tmp_path) as served:
        served.script.failure = RuntimeError("a fault")
        assert served.ask("/v1/completions", {"prompt": "p", "max_tokens": 3})[0] == 500
        (kept,) = tmp_path.glob("failed-step-*.flight")
    found = read_flight(kept.read_bytes())
    assert found.steps[0].flags == FAILED and len(found.requests) == 1
    assert kept.stat().st_mode & 0o777 == 0o600


def test_a_file_outlives_a_killed_writer_and_is_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After kill -9 in the middle of a step, the command shows the step in flight and writes a trace."""
    path = str(tmp_path / "engine-1-0.flight")
    code = (
        "import os, signal, sys\n"
        "from tokenmill.net.mapped_files import flight_file\n"
        "from tokenmill.core.flight import CHUNK, RequestRecord\n"
        "with flight_file(sys.argv[1], 'toy') as file:\n"
        "    w = file.writer\n"
        "    w.request(RequestRecord(0, 1.0, 2.0, 0.0, 0.0, 20, 4, 9, 0, 1, '', 0, 'deadly', ''))\n"
        "    w.event(CHUNK, 2.0, 0, 0, 4, 16)\n"
        "    w.step(0, 2.0, (1, 16, 1, 0, 9, 0), [0])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, path], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == -signal.SIGKILL
    lost = keep_lost(path)
    assert lost is not None and lost.name.startswith("lost-") and keep_lost(path) is None
    out = tmp_path / "trace.json"
    assert main(["flight", str(lost), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert "step 0" in said and "in flight" in said and "deadly" in said and "1 requests were open" in said
    assert_opens_in_perfetto(json.loads(out.read_text()))
    assert main(["flight", str(out)]) == 2 and "cannot be used" in capsys.readouterr().err
    assert main(["flight", str(tmp_path / "none")]) == 2 and "cannot be read" in capsys.readouterr().err


def test_files_of_engines_that_run_are_not_pruned(tmp_path: Path) -> None:
    """The last few of the others are kept, the file in use whatever its age."""
    path = new_path(str(tmp_path), "0")
    with flight_file(path, "toy") as file:
        assert file is not None
        copies = [keep_copy(path, f"asked{i}") for i in range(5)]
        for i, copy in enumerate(copies):
            os.utime(copy, (1000 + i, 1000 + i))
        os.utime(path, (1, 1))
        prune(str(tmp_path), 2)
        assert sorted(tmp_path.iterdir()) == sorted([Path(path), *copies[3:]])
        with flight_file(path, "other") as second:
            assert second is None, "another engine's"
    assert not Path(path).exists()


def test_a_ring_read_late_goes_on_with_what_is_left(tmp_path: Path) -> None:
    """Events that were overwritten before they were read are missing; later ones are there, each once."""
    path = str(tmp_path / "engine-1-0.flight")
    with flight_file(path, "toy") as file:
        rings = Rings()
        rings.open(0, path)
        ring = rings.get(0)
        assert ring is not None and file is not None
        for number in range(3):
            file.writer.event(CHUNK, float(number), 1, number, 0, 1)
        assert [each.step for each in ring.events(1)] == [0, 1, 2]
        for number in range(3, NUM_EVENTS + 10):
            file.writer.event(CHUNK, float(number), 2, number, 0, 1)
        assert [each.step for each in ring.events(2)] == list(range(10, NUM_EVENTS + 10))
        file.writer.event_ended(NUM_EVENTS + 9, 5.0)
        assert ring.end_of(ring.events(2)[-1]) == 5.0


def test_the_description_of_an_unused_recorder_is_one_line() -> None:
    """An engine that made no step."""
    data, _ = written()
    assert len(describe(read_flight(bytes(data)))) == 1
    assert trace(data)["otherData"]["pid"] == 7
