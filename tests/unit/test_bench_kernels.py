"""`bench kernels` and `bench profile`: shares of a known limit come out, and tables add up to what was measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from ops_cases import raw_tensor

from tokenmill.bench import kernels
from tokenmill.bench import profile as profile
from tokenmill.bench.kernels import Case, measure
from tokenmill.bench.profile import ServedTimes, StepTimes
from tokenmill.ops.api import StepBatch, StepLimits
from tokenmill.ops.native import NativeOps, available

PEAKS = {"int8": 1e12, "f32": 1e11, "bf16": 2e11}
native = pytest.mark.skipif(available() is not None, reason=str(available()))


class FakeMachine:
    """Reads small working sets at 100 GB/s and large ones at 10 GB/s; writes down what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []

    def probe(self, what: str, num_bytes: int = 0, rounds: int = 1) -> float:
        self.asked.append((what, num_bytes, rounds))
        return (1e11 if num_bytes < 1 << 20 else 1e10) if what == "read" else PEAKS[what]


def case(seconds: float, *, num_copies: int = 1, num_bytes: int = 1000, num_ops: int = 0, unit: str = "int8") -> Case:
    return Case("linear", "N=1", 1, num_copies, num_bytes, num_ops, unit, lambda: seconds)


def test_share_is_the_least_time_over_the_measured_one() -> None:
    """10 MB in 2 ms at 10 GB/s is half of what the memory gives; 1 GOP in 2 ms is half of the int8 peak."""
    by_memory = measure(case(0.002, num_bytes=10_000_000), FakeMachine(), PEAKS, 3)
    assert (by_memory.share, by_memory.bound) == (pytest.approx(0.5), "memory")
    by_compute = measure(case(0.002, num_ops=1_000_000_000), FakeMachine(), PEAKS, 3)
    assert (by_compute.share, by_compute.bound) == (pytest.approx(0.5), "compute")
    in_floats = measure(case(0.02, num_ops=1_000_000_000, unit="f32"), FakeMachine(), PEAKS, 3)
    assert in_floats.share == pytest.approx(0.5)


def test_copies_are_one_working_set_and_a_share_of_the_time() -> None:
    """30 copies of 1 MB are probed as 30 MB, beside every run."""
    machine = FakeMachine()
    found = measure(case(0.03, num_copies=30, num_bytes=1_000_000), machine, PEAKS, 4)
    assert found.seconds == pytest.approx([0.001] * 4)
    assert machine.asked == [("read", 30_000_000, 2)] * 4
    assert found.share == pytest.approx(0.1)
    tiny = FakeMachine()
    measure(case(1.0, num_bytes=10), tiny, PEAKS, 1)
    assert tiny.asked == [("read", kernels.LEAST_PROBED, 1024)]


def test_kernels_writes_what_it_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    kernels.add_arguments(parser)
    files = ["--json", str(tmp_path / "k.json"), "--markdown", str(tmp_path / "k.md")]
    args = parser.parse_args(["--only", "N=1", "--repeats", "2", *files])
    other = Case("norm", "D=8", 1, 1, 1, 1, "f32", lambda: pytest.fail("was not asked for"))
    assert kernels.run(args, [case(0.002, num_bytes=10_000_000), other], FakeMachine(), {"model": "m.gguf"}) == 0
    saved = json.loads((tmp_path / "k.json").read_text())
    assert [(row["operation"], row["share"]) for row in saved["cases"]] == [("linear", pytest.approx(0.5))]
    lines = (tmp_path / "k.md").read_text().splitlines()
    assert lines[2] == "| linear | N=1 | 1 | 2000.0 | 5.0 | 0.0 | 10-10 | 1000 | 50% | memory |"
    assert "- model: m.gguf" in lines
    assert "N=1" in capsys.readouterr().out


STEP = StepTimes(
    1, 192, {"linear qkv": 300.0, "attention": 600.0}, 1000.0, 50.0, 1250.0, {"plan": 40.0, "commit": 60.0}
)
SERVED = ServedTimes(1, 128, 11, 5000.0, 500.0, 70.0, {"engine": 900.0, "front end": 100.0}, {"tokens to text": 30.0})


