"""The native backend around its kernels: fusing, memory, checks at the border, sampling, the thread team."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import Sequences, TinyDecoder, raw_tensor

from tokenmill.core.errors import ConfigError
from tokenmill.ops.api import NEVER, HeadGeometry, RawTensor, SampleBatch, StepLimits
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.fuse import fuse
from tokenmill.ops.native.library import available_isas
from tokenmill.ops.native.memory import place
from tokenmill.ops.native.operation import SymbolicBatch
from tokenmill.ops.native.record import Recorder
from tokenmill.ops.reference import ReferenceOps
from tokenmill.ops.select import select_ops

HEADS = HeadGeometry(6, 2, 64)
needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))


@pytest.fixture(scope="module")
def ops() -> Any:
    if available() is not None:
        pytest.skip(str(available()))
    made = NativeOps(2)
    yield made
    made.close()


@given(
    st.lists(st.tuples(st.integers(1, 500), st.integers(0, 20), st.integers(0, 6)), min_size=1, max_size=30),
)
def test_values_alive_together_never_overlap(values: list[tuple[int, int, int]]) -> None:
    """Random sizes and lives: pieces that share bytes are never alive at once, and all lie inside the arena."""
    sizes = [size for size, _, _ in values]
    lives = [(first, first + length) for _, first, length in values]
    offsets, total = place(sizes, lives)
    for a in range(len(values)):
        assert offsets[a] % 64 == 0 and offsets[a] + sizes[a] <= total
        for b in range(a):
            apart = offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
            assert apart or lives[a][1] < lives[b][0] or lives[b][1] < lives[a][0], (a, b)


@needs_native
@pytest.mark.parametrize("isa", ["scalar", "scalartiles"])
def test_a_layer_is_eight_operations(isa: str) -> None:
    """The common layer fuses to norm, qkv, rope+KV, attention, output+residual, norm, gate+up+silu, down+residual;
    where activations have one scale for a whole row, two of them become digits apart."""
    ops = NativeOps(1, isa)
    apart = ["quantise"] if isa == "scalartiles" else []
    decoder = TinyDecoder(ops, 1, HEADS)
    group = decoder.group(16)
    kv = ops.bind_kv(np.zeros((4, group.bytes_per_block), np.uint8), group)
    batch = SymbolicBatch()
    recorder = Recorder(batch)
    output = decoder.forward(recorder, kv, batch)
    codes = [operation.kind for operation in fuse(recorder.operations, output)]
    layer = [
        "rms_norm",
        "linear",
        "rope",
        "attention",
        *apart,
        "linear",
        "rms_norm",
        "linear_gated",
        *apart,
        "linear",
    ]
    ops.close()
    assert codes == ["embed", *layer, *layer, "gather", "rms_norm", "linear"]


@needs_native
def test_a_call_tells_when_it_began_and_ended(ops: NativeOps) -> None:
    table = ops.pack([raw_tensor(np.random.default_rng(0), "f32", 9, 64)])
    program = ops.compile(lambda backend, batch: backend.embed(table, batch.tokens_T), StepLimits(8, 1, 1, 1))
    call = program.bind(Sequences(16, [np.zeros(1, np.int32)]).batch([(0, [3, 1, 8], 0)]))
    call()
    began_s, ended_s = call.span_s
    assert 0 < began_s <= ended_s


@needs_native
def test_a_value_read_twice_is_not_fused_away(ops: NativeOps) -> None:
    """A norm whose output is also added, and a linear added to itself, give the unfused result."""
    rng = np.random.default_rng(0)
    weight, norm = ops.pack([raw_tensor(rng, "q4_1", 64, 64)]), ops.vector(rng.standard_normal(64))
    table = ops.pack([raw_tensor(rng, "f32", 9, 64)])

    def forward(ops: Any, batch: Any) -> Any:
        x = ops.embed(table, batch.tokens_T)
        normed = ops.rms_norm(x, norm, 1e-5)
        y = ops.linear(normed, weight)
        return ops.add(ops.add(normed, y), ops.add(y, y))

    batch = Sequences(16, [np.zeros(1, np.int32)]).batch([(0, [3, 1, 8], 0)])
    plain = NativeOps(1, fuse=False)
    results = [backend.compile(forward, StepLimits(8, 1, 1, 1))(batch).copy() for backend in (ops, plain)]
    plain.close()
    assert np.array_equal(*results)
    codes = Counter(operation.kind for operation in _recorded(forward))
    assert codes["quantise"] == 1


@needs_native
@pytest.mark.parametrize(("kind", "read_later"), [("q4_1", False), ("q4_1", True), ("f16", False)])
def test_a_residual_is_written_over_by_its_last_reader_only(ops: NativeOps, kind: str, read_later: bool) -> None:
    """A sum with a linear's products takes the residual's place, unless that is read once more, or sums of a dense
    kernel wait in the output; bits are the same."""
    rng = np.random.default_rng(0)
    weight, norm = ops.pack([raw_tensor(rng, kind, 64, 64)]), ops.vector(rng.standard_normal(64))
    table = ops.pack([raw_tensor(rng, "f32", 9, 64)])

    def forward(ops: Any, batch: Any) -> Any:
        x = ops.embed(table, batch.tokens_T)
        total = ops.add(x, ops.linear(ops.rms_norm(x, norm, 1e-5), weight))
        return ops.add(ops.rms_norm(total, norm, 1e-5), x if read_later else total)

    batch = Sequences(16, [np.zeros(1, np.int32)]).batch([(0, [3, 1, 8], 0)])
    plain = NativeOps(1, fuse=False)
    results = [backend.compile(forward, StepLimits(8, 1, 1, 1))(batch).copy() for backend in (ops, plain)]
    plain.close()
    assert np.array_equal(*results)
    (linear,) = (operation for operation in _recorded(forward) if operation.kind == "linear")
    assert (linear.out is linear.inputs[2]) is (kind == "q4_1" and not read_later)


def _recorded(forward: Any) -> list[Any]:
    batch = SymbolicBatch()
    recorder = Recorder(batch)
    return fuse(recorder.operations, forward(recorder, batch))


@needs_native
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokens_T", 211, "token id out of range"),
        ("tokens_T", -1, "token id out of range"),
        ("positions_T", 1024, "position out of range"),
        ("block_tables_SB", 4, "block id out of range"),
        ("block_tables_SB", -1, "block id out of range"),
        ("context_lens_S", 1000, "context longer"),
        ("context_lens_S", 1, "context shorter"),
        ("row_starts_S1", 7, "cover the tokens"),
        ("logit_rows_L", 3, "logit row out of range"),
    ],
)
def test_a_bad_step_is_refused_untouched(ops: NativeOps, field: str, value: int, message: str) -> None:
    """Each number out of range is named, and nothing is written."""
    decoder = TinyDecoder(ops, 1, HEADS)
    group = decoder.group(16)
    pool = np.zeros((4, group.bytes_per_block), np.uint8)
    kv = ops.bind_kv(pool, group)
    run = ops.compile(lambda rec, batch: decoder.forward(rec, kv, batch), StepLimits(8, 2, 4, 2))
    batch = Sequences(16, [np.array([1, 2], np.int32)]).batch([(0, [5, 6, 7], 0)])
    getattr(batch, field).reshape(-1)[-1 if field != "block_tables_SB" else 0] = value
    with pytest.raises(AssertionError, match=message):
        run(batch)
    assert not pool.any()


@needs_native
def test_a_step_beyond_its_limits_is_refused(ops: NativeOps) -> None:
    """More tokens, sequences, blocks or logit rows than the program was sized for."""
    table = ops.pack([raw_tensor(np.random.default_rng(0), "f32", 9, 64)])
    sequences = Sequences(16, [np.zeros(3, np.int32), np.zeros(3, np.int32)])

    def forward(ops: Any, batch: Any) -> Any:
        return ops.gather_rows(ops.embed(table, batch.tokens_T), batch.logit_rows_L)

    big = sequences.batch([(0, [1] * 4, 0), (1, [2] * 4, 0)])
    for limits, message in (
        (StepLimits(7, 2, 3, 2), "tokens"),
        (StepLimits(8, 1, 3, 2), "sequences"),
        (StepLimits(8, 2, 2, 2), "blocks"),
        (StepLimits(8, 2, 3, 1), "logit rows"),
    ):
        with pytest.raises(AssertionError, match=f"too many {message}"):
            ops.compile(forward, limits)(big)
    assert ops.compile(forward, StepLimits(8, 2, 3, 2))(big).shape == (2, 64)


@needs_native
def test_an_empty_step_and_a_step_without_logits(ops: NativeOps) -> None:
    """No tokens, or no wanted logits, give an array of no rows."""
    decoder = TinyDecoder(ops, 1, HEADS)
    group = decoder.group(16)
    kv = ops.bind_kv(np.zeros((4, group.bytes_per_block), np.uint8), group)
    run = ops.compile(lambda rec, batch: decoder.forward(rec, kv, batch), StepLimits(8, 2, 4, 2))
    sequences = Sequences(16, [np.array([1], np.int32)])
    assert run(sequences.batch([])).shape == (0, 211)
    assert run(sequences.batch([(0, [1, 2], 0)], logit_rows=[])).shape == (0, 211)


@needs_native
def test_memory_is_accounted(ops: NativeOps) -> None:
    """Packed bytes equal a checkpoint's, or as integers come near them; a program's scratch grows with its limits."""
    raw = raw_tensor(np.random.default_rng(0), "q4_1", 64, 96)
    for isa, most in (("scalar", 1.0), ("scalartiles", 1.07)):
        with closing(NativeOps(1, isa)) as backend:
            assert raw.data.size <= backend.pack([raw]).num_bytes <= most * raw.data.size
    table = ops.pack([raw])
    small, large = (
        ops.compile(lambda rec, batch: rec.embed(table, batch.tokens_T), StepLimits(tokens, 1, 1, 1)).scratch_bytes
        for tokens in (8, 80)
    )
    assert small == 8 * 96 * 4 and large == 10 * small


@needs_native
def test_two_programs_share_a_team_and_close(ops: NativeOps) -> None:
    """A closed program refuses to run; the other still does."""
    table = ops.pack([raw_tensor(np.random.default_rng(0), "f32", 9, 64)])
    first, second = (ops.compile(lambda rec, b: rec.embed(table, b.tokens_T), StepLimits(8, 1, 1, 1)) for _ in "ab")
    batch = Sequences(16, [np.zeros(1, np.int32)]).batch([(0, [1, 2], 0)], logit_rows=[])
    kept = first(batch).copy()
    first.close()
    assert np.array_equal(second(batch), kept)
    with pytest.raises(AssertionError, match="closed"):
        first(batch)


@needs_native
def test_every_operation_is_progress_with_one_thread_too() -> None:
    """A long prompt may take minutes on a busy machine: who watches must see that its step gets on."""
    rng = np.random.default_rng(0)
    with closing(NativeOps(1)) as backend:
        table, square = (backend.pack([raw_tensor(rng, "f32", 64, 64)]) for _ in "ab")
        program = backend.compile(
            lambda rec, b: rec.linear(rec.linear(rec.embed(table, b.tokens_T), square), square), StepLimits(8, 1, 1, 1)
        )
        before = backend.progress()
        program(Sequences(16, [np.zeros(1, np.int32)]).batch([(0, [1, 2], 0)], logit_rows=[]))
        assert (backend.progress() - before) >> 32 >= 3, "high half: what has been done"


@needs_native
def test_more_threads_than_processors_make_progress() -> None:
    """Eight threads on few processors, called from several Python threads in turn, finish and agree."""
    rng = np.random.default_rng(0)
    crowd, one = NativeOps(8), NativeOps(1)
    raw = raw_tensor(rng, "q4_1", 320, 96)
    x = rng.standard_normal((50, 96)).astype(np.float32)
    expected = one.linear(x, one.pack([raw]))
    weight = crowd.pack([raw])
    wrong: list[int] = []

    def call() -> None:
        for turn in range(20):
            if not np.array_equal(crowd.linear(x, weight), expected):
                wrong.append(turn)

    for _ in range(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    crowd.close()
    one.close()
    assert not wrong


@needs_native
@pytest.mark.exact
def test_steps_of_few_rows_take_few_threads_and_give_the_same_bits() -> None:
    """One, two or all four, turn by turn: those without a part sleep, wake when they have one, and change nothing."""
    rng = np.random.default_rng(0)
    raw = [raw_tensor(rng, "q4_1", 640, 640) for _ in "ab"]
    x = rng.standard_normal((40, 640)).astype(np.float32)
    with closing(NativeOps(1)) as one, closing(NativeOps(4)) as crowd:
        programs = []
        for ops in (one, crowd):
            first, second = (ops.pack([each]) for each in raw)
            table = ops.pack([RawTensor("f32", 40, 640, x.view(np.uint8))])

            def forward(rec: Any, batch: Any, table: Any = table, first: Any = first, second: Any = second) -> Any:
                return rec.linear(rec.linear(rec.embed(table, batch.tokens_T), first), second)

            programs.append(ops.compile(forward, StepLimits(40, 1, 3, 1)))
        sequences = Sequences(16, [np.arange(3, dtype=np.int32)])
        for limits in ([(1, 1), (8, 2)], [], [(4, 3)], [(2**31 - 1, 1)]):
            crowd.limit_threads(limits)
            for rows in (1, 40, 1, 5, 40, 5, 1, 1, 40) * 4:
                batch = sequences.batch([(0, list(range(rows)), 0)], logit_rows=[])
                before = crowd.progress()
                assert np.array_equal(programs[1](batch), programs[0](batch)), (limits, rows)
                assert crowd.progress() != before
        for wrong in ([(1, 5)], [(1, 0)], [(8, 2), (8, 1)]):
            with pytest.raises(AssertionError, match=r"fewer threads|must rise"):
                crowd.limit_threads(wrong)


@needs_native
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system places no threads")
def test_threads_run_where_they_are_placed() -> None:
    """All but the first, which is the caller's own. Processors that there are none of are no reason to fail."""
    known, own = set(os.listdir("/proc/self/task")), os.sched_getaffinity(0)
    processor = max(own)
    with closing(NativeOps(1)) as ops:
        ops.use_threads(3, [[processor], [processor], [1 << 20]])
        made = {int(thread) for thread in set(os.listdir("/proc/self/task")) - known}
        assert sorted(map(sorted, map(os.sched_getaffinity, made))) == sorted([[processor], sorted(own)])
        assert os.sched_getaffinity(0) == own and "threads 3" in str(ops.describe()).replace("': '", " ")


