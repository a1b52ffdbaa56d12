"""Exactness of latent attention: a request's tokens and logprobs do not depend on what runs beside it, on what was
cached, kept, moved or computed anew. As test_exactness.py, test_saved_kv.py and test_moved_kv.py, whose mixes and
engines these are."""

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
    TINY_SHAPE,
    Mix,
    alone,
    compare,
    crowded_mixes,
    native_ops,
    run,
    run_mixes,
    worker_maker,
)

from tiny_latent import MODELS, latent_checkpoint
from tokenmill.core.block import full_groups
from tokenmill.core.config import EngineConfig
from tokenmill.core.request import Request, SamplingParams
from tokenmill.ops.api import Ops
from tokenmill.ops.native import NativeOps, available
from tokenmill.ops.native.record import Recorder
from tokenmill.ops.reference import ReferenceOps
from tokenmill.worker import build
from tokenmill.worker.build import Worker

HAS_NATIVE = available() is None and hasattr(Recorder, "moe_ffn") and hasattr(Recorder, "latent_attention")
needs_native = pytest.mark.skipif(not HAS_NATIVE, reason=f"no native latents and experts: {available()}")
BACKENDS = [
    pytest.param(ReferenceOps, "f32", id="numpy"),
    *(pytest.param(NativeOps, dtype, id=f"native-{dtype}", marks=needs_native) for dtype in ("f16", "bf16", "int8")),
]
MAX_LEN = 600


@pytest.fixture(autouse=True)
def no_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "weights_digest", lambda path, cache_dir: "tiny latent")


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    yield from worker_maker(latent_checkpoint, full_groups(NUM_BLOCKS))


@pytest.mark.parametrize("name", MODELS)
def test_mixes_on_numpy(make_worker: Callable[..., Worker], name: str) -> None:
    """The same tokens whatever the batch, the chunks, the cache and preemption."""
    run_mixes(make_worker(name, ReferenceOps(), "f32"), [(seed, TINY_SHAPE) for seed in (3, 11)], exact=False)


KERNELS = [
    pytest.param(name, isa, kind, kv, id=f"{name}-{isa}-{kind or 'f32'}-{kv}")
    for name, isa, kind, kv in (
        ("V2", "avx512bf16", None, "bf16"),
        ("V2", "avx2", "q8_0", "f16"),
        ("V2", "avx512", "bf16", "int8"),
        ("V2", "scalar", None, "f32"),
        ("V3", "avx512", "q4_0", "bf16"),
        ("V3", "avxvnni", "q4_1", "int8"),
        ("V3", "scalartiles", "q8_0", "bf16"),
        ("MiniCPM3", "avx512", "q8_0", "int8"),
        ("MiniCPM3", "avx2", "bf16", "f16"),
    )
]


@pytest.mark.exact
@needs_native
@pytest.mark.parametrize(("name", "isa", "quantization", "kv_dtype"), KERNELS)
def test_mixes_bit_for_bit(
    make_worker: Callable[..., Worker], name: str, isa: str, quantization: str | None, kv_dtype: str
) -> None:
    """Tokens and logprobs equal to the last bit, in every kernel family and kind of KV."""
    worker = make_worker(name, native_ops(isa), kv_dtype, quantization=quantization)
    run_mixes(worker, crowded_mixes(isa), exact=True)


@pytest.mark.exact
@needs_native
def test_several_spans_bit_for_bit(make_worker: Callable[..., Worker]) -> None:
    """Contexts of three spans of attention, in chunks and whole, with and without cached prefixes."""
    worker = make_worker("V2", NativeOps(), "bf16", max_model_len=MAX_LEN)
    long = {"num_requests": 5, "max_prompt": MAX_LEN - 20, "max_output": 20}
    run_mixes(worker, [(210, long), (211, long), (215, CROWDED)], exact=True)


@pytest.mark.parametrize(("make_ops", "kv_dtype"), BACKENDS)
def test_a_second_turn_hits_what_the_first_generated(
    make_worker: Callable[..., Worker], make_ops: Callable[[], Ops], kv_dtype: str
) -> None:
    """Latents that decoding wrote serve a prompt that comes later as those do that prefill writes: the one form for
    both is what makes that so. A rule by position would break here."""
    worker = make_worker("V2", make_ops(), kv_dtype, max_model_len=256)
    config = EngineConfig(
        full_groups(NUM_BLOCKS), 256, block_size=BLOCK_SIZE, max_num_seqs=4, max_num_batched_tokens=64
    )
    sampling = SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True)
    first = Request("first", tuple(range(3, 40)), sampling, 70, seed=1)
    said = alone(worker, first, 256).tokens
    second = Request("second", (*first.prompt_tokens, *said, 7, 8, 9), sampling, 40, seed=2)
    expected = alone(worker, second, 256)
    streams, core = run(worker, Mix(config, [(0, first), (200, second)], {}))
    assert streams["first"].tokens == said
    assert core.stats().prefix_hits > len(first.prompt_tokens)
    assert streams["second"].tokens == expected.tokens
    compare(streams["second"].logprobs, expected.logprobs, make_ops is NativeOps, "second turn")


@pytest.mark.parametrize("make_ops", [ReferenceOps, pytest.param(NativeOps, marks=needs_native)])
def test_kept_and_read_again(make_ops: type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks go to a folder and back into another life's pool: every full block of the prompts is hit."""
    monkeypatch.setattr(test_saved_kv, "tiny_checkpoint", lambda **_: latent_checkpoint())
    live, prompts, size = test_saved_kv.live, test_saved_kv.PROMPTS, test_saved_kv.SIZE
    first, saved = live(make_ops, tmp_path, test_saved_kv.FULL)
    second, again = live(make_ops, tmp_path, test_saved_kv.FULL)
    assert saved.num_saved > 0 and again.num_read > 0 and again.num_saved == 0
    assert [output.tokens for output in second] == [output.tokens for output in first]
    assert [output.num_cached for output in second] == [(len(prompt) - 1) // size * size for prompt in prompts]


@pytest.mark.parametrize("kv_dtype", ["f32", "int8"])
@pytest.mark.parametrize("is_remote", [False, True], ids=["memory", "tcp"])
def test_handed_over_and_moved(is_remote: bool, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a worker that computes prompts to one that goes on, and away in the middle: the bits of one worker."""
    monkeypatch.setattr(test_moved_kv, "checkpoint_for", lambda groups: latent_checkpoint("V3"))
    how = {"is_remote": is_remote, "hurt": lambda side: None, "seed": 0}
    pulled = test_moved_kv.compare(test_moved_kv.FULL, kv_dtype, **how)
    assert all(num > 0 for num in pulled if num >= 0) and max(pulled) > 60, pulled


def test_a_form_by_position_is_caught(make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what prefill writes differs a little from what decoding writes of the same token."""
    write = ReferenceOps.write_latent

    def by_position(self: Any, kv: Any, layer: int, c_TX: Any, batch: Any, latent: Any) -> None:
        write(self, kv, layer, c_TX * 1.001 if len(c_TX) > len(batch.context_lens_S) else c_TX, batch, latent)

    monkeypatch.setattr(ReferenceOps, "write_latent", by_position)
    with pytest.raises(AssertionError):
        test_a_second_turn_hits_what_the_first_generated(make_worker, ReferenceOps, "f32")