def test_a_page_adds_up_and_names_what_is_left() -> None:
    """Whatever the parts leave of a whole has a row of its own."""
    page = profile.to_page([STEP], [SERVED], {"model": "m.gguf"})
    for row in (
        "| native call | 1000.0 (80%) |",
        "| between calls | 50.0 (4%) |",
        "| slower with work beside it | 200.0 (16%) |",
        "| **whole step** | **1250.0** |",
        "Outside the native call: 250 at 1",
        "| commit | 60.0 (60%) |",
        "| attention | 600.0 (60%) |",
        "| entering and checking | 100.0 (10%) |",
        "| **whole request** | **10000.0** |",
        "| front end | 100.0 (10%) |",
        "| JSON, HTTP, event loop | 70.0 (70%) |",
    ):
        assert row in page, row
    assert page.index("| attention |") < page.index("| linear qkv |")
    assert page.index("- model: m.gguf") < page.index("## A decode step")


def test_a_page_without_processor_times_leaves_their_tables_out() -> None:
    page = profile.to_page([STEP], [ServedTimes(1, 128, 11, 5000.0, 500.0, 70.0)], {})
    assert "whole request" in page and "front end" not in page


def test_the_page_is_written_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    target = tmp_path / "profile.md"
    measured = [STEP], [SERVED], {"model": "m.gguf"}
    assert profile.show(parser.parse_args(["--output", str(target)]), *measured) == 0
    assert not target.exists() and "A decode step" in capsys.readouterr().out
    assert profile.show(parser.parse_args(["--output", str(target), "--write"]), *measured) == 0
    assert target.read_text() == profile.to_page(*measured)
    capsys.readouterr()
    assert profile.show(parser.parse_args(["--json", "-"]), *measured) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["steps"][0]["outside"] == 250.0 and plain["served"][0]["processes"]["engine"] == 900.0


@native
def test_every_operation_of_a_program_is_timed_and_only_while_asked() -> None:
    """Norm, two linears and an add, on one thread and on two: each took some time, a second step adds to it, and after
    None nothing is added."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 256), np.float32)
    batch = StepBatch(
        tokens_T=np.zeros(64, np.int32),
        positions_T=np.zeros(64, np.int32),
        row_starts_S1=np.array([0, 64], np.int32),
        context_lens_S=np.array([64], np.int32),
        block_tables_SB=np.zeros((1, 1), np.int32),
        logit_rows_L=np.zeros(0, np.int32),
    )
    for num_threads in (1, 2):
        ops = NativeOps(num_threads)
        weight = ops.pack([raw_tensor(rng, "q8_0", 256, 256)])
        scale = ops.vector(np.ones(256, np.float32))

        def forward(recorder, _, weight=weight, scale=scale):
            normed = recorder.rms_norm(x, scale, 1e-5)
            return recorder.add(recorder.linear(recorder.linear(normed, weight), weight), normed)

        program = ops.compile(forward, StepLimits(64, 1, 1, 1))
        plain = program(batch).copy()
        times_ns = np.zeros(len(program.operations) + 1, np.int64)
        program.time_operations(times_ns)
        assert (program(batch) == plain).all()
        first = times_ns.copy()
        assert (first > 0).all() and len(first) >= 3
        program(batch)
        assert (times_ns > first)[:-1].all()
        program.time_operations(None)
        second = times_ns.copy()
        program(batch)
        assert (times_ns == second).all()
        ops.close()


@native
def test_probes_answer_for_every_instruction_set() -> None:
    """Memory can always be read; the scalar kernels have no vector peak to be held to."""
    for isa in ("auto", "scalar"):
        ops = NativeOps(2, isa)
        assert ops.probe("read", 1 << 20) > 1e6
        peaks = [ops.probe(what) for what in ("int8", "f32")]
        assert all((peak > 1e6) == (ops.isa != "scalar") for peak in peaks), (isa, peaks)
        ops.close()