@needs_native
def test_probes_are_of_the_threads_that_take_part(ops: NativeOps) -> None:
    """Each is a rate, or 0 where the instruction set has no such instruction."""
    ops.limit_threads([(1, 1)])
    try:
        found = {what: ops.probe(what, 1 << 16, 4) for what in ("read", "int8", "f32", "bf16", "phase")}
    finally:
        ops.limit_threads([])
    assert found["read"] > 0 and found["phase"] > 0 and all(rate >= 0 for rate in found.values())
    assert (found["bf16"] > 0) == (ops.isa in ("amx", "avx512bf16"))


def _how(rng: np.random.Generator, num_rows: int) -> SampleBatch:
    return SampleBatch(
        temperature_L=rng.choice([0, 0.3, 0.7, 1, 1.5], num_rows).astype(np.float32),
        top_k_L=rng.choice([0, 1, 5, 40, 300], num_rows).astype(np.int32),
        top_p_L=rng.choice([0.1, 0.5, 0.95, 1], num_rows).astype(np.float32),
        min_p_L=rng.choice([0, 0, 0.05, 0.5], num_rows).astype(np.float32),
        seed_L=rng.integers(0, 2**64, num_rows, dtype=np.uint64),
        choice_L=rng.integers(0, 4, num_rows).astype(np.int32),
        position_L=rng.integers(0, 1000, num_rows).astype(np.int32),
    )


