"""Exactness of models whose layers are unlike each other: heads of two sizes, keys and values that several layers see,
inputs of each layer's own. As test_exactness.py, test_saved_kv.py and test_moved_kv.py, whose mixes and engines these
are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_moved_kv
import test_saved_kv
from test_exactness import (
    CROWDED,
    NUM_BLOCKS,
    TINY_SHAPE,
    crowded_mixes,
    native_ops,
    run_mixes,
    worker_maker,
)

from tiny_shared import MODELS, WINDOW, shared_checkpoint
from tokenmill.core.block import full_groups, window_group
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker

needs_native = pytest.mark.skipif(available() is not None, reason=str(available()))
BACKENDS = [pytest.param(ReferenceOps, id="numpy"), pytest.param(NativeOps, id="native", marks=needs_native)]
GROUPS = (*full_groups(NUM_BLOCKS), window_group(NUM_BLOCKS, WINDOW))


@pytest.fixture(autouse=True)
def no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny shared")


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    yield from worker_maker(shared_checkpoint, GROUPS)


@pytest.mark.parametrize("name", MODELS)
def test_mixes_on_numpy(make_worker: Callable[..., Worker], name: str) -> None:
    """The same tokens whatever the batch, the chunks, the cache and preemption."""
    shapes = [(3, TINY_SHAPE), (11, TINY_SHAPE), (215, CROWDED)]
    run_mixes(make_worker(name, ReferenceOps(), "f32"), shapes, exact=False)


def test_shared_kv_counts_once(make_worker: Callable[..., Worker]) -> None:
    """Each pool holds the layers that have keys and values of their own, with heads of their size."""
    full, local = make_worker("Gemma 4", ReferenceOps(), "f32").kv_groups
    assert (full.layers, full.num_kv_heads, full.head_dim) == ((1,), 2, 64)
    assert (local.layers, local.num_kv_heads, local.head_dim, local.window) == ((0, 2), 2, 32, WINDOW)
    assert (full.bytes_per_token, local.bytes_per_token) == (2 * 2 * 64 * 4, 2 * 2 * 2 * 32 * 4)
    full, local = make_worker("Gemma 4, keys that are values", ReferenceOps(), "f32").kv_groups
    assert (full.layers, full.num_kv_heads, full.head_dim) == ((1, 2), 1, 64)


KERNELS = [
    pytest.param(name, isa, kind, kv, id=f"{index}-{isa}-{kind or 'f32'}-{kv}")
    for index, (name, isa, kind, kv) in enumerate(
        (
            ("Gemma 4", "avx512", "q8_0", "f16"),
            ("Gemma 4", "avx2", "q4_0", "int8"),
            ("Gemma 4", "scalar", None, "f32"),
            ("Gemma 4, experts", "avx512", "q8_0", "bf16"),
            ("Llama 4", "avx512", "q4_0", "f16"),
            ("Llama 4", "avx2", None, "int8"),
            ("Gemma 4, keys that are values", "avx512bf16", "bf16", "bf16"),
            ("Gemma 4, keys that are values", "avxvnni", "q4_1", "int8"),
        )
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


@pytest.mark.parametrize("make_ops", BACKENDS)
def test_kept_and_read_again(make_ops: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of both sizes go to a folder and back into another life's pools."""
    monkeypatch.setattr(test_saved_kv, "tiny_checkpoint", lambda **_: shared_checkpoint())
    groups = (*test_saved_kv.FULL, window_group(40, WINDOW))
    first, saved = test_saved_kv.live(make_ops, tmp_path, groups)
    second, again = test_saved_kv.live(make_ops, tmp_path, groups)
    assert saved.num_saved > 0 and again.num_read > 0
    assert [output.tokens for output in second] == [output.tokens for output in first]
    size = test_saved_kv.SIZE
    assert [output.num_cached for output in second] == [
        (len(each) - 1) // size * size for each in test_saved_kv.PROMPTS
    ]


@pytest.mark.parametrize("kv_dtype", ["f32", "int8"])
@pytest.mark.parametrize("is_remote", [False, True], ids=["memory", "tcp"])
def test_handed_over_and_moved(is_remote: bool, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a worker that computes prompts to one that goes on, and away in the middle: the bits of one worker."""
    monkeypatch.setattr(test_moved_kv, "checkpoint_for", lambda groups: shared_checkpoint())
    groups = (*test_moved_kv.FULL, window_group(40, WINDOW))
    pulled = test_moved_kv.compare(groups, kv_dtype, is_remote=is_remote, hurt=lambda side: None, seed=0)
    assert max(pulled) > 60, pulled


def writes_twice(patch: pytest.MonkeyPatch) -> None:
    """A layer that shares KV writes, too, what stands in the place of its keys and values."""
    attention = ReferenceOps.paged_attention

    def write_after(self: ReferenceOps, kv: Any, layer: int, qkv_TW: Any, batch: Any, heads: Any, *a: Any, **k: Any):
        mixed = attention(self, kv, layer, qkv_TW, batch, heads, *a, **k)
        self.write_kv(kv, layer, qkv_TW, batch, heads)
        return mixed

    patch.setattr(ReferenceOps, "paged_attention", write_after)


def test_a_planted_bug_is_found(make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker("Gemma 4", ReferenceOps(), "f32")
    writes_twice(monkeypatch)
    with pytest.raises(AssertionError):
        run_mixes(worker, [(seed, TINY_SHAPE) for seed in (3, 11)], exact=False)
