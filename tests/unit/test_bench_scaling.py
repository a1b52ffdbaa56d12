"""`bench scaling`: a schedule's critical path comes out by hand, and a model's steps are cut as they say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
from ops_cases import Sequences, raw_tensor

from random_models import Shape, write_gguf_model
from tokenmill.bench.scaling import Phase, add_arguments, schedule, show, span
from tokenmill.cli import main as cli
from tokenmill.ops.api import StepLimits
from tokenmill.ops.native import NativeOps, available

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))


def test_equal_units_are_shared_and_the_last_one_is_waited_for() -> None:
    """Where lines cost nothing: 8 units on 4 threads take two of them, 9 take three."""
    assert span([1.0] * 8, 4, 0.0) == 2.0
    assert span([1.0] * 9, 4, 0.0) == 3.0
    assert span([1.0] * 3, 64, 0.0) == 1.0


def test_who_is_done_helps_the_others() -> None:
    """A run of long units is shared by all that have short ones: its last unit is taken up when its first one ends."""
    assert span([4.0, 4.0, 1.0, 1.0], 2, 0.0) == 6.0
    assert span([4.0, 1.0, 1.0, 1.0, 1.0, 1.0], 2, 0.0) == 5.0


def test_lines_that_all_write_are_had_one_after_the_other() -> None:
    """Each thread of a group counts off its unit; then each group."""
    assert span([1.0] * 4, 4, 0.1) == pytest.approx(1.0 + 4 * 0.1 + 0.1)
    assert span([1.0] * 16, 16, 0.1) == pytest.approx(1.0 + 8 * 0.1 + 2 * 0.1)


def test_a_step_is_its_parts() -> None:
    """Of two threads; memory takes the first phase longer than its units."""
    phases = [Phase("a", 0.5, [1.0, 1.0], 300), Phase("b", 0.25, [2.0]), Phase("a", 0.0, [1.0, 1.0])]
    found = schedule(phases, 2, 0.0, bandwidth=100.0)
    assert (found.between_s, found.handing_s, found.shared_s) == (0.75, 0.0, 3.0)
    assert (found.waiting_s, found.memory_s, found.step_s) == (1.0, 2.0, 6.75)
    assert found.by_operation == {"a": 4.0, "b": 2.0}
    assert schedule(phases, 2, 0.0).step_s == 4.75
    assert schedule(phases, 1, 1.0).step_s == 6.75 and schedule(phases, 2, 0.01).handing_s > 0


@needs_native
def test_units_are_those_of_a_step_cut_for_so_many_threads() -> None:
    """On one thread, with the bits of any other; with more threads there are more units, each within the step."""
    rng = np.random.default_rng(0)
    ops = NativeOps(2)
    try:
        table, weight = ops.pack([raw_tensor(rng, "f32", 9, 640)]), ops.pack([raw_tensor(rng, "q4_1", 6400, 640)])

        def forward(rec: object, batch: object) -> object:
            return rec.linear(rec.embed(table, batch.tokens_T), weight)  # type: ignore[attr-defined]

        program = ops.compile(forward, StepLimits(8, 1, 1, 1))
        batch = Sequences(16, [np.zeros(1, np.int32)]).batch([(0, [1, 2], 0)], logit_rows=[])
        expected = program(batch).copy()
        few, many, one = (program.record_units(batch, count) for count in (2, 64, 1))
        assert np.array_equal(program(batch), expected), "recording ends"
        assert len(one) <= len(few) < len(many) and set(one["phase"]) == {-1}
        for units in (few, many):
            places = [operation.kind for operation in program.operations]
            assert {places[place] for place in units["place"][units["phase"] == 0]} == {"linear"}
            assert (units["ended_ns"] >= units["began_ns"]).all()
            assert (units["began_ns"][1:] >= units["ended_ns"][:-1]).all()
        with pytest.raises(AssertionError, match="between 1 and 1024"):
            program.record_units(batch, 2000)
    finally:
        ops.close()


@needs_native
def test_the_command_shows_and_writes_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every number of threads, the same work: what units take together does not fall with their number."""
    path = tmp_path / "model.gguf"
    small = {"width": 64, "heads": 2, "kv_heads": 2, "head": 32, "rope": 32, "value": 32, "experts": 0, "dense_ffn": 64}
    write_gguf_model(path, Shape("qwen3", layers=2, context=1024, **small), "q8_0")
    assert cli.main(["bench", "scaling", str(path), "--json", str(tmp_path / "s.json"), "--line-ns", "50"]) == 0
    said = capsys.readouterr().out
    assert "prefill, 512 rows, by operation" in said and "linear lm_head" in said
    saved = json.loads((tmp_path / "s.json").read_text())
    assert saved["line_ns"] == 50 and len(saved["steps"]) == 3 * 7
    for one in saved["steps"]:
        parts = [one[f"{part}_s"] for part in ("between", "handing", "shared", "waiting", "memory")]
        assert sum(parts) == pytest.approx(one["step_s"]) and min(parts) >= -1e-12


def test_what_is_shown_is_relative_to_one_thread(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    phases = {1: [Phase("linear", 0.0, [4.0])], 4: [Phase("linear", 0.0, [1.0] * 4)]}
    assert show(parser.parse_args(["--line-ns", "0"]), {"decode": phases}, {"model": "m.gguf"}) == 0
    said = capsys.readouterr().out
    assert "4.0" in said and "model: m.gguf" in said
