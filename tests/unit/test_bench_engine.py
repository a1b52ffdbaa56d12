"""`bench engine` on engines whose speed is known: the right runs are made, in turns, and the right rates come out."""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.bench import engine as bench
from tokenmill.bench import machine
from tokenmill.bench.engine import Demand, Load
from tokenmill.bench.machine import RunTime
from tokenmill.bench.peer import llama_engine
from tokenmill.bench.peer import processes as llama_tools
from tokenmill.bench.peer import processes as peers
from tokenmill.cli.bench.engine import with_grammar
from tokenmill.core.errors import ConfigError, InvalidRequest, TokenmillError
from tokenmill.core.request import SamplingParams

LOAD = Load("2 streams", ((2, 8, 11),))


class FakeEngine:
    """Takes prompt_s for each prompt token and step_s for each step; writes down what it is asked for."""

    vocab_size = 1000
    pids = ()
    takes_uneven = True
    cores = 2
    """Processors that it keeps busy; 0: it cannot tell."""
    threads = 1
    model_path = Path("fake.gguf")

    def __init__(self, name: str, prompt_s: float, step_s: float, log: list[tuple] | None = None) -> None:
        self.name = name
        self.facts = {"kernels": "none"}
        self.prompt_s, self.step_s = prompt_s, step_s
        self.log = [] if log is None else log
        self.is_closed = False

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> RunTime:
        self.log.append((self.name, prompts, max_tokens))
        wall_s = sum(map(len, prompts)) * self.prompt_s + (max(max_tokens) - 1) * self.step_s
        return RunTime(wall_s, self.cores * wall_s if self.cores else None)

    def peak_bytes(self) -> int | None:
        return 3 << 30

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROBE_BYTES", 1 << 16)
    monkeypatch.setattr(bench, "SETTLE_S", 0)


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


def test_processor_time_counts_in_place_of_the_clocks() -> None:
    """Two processors are busy, so the rates are half as high; who cannot tell its time is named."""
    engine = FakeEngine("ours", 0.01, 0.05)
    figures = bench.measure([engine], LOAD, 1, random.Random(0), by_cpu=True)
    rates = {figure.quantity: figure.runs["ours"] for figure in figures}
    assert rates["decode only"] == pytest.approx([10 / 0.5])
    assert rates["generated over CPU time"] == pytest.approx([11 / (0.16 + 0.5)])
    report = bench.compare([engine], [LOAD], 1, 1, by_cpu=True)
    assert report.cells()[0][1] == "tokens/CPU s" and report.to_json()["clock"] == "cpu"
    engine.cores = 0
    with pytest.raises(ConfigError, match="processor time of ours is not known"):
        bench.measure([engine], LOAD, 1, random.Random(0), by_cpu=True)


def test_prefill_is_one_run_to_the_first_token() -> None:
    engine = FakeEngine("ours", 0.001, 1.0)
    (figure,) = bench.measure([engine], Load("prefill 512", ((1, 512, 1),)), 3, random.Random(0))
    assert figure.quantity == "prompt"
    assert figure.runs == {"ours": pytest.approx([1000.0] * 3)}
    assert [max_tokens for _, _, max_tokens in engine.log] == [[1]] * 4


def test_engines_take_turns_on_the_same_prompts() -> None:
    """After one warm-up each: ours, peer, ours, peer; equal prompts inside a repeat, new ones in the next."""
    log: list[tuple] = []
    engines = [FakeEngine("ours", 0.01, 0.01, log), FakeEngine("peer", 0.01, 0.01, log)]
    bench.measure(engines, LOAD, 2, random.Random(0))
    measured = log[2:]
    assert [name for name, _, _ in log[:2]] == ["ours", "peer"]
    assert [(name, n) for name, _, n in measured] == [
        ("ours", [1, 1]),
        ("ours", [11, 11]),
        ("peer", [1, 1]),
        ("peer", [11, 11]),
    ] * 2
    first, second = [prompts for _, prompts, _ in measured[:4]], [prompts for _, prompts, _ in measured[4:]]
    assert first == [first[0]] * 4 and second == [second[0]] * 4
    assert first[0] != second[0]
    assert [len(prompt) for prompt in first[0]] == [8, 8]
    assert first[0][0] != first[0][1]


def test_loads_are_prefill_then_the_asked_streams_then_mixed() -> None:
    first, one, many, mixed = bench.loads((1, 32))
    assert first == Load("prefill 512", ((1, 512, 1),))
    assert (one, many) == (Load("1 stream", ((1, 128, 128),)), Load("32 streams", ((32, 128, 128),)))
    assert (mixed.num_streams, mixed.num_prompt, mixed.longest) == (16, 12 * 128 + 4 * 512, 544)
    assert mixed.max_tokens == [128] * 12 + [32] * 4
    assert bench.loads((4,), 64)[1].max_tokens == [64] * 4


