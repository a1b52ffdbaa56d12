"""`bench engine` on engines whose speed is known: the right runs are made, in turns, and the right rates come out."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tokenmill.bench import engine as bench
from tokenmill.bench import llama_worker, machine, peers
from tokenmill.bench.engine import Demand, Load
from tokenmill.core.errors import ConfigError, TokenmillError

LOAD = Load("2 streams", 2, 8, 11)


class FakeEngine:
    """Takes prompt_s for each prompt token and step_s for each step; writes down what it is asked for."""

    vocab_size = 1000
    pids = ()
    threads = 1
    model_path = Path("fake.gguf")

    def __init__(self, name: str, prompt_s: float, step_s: float, log: list[tuple] | None = None) -> None:
        self.name = name
        self.facts = {"kernels": "none"}
        self.prompt_s, self.step_s = prompt_s, step_s
        self.log = [] if log is None else log
        self.is_closed = False

    def run(self, prompts: list[list[int]], max_tokens: int) -> float:
        self.log.append((self.name, prompts, max_tokens))
        return sum(map(len, prompts)) * self.prompt_s + (max_tokens - 1) * self.step_s

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 16)


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return parser.parse_args(argv)


def test_rates_follow_from_the_seconds_of_two_runs() -> None:
    """16 prompt tokens at 10 ms, ten steps of 50 ms for two streams."""
    figures = bench.measure([FakeEngine("ours", 0.01, 0.05)], LOAD, 2, random.Random(0))
    rates = {figure.quantity: figure.runs["ours"] for figure in figures}
    assert rates["decode only"] == pytest.approx([2 * 10 / 0.5] * 2)
    assert rates["generated over wall"] == pytest.approx([2 * 11 / (0.16 + 0.5)] * 2)


def test_prefill_is_one_run_to_the_first_token() -> None:
    engine = FakeEngine("ours", 0.001, 1.0)
    (figure,) = bench.measure([engine], Load("prefill 512", 1, 512, 1), 3, random.Random(0))
    assert figure.quantity == "prompt"
    assert figure.runs == {"ours": pytest.approx([1000.0] * 3)}
    assert {max_tokens for _, _, max_tokens in engine.log} == {1}


def test_engines_take_turns_on_the_same_prompts() -> None:
    """After one warm-up each: ours, peer, ours, peer; equal prompts inside a repeat, new ones in the next."""
    log: list[tuple] = []
    engines = [FakeEngine("ours", 0.01, 0.01, log), FakeEngine("peer", 0.01, 0.01, log)]
    bench.measure(engines, LOAD, 2, random.Random(0))
    measured = log[2:]
    assert [name for name, _, _ in log[:2]] == ["ours", "peer"]
    assert [(name, n) for name, _, n in measured] == [("ours", 1), ("ours", 11), ("peer", 1), ("peer", 11)] * 2
    first, second = [prompts for _, prompts, _ in measured[:4]], [prompts for _, prompts, _ in measured[4:]]
    assert first == [first[0]] * 4 and second == [second[0]] * 4
    assert first[0] != second[0]
    assert [len(prompt) for prompt in first[0]] == [8, 8]
    assert first[0][0] != first[0][1]


def test_loads_are_prefill_and_then_the_asked_streams() -> None:
    names = [(load.name, load.num_streams, load.prompt_tokens, load.new_tokens) for load in bench.loads((1, 32))]
    assert names == [("prefill 512", 1, 512, 1), ("1 stream", 1, 128, 128), ("32 streams", 32, 128, 128)]


def test_a_run_that_makes_no_sense_is_refused() -> None:
    """More tokens in less time is a disturbed machine, not an infinite rate."""
    with pytest.raises(TokenmillError, match="too busy"):
        bench.measure([FakeEngine("ours", 0.01, -0.001)], LOAD, 1, random.Random(0))


def test_the_command_prints_and_writes_and_closes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table on standard output, both files, the engine closed; the demand covers the largest load."""
    engine = FakeEngine("ours", 0.001, 0.002)
    demands: list[Demand] = []

    def make(demand: Demand) -> FakeEngine:
        demands.append(demand)
        return engine

    args = parse("--streams", "1,4", "--repeats", "2", "--json", str(tmp_path / "r.json"))
    args.markdown = tmp_path / "r.md"
    assert bench.run(args, make) == 0
    assert demands == [Demand(4, 513)]
    assert engine.is_closed
    assert "prefill 512" in capsys.readouterr().out
    saved = json.loads((tmp_path / "r.json").read_text())
    assert [figure["load"] for figure in saved["figures"]] == ["prefill 512", *["1 stream"] * 2, *["4 streams"] * 2]
    assert saved["figures"][1]["runs"]["ours"] == pytest.approx([500.0] * 2)
    assert "| 4 streams | decode only |" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize("argv", [["--repeats", "0"], ["--peers"], ["--peer-python", "/nowhere/python"]])