@needs_native
@pytest.mark.parametrize("vocab_size", [1, 7, 63, 1000, 5003])
def test_samples_are_those_of_the_reference(ops: NativeOps, vocab_size: int) -> None:
    """Draws agree with numpy's, which sums in float64, but where a draw falls within rounding of a border: at most one
    in a hundred. Rows do not depend on each other."""
    rng = np.random.default_rng(vocab_size)
    logits = (rng.standard_normal((200, vocab_size)) * 3).astype(np.float32)
    logits[::7] = np.round(logits[::7])  # ties
    logits[3, : vocab_size // 2] = NEVER
    how = _how(rng, 200)
    tokens = ops.sample(logits, how)
    assert (tokens != ReferenceOps().sample(logits, how)).mean() <= 0.01
    greedy = how.temperature_L == 0
    assert np.array_equal(tokens[greedy], logits[greedy].argmax(axis=1))
    for row in range(0, 200, 29):
        alone = SampleBatch(*(column[row : row + 1] for column in how.columns() if column is not None))
        assert ops.sample(logits[row : row + 1], alone)[0] == tokens[row]


@needs_native
def test_draws_follow_the_distribution(ops: NativeOps) -> None:
    """Frequencies of 20,000 draws lie within four standard deviations of softmax, restricted by top_k."""
    num_draws = 20000
    logits = np.array([[1.0, 0.0, 2.0, -1.0, 1.5]], np.float32).repeat(num_draws, axis=0)
    ones = np.ones(num_draws, np.float32)
    how = SampleBatch(
        temperature_L=ones,
        top_k_L=np.full(num_draws, 4, np.int32),
        top_p_L=ones,
        min_p_L=0 * ones,
        seed_L=np.full(num_draws, 11, np.uint64),
        choice_L=np.zeros(num_draws, np.int32),
        position_L=np.arange(num_draws, dtype=np.int32),
    )
    share = np.exp(logits[0]) * np.array([1, 1, 1, 0, 1])
    share /= share.sum()
    found = np.bincount(ops.sample(logits, how), minlength=5) / num_draws
    assert (np.abs(found - share) <= 4 * np.sqrt(share * (1 - share) / num_draws)).all(), (found, share)


@needs_native
@pytest.mark.exact
def test_samples_agree_between_variants() -> None:
    """Every instruction set and thread count draws the same tokens and tells the same log probabilities."""
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((60, 3001)) * 4).astype(np.float32)
    how, tokens = _how(rng, 60), rng.integers(0, 3001, 60).astype(np.int32)
    results = []
    for isa in available_isas():
        for num_threads in (1, 3):
            backend = NativeOps(num_threads, isa)
            results.append((backend.sample(logits, how), *backend.token_logprobs(logits, tokens, 9)))
            backend.close()
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_native
@settings(max_examples=30)
@given(st.integers(1, 2000), st.integers(0, 20), st.integers(0, 2**32))
def test_logprobs_are_those_of_the_reference(ops: NativeOps, vocab_size: int, num_top: int, seed: int) -> None:
    """Ranks and top ids, ties included, are equal; log probabilities within float32 rounding of their sums."""
    rng = np.random.default_rng(seed)
    num_top = min(num_top, vocab_size)
    logits = np.round(rng.standard_normal((4, vocab_size)) * 3, 1).astype(np.float32)
    tokens = rng.integers(0, vocab_size, 4).astype(np.int32)
    got, expected = (each.token_logprobs(logits, tokens, num_top) for each in (ops, ReferenceOps()))
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6, atol=2e-6)
    assert np.array_equal(got[1], expected[1])
    assert np.array_equal(got[2], expected[2])
    np.testing.assert_allclose(got[3], expected[3], rtol=1e-6, atol=2e-6)