def test_the_mixed_load_counts_all_tokens_and_leaves_out_who_cannot_run_it() -> None:
    """(2 * 4 + 3 + 2 * 5 + 2) tokens in 11 prompt tokens at 10 ms and 4 steps at 50 ms."""
    even = FakeEngine("even", 0.01, 0.05)
    even.takes_uneven = False
    load = Load("mixed", ((2, 4, 5), (1, 3, 2)))
    (figure,) = bench.measure([FakeEngine("ours", 0.01, 0.05), even], load, 1, random.Random(0))
    assert figure.quantity == "read and generated"
    assert figure.runs == {"ours": pytest.approx([23 / 0.31])}
    assert even.log == []


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
    assert demands == [Demand(16, 544)]
    assert engine.is_closed
    assert "prefill 512" in capsys.readouterr().out
    saved = json.loads((tmp_path / "r.json").read_text())
    loads = [figure["load"] for figure in saved["figures"]]
    assert loads == ["prefill 512", *["1 stream"] * 2, *["4 streams"] * 2, "mixed"]
    assert saved["facts"]["ours"] == {"kernels": "none", "peak memory": "3.0 GiB"}
    assert saved["figures"][1]["runs"]["ours"] == pytest.approx([500.0] * 2)
    assert "| 4 streams | decode only |" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize(
    ("param", "argv"),
    [
        ("repeats", ["--repeats", "0"]),
        ("peers", ["--peers"]),
        ("peer_python", ["--peer-python", "/nowhere/python"]),
        ("peer_llama_bin", ["--peer-llama-bin", "/nowhere"]),
        ("peer_model", ["--peer-model", "vllm=/nowhere", "--peer-llama-bin", "."]),
    ],
)
def test_a_wish_that_cannot_be_met_names_its_option(
    param: str, argv: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before any model is loaded."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / llama_tools.TOOL).touch()
    monkeypatch.setattr(peers, "_LOOK", "print('[\"\", []]')")
    with pytest.raises(ConfigError) as caught:
        bench.run(parse(*argv), lambda demand: pytest.fail("the engine was loaded"))
    assert caught.value.param == param


def test_an_interpreter_says_which_engines_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of its engines with each model named for it; llama.cpp without one takes the file under test."""
    monkeypatch.setattr(peers, "_LOOK", 'print(\'["/env", ["vllm", "llama_cpp"]]\')')
    found = peers.find([sys.executable], None, [("vllm", tmp_path), ("vllm", Path(__file__))])
    assert [(peer.engine, peer.model, peer.prefix) for peer in found] == [
        ("vllm", tmp_path, "/env"),
        ("vllm", Path(__file__), "/env"),
        ("llama", None, "/env"),
    ]
    assert found[1].name() == f"vLLM {Path(__file__).name}"
    with pytest.raises(ConfigError, match="--peer-model vllm=PATH"):
        peers.find([sys.executable], None, [])


def test_another_tokenmill_is_a_peer_where_there_is_no_other_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not this interpreter's own; it takes the file under test, and says where it lies."""
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    monkeypatch.setattr(peers, "_LOOK", 'print(\'["/env", ["tokenmill"]]\')')
    (found,) = peers.find([str(other)], None, [])
    assert (found.engine, found.model, found.name()) == ("tokenmill", None, "tokenmill of /env")
    with pytest.raises(ConfigError, match="finds none"):
        peers.find([sys.executable], None, [])
    monkeypatch.setattr(peers, "_LOOK", 'print(\'["/env", ["llama_cpp", "tokenmill"]]\')')
    assert [peer.engine for peer in peers.find([str(other)], None, [])] == ["llama"]


FAKE_WORKER = """
import json, os, sys
engine, model, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if options.get("extra_buffers") and "fragile" in model:
    print("boom", file=sys.stderr)
    os._exit(3)
print(json.dumps({"facts": {"version": "fake", "engine": engine}, "vocab_size": 7}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["max_tokens"] == [99]:
        os._exit(4)
    seconds = len(request["prompts"]) + sum(request["max_tokens"])
    print(json.dumps({"seconds": seconds, "cpu_seconds": 3 * seconds}), flush=True)
"""


@pytest.fixture
def fake_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    worker = tmp_path / "worker.py"
    worker.write_text(FAKE_WORKER)
    monkeypatch.setattr(peers, "WORKER", worker)
    yield


def start_peer(engine: str, model: str) -> list[peers.Worker]:
    started = peers.start(peers.Wanted(engine, Path(model), sys.executable), Path("own.gguf"), 2, 4)
    assert all(isinstance(peer, peers.Worker) for peer in started)
    return started


def test_a_peer_answers_over_its_pipe(fake_worker: None) -> None:
    plain, flash = start_peer("llama", "m.gguf")
    (other,) = start_peer("vllm", "folder")
    assert flash.run([[1], [2]], [5, 1]) == RunTime(8.0, 24.0)
    assert [peer.name for peer in (plain, flash, other)] == [
        "llama.cpp m.gguf",
        "llama.cpp m.gguf, flash attention",
        "vLLM folder",
    ]
    assert plain.vocab_size == 7
    assert plain.facts["version"] == "fake" and "rearranged" in plain.facts["weights"]
    assert (plain.facts["engine"], other.facts["engine"]) == ("llama", "vllm")
    assert len(plain.pids) == 1
    for peer in (plain, flash, other):
        peer.close()


def test_a_peer_that_dies_on_rearranged_weights_runs_without_and_says_so(fake_worker: None) -> None:
    for peer in start_peer("llama", "fragile.gguf"):
        assert peer.run([[1]], [1]).wall_s == 2.0
        assert "code 3: boom" in peer.facts["weights"]
        peer.close()


def test_a_peer_that_dies_in_a_run_is_an_error_with_its_code(fake_worker: None) -> None:
    (peer,) = start_peer("openvino", "folder")
    with pytest.raises(peers.PeerDied, match="code 4"):
        peer.run([[1]], [99])


def test_a_peer_does_not_see_our_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """vLLM's own OpenMP is loaded first, from wherever its environment keeps it."""
    monkeypatch.setenv("PYTHONPATH", "/ours")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    env = peers.environment(peers.Wanted("vllm", Path("m"), sys.executable, str(tmp_path)), 1)
    assert "PYTHONPATH" not in env
    assert env["LD_PRELOAD"] == str(tmp_path / "lib" / "libiomp5.so")
    assert "LD_PRELOAD" not in peers.environment(peers.Wanted("openvino", Path("m"), sys.executable), 1)


def test_llama_extends_started_sequences_before_it_reads_on() -> None:
    """Rows are (sequence, position, token, wants logits); a step holds at most BATCH_TOKENS of them."""
    llama_engine.BATCH_TOKENS, whole = 4, llama_engine.BATCH_TOKENS
    try:
        steps = list(llama_engine.steps([[7, 8, 9], [5, 6]], [3, 2]))
    finally:
        llama_engine.BATCH_TOKENS = whole
    assert steps == [
        [(0, 0, 7, False), (0, 1, 8, False), (0, 2, 9, True), (1, 0, 5, False)],
        [(0, 3, 7, True), (1, 1, 6, True)],
        [(0, 4, 8, True), (1, 2, 5, True)],
    ]


FAKE_TOOL = """#!{python}
import json, sys
if sys.argv[1:] == ["--version"]:
    sys.exit("version: 12 (abc)")
pairs = dict(zip(sys.argv[1::2], sys.argv[2::2]))
npp, ntg, npl = int(pairs["-npp"]), int(pairs["-ntg"]), int(pairs["-npl"])
print("some words")
if npl < 100:
    assert int(pairs["-c"]) >= npl * (npp + ntg)
    print(json.dumps({{"t_pp": npp * npl, "t_tg": ntg / 1000}}))
"""


def test_llamas_program_is_told_the_shape_and_its_times_are_read(tmp_path: Path) -> None:
    """A prompt of 8 for 2 streams takes 16 s; 11 tokens are 10 steps of 1 ms, and one token is none."""
    tool = tmp_path / llama_tools.TOOL
    tool.write_text(FAKE_TOOL.format(python=sys.executable))
    tool.chmod(0o755)
    plain, flash = peers.start(peers.Wanted("llama", None, folder=tmp_path), Path("own.gguf"), 2, 4)
    assert (plain.name, flash.name) == ("llama.cpp", "llama.cpp, flash attention")
    prompts = [[1] * 8, [2] * 8]
    assert plain.facts["version"] == f"{llama_tools.TOOL} 12 (abc)"
    assert plain.run(prompts, [11, 11]).wall_s == pytest.approx(16.01)
    assert plain.run(prompts, [1, 1]) == RunTime(16.0, None)
    with pytest.raises(TokenmillError, match="reported no times"):
        plain.run([[1]] * 100, [1] * 100)


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


def test_a_bias_in_the_settings_of_streams_may_name_tokens_as_json_does() -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    given = parser.parse_args(["--sampling", '{"temperature": 1, "logit_bias": {"5": 2.0}}'])
    assert SamplingParams(**given.sampling).logit_bias == ((5, 2.0),)


def test_streams_may_follow_a_grammar() -> None:
    """Asked for as clients ask for it; what else is set stays."""
    given = with_grammar({"temperature": 1, "structured_outputs": {"regex": "([a-z]+ )*"}})
    sampling = SamplingParams(**given)
    assert sampling.temperature == 1 and "[a-z]" in sampling.grammar
    assert with_grammar({"temperature": 1}) == {"temperature": 1}
    with pytest.raises(InvalidRequest, match="structured_outputs"):
        with_grammar({"structured_outputs": {"regexp": "a"}})