def test_a_wish_that_cannot_be_met_names_its_option(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any model is loaded."""
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        bench.run(parse(*argv), lambda demand: pytest.fail("the engine was loaded"))
    assert caught.value.param == argv[0].strip("-").replace("-", "_")


FAKE_WORKER = """
import json, os, sys
options = json.loads(sys.argv[2])
if options["extra_buffers"] and "fragile" in sys.argv[1]:
    print("boom", file=sys.stderr)
    os._exit(3)
print(json.dumps({"facts": {"version": "fake"}, "vocab_size": 7}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["max_tokens"] == 99:
        os._exit(4)
    print(json.dumps({"seconds": len(request["prompts"]) + request["max_tokens"]}), flush=True)
"""


@pytest.fixture
def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_WORKER)
    monkeypatch.setattr(peers, "WORKER", worker)
    yield


def test_a_peer_answers_over_its_pipe(fake_worker: None) -> None:
    peer = peers.start_llama(sys.executable, Path("m.gguf"), threads=2, flash_attention=True)
    assert peer.run([[1], [2]], 5) == 7.0
    assert peer.name == "llama.cpp, flash attention"
    assert peer.vocab_size == 7
    assert peer.facts["version"] == "fake" and "rearranged" in peer.facts["weights"]
    assert len(peer.pids) == 1
    peer.close()


def test_a_peer_that_dies_on_rearranged_weights_runs_without_and_says_so(fake_worker: None) -> None:
    peer = peers.start_llama(sys.executable, Path("fragile.gguf"), threads=2, flash_attention=False)
    assert peer.run([[1]], 1) == 2.0
    assert "code 3: boom" in peer.facts["weights"]
    peer.close()


def test_a_peer_that_dies_in_a_run_is_an_error_with_its_code(fake_worker: None) -> None:
    peer = peers.start_llama(sys.executable, Path("m.gguf"), threads=2, flash_attention=False)
    with pytest.raises(peers.PeerDied, match="code 4"):
        peer.run([[1]], 99)


def test_llama_worker_reads_all_prompts_and_then_extends_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are (sequence, position, token, wants logits); a batch holds at most BATCH_TOKENS of them."""

    class Recorder(llama_worker.Runner):
        def __init__(self) -> None:
            self.lib = SimpleNamespace(llama_synchronize=lambda context: None)
            self.context = None
            self.steps: list[list[tuple[int, int, int, bool]]] = []
            self.room = (0, 0)

        def prepare(self, num_sequences: int, num_tokens: int) -> None:
            self.room = (num_sequences, num_tokens)

        def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
            self.steps.append(rows)

    monkeypatch.setattr(llama_worker, "BATCH_TOKENS", 4)
    runner = Recorder()
    assert runner.run([[7, 8, 9], [5, 6]], 3) >= 0
    assert runner.room == (2, 6)
    assert runner.steps == [
        [(0, 0, 7, False), (0, 1, 8, False), (0, 2, 9, True), (1, 0, 5, False)],
        [(1, 1, 6, True)],
        [(0, 3, 7, True), (1, 2, 5, True)],
        [(0, 4, 8, True), (1, 3, 6, True)],
    ]


def test_interference_is_what_neither_we_nor_our_peers_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc of a made-up machine: of 300 busy ticks in a second, the measured peer used 100 and we none."""
    ticks = machine.os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(machine.os, "times", lambda: (0.0, 0.0))
    clock = iter([10.0, 11.0])
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(clock))
    (tmp_path / "42").mkdir()

    def write(busy: int, own: int, steal: int) -> None:
        (tmp_path / "stat").write_text(f"cpu  {busy} 0 0 5000 9 0 0 {steal} 0 0\n")
        (tmp_path / "42" / "stat").write_text(f"42 (a (odd) name) S {'0 ' * 10}{own} 0 0 0\n")

    write(1000, 500, 0)
    before = machine.read_cpu_time([42], tmp_path)
    write(1000 + 3 * ticks, 500 + ticks, ticks // 2)
    state = machine.interference(before, machine.read_cpu_time([42], tmp_path))
    assert state is not None
    assert state.other_cores == pytest.approx(2.0)
    assert state.steal_cores == pytest.approx(0.5)
    assert state.is_contaminated and "CONTAMINATED: 2.00 cores" in str(state)


def test_where_there_is_no_proc_nothing_is_claimed(tmp_path: Path) -> None:
    assert machine.read_cpu_time([], tmp_path) is None
    assert machine.interference(None, None) is None


def test_hardware_names_the_processor_and_the_kernels_instruction_sets(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Some CPU\nflags\t\t: sse2 avx2 avx512_vnni bmi1\n")
    facts = machine.hardware(tmp_path)
    assert facts["processor"] == "Some CPU"
    assert facts["instruction sets"] == "avx2 avx512_vnni"


def test_the_bandwidth_probe_reads_memory() -> None:
    assert machine.read_bandwidth(2) > 0.01
