"""Exactness of hybrid models: a request gives the same tokens and logprobs whatever runs beside it, however its prompt
is cut, and whichever states were kept, saved, moved or computed anew. As test_exactness.py, test_saved_kv.py and
test_moved_kv.py, whose mixes and engines these are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_moved_kv
import test_saved_kv
from test_exactness import (
    BLOCK_SIZE,
    CROWDED,
    NUM_BLOCKS,
    NUM_STATES,
    TINY_SHAPE,
    Mix,
    alone,
    crowded_mixes,
    native_ops,
    run,
    run_mixes,
    worker_maker,
)

from tiny_hybrid import MODELS, hybrid_checkpoint
from tokenmill.core import block
from tokenmill.core.block import full_groups, state_group
from tokenmill.core.config import EngineConfig
from tokenmill.core.request import Request, SamplingParams
from tokenmill.ops import reference_state
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))
BACKENDS = [pytest.param(ReferenceOps, id="numpy"), pytest.param(NativeOps, id="native", marks=needs_native)]
GROUPS = (*full_groups(NUM_BLOCKS), state_group(NUM_STATES, 4))


@pytest.fixture(autouse=True)
def no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny hybrid")


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    yield from worker_maker(hybrid_checkpoint, GROUPS)


@pytest.mark.parametrize("name", MODELS)
def test_mixes_on_numpy(make_worker: Callable[..., Worker], name: str) -> None:
    """The same tokens whatever the batch, the chunks, the cache and preemption."""
    shapes = [(3, TINY_SHAPE), (11, TINY_SHAPE), (215, CROWDED)]
    run_mixes(make_worker(name, ReferenceOps(), "f32"), shapes, exact=False)


KERNELS = [
    pytest.param(name, isa, kind, kv, id=f"{name.replace(' ', '-')}-{isa}-{kind or 'f32'}-{kv}")
    for name, isa, kind, kv in (
        ("LFM2", "avx512", "q8_0", "f16"),
        ("LFM2", "scalar", None, "f32"),
        ("Qwen3.5", "avx512bf16", "bf16", "bf16"),
        ("Qwen3.5", "avx2", "q4_0", "int8"),
        ("Qwen3.5", "scalar", None, "f32"),
        ("Qwen3-Next", "avx512", "q8_0", "f16"),
        ("Bamba", "avxvnni", "q8_0", "f16"),
        ("Bamba", "avx2", None, "f32"),
        ("Granite 4", "avx512", "q4_1", "int8"),
        ("Granite 4", "scalartiles", "q8_0", "bf16"),
        ("Falcon-H1", "avx512", "q8_0", "f16"),
        ("Jamba", "avx2", "q4_0", "int8"),
        ("Jamba", "scalar", None, "f32"),
        ("Mamba-2", "avx2", "q8_0", "f16"),
        ("Nemotron-H", "avx512bf16", "q4_0", "f16"),
        ("Nemotron-H", "scalar", None, "f32"),
    )
]


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize(("name", "isa", "quantization", "kv_dtype"), KERNELS)
def test_mixes_bit_for_bit(
    make_worker: Callable[..., Worker], name: str, isa: str, quantization: str | None, kv_dtype: str
) -> None:
    """Tokens and logprobs equal to the last bit, in every kernel family."""
    worker = make_worker(name, native_ops(isa), kv_dtype, quantization=quantization)
    run_mixes(worker, crowded_mixes(isa), exact=True)


def turns(worker: Worker, interval: int, num_states: int = NUM_STATES) -> tuple[int, list[bool]]:
    """A prompt, the same again, its conversation's next turn, and prompts that leave it in the middle, twice: tokens of
    all their hits, and of each whether it gives what it gives alone."""
    config = EngineConfig(
        (*full_groups(NUM_BLOCKS), state_group(num_states, interval)), 512, block_size=BLOCK_SIZE, max_num_seqs=4,
        max_num_batched_tokens=64,
    )  # fmt: skip
    sampling = SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True)
    prompt = tuple(each % 90 + 3 for each in range(0, 7 * 180, 7))
    said = tuple(alone(worker, Request("first", prompt, sampling, 100, seed=1), 512).tokens)
    left = (*prompt[:120], *range(20, 60))
    prompts = [(prompt, 100), (prompt, 20), ((*prompt, *said, 7, 8, 9), 20), (left, 20), ((*left[:130], 5), 20)]
    requests = [Request(f"r{i}", tokens, sampling, most, seed=1) for i, (tokens, most) in enumerate(prompts)]
    expected = [alone(worker, request, 512) for request in requests]
    streams, core = run(worker, Mix(config, [(300 * i, request) for i, request in enumerate(requests)], {}))
    is_equal = [
        (streams[request.id].tokens, streams[request.id].logprobs) == (want.tokens, want.logprobs)
        for request, want in zip(requests, expected, strict=True)
    ]
    return core.stats().prefix_hits, is_equal


@needs_native
@pytest.mark.parametrize("name", ["Qwen3.5", "Bamba", "Mamba-2"])
def test_turns_of_a_conversation_hit(make_worker: Callable[..., Worker], name: str) -> None:
    """The states behind prompts and answers serve who comes next; so does, for the second, that where a prompt left
    another one. Few states are enough for that, however long they are apart."""
    worker = make_worker(name, NativeOps(), "f16", max_model_len=512)
    hits, is_equal = turns(worker, interval=64)
    assert all(is_equal), is_equal
    # Of the same prompt all full blocks; of the next turn what was said, to a multiple of 64; of the fifth what comes
    # before the border where the fourth left the first.
    assert hits == 176 + 256 + 112
    few, is_equal = turns(worker, interval=64, num_states=2)
    assert all(is_equal) and few < hits, "with room for two states some are given up"


@pytest.mark.parametrize("name", ["Qwen3.5", "Mamba-2"])
@pytest.mark.parametrize("make_ops", BACKENDS)
def test_kept_and_read_again(make_ops: type, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks go to a folder and back into another life's pool: what is computed again is less than two blocks."""
    monkeypatch.setattr(test_saved_kv, "tiny_checkpoint", lambda **_: hybrid_checkpoint(name))
    live, prompts, size = test_saved_kv.live, test_saved_kv.PROMPTS, test_saved_kv.SIZE
    groups = (*test_saved_kv.FULL, state_group(20, 100))
    first, saved = live(make_ops, tmp_path, groups)
    second, again = live(make_ops, tmp_path, groups)
    assert saved.num_saved > 0 and again.num_read > 0
    assert [output.tokens for output in second] == [output.tokens for output in first]
    assert [output.num_cached for output in second] == [(len(prompt) - 1) // size * size for prompt in prompts]


@pytest.mark.parametrize(("name", "kv_dtype"), [("Qwen3.5", "f32"), ("Qwen3.5", "int8"), ("Mamba-2", "f16")])
@pytest.mark.parametrize("is_remote", [False, True], ids=["memory", "tcp"])
def test_handed_over_and_moved(is_remote: bool, name: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a worker that computes prompts to one that goes on, and away in the middle: the bits of one worker."""
    monkeypatch.setattr(test_moved_kv, "checkpoint_for", lambda groups: hybrid_checkpoint(name))
    groups = (*test_moved_kv.FULL, state_group(30, 3))
    how = {"is_remote": is_remote, "hurt": lambda side: None, "seed": 0}
    pulled = test_moved_kv.compare(groups, kv_dtype, **how)
    assert max(pulled) > 60, pulled


def hits_anywhere(patch: pytest.MonkeyPatch) -> None:
    """A state is published that is not the one behind its block."""
    keeps = block.Checkpoints.keeps
    patch.setattr(block.Checkpoints, "keeps", lambda self, num_blocks: keeps(self, num_blocks + 1))
    stays = reference_state._stays

    def stay(kv: Any, batch: Any, row: int, position: int, is_last: bool, table: Any) -> Iterator[int]:
        return stays(kv, batch, row, position, is_last, table) if is_last else iter(())

    patch.setattr(reference_state, "_stays", stay)


def forgets_the_convolution(patch: pytest.MonkeyPatch) -> None:
    """A chunk begins as if nothing had come before it, for the convolution alone."""
    before = reference_state._before

    def forget(kv: Any, layer: int, position: int, table: Any, state: Any) -> Any:
        values = before(kv, layer, position, table, state)
        values[: (state.taps - 1) * state.conv_width] = 0
        return values

    patch.setattr(reference_state, "_before", forget)


@pytest.mark.parametrize("plant", [hits_anywhere, forgets_the_convolution])
def test_planted_bugs_are_found(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    worker = make_worker("Qwen3.5", ReferenceOps(), "f32")
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_mixes(worker, [(seed, TINY_SHAPE) for seed in (3, 11)], exact=False)