def test_backends_by_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """'numpy' is the reference; 'auto' falls back to it with one warning, 'native' does not; bad names are refused."""
    assert select_ops("numpy").name == "numpy"
    for backend, threads, isa in (("gpu", None, None), ("numpy", 0, None)):
        with pytest.raises(ConfigError):
            select_ops(backend, threads, isa)
    if available() is None:
        assert select_ops("auto", 1).name == "native"
        with pytest.raises(ConfigError, match="cannot run on this machine"):
            select_ops("native", 1, "sse9")
    monkeypatch.setenv("TOKENMILL_NATIVE_LIB", "/nowhere/lib.so")
    with pytest.raises(ConfigError, match="no native library"):
        select_ops("native")
    assert select_ops("auto").name == "numpy"
    assert len(caplog.records) == 1


@needs_native
def test_the_environment_chooses_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """TOKENMILL_ISA forces a variant, and an impossible one is refused by name."""
    monkeypatch.setenv("TOKENMILL_ISA", "scalar")
    backend = NativeOps(1)
    assert backend.describe()["instruction set"] == "scalar"
    backend.close()
    monkeypatch.setenv("TOKENMILL_ISA", "sse9")
    with pytest.raises(AssertionError, match="sse9"):
        NativeOps(1).describe()
    with pytest.raises(ConfigError, match="sse9"):
        select_ops("native", 1)
